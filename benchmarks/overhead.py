# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
What the trainer costs over TRL's: time of an optimizer step, by part, and memory.

    python -m benchmarks overhead

The demo's model and settings, with a rollout of 32 completions for four updates, all completions of the same length,
so that every arm does the same work. One rollout to warm up, then twenty. Every repeat runs every arm once, each in a
fresh process, in turned order; ratios are within a repeat. Two groups: rollouts from the trainer's own model, where
TRL's `GRPOTrainer` can be run beside, and rollouts from a vLLM engine, where on a CPU it cannot, because its weight
sync fails there.

Without a GPU the parts are the process's CPU time, so that other work on the machine does not count, and stand beside
the wall clock. There FP8 is emulated: its arms say what calibration costs over fixed bounds, not what FP8 costs over
BF16.
"""

import os


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import dataclasses  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import yaml  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from rich.progress import track  # noqa: E402
from transformers.utils import logging  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from benchmarks.measuring import Clock, fresh, median_interval, peak_memory, rotated  # noqa: E402
from benchmarks.results import Results, argument_parser, report  # noqa: E402
from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer, embedded  # noqa: E402
from trl_calclip.report_panels import COLORS  # noqa: E402


CONFIG = Path(__file__).parents[1] / "configs" / "grpo_demo.yaml"
UPDATES = 4  # per rollout
TOKENS = 48  # of every completion
_CALIBRATED = {"calibrated_clip": True}
_FIXED = {"calibrated_clip": False}
ARMS: dict[str, dict[str, Any]] = {
    "TRL": {"fp8_recipe": None, **_FIXED},
    "everything off": {"fp8_recipe": None, **_FIXED},
    "BF16, FP8 rollout": {"fp8_recipe": None, "fp8_rollout": "rowwise", **_FIXED},
    "FP8, fixed bounds": _FIXED,
    "calibrated, interval 1": {"calibration_interval": 1, **_CALIBRATED},
    "calibrated, interval 5": {"calibration_interval": 5, **_CALIBRATED},
    "calibrated, interval 5, fraction 0.25": {
        "calibration_interval": 5, "calibration_fraction": 0.25, **_CALIBRATED
    },
    "calibrated, interval 20": {"calibration_interval": 20, **_CALIBRATED},
}  # fmt: skip
PARTS = (
    "generation", "weight sync", "scoring and rest of the rollout", "forward", "backward", "BF16 passes",
    "pool and solve", "optimizer and rest",
)  # fmt: skip


def arms(vllm: bool) -> list[str]:
    """Names of a group's arms, the one that the others are compared with first."""
    without_engine = {"TRL", "everything off"} if vllm and not torch.cuda.is_available() else set()
    return [name for name in ARMS if name not in without_engine and (vllm or name != "BF16, FP8 rollout")]


def digits_reward(completions: list[str], **columns) -> list[float]:
    """Share of even digits: it differs between the completions of any prompt, so that no group is without gradient."""
    return [sum(text.count(digit) for digit in "02468") / max(len(text), 1) for text in completions]


class Stopwatch:
    """
    Times the parts of a trainer's steps from outside: its own public methods, its engine's, its model's.

    Args:
        trainer ([`~trl.GRPOTrainer`]): Any, ours or TRL's.
        warm_up (`int`): Calls of `training_step` that are not counted.
    """

    def __init__(self, trainer: GRPOTrainer, warm_up: int):
        self.clock = Clock(time.perf_counter if torch.cuda.is_available() else time.process_time)
        self.started = self.started_wall = 0.0
        self._calls, self._warm_up = 0, warm_up
        timed = self.clock.timed
        trainer.compute_loss = timed("forward", trainer.compute_loss)
        trainer.accelerator.backward = timed("backward", trainer.accelerator.backward)
        trainer.model.generate = timed("generation", trainer.model.generate)
        if trainer.use_vllm:
            generation = trainer.vllm_generation
            generation.generate = timed("generation", generation.generate)
            generation.sync_weights = timed("weight sync", generation.sync_weights)
        if isinstance(trainer, CalibratedGRPOTrainer):
            trainer.score = timed("BF16 passes", trainer.score)
            trainer.end_rollout = timed("pool and solve", trainer.end_rollout)
        step = timed("scoring and rest of the rollout", trainer.training_step)

        def training_step(*args, **kwargs):
            if self._calls == self._warm_up:
                self.clock.seconds.clear()
                self.started, self.started_wall = self.clock.now(), time.perf_counter()
            self._calls += 1
            return step(*args, **kwargs)

        trainer.training_step = training_step

    def parts(self, steps: int) -> dict[str, float]:
        """Milliseconds of one optimizer step since the warm-up: by part, their sum `"step"`, and `"wall"`."""
        whole, wall = self.clock.now() - self.started, time.perf_counter() - self.started_wall
        seconds = {part: self.clock.seconds.get(part, 0.0) for part in PARTS}
        seconds["optimizer and rest"] = whole - sum(seconds.values())
        return {part: 1000 * value / steps for part, value in {**seconds, "step": whole, "wall": wall}.items()}


def build(arm: str, vllm: bool, rollouts: int, cache: str, output: str) -> GRPOTrainer:
    """An arm's trainer."""
    settings = {
        **yaml.safe_load(CONFIG.read_text()), "output_dir": output, "use_vllm": vllm, "max_steps": UPDATES * rollouts,
        "per_device_train_batch_size": 8, "steps_per_generation": UPDATES, "max_completion_length": TOKENS,
        "generation_kwargs": {"min_tokens" if vllm else "min_new_tokens": TOKENS}, "save_strategy": "no",
        "disable_tqdm": True, "calibration_min_tokens": 50, "use_cpu": not torch.cuda.is_available(), **ARMS[arm],
    }  # fmt: skip
    if not settings["calibrated_clip"]:  # settings without effect are errors
        settings = {name: value for name, value in settings.items() if not name.startswith("calibration_")}
    trainer_class, config_class = CalibratedGRPOTrainer, CalibratedGRPOConfig
    if arm == "TRL":
        trainer_class, config_class = GRPOTrainer, GRPOConfig
        known = {field.name for field in dataclasses.fields(GRPOConfig)}
        settings = {name: value for name, value in settings.items() if name in known}
    return trainer_class(
        embedded.warm_start(cache), digits_reward, config_class(**settings),
        train_dataset=embedded.arithmetic_dataset(4096),
    )  # fmt: skip


def run(arm: str, vllm: bool, rollouts: int, cache: str) -> dict[str, float]:
    """Train one arm in this process, which must be fresh: milliseconds by part, peak memory, calibrations."""
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as output:
        trainer = build(arm, vllm, 1 + rollouts, cache, output)
        stopwatch = Stopwatch(trainer, warm_up=UPDATES)
        with peak_memory() as memory:
            trainer.train()
            parts = stopwatch.parts(UPDATES * rollouts)
    history = trainer.calibration_history if isinstance(trainer, CalibratedGRPOTrainer) else []
    counted = sum(record["rollout"] > 0 for record in history)
    return {**parts, "memory": memory["MiB"], "calibrations": counted}


def summaries(results: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """A row for each arm: medians over the repeats, and ratios to TRL's trainer and to fixed bounds in each repeat."""
    rows = []
    for arm, runs in results.items():
        row: dict[str, Any] = {"arm": arm, "repeats": len(runs)}
        row |= {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for name, other in (("trl", "TRL"), ("fixed", "FP8, fixed bounds")):
            if other not in results or other == arm:
                continue
            for time_of in ("step", "wall"):
                ratios = [run[time_of] / base[time_of] for run, base in zip(runs, results[other], strict=True)]
                key = f"{name}_{time_of}"
                row |= {key: statistics.median(ratios), f"{key}_all": ratios, f"{key}_95": median_interval(ratios)}
                row[f"{key}_text"] = f"{row[key]:.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"
        rows.append(row)
    return rows


def tables(title: str, rows: list[dict[str, Any]]) -> list[Results]:
    """Ratios, then parts."""
    repeats = f"{rows[0]['repeats']} repeats, medians [range]."
    ratios = Results(
        f"{title}: an optimizer step",
        {
            "arm": "{arm}",
            "calibrations": "{calibrations:.0f}",
            "ms": "{step:.1f}",
            "wall, ms": "{wall:.1f}",
            "to TRL": "{trl_step_text}",
            "wall, to TRL": "{trl_wall_text}",
            "to fixed bounds": "{fixed_step_text}",
            "wall, to fixed bounds": "{fixed_wall_text}",
            "peak memory, MiB": "{memory:.0f}",
        },
        rows,
        [repeats],
    )
    off = next((row for row in rows if row["arm"] == "everything off" and "trl_step" in row), None)
    for key, meant in (("trl_step", "time"), ("trl_wall", "wall clock")):
        if off is not None:
            low, high = off[f"{key}_95"]
            ratios.notes.append(f"Everything off, {meant}: {off[key]:.3f} of TRL's, 95 % [{low:.3f}, {high:.3f}].")
    parts = Results(f"{title}: where a step's milliseconds go", {"arm": "{arm}"}, rows)
    parts.columns |= {part: f"{{{part}:.2f}}" for part in PARTS}
    return [ratios, parts]


def draw(groups: dict[str, list[dict[str, Any]]]) -> Figure:
    """Stacked bars, one for each arm."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    heights = [len(rows) for rows in groups.values()]
    axes = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (title, rows) in zip(axes, groups.items(), strict=True):
        left = [0.0] * len(rows)
        names = [row["arm"] for row in rows]
        for part, color in zip(PARTS, COLORS, strict=True):
            widths = [row[part] for row in rows]
            axis.barh(names, widths, left=left, color=color, height=0.65, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.invert_yaxis()
        axis.set_title(title, loc="left")
        axis.grid(alpha=0.25, axis="x")
    axes[-1].set_xlabel("milliseconds of an optimizer step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser("overhead", __doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--rollouts", type=int, default=20, help="counted ones; 20 hold one calibration at interval 20"
    )
    parser.add_argument("--groups", nargs="+", default=["model", "vllm"], choices=["model", "vllm"])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), help="only these")
    parser.add_argument("--cache", default="runs/models/toy")
    options = parser.parse_args(argv)
    embedded.warm_start(options.cache)
    titles = {"model": "Rollouts from the trainer's own model", "vllm": "Rollouts from a vLLM engine"}
    groups, shown = {}, []
    for group in options.groups:
        names = [name for name in arms(group == "vllm") if options.arms is None or name in options.arms]
        results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for repeat in track(range(options.repeats), description=titles[group]):
            directory = options.output / "runs" / f"{group}-{repeat}"
            directory.mkdir(parents=True, exist_ok=True)
            for name in rotated(names, repeat):
                path = directory / f"{name.replace(' ', '_').replace(',', '')}.json"
                if not path.exists():  # a broken benchmark goes on where it was
                    result = fresh(run, name, group == "vllm", options.rollouts, options.cache)
                    path.write_text(json.dumps(result))
                results[name].append(json.loads(path.read_text()))
        groups[titles[group]] = summaries(results)
        shown += tables(titles[group], groups[titles[group]])
    report(options.output, *shown, figure=draw(groups))
