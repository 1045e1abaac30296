# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Dynamic sampling on and off, everything else equal, on a task of which two thirds are out of the model's reach.

    python -m benchmarks dynamic_sampling --seeds 0 1 2

One third of the prompts are the demo's sums, two thirds are sums of six to eight numbers of four digits, which the
model does not solve. The reward is 1 for the right number and 0 otherwise, so that most groups are uniform. Both arms
take the same number of optimizer steps on batches of the same size; the one with dynamic sampling generates more. The
held-out reward is over 512 prompts within reach, four completions each.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np  # noqa: E402
import reasoning_gym  # noqa: E402
from datasets import Dataset, concatenate_datasets  # noqa: E402
from trl import TrlParser  # noqa: E402

from benchmarks.results import Results, argument_parser, report  # noqa: E402
from trl_calclip import CalibratedDAPOConfig, CalibratedDAPOTrainer, embedded  # noqa: E402


# Without the soft overlong punishment: by it, wrong answers of different lengths would differ in reward.
CONFIG = Path(__file__).parents[1] / "configs" / "grpo_demo.yaml"


def exact_reward(completions: list[str], entry: list[str], **columns) -> list[float]:
    """1 for the right number, 0 for anything else."""
    return [float(score == 1.0) for score in embedded.arithmetic_reward(completions, entry)]


def mixture(size: int, seed: int) -> Dataset:
    """`size` prompts, two thirds of them out of reach."""
    easy = embedded.arithmetic_dataset(size // 3, seed=seed, split="train")
    items = reasoning_gym.create_dataset(
        embedded.TASK,
        min_terms=6,
        max_terms=8,
        min_digits=4,
        max_digits=4,
        seed=seed * 10**9,
        size=2 * size // 3,
    )
    hard = Dataset.from_list(
        [
            {
                "prompt": item["metadata"]["expression"].replace(" ", "") + "=",
                "answer": item["answer"],
                "entry": json.dumps(item),
            }
            for item in items
        ]
    )
    return concatenate_datasets([easy, hard]).shuffle(seed=seed)


def run_one(seed: int, dynamic_sampling: bool, steps: int, directory: Path) -> None:
    """One arm of one seed, in this process; the result goes to `directory/result.json`."""
    arguments = ["--config", str(CONFIG), "--output_dir", str(directory), "--use_cpu", "true", "--seed", str(seed)]
    arguments += [
        "--max_steps",
        str(steps),
        "--calibration_min_tokens",
        "50",
        "--save_strategy",
        "no",
        "--dynamic_sampling",
        str(dynamic_sampling),
    ]
    arguments += ["--per_device_train_batch_size", "16", "--num_generations_eval", "4", "--disable_tqdm", "true"]
    arguments += ["--dynamic_sampling_surplus", "4"] if dynamic_sampling else []
    arguments += ["--loss_type", "dapo", "--per_device_eval_batch_size", "64", "--vllm_max_model_length", "112"]
    (args,) = TrlParser(CalibratedDAPOConfig).parse_args_and_config(arguments)
    model = embedded.warm_start(directory.parent / f"warm_start_{seed}", seed=seed)
    trainer = CalibratedDAPOTrainer(
        model,
        exact_reward,
        args,
        train_dataset=mixture(6144, seed),
        eval_dataset=embedded.arithmetic_dataset(512, split="test"),
    )
    before = trainer.evaluate()["eval_reward"]
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    history = [entry for entry in trainer.state.log_history if "frac_reward_zero_std" in entry]
    result = {
        "before": before,
        "after": trainer.evaluate()["eval_reward"],
        "uniform": float(np.mean([entry["frac_reward_zero_std"] for entry in history[:5]])),
        "completions": trainer_completions(trainer, history),
        "seconds": seconds,
        "cap_hits": trainer.num_cap_hits,
        "rounds": float(np.mean([entry.get("dynamic_sampling/rounds", 1.0) for entry in history])),
        "lower": trainer.clip_range.lower,
    }
    (directory / "result.json").write_text(json.dumps(result))


def trainer_completions(trainer: CalibratedDAPOTrainer, history: list[dict]) -> int:
    """Completions generated in training."""
    per_batch = trainer.args.generation_batch_size // trainer.num_generations
    groups = [
        entry.get("dynamic_sampling/kept_groups", per_batch)
        + entry.get("dynamic_sampling/discarded_all_correct", 0)
        + entry.get("dynamic_sampling/discarded_all_wrong", 0)
        for entry in history
    ]
    return int(sum(groups)) * trainer.num_generations


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser("dynamic_sampling", __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one is not None:
        seed, arm, directory = options.one
        run_one(int(seed), arm == "on", options.steps, Path(directory))
        return

    table = Results(
        "Dynamic sampling on and off",
        {
            "seed": "{seed}",
            "dynamic sampling": "{arm}",
            "held-out reward": "{before:.3f} to {after:.3f}",
            "uniform at first": "{uniform:.0%}",
            "completions": "{completions:,}",
            "rounds": "{rounds:.1f}",
            "at the cap": "{cap_hits}",
            "time": "{seconds:.0f} s",
        },
    )
    gains = []
    for seed in options.seeds:
        results = {}
        for arm in ("off", "on"):
            directory = options.output / f"seed_{seed}" / arm
            directory.mkdir(parents=True, exist_ok=True)
            if not (directory / "result.json").exists():
                command = [sys.executable, "-m", "benchmarks", "dynamic_sampling", "--steps", str(options.steps)]
                subprocess.run([*command, "--one", str(seed), arm, str(directory)], check=True)
            results[arm] = json.loads((directory / "result.json").read_text())
            table.rows.append({"seed": seed, "arm": arm, **results[arm]})
        gains.append(results["on"]["after"] - results["off"]["after"])
    table.notes.append(f"Gain in held-out reward by seed: {', '.join(f'{gain:+.3f}' for gain in gains)}.")
    report(options.output, table)
