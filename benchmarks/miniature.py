# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The paper's main table in miniature: BF16, BF16 training with FP8 rollout, FP8 with fixed bounds, FP8 with the lower
bound alone relaxed, FP8 calibrated, per recipe, with GRPO and DAPO's loss, over several seeds.

    python -m benchmarks miniature                                # everything, in the order of the stages; it resumes
    python -m benchmarks miniature --stages rowwise --seeds 0 1
    python -m benchmarks miniature --report                       # the tables of what is there

Everything else is equal: the same warm start, prompts, seeds, engine and updates. A toy's FP8 noise is a fraction of a
language model's, so the regime is scaled: `miniature.yaml` narrows the reference bounds, and with them the search
limits, the steps and the start, by one factor, until noise and bounds stand to each other as the paper's clip shares
say they do there. The BF16 arms sample from the same vLLM engine as the others, loaded in BF16.

The policies are compared in BF16 on held-out prompts, whatever they were trained in. Clip shares are those of FP8
against BF16 at calibration batches, which the arms with fixed bounds take too, without moving their bounds; the first
ones, in which the bounds still travel from their start, are left out. Intervals are over seeds for rewards, and over
completions for clip shares.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402
from trl import TrlParser  # noqa: E402

from benchmarks.demo import completion_counts  # noqa: E402
from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer, embedded  # noqa: E402
from trl_calclip.fp8.linear import bf16_pass  # noqa: E402
from trl_calclip.offline import sample_with_model  # noqa: E402
from trl_calclip.report import series  # noqa: E402


CONFIG = Path(__file__).with_name("miniature.yaml")
TERMS, SEPARATORS = (5, 8), ",;: "
WARM_START_STEPS = 500
HELD_OUT, SAMPLES = 512, 4


@dataclass(frozen=True)
class Arm:
    """
    What one run differs in.

    Args:
        training (`bool`): Whether the trainer runs in FP8.
        rollout (`bool`): Whether the engine does.
        moves (`bool`): Whether calibration moves the bounds; otherwise it only measures.
        lower (`float`, *optional*): Lower bound to fix, in units of the reference distance from 1.
    """

    training: bool
    rollout: bool
    moves: bool = False
    lower: float | None = None


ARMS = {
    "BF16": Arm(False, False),
    "BF16, FP8 rollout": Arm(False, True),
    "FP8, fixed": Arm(True, True),
    "FP8, lower bound only": Arm(True, True, lower=2.0),  # the paper's 0.6 where 0.8 is the reference
    "FP8, calibrated": Arm(True, True, moves=True),
}
STAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "rowwise": ("grpo", "rowwise", ("BF16", "FP8, fixed", "FP8, calibrated", "BF16, FP8 rollout")),
    "tensorwise": ("grpo", "tensorwise", ("FP8, fixed", "FP8, calibrated")),
    "blockwise": ("grpo", "blockwise", ("FP8, fixed", "FP8, calibrated")),
    "lower": ("grpo", "rowwise", ("FP8, lower bound only",)),
    "dapo": ("dapo", "rowwise", ("BF16", "FP8, fixed", "FP8, calibrated")),
}
TRANSIENT = 4  # calibrations that the bounds need at most from their start to the reference


class EngineConfig(CalibratedGRPOConfig):
    """BF16 rollouts come from this package's engine too: TRL's own weight sync fails with vLLM's CPU build."""

    @property
    def checked_vllm(self) -> bool:
        return self.use_vllm


class MeasuringTrainer(CalibratedGRPOTrainer):
    """Keeps the clip counts of each calibration batch in a file, so that a resumed run has them all."""

    moves = True

    def _calibrate(self, pool):
        before = self.clip_range
        record = {
            "rollout": self.num_rollouts,
            "counts": completion_counts(pool, self.reference_clip_range, before),
            "bf16_std": pool.bf16_ratio.log().std().item(),
        }
        with open(Path(self.args.output_dir, "counts.jsonl"), "a") as file:
            file.write(json.dumps(record) + "\n")
        super()._calibrate(pool)
        if not self.moves:
            self.clip_range = before
            self._apply_clip_range()


def name_of(loss: str, recipe: str, arm: str, seed: int) -> str:
    """Directory of a run. BF16 throughout is the same run for every recipe."""
    parts = [loss, arm, str(seed)] if arm == "BF16" else [loss, recipe, arm, str(seed)]
    return "_".join(parts).replace(", ", "_").replace(" ", "_").lower()


def arguments_of(loss: str, recipe: str, arm: str, seed: int, directory: Path) -> list[str]:
    """Command line of a run."""
    settings = ARMS[arm]
    arguments = ["--config", str(CONFIG), "--output_dir", str(directory), "--seed", str(seed), "--loss_type", loss]
    if not torch.cuda.is_available():
        arguments += ["--use_cpu", "true"]
    if loss == "dapo":
        arguments += ["--epsilon_high", "0.07"]  # 0.28, scaled as the other bounds
    arguments += ["--fp8_recipe", recipe if settings.training else "none"]
    arguments += ["--fp8_rollout", recipe if settings.rollout else "off"]
    arguments += ["--calibrated_clip", str(settings.training)]
    if not settings.moves:
        arguments += ["--calibration_start_at_reference", str(settings.lower is None)]
    return arguments


@torch.no_grad()
def held_out_rewards(model, tokenizer) -> list[float]:
    """Mean reward of each held-out prompt, sampled from the policy in BF16."""
    data = embedded.arithmetic_dataset(HELD_OUT, split="test", terms=TERMS)
    ids = [tokenizer(prompt)["input_ids"] for prompt in data["prompt"] for _ in range(SAMPLES)]
    entries = [entry for entry in data["entry"] for _ in range(SAMPLES)]
    with bf16_pass(model):
        rollout = sample_with_model(model.eval(), ids, tokens=96, rows=256)
    texts = [
        tokenizer.decode(sequence[-length:], skip_special_tokens=True)
        for sequence, length in zip(rollout.sequences, rollout.lengths, strict=True)
    ]
    return np.array(embedded.arithmetic_reward(texts, entries)).reshape(-1, SAMPLES).mean(1).tolist()


def warm_start(seed: int, output: Path) -> str:
    return embedded.warm_start(
        output / f"warm_start_{seed}", seed, steps=WARM_START_STEPS, terms=TERMS, separators=SEPARATORS
    )


def run_one(loss: str, recipe: str, arm: str, seed: int, output: Path) -> None:
    """One run, in this process; the result goes to `result.json` in its directory."""
    directory = output / name_of(loss, recipe, arm, seed)
    directory.mkdir(parents=True, exist_ok=True)
    (args,) = TrlParser(EngineConfig).parse_args_and_config(arguments_of(loss, recipe, arm, seed, directory))
    if ARMS[arm].lower is not None:
        lower = 1 - ARMS[arm].lower * args.epsilon
        args.calibration_start = [lower, args.reference_clip_range.upper]
    trainer = MeasuringTrainer(
        warm_start(seed, output),
        embedded.arithmetic_reward,
        args,
        train_dataset=embedded.arithmetic_dataset(16384, seed=seed, terms=TERMS),
    )
    trainer.moves = ARMS[arm].moves
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(directory))
    seconds = time.perf_counter() - start
    history = trainer.state.log_history
    names = ("reward", "entropy", "completions/mean_length", "clip_ratio/low_mean", "clip_ratio/high_mean")
    result = {
        "loss": loss, "recipe": recipe, "arm": arm, "seed": seed, "seconds": seconds,
        "rewards": held_out_rewards(trainer.model, trainer.processing_class),
        "curves": {name: series(history, name) for name in names},
        "calibration_history": trainer.calibration_history,
        "clip_range": [trainer.clip_range.lower, trainer.clip_range.upper],
    }  # fmt: skip
    (directory / "result.json").write_text(json.dumps(result))


def plan(stages: list[str], seeds: list[int]) -> list[tuple[str, str, str, int]]:
    """Runs in their order: stage by stage, and within a stage seed by seed, so that what is there compares."""
    runs = [
        (loss, recipe, arm, seed)
        for loss, recipe, arms in (STAGES[stage] for stage in stages)
        for seed in seeds
        for arm in arms
    ]
    return list(dict.fromkeys(runs))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks/miniature"))
    parser.add_argument("--report", action="store_true", help="run nothing, report what is there")
    parser.add_argument("--one", nargs=4, metavar=("LOSS", "RECIPE", "ARM", "SEED"), help="one run, in this process")
    options = parser.parse_args(argv)
    if options.one is not None:
        loss, recipe, arm, seed = options.one
        run_one(loss, recipe, arm, int(seed), options.output)
        return
    for run in plan(options.stages, options.seeds):
        if options.report or (options.output / name_of(*run) / "result.json").exists():
            continue
        command = [sys.executable, "-m", "benchmarks.miniature", "--output", str(options.output), "--one"]
        subprocess.run([*command, *map(str, run)], check=True)


if __name__ == "__main__":
    main()
