# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
What the trainer costs over TRL's: time of an optimizer step, by part, and memory.

    python -m benchmarks overhead

The demo's model and settings, with rollouts of 32 completions for four updates, all completions of the same length, so
that every arm does the same work. Two groups. Where rollouts come from the trainer's own model, all arms are in one
process and take turns, a rollout each, in an order that changes with every round: each round gives one ratio to TRL's
`GRPOTrainer`. Where they come from a vLLM engine, every arm has a fresh process, and TRL's is missing on a CPU: its
weight sync fails there. The first rollout is not counted. Peak memory is always that of a fresh process.

Without a GPU times are the process's CPU time, so that other work on the machine does not count, and stand beside the
wall clock. There FP8 is emulated: its arms say what calibration costs over fixed bounds, not what FP8 costs over BF16.
"""

import os


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import dataclasses  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import yaml  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from rich.progress import track  # noqa: E402
from transformers.utils import logging  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from benchmarks.measuring import Clock, Turns, fresh, median_interval, peak_memory, rotated, total_ratio  # noqa: E402
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
        turns ([`Turns`]): When it may run; a turn is a rollout.
        who (`int`): Its number there.

    Attributes:
        rollouts (`list[tuple[float, float]]`): Time and wall clock of each counted rollout, seconds.
    """

    def __init__(self, trainer: GRPOTrainer, turns: Turns, who: int):
        self.trainer, self.turns, self.who = trainer, turns, who
        self.clock = Clock(time.perf_counter if torch.cuda.is_available() else time.process_time)
        self.rollouts: list[tuple[float, float]] = []
        self._calls = 0
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
            if self._calls and self._calls % UPDATES == 0:
                self._end_turn()
                self._begin_turn()
            self._calls += 1
            return step(*args, **kwargs)

        trainer.training_step = training_step

    def train(self) -> None:
        """Train, one rollout whenever it is this one's turn."""
        try:
            self._begin_turn()
            self.trainer.train()
            self._end_turn()
        except BaseException:
            self.turns.give_up()
            raise

    def _begin_turn(self) -> None:
        self.turns.wait(self.who)
        self._began = self.clock.now(), time.perf_counter()

    def _end_turn(self) -> None:
        if self._calls > UPDATES:
            self.rollouts.append((self.clock.now() - self._began[0], time.perf_counter() - self._began[1]))
        else:
            self.clock.seconds.clear()  # start-up and the first rollout
        self.turns.hand_over()

    def parts(self) -> dict[str, float]:
        """Milliseconds of one optimizer step: by part, their sum `"step"`, and `"wall"`."""
        whole, wall = (sum(column) for column in zip(*self.rollouts, strict=True))
        seconds = {part: self.clock.seconds.get(part, 0.0) for part in PARTS}
        seconds["optimizer and rest"] = whole - sum(seconds.values())
        steps = UPDATES * len(self.rollouts)
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


def measure(names: list[str], vllm: bool, rollouts: int, cache: str) -> dict[str, dict[str, Any]]:
    """
    Train arms in this process, which must be fresh, taking turns.

    Returns:
        `dict[str, dict[str, Any]]`: For each arm milliseconds by part, the counted rollouts, how many of these
        calibrated, and the process's peak memory, which is the arm's if it is alone.
    """
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as output:
        trainers = [build(name, vllm, 1 + rollouts, cache, f"{output}/{name}") for name in names]
        turns = Turns([who for number in range(1 + rollouts) for who in rotated(range(len(names)), number)])
        stopwatches = [Stopwatch(trainer, turns, who) for who, trainer in enumerate(trainers)]
        with peak_memory() as memory, ThreadPoolExecutor(len(names)) as pool:
            for running in [pool.submit(stopwatch.train) for stopwatch in stopwatches]:
                running.result()
    results = {}
    for name, trainer, stopwatch in zip(names, trainers, stopwatches, strict=True):
        history = trainer.calibration_history if isinstance(trainer, CalibratedGRPOTrainer) else []
        calibrations = sum(record["rollout"] > 0 for record in history)
        counted = {"rollouts": stopwatch.rollouts, "calibrations": calibrations, "memory": memory["MiB"]}
        results[name] = {**stopwatch.parts(), **counted}
    return results


def summaries(results: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each arm: medians over the repeats, ratios to TRL's trainer and to fixed bounds over all rollouts."""
    rows = []
    for arm, runs in results.items():
        row: dict[str, Any] = {"arm": arm, "repeats": len(runs), "rollouts": sum(len(run["rollouts"]) for run in runs)}
        row |= {name: statistics.median(run[name] for run in runs) for name in runs[0] if name != "rollouts"}
        for name, other in (("trl", "TRL"), ("fixed", "FP8, fixed bounds")):
            if other not in results or other == arm:
                continue
            for column, time_of in enumerate(("step", "wall")):
                own, base = (
                    [rollout[column] for run in several for rollout in run["rollouts"]]
                    for several in (runs, results[other])
                )
                key, ratios = f"{name}_{time_of}", [a / b for a, b in zip(own, base, strict=True)]
                row[key], *row[f"{key}_95"] = total_ratio(own, base)
                row[f"{key}_median"], row[f"{key}_median_95"] = statistics.median(ratios), median_interval(ratios)
                row[f"{key}_text"] = "{:.3f} [{:.3f}, {:.3f}]".format(row[key], *row[f"{key}_95"])
        rows.append(row)
    return rows


def tables(title: str, rows: list[dict[str, Any]]) -> list[Results]:
    """Ratios, then parts."""
    ratios = Results(
        f"{title}: an optimizer step",
        {
            "arm": "{arm}",
            "rollouts, calibrations": "{rollouts}, {calibrations:.0f}",
            "ms": "{step:.1f}",
            "wall, ms": "{wall:.1f}",
            "to TRL [95 %]": "{trl_step_text}",
            "wall, to TRL [95 %]": "{trl_wall_text}",
            "to fixed bounds [95 %]": "{fixed_step_text}",
            "wall, to fixed bounds [95 %]": "{fixed_wall_text}",
            "peak memory, MiB": "{memory:.0f}",
        },
        rows,
        ["Ratios of all counted time; intervals by a bootstrap over rollouts."],
    )
    off = next((row for row in rows if row["arm"] == "everything off" and "trl_step" in row), None)
    for key, meant in (("trl_step_median", "time"), ("trl_wall_median", "wall clock")):
        if off is not None:
            low, high = off[f"{key}_95"]
            ratios.notes.append(
                f"Everything off, median {meant}: {off[key]:.3f} of TRL's, 95 % [{low:.3f}, {high:.3f}]."
            )
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


def collect(group: str, repeat: int, names: list[str], options) -> dict[str, dict[str, Any]]:
    """One repeat of a group, from its file where an interrupted benchmark left one."""
    path = options.output / "runs" / f"{group}-{repeat}.json"
    if path.exists():
        return json.loads(path.read_text())
    if group == "model":
        results = fresh(measure, names, False, options.rollouts, options.cache)
        for name in names:
            results[name]["memory"] = fresh(measure, [name], False, 1, options.cache)[name]["memory"]
    else:
        results = {}
        for name in rotated(names, repeat):
            results |= fresh(measure, [name], True, options.rollouts, options.cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results))
    return results


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser("overhead", __doc__)
    parser.add_argument("--repeats", type=int, default=3)
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
        repeats = range(options.repeats)
        runs = [collect(group, repeat, names, options) for repeat in track(repeats, description=titles[group])]
        groups[titles[group]] = summaries({name: [results[name] for results in runs] for name in names})
        shown += tables(titles[group], groups[titles[group]])
    report(options.output, *shown, figure=draw(groups))
