# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
What the solve costs: time and peak memory of `calibrate_clip_range`, against one `torch.sort` of the same tokens and
against the paper's grid search.

    python -m benchmarks solver

Interleaved repeats, medians with the range of the repeats. Peak memory is the growth of the process's high-water mark
in a process of its own. Beside it stands how far the grid's bounds are from the exact ones, in ratio.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.progress import track

from benchmarks.measuring import fresh, peak_memory
from benchmarks.results import Results, argument_parser, report
from trl_calclip.clip_range import CalibrationResult, ClipRange, calibrate_clip_range
from trl_calclip.report_panels import COLORS


REFERENCE, CURRENT = ClipRange(0.8, 1.24), ClipRange(0.6, 1.8)
GRID_STEP = 0.02


def tokens(count: int, seed: int = 0) -> list[torch.Tensor]:
    """FP8 and BF16 ratios, advantages, TIS weights, sampling probabilities: a small drift under a larger noise."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(count, generator=generator) for _ in range(4)]
    drift = 0.1 * draw[0]
    return [
        (drift + 0.15 * draw[1]).exp(),
        drift.exp(),
        draw[2],
        (0.1 * draw[3]).exp().clamp(max=2.0),
        torch.rand(count, generator=generator),
    ]


def solve(data: list[torch.Tensor]) -> CalibrationResult:
    """The exact solve."""
    fp8, bf16, advantages, weights, probs = data
    result = calibrate_clip_range(
        fp8, bf16, advantages, tis_weights=weights, sampling_probs=probs, reference=REFERENCE, current=CURRENT
    )
    assert result.skipped_reason is None or len(fp8) < 10_000, result.skipped_reason
    return result


def grid_search(data: list[torch.Tensor]) -> ClipRange:
    """
    The two targets as the paper finds them: the empirical quantile, and the best of the upper bounds in steps of 0.02,
    one masked sum for each. Limits and damped step of the lower bound are those of [`calibrate_clip_range`].

    Source: Chen et al., arXiv 2609.22870.
    """
    fp8, bf16, advantages, weights, probs = (column.double() for column in data)
    negative, positive = advantages < 0, advantages > 0
    weight = weights * probs * advantages.abs()
    alpha = (bf16[negative] < REFERENCE.lower).double().mean().item()
    lower_target = min(max(float(np.quantile(fp8[negative].numpy(), alpha)), 0.5), 0.9)
    lower = CURRENT.lower + min(max((lower_target - CURRENT.lower) / 2, -0.05), 0.05)

    def mass(ratio: torch.Tensor, kept: torch.Tensor) -> float:
        return (ratio * weight * kept).sum().item()

    rho = mass(bf16, positive & (bf16 <= REFERENCE.upper)) / mass(bf16, negative & (bf16 >= REFERENCE.lower))
    target = rho * mass(fp8, negative & (fp8 >= lower))
    ratio, weight = fp8[positive], weight[positive]
    candidates = [1.2 + GRID_STEP * number for number in range(41)]
    return ClipRange(lower_target, min(candidates, key=lambda bound: abs(mass(ratio, ratio <= bound) - target)))


METHODS: dict[str, Callable] = {"sort": lambda data: torch.sort(data[0]), "solve": solve, "grid": grid_search}


def peak_mebibytes(method: str, count: int) -> float:
    """Growth of the high-water mark of this process, which must be fresh, over the inputs."""
    data = tokens(count)
    METHODS[method]([column[:1000] for column in data])
    with peak_memory() as memory:
        METHODS[method](data)
    return memory["MiB"]


def measure(count: int, repeats: int) -> dict[str, float | None]:
    """Medians, ranges, memory and differences for `count` tokens."""
    data = tokens(count)
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(repeats):
        for method, function in METHODS.items():
            start = time.perf_counter()
            function(data)
            times[method].append(time.perf_counter() - start)
    row: dict[str, float | None] = {"tokens": count, "repeats": repeats}
    for method, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times["sort"], strict=True)]
        row |= {f"{method}_ms": 1000 * statistics.median(seconds), f"{method}_ratio": statistics.median(ratios)}
        row |= {f"{method}_fastest": min(ratios), f"{method}_slowest": max(ratios)}
        row[f"{method}_mib"] = fresh(peak_mebibytes, method, count)
    exact, grid = solve(data).target, grid_search(data)
    return {**row, "lower_off": abs(grid.lower - exact.lower), "upper_off": abs(grid.upper - exact.upper)}


def draw(rows: list[dict]) -> Figure:
    """Time and memory against tokens."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    labels = {"sort": "one torch.sort", "solve": "exact solve", "grid": "grid search"}
    for axis, unit, title in zip(figure.subplots(1, 2), ("ms", "mib"), ("milliseconds", "peak MiB"), strict=True):
        for (method, label), color in zip(labels.items(), COLORS, strict=False):
            points = [(row["tokens"], row[f"{method}_{unit}"]) for row in rows if row[f"{method}_{unit}"] >= 0.01]
            axis.loglog(*zip(*points, strict=True), "o-", color=color, label=label)
        axis.set_xlabel("tokens")
        axis.set_title(title)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser("solver", __doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(argv)
    table = Results(
        "Solving for the bounds",
        {
            "tokens": "{tokens:,}",
            "torch.sort, ms": "{sort_ms:.2f}",
            "solve, ms": "{solve_ms:.2f}",
            "in sorts: median [range]": "{solve_ratio:.2f} [{solve_fastest:.2f}, {solve_slowest:.2f}]",
            "peak, MiB": "{solve_mib:.0f}",
            "grid, ms": "{grid_ms:.2f}",
            "in sorts: median [range] ": "{grid_ratio:.2f} [{grid_fastest:.2f}, {grid_slowest:.2f}]",
            "peak, MiB ": "{grid_mib:.0f}",
            "grid off by, L": "{lower_off:.5f}",
            "H": "{upper_off:.5f}",
        },
        [measure(count, options.repeats) for count in track(options.counts)],
        [f"{options.repeats} interleaved repeats. Peak memory is above the inputs'."],
    )
    report(options.output, table, figure=draw(table.rows))
