# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The panels of the report: each draws one thing of all runs on an axis, and says in words what is to be seen."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .metrics import ENTROPY_BINS
from .report import first_and_last_tenth, series


# One per run: middle tones, legible on white and on near-black, apart for the colour-blind.
COLORS = ("#2f7ed8", "#d9742b", "#1f9e77", "#c2519b", "#8d7a2f", "#7570d6", "#c8404a", "#3ba3ad")
STYLES = ("-", "--", "-.", ":")
MAX_POINTS = 800


@dataclass(frozen=True)
class Panel:
    """
    One picture.

    Args:
        key (`str`): For ids and file names.
        title (`str`): What it shows, with its unit.
        caption (`str`): How to read it.
        lines (`Sequence[tuple[str, str]]`): Metric names and what the line is called ("" for a single one).
        source (`str`): `"log"` for log entries, `"calibrations"` for the calibrations' records.
        smooth (`bool`): Whether a moving average is drawn over the faint values.
        log_scale (`bool`): Whether the y axis is logarithmic.
        scale (`float`): What values are multiplied by.
        drawing (`Callable`, *optional*): `(axis, runs)`, in place of the lines.
    """

    key: str
    title: str
    caption: str
    lines: Sequence[tuple[str, str]] = ()
    source: str = "log"
    smooth: bool = False
    log_scale: bool = False
    scale: float = 1.0
    drawing: Callable | None = None

    def values(self, run, metric: str) -> tuple[list[int], list[float]]:
        """Steps and scaled values of a line."""
        steps, values = series(run.log_history if self.source == "log" else run.calibrations, metric)
        points = [(s, v * self.scale) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
        return [step for step, _ in points], [value for _, value in points]

    def has_data(self, runs) -> bool:
        """Whether there is anything to draw."""
        if self.drawing is not None:
            return any(time_split(run) for run in runs)
        return any(self.values(run, metric)[1] for run in runs for metric, _ in self.lines)

    def draw(self, axis, runs) -> None:
        """Draw it."""
        if self.drawing is not None:
            self.drawing(axis, runs)
            return
        for color, run in zip(COLORS, runs, strict=False):
            for style, (metric, _) in zip(STYLES, self.lines, strict=False):
                steps, values = thin(*self.values(run, metric))
                if self.smooth:
                    axis.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
                    values = moving_average(values)
                axis.plot(steps, values, linestyle=style, color=color, linewidth=1.7)
        if len(self.lines) > 1:
            ink = axis.xaxis.label.get_color()
            for style, (_, name) in zip(STYLES, self.lines, strict=False):
                axis.plot([], [], linestyle=style, color=ink, label=name)
            axis.legend(fontsize="small", frameon=False)
        if self.log_scale:
            axis.set_yscale("log")
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.25)

    def alt(self, runs) -> str:
        """What is to be seen, in words and numbers."""
        parts = []
        for run in runs:
            if self.drawing is not None:
                split = time_split(run)
                said = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in split.items()) or "no data"
                parts.append(f"{run.name}: {said}")
                continue
            for metric, name in self.lines:
                first, last = first_and_last_tenth(self.values(run, metric)[1])
                said = "no data" if math.isnan(first) else f"{first:.3g} to {last:.3g}"
                parts.append(f"{run.name}{', ' if name else ''}{name}: {said}")
        return f"{self.title}, from the first to the last tenth of the run. {'; '.join(parts)}."


def thin(steps: Sequence[float], values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """At most `MAX_POINTS` points: means over equal chunks."""
    size = math.ceil(len(values) / MAX_POINTS)
    if size <= 1:
        return steps, values
    chunks = range(0, len(values), size)
    steps, values = ([sum(part[i : i + size]) / len(part[i : i + size]) for i in chunks] for part in (steps, values))
    return steps, values


def moving_average(values: Sequence[float]) -> list[float]:
    """Centred mean over a twentieth of the run; the window shrinks at the ends."""
    half = max(2, len(values) // 40)
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def label_text(name: str) -> str:
    """A name that matplotlib draws as it stands: no mathematics, no markup, not too long."""
    text = re.sub(r"[^\w .,:+=/()-]", "?", name)
    return re.sub(r"-{2,}", "-", text).lstrip("_")[:32] or "run"


def time_split(run) -> dict[str, float]:
    """Seconds of a run's training in rollouts, BF16 passes and the rest; empty where it was not logged."""
    runtime, rollout = (series(run.log_history, name)[1] for name in ("train_runtime", "time/rollout_seconds"))
    if not runtime or not rollout:
        return {}
    number = run.num_rollouts or len(rollout)
    rollouts = sum(rollout) / len(rollout) * number
    passes = sum(record["bf16_pass_seconds"] for record in run.calibrations)
    rest = max(0.0, sum(runtime) - rollouts - passes)
    return {"rollouts": rollouts, "updates and the rest": rest, "BF16 passes": passes}


def _draw_times(axis, runs) -> None:
    shades = (1.0, 0.55, 0.25)
    longest = max(sum(time_split(run).values()) for run in runs)
    ink = axis.xaxis.label.get_color()
    for position, (color, run) in enumerate(zip(COLORS, runs, strict=False)):
        left = 0.0
        for shade, seconds in zip(shades, time_split(run).values(), strict=False):
            axis.barh(position, seconds, left=left, color=color, alpha=shade, height=0.6)
            left += seconds
    for shade, name in zip(shades, ("rollouts", "updates and the rest", "BF16 passes"), strict=True):
        axis.bar([0], [0], color=ink, alpha=shade, label=name)
    axis.set_yticks(range(len(runs)), [label_text(run.name)[:18] for run in runs])
    axis.invert_yaxis()
    axis.set_ylim(len(runs) - 0.5 + 0.35 * len(runs), -0.5)
    axis.legend(fontsize="small", frameon=False, loc="lower right", ncols=3)
    axis.set_xlim(0, 1.05 * longest)
    axis.set_xlabel("seconds")
    axis.grid(alpha=0.25, axis="x")


PANELS = (
    Panel("reward", "Mean reward", "Faint: as logged. Full: moving average.", [("reward", "")], smooth=True),
    Panel(
        "entropy",
        "Entropy of the policy, nats per token",
        "A surge in mid-training is the mark of over-clipping; a fall to nothing ends learning.",
        [("entropy", "")],
        smooth=True,
    ),
    Panel(
        "bounds",
        "Clip bounds in force, as ratios",
        "Upper and lower; they move at calibrations only.",
        [("calclip/upper", "upper"), ("calclip/lower", "lower")],
    ),
    Panel(
        "clipped",
        "Negative-advantage tokens under the lower bound, %",
        "At calibration batches. Calibration brings FP8's share to BF16's.",
        [
            ("clip_frac_low_neg_fp8", "FP8, in force"),
            ("clip_frac_low_neg_fp8_reference", "FP8, reference"),
            ("alpha_low_bf16", "BF16, reference"),
        ],
        source="calibrations",
        scale=100.0,
    ),
    Panel(
        "overclipped",
        "Over-clipped tokens, %",
        "Clipped by FP8 at the bounds in force, kept by BF16 at the reference bounds; of the tokens of that sign.",
        [("overclip_low_frac", "low, negative"), ("overclip_high_frac", "high, positive")],
        source="calibrations",
        scale=100.0,
    ),
    Panel(
        "entropy_bins",
        "Completions by their entropy, %",
        "At calibration batches; edges in nats per token. Garbled text is in the top bin.",
        [(f"entropy_bin/{label}/completions", label) for label in ENTROPY_BINS],
        source="calibrations",
        scale=100.0,
    ),
    Panel(
        "all_clipped",
        "All tokens clipped, low side, %",
        "TRL's clip_ratio/low_mean: of all tokens, on-policy steps included. In every run, BF16 or FP8.",
        [("clip_ratio/low_mean", "")],
        smooth=True,
        scale=100.0,
    ),
    Panel(
        "mismatch",
        "Mismatch of rollout and trainer, nats per token",
        "rollout_corr/k3_kl, once a rollout. A jump is a broken weight sync, not FP8 noise.",
        [("rollout_corr/k3_kl", "")],
        log_scale=True,
    ),
    Panel("time", "Where the time went", "Seconds of training time.", drawing=_draw_times),
)
