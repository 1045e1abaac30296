# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
What pooling and solving cost as tokens and ranks grow, on gloo ranks of one machine.

    python -m benchmarks pooling

The tokens are spread evenly, and half of the places that a rank sends are filled, as when completions are half as long
as the longest one allowed. Seconds are the median of the repeats on the slowest rank, the ranks started together.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from benchmarks.results import Results, argument_parser, report
from benchmarks.solver import tokens
from trl_calclip import ClipRange
from trl_calclip.calibration import NUM_COLUMNS, TokenCollector, calibrate


def rows(count: int, rank: int, ranks: int) -> torch.Tensor:
    """A rank's share of `count` made-up tokens, in completions of 256."""
    number = torch.arange(rank, count, ranks)
    columns = [column[number].float() for column in tokens(count)]
    entropies = log_prob_errors = torch.zeros(len(number))
    places = [(number // 256).float(), (number % 256).float()]
    return torch.stack([*columns, *places, entropies, log_prob_errors], dim=1)


def measure(counts: list[int], repeats: int, output: Path) -> None:
    """On one rank: the times of all repeats, written by the first."""
    accelerator = Accelerator(cpu=True)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    result = {}
    for count in counts:
        mine = rows(count, rank, ranks)
        times = []
        for _ in range(repeats):
            collector = TokenCollector(rank, ranks, max_tokens=10**6, max_tokens_per_rank=2 * count // ranks)
            collector._rows = list(mine.split(1024))
            accelerator.wait_for_everyone()
            start = time.perf_counter()
            pool = collector.pool(accelerator)
            middle = time.perf_counter()
            result_, _ = calibrate(
                pool, reference=ClipRange(0.8, 1.24), current=ClipRange(0.6, 1.8), use_sampling_probs=True
            )
            times.append([middle - start, time.perf_counter() - middle])
            assert result_.skipped_reason is None and len(pool.fp8_ratio) == count
        both = accelerator.gather(torch.tensor(times).unsqueeze(0)).reshape(-1, repeats, 2).amax(0)
        result[count] = both.tolist()
    if accelerator.is_main_process:
        output.write_text(json.dumps(result))
    accelerator.wait_for_everyone()
    accelerator.end_training()  # a rank that exits with its process group open may be aborted


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser("pooling", __doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[10**4, 10**5, 10**6])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one is not None:
        measure(options.counts, options.repeats, options.one)
        return
    table = Results(
        "One calibration without its BF16 passes",
        {
            "ranks": "{ranks}",
            "tokens": "{tokens:,}",
            "sent by a rank, MiB": "{sent:.1f}",
            "pool, s": "{pool:.3f}",
            "solve, s": "{solve:.3f}",
            "both, fastest to slowest repeat, s": "{fastest:.3f} to {slowest:.3f}",
        },
    )
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as directory:
            output = Path(directory) / "times.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
            command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0", "-m", "benchmarks"]
            command += ["pooling", "--one", str(output), "--repeats", str(options.repeats)]
            command += ["--counts", *map(str, options.counts)]
            environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, env=environment, capture_output=True)
            result = json.loads(output.read_text())
        for count, times in result.items():
            pool, solve = (statistics.median(column) for column in zip(*times, strict=True))
            both = [sum(pair) for pair in times]
            sent = 2 * int(count) // ranks * 4 * NUM_COLUMNS / 2**20 if ranks > 1 else 0
            row = {"ranks": ranks, "tokens": int(count), "sent": sent, "pool": pool, "solve": solve}
            table.rows.append({**row, "fastest": min(both), "slowest": max(both)})
    report(options.output, table)
