# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The demo over several seeds: does it learn, and does calibration bring FP8's clip share nearer to BF16's?

    python -m benchmarks demo --seeds 0 1 2

The second question is asked of the calibration batches after the first four, which the bounds need at most to get from
their start to the reference by steps of 0.05. The bounds in force there were fixed by earlier batches, so the tokens
are held out. Per seed and pooled it reports the share of negative-advantage tokens that BF16 clips, that FP8 clips at
the reference bounds, and that FP8 clips at the calibrated bounds; the gain is |FP8 at reference - BF16| - |FP8
calibrated - BF16|, with a 95 % interval from a paired bootstrap that resamples completions.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from trl import TrlParser  # noqa: E402

from benchmarks.clip_counts import completion_counts, paired_bootstrap  # noqa: E402
from benchmarks.results import Results, argument_parser, report  # noqa: E402
from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer, embedded  # noqa: E402
from trl_calclip.report import first_and_last_tenth, series  # noqa: E402


TRANSIENT = 4
CONFIG = Path(__file__).parents[1] / "configs" / "grpo_demo.yaml"


class CountingTrainer(CalibratedGRPOTrainer):
    """Keeps, for each completion of a calibration batch, its number of negative tokens and of clipped ones."""

    counts: list[list[list[int]]] = []

    def _calibrate(self, pool):
        self.counts.append(completion_counts(pool, self.reference_clip_range, self.clip_range))
        super()._calibrate(pool)


def run_one(seed: int, output: Path) -> None:
    """One seed, in this process; the result goes to `output` as JSON."""
    directory = output.with_suffix("")
    arguments = ["--config", str(CONFIG), "--output_dir", str(directory), "--seed", str(seed), "--save_strategy", "no"]
    if not torch.cuda.is_available():
        arguments += ["--use_cpu", "true"]
    (args,) = TrlParser(CalibratedGRPOConfig).parse_args_and_config(arguments)
    trainer = CountingTrainer(
        embedded.warm_start(directory / "warm_start", seed=seed),
        embedded.arithmetic_reward,
        args,
        train_dataset=embedded.arithmetic_dataset(4096, seed=seed),
    )
    trainer.train()
    first, last = first_and_last_tenth(series(trainer.state.log_history, "reward")[1])
    result = {
        "seed": seed,
        "first_tenth": first,
        "last_tenth": last,
        "train_seconds": series(trainer.state.log_history, "train_runtime")[1][0],
        "clip_range": [trainer.clip_range.lower, trainer.clip_range.upper],
        "calibration_history": trainer.calibration_history,
        "counts": trainer.counts,
    }
    output.write_text(json.dumps(result))


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser("demo", __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    if options.one is not None:
        run_one(options.one, options.output / f"seed{options.one}.json")
        return

    table = Results(
        "Demo: learning, and clip shares of negative-advantage tokens on held-out calibration batches",
        {
            "seed": "{seed}",
            "reward first → last tenth": "{first_tenth:.3f} → {last_tenth:.3f}",
            "train s": "{train_seconds:.0f}",
            "final range": "[{lower:.3f}, {upper:.3f}]",
            "calibrations": "{calibrations}",
            "completions": "{completions}",
            "tokens": "{tokens:,}",
            "BF16": "{bf16:.2%}",
            "FP8 reference": "{fp8_reference:.2%}",
            "FP8 calibrated": "{fp8_in_force:.2%}",
            "gain, 95 % interval": "{gain:.2%} [{gain_low:.2%}, {gain_high:.2%}]",
        },
    )
    pooled = []
    for seed in options.seeds:
        path = options.output / f"seed{seed}.json"
        if not path.exists():  # a broken benchmark goes on where it was
            command = [sys.executable, "-m", "benchmarks", "demo", "--one", str(seed), "--output", str(options.output)]
            subprocess.run(command, check=True)
        result = json.loads(path.read_text())
        pooled.append(np.concatenate([np.array(batch) for batch in result["counts"][TRANSIENT:]]))
        row = {name: result[name] for name in ("seed", "first_tenth", "last_tenth", "train_seconds")}
        row["lower"], row["upper"] = result["clip_range"]
        table.rows.append({**row, "calibrations": len(result["calibration_history"]), **paired_bootstrap(pooled[-1])})
    if len(pooled) > 1:
        table.rows.append({"seed": "all", **paired_bootstrap(np.concatenate(pooled))})
    report(options.output, table)
