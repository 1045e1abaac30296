# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Clip counts of a calibration batch by completion, and what they say of FP8 against BF16, with intervals."""

import math

import numpy as np
import torch

from trl_calclip import ClipRange
from trl_calclip.calibration import TokenPool


def completion_counts(pool: TokenPool, reference: ClipRange, in_force: ClipRange) -> list[list[int]]:
    """
    Per completion of a calibration batch: tokens with negative advantage, and how many of them the lower bound clips
    in BF16, in FP8 at the reference, and in FP8 at the bounds in force.
    """
    finite = pool.fp8_ratio.isfinite() & pool.bf16_ratio.isfinite() & (pool.advantages < 0)
    _, completion = pool.completions[finite].unique(return_inverse=True)
    fp8, bf16 = pool.fp8_ratio[finite], pool.bf16_ratio[finite]
    columns = [
        torch.ones_like(fp8, dtype=torch.bool),
        bf16 < reference.lower,
        fp8 < reference.lower,
        fp8 < in_force.lower,
    ]
    rows = [torch.bincount(completion, weights=column.double()).long().tolist() for column in columns]
    return [list(row) for row in zip(*rows, strict=True)]


def paired_bootstrap(counts: np.ndarray, draws: int = 10_000, seed: int = 0) -> dict[str, float | None]:
    """
    How much nearer to BF16 the bounds in force are than the reference bounds.

    Args:
        counts (`np.ndarray`):
            `(completions, 4)`: negative tokens, clipped in BF16, in FP8 at the reference bounds, and in FP8 at the
            bounds in force.
        draws (`int`, *optional*, defaults to `10_000`): Bootstrap samples of completions, whose tokens share a fate.
        seed (`int`, *optional*, defaults to `0`): Seed of the samples.

    Returns:
        `dict[str, float | None]`: The three shares; as multiples of BF16's (`None` where BF16 clips nothing) and as
        differences, that at the reference and that in force; the gain `|reference - BF16| - |in force - BF16|`; each
        of the latter five with its 95 % interval, `*_low` and `*_high`.
    """
    generator = np.random.default_rng(seed)

    def statistics(total: np.ndarray) -> dict[str, np.ndarray]:
        bf16, reference, in_force = np.moveaxis(total[..., 1:] / total[..., :1], -1, 0)
        nothing = np.where(bf16 > 0, bf16, np.nan)
        return {
            "multiple_reference": reference / nothing,
            "multiple_in_force": in_force / nothing,
            "difference_reference": reference - bf16,
            "difference_in_force": in_force - bf16,
            "gain": abs(reference - bf16) - abs(in_force - bf16),
        }

    n, total = len(counts), counts.sum(0)
    samples = np.concatenate(
        [generator.multinomial(n, np.full(n, 1 / n), size=min(500, draws)) @ counts for _ in range(-(-draws // 500))]
    )
    bf16, reference, in_force = (total[1:] / total[0]).tolist()
    result: dict[str, float | None] = {"completions": n, "tokens": int(total[0]), "bf16_clipped": int(total[1])}
    result |= {"bf16": bf16, "fp8_reference": reference, "fp8_in_force": in_force}
    spread = statistics(samples)
    for name, value in statistics(total).items():
        defined = spread[name][np.isfinite(spread[name])]
        known = math.isfinite(value) and len(defined)
        low, high = np.quantile(defined, [0.025, 0.975]).tolist() if known else (None, None)
        result |= {name: float(value) if known else None, f"{name}_low": low, f"{name}_high": high}
    return result
