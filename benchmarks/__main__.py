# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Everything that is measured, by name.

    python -m benchmarks                    what there is
    python -m benchmarks solver --help      options of one
    python -m benchmarks solver             run it
"""

import difflib
import importlib
import sys

from rich.console import Console
from rich.table import Table


# Name of the module: what it measures, what it needs.
BENCHMARKS = {
    "alignment": ("gap of log-probabilities between trainer and engine, with and without alignment", "CPU, vLLM"),
    "demo": ("the demo over seeds: learning, and clip shares on held-out calibration batches", "CPU, vLLM"),
    "drift": ("does FP8 amplify small optimizer steps beyond noise", "CPU"),
    "dynamic_sampling": ("dynamic sampling on and off, everything else equal", "CPU, vLLM"),
    "fraction": ("BF16 passes on a share of the micro-batches: error and saving", "CPU, vLLM"),
    "kernels": ("FP8 against BF16 training step, per recipe and layer shape", "GPU with FP8"),
    "miniature": ("the paper's main table in miniature", "CPU, vLLM, hours"),
    "noise": ("FP8 noise of the ratio against policy drift, per recipe", "CPU"),
    "overhead": ("step time and memory against TRL's trainer, by part", "CPU, vLLM"),
    "pooling": ("pooling and solving as tokens and ranks grow", "CPU"),
    "sequence_level": ("FP8 noise of one ratio per completion (GSPO)", "CPU, vLLM for --train"),
    "solver": ("the solve against one sort and against the paper's grid search", "CPU"),
    "sync": ("re-quantizing weight sync against building the engine anew, as models grow", "CPU, vLLM"),
    "sync_faults": ("gap of the self-check after syncs with a fault put in", "CPU, vLLM"),
}


def listing() -> Table:
    """The table of benchmarks."""
    table = Table("NAME", "measures", "needs", title="python -m benchmarks NAME [options]", title_justify="left")
    for name, (measures, needs) in BENCHMARKS.items():
        table.add_row(name, measures, needs)
    return table


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        Console().print(listing())
        return
    name, *options = argv
    if name not in BENCHMARKS:
        close = difflib.get_close_matches(name, BENCHMARKS, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(BENCHMARKS)}."
        sys.exit(f"There is no benchmark {name!r}. {hint}")
    importlib.import_module(f"benchmarks.{name}").main(options)


if __name__ == "__main__":
    main()
