# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The runs of the miniature: its arms, and one of them trained, measured and saved."""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402
from trl import TrlParser  # noqa: E402

from benchmarks.clip_counts import completion_counts  # noqa: E402
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


def start_reward(seed: int, output: Path) -> float:
    """Held-out reward of the warm start, measured once."""
    path = output / f"warm_start_{seed}.json"
    if not path.exists():
        directory = warm_start(seed, output)
        model = AutoModelForCausalLM.from_pretrained(directory)
        path.write_text(json.dumps(held_out_rewards(model, AutoTokenizer.from_pretrained(directory))))
    return float(np.mean(json.loads(path.read_text())))


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
    if trainer.state.global_step < args.max_steps:  # after a SIGTERM
        step = trainer.state.global_step
        sys.exit(f"Stopped at step {step} of {args.max_steps}; the same command goes on from there.")
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
