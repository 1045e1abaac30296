# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
What the solve costs: time and peak memory of `calibrate_clip_range`, in multiples of one `torch.sort` of the same
tokens.

    python -m benchmarks.solver

Interleaved repeats, medians with the range of the repeats. Peak memory is the growth of the process's high-water mark
in a process of its own.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.header import header
from trl_calclip.clip_range import ClipRange, calibrate_clip_range


def tokens(count: int) -> list[torch.Tensor]:
    """FP8 and BF16 ratios, advantages, TIS weights, sampling probabilities: a small drift under a larger noise."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(count, generator=generator) for _ in range(4)]
    drift = 0.05 * draw[0]
    return [
        (drift + 0.15 * draw[1]).exp(),
        drift.exp(),
        draw[2],
        (0.1 * draw[3]).exp().clamp(max=2.0),
        torch.rand(count, generator=generator),
    ]


def solve(data: list[torch.Tensor]) -> None:
    fp8, bf16, advantages, weights, probs = data
    result = calibrate_clip_range(
        fp8, bf16, advantages, tis_weights=weights, sampling_probs=probs,
        reference=ClipRange(0.8, 1.24), current=ClipRange(0.6, 1.8),
    )  # fmt: skip
    assert result.skipped_reason is None or len(fp8) < 10_000, result.skipped_reason


def status(field: str) -> int:
    """A field of this process's memory status, in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}: peak memory is measured on Linux only.")


def peak_megabytes(count: int) -> float:
    """Growth of the high-water mark while solving, in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.solver", "--peak", str(count)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak is not None:
        data = tokens(options.peak)
        solve([column[:1000] for column in data])
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew from what is held now
        before = status("VmRSS")
        solve(data)
        print((status("VmHWM") - before) / 1024)
        return

    table = Table(title=f"calibrate_clip_range, {torch.get_num_threads()} thread(s)")
    for column in ("tokens", "torch.sort ms", "solve ms", "solve / sort: median [range]", "peak MiB above the inputs"):
        table.add_column(column, justify="right")
    for count in options.counts:
        data = tokens(count)
        sorts, solves = [], []
        for _ in range(options.repeats):
            for times, function in (
                (sorts, lambda data=data: torch.sort(data[0])),
                (solves, lambda data=data: solve(data)),
            ):
                start = time.perf_counter()
                function()
                times.append(1000 * (time.perf_counter() - start))
        ratios = [b / a for a, b in zip(sorts, solves, strict=True)]
        table.add_row(
            f"{count:,}", f"{statistics.median(sorts):.2f}", f"{statistics.median(solves):.2f}",
            f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]", f"{peak_megabytes(count):.0f}",
        )  # fmt: skip
    console = Console(width=150)
    console.print(header())
    console.print(table)


if __name__ == "__main__":
    main()
