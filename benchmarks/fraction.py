# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
BF16 passes on a share of the micro-batches: how far the bounds are from those of the full pass, and what it saves.

    python -m benchmarks fraction

Records calibration batches of the demo with all passes, twelve micro-batches each; then solves every batch again and
again from random draws of whole micro-batches. The error is that of the target (the bound before damping) against the
full pass on the same batch. Beside it stands what the full pass itself is uncertain by: the same spread when the
twelve micro-batches are drawn with replacement. `--cost` times the demo as it is, with all passes and with
`--fraction`.
"""

import os
import time
from pathlib import Path


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402
from trl import TrlParser  # noqa: E402

from benchmarks.results import Results, argument_parser, report  # noqa: E402
from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer, ClipRange, embedded  # noqa: E402
from trl_calclip.calibration import TokenPool, calibrate, num_drawn  # noqa: E402
from trl_calclip.report import series  # noqa: E402


CONFIG = Path(__file__).parents[1] / "configs" / "grpo_demo.yaml"


class Recording(CalibratedGRPOTrainer):
    """Keeps a calibration batch's tokens by micro-batch with the bounds in force, and times pooling and solving."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches: list[tuple[list[torch.Tensor], ClipRange]] = []
        self.solve_seconds = 0.0

    def end_rollout(self):
        if self._collector is not None:
            self.batches.append((list(self._collector._rows), self.clip_range))
        start = time.perf_counter()
        super().end_rollout()
        self.solve_seconds += time.perf_counter() - start


def run(output: Path, rollouts: int, *overrides: str) -> Recording:
    """A run of the demo with other settings."""
    arguments = ["--config", str(CONFIG), "--output_dir", str(output), "--save_strategy", "no", "--max_steps"]
    arguments += [str(4 * rollouts), *overrides]
    if not torch.cuda.is_available():
        arguments += ["--use_cpu", "true"]
    (args,) = TrlParser(CalibratedGRPOConfig).parse_args_and_config(arguments)
    model = embedded.warm_start(output / "warm_start")
    trainer = Recording(model, embedded.arithmetic_reward, args, train_dataset=embedded.arithmetic_dataset(4096))
    trainer.train()
    return trainer


def error_table(batches: list[tuple[list[torch.Tensor], ClipRange]], shares: list[float], draws: int) -> Results:
    """Root mean square errors of the targets over batches and draws."""
    generator = torch.Generator().manual_seed(0)

    def solve(parts: list[torch.Tensor], current: ClipRange):
        pool = TokenPool.from_rows(torch.cat(parts))
        reference = ClipRange(0.8, 1.24)
        return calibrate(pool, reference=reference, current=current, use_sampling_probs=True)[0]

    batches = [(parts, current) for parts, current in batches if solve(parts, current).skipped_reason is None]
    full = [solve(parts, current) for parts, current in batches]
    negative = sum(result.num_negative_tokens for result in full) / len(full)
    table = Results(
        "Error of the bounds from a share of the micro-batches, root mean square",
        {
            "share": "{share}",
            "micro-batches": "{count} of {total}",
            "lower target": "{lower_target:.4f}",
            "upper target": "{upper_target:.4f}",
            "lower bound in force": "{lower:.4f}",
            "upper bound in force": "{upper:.4f}",
            "BF16 clip share, points": "{alpha_points:.2f}",
            "skipped": "{skipped:.1%}",
        },
        notes=[f"{len(batches)} batches, {negative:,.0f} negative tokens each on average, {draws} draws of each."],
    )
    total = len(batches[0][0])
    for share in [*shares, None]:
        errors, skipped = [], 0
        count = total if share is None else num_drawn(share, total)
        for (parts, current), expected in zip(batches, full, strict=True):
            for _ in range(draws):
                if share is None:
                    chosen = torch.randint(total, (total,), generator=generator)
                else:
                    chosen = torch.randperm(total, generator=generator)[:count]
                result = solve([parts[number] for number in chosen.tolist()], current)
                if result.skipped_reason is not None:
                    skipped += 1
                    continue
                errors.append(
                    [
                        result.target.lower - expected.target.lower,
                        result.target.upper - expected.target.upper,
                        result.clip_range.lower - expected.clip_range.lower,
                        result.clip_range.upper - expected.clip_range.upper,
                        100 * (result.alpha_low_bf16 - expected.alpha_low_bf16),
                    ]
                )
        rms = torch.tensor(errors, dtype=torch.float64).square().mean(0).sqrt().tolist()
        row = dict(zip(("lower_target", "upper_target", "lower", "upper", "alpha_points"), rms, strict=True))
        row |= {"count": count, "total": total, "skipped": skipped / (draws * len(batches))}
        table.rows.append({"share": "1, drawn with replacement" if share is None else share, **row})
    return table


def cost(output: Path, rollouts: int, fraction: float) -> Results:
    """Share of a rollout batch's time that a calibration takes, at an interval of 20."""
    table = Results(
        "Cost of a calibration",
        {
            "calibration_fraction": "{fraction:g}",
            "BF16 passes, s": "{passes:.3f}",
            "pool and solve, s": "{solve:.4f}",
            "rollout batch without them, s": "{rest:.2f}",
            "share at interval 20": "{share:.2%}",
        },
    )
    for value in (1.0, fraction):
        trainer = run(output, rollouts, "--calibration_interval", "1", "--calibration_fraction", str(value))
        passes = sum(record["bf16_pass_seconds"] for record in trainer.calibration_history) / rollouts
        solve = trainer.solve_seconds / rollouts
        whole = series(trainer.state.log_history, "train_runtime")[1][0] / rollouts
        rest = whole - passes - solve
        share = (passes + solve) / (20 * rest + passes + solve)
        row = {"fraction": value, "passes": passes, "solve": solve, "rest": rest, "share": share}
        table.rows.append(row)
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser("fraction", __doc__)
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--interval", type=int, default=2)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25, 0.5, 0.75])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--fraction", type=float, default=0.25)
    options = parser.parse_args(argv)
    if options.cost:
        report(options.output / "cost", cost(options.output, options.rollouts, options.fraction))
        return
    trainer = run(
        options.output, options.rollouts, "--calibration_interval", str(options.interval),
        "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "4", "--steps_per_generation", "16",
        "--calibration_min_tokens", "1",
    )  # fmt: skip
    report(options.output, error_table(trainer.batches, options.shares, options.draws))
