# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
What a run did, at a glance: a short table and a picture, from the trainer's own log history.

matplotlib and rich do the drawing; the numbers are those that the trainer logged.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from .clip_range import ClipRange


Records = Sequence[dict[str, Any]]


def series(log_history: Records, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a logged metric; entries without it, or with an undefined value, are left out."""
    points = [(entry["step"], entry[name]) for entry in log_history if entry.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def first_and_last_tenth(values: Sequence[float]) -> tuple[float, float]:
    """Means over the first and the last tenth (at least one value each); NaN for no values."""
    if not values:
        return math.nan, math.nan
    n = max(1, len(values) // 10)
    return sum(values[:n]) / n, sum(values[-n:]) / n


def mean_share(records: Records, name: str, weight: str = "num_negative_tokens") -> float:
    """Mean of a share over calibrations, weighted by their tokens; NaN for none."""
    rows = [(record[name], record[weight]) for record in records if record.get(name) is not None and record[weight]]
    total = sum(tokens for _, tokens in rows)
    return sum(value * tokens for value, tokens in rows) / total if total else math.nan


def summary_table(
    log_history: Records, calibration_history: Records, clip_range: ClipRange, reference: ClipRange
) -> Table:
    """
    The short table at the end of a run.

    Args:
        log_history (`list[dict]`): `trainer.state.log_history`.
        calibration_history (`list[dict]`): `trainer.calibration_history`.
        clip_range ([`ClipRange`]): Bounds at the end.
        reference ([`ClipRange`]): Bounds as used in BF16.
    """
    table = Table(title="Run summary", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")

    first, last = first_and_last_tenth(series(log_history, "reward")[1])
    table.add_row("Mean reward, first → last tenth", f"{first:.3f} → {last:.3f}")
    lowers, uppers = series(log_history, "calclip/lower")[1], series(log_history, "calclip/upper")[1]
    if lowers:
        table.add_row(
            f"Clip range (reference {_range(reference)})",
            f"{_range(ClipRange(lowers[0], uppers[0]))} → {_range(clip_range)}",
        )
    done = [record for record in calibration_history if record["alpha_low_bf16"] is not None]
    if done:
        later = done[1:] or done
        tokens = sum(record["num_negative_tokens"] for record in later)
        table.add_row("Calibrations", str(len(done)))
        table.add_section()
        table.add_row("Negative tokens, later calibrations", f"{tokens:,}")
        table.add_row("  clipped in BF16, reference bounds", _percent(mean_share(later, "alpha_low_bf16")))
        table.add_row(
            "  clipped in FP8, reference bounds", _percent(mean_share(later, "clip_frac_low_neg_fp8_reference"))
        )
        table.add_row("  clipped in FP8, calibrated bounds", _percent(mean_share(later, "clip_frac_low_neg_fp8")))
        table.add_row(
            "  over-clipped, before → after calibration",
            f"{_percent(mean_share(later, 'overclip_low_frac_reference'))} → "
            f"{_percent(mean_share(later, 'overclip_low_frac'))}",
        )
        table.add_section()
    mismatch = series(log_history, "sampling/sampling_logp_difference/mean")[1]
    if mismatch:
        table.add_row("Rollout to trainer, mean |Δ log p|", f"{sum(mismatch) / len(mismatch):.4f} nats")
    runtime = series(log_history, "train_runtime")[1]
    if runtime and calibration_history:
        seconds = sum(record["bf16_pass_seconds"] for record in calibration_history)
        table.add_row("Time in BF16 passes", f"{_percent(seconds / sum(runtime))} of {sum(runtime):.0f} s")
    return table


def plot_run(path: str | Path, log_history: Records, calibration_history: Records, reference: ClipRange) -> None:
    """
    Draw reward, entropy, bounds and clip shares over optimizer steps, and save the picture.

    Args:
        path (`str` or `Path`): File to write; its ending says the format.
        log_history (`list[dict]`): `trainer.state.log_history`.
        calibration_history (`list[dict]`): `trainer.calibration_history`.
        reference ([`ClipRange`]): Bounds as used in BF16.
    """
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    (reward, entropy), (bounds, shares) = figure.subplots(2, 2, sharex=True)

    steps, values = series(log_history, "reward")
    reward.plot(steps, values, color="tab:blue", alpha=0.35, linewidth=1, label="per rollout")
    reward.plot(steps, _smooth(values), color="tab:blue", label="smoothed")
    reward.set_title("Mean reward")

    steps, values = series(log_history, "entropy")
    entropy.plot(steps, values, color="tab:purple")
    entropy.set_title("Entropy of the policy (nats per token)")

    for name, bound, color in (("upper", reference.upper, "tab:red"), ("lower", reference.lower, "tab:green")):
        steps, values = series(log_history, f"calclip/{name}")
        bounds.step(steps, values, where="post", color=color, label=f"{name}, in force")
        bounds.axhline(bound, color=color, linestyle=":", linewidth=1, label=f"{name}, reference")
        targets = [record for record in calibration_history if record[f"{name}_target"] is not None]
        bounds.plot(
            [record["step"] for record in targets], [record[f"{name}_target"] for record in targets],
            "x", color=color, markersize=5, label=f"{name}, target",
        )  # fmt: skip
    bounds.set_title("Clip range (ratios)")

    for name, label, style, color in (
        ("alpha_low_bf16", "BF16, reference bounds", "o-", "black"),
        ("clip_frac_low_neg_fp8_reference", "FP8, reference bounds", "s--", "tab:orange"),
        ("clip_frac_low_neg_fp8", "FP8, calibrated bounds", "^-", "tab:green"),
    ):
        steps, values = series(calibration_history, name)
        shares.plot(steps, [100 * value for value in values], style, color=color, markersize=4, label=label)
    shares.set_title("Negative-advantage tokens clipped (%)")

    for axis in (reward, bounds, shares):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    for axis in (reward, entropy, bounds, shares):
        axis.grid(alpha=0.3)
    for axis in (bounds, shares):
        axis.set_xlabel("optimizer step")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _range(clip_range: ClipRange) -> str:
    return f"[{clip_range.lower:.3f}, {clip_range.upper:.3f}]"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.2f} %"


def _smooth(values: Sequence[float], window: int = 9) -> list[float]:
    """Centred moving average; the window shrinks at the ends."""
    half = window // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]
