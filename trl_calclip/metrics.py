# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Shares of clipped and over-clipped tokens: what FP8 does to the clip, in numbers."""

import math
from typing import TYPE_CHECKING

import torch

from .clip_range import ClipRange


if TYPE_CHECKING:
    from .calibration import TokenPool


def share(part: torch.Tensor, whole: torch.Tensor) -> float:
    """Number of `part` over number of `whole`, both boolean; NaN where `whole` is empty."""
    total = whole.sum().item()
    return (part & whole).sum().item() / total if total else math.nan


def clip_metrics(pool: "TokenPool", *, reference: ClipRange, in_force: ClipRange) -> dict[str, float]:
    """
    Clip shares of a calibration batch.

    A token is over-clipped when FP8 clips it and BF16, at the reference bounds, would not. Shares are of the tokens
    with negative (low) or positive (high) advantage; tokens with a non-finite ratio are in none.

    Args:
        pool ([`TokenPool`]): Pooled tokens of the batch.
        reference ([`ClipRange`]): Bounds as used in BF16.
        in_force ([`ClipRange`]): Bounds under which the batch was trained.

    Returns:
        `dict[str, float]`: Shares in [0, 1], NaN without tokens of that sign. `*_reference`: as if the reference
        bounds had been in force in FP8.
    """
    finite = pool.fp8_ratio.isfinite() & pool.bf16_ratio.isfinite()
    negative, positive = finite & (pool.advantages < 0), finite & (pool.advantages > 0)
    kept_low, kept_high = pool.bf16_ratio >= reference.lower, pool.bf16_ratio <= reference.upper
    low, high = pool.fp8_ratio < in_force.lower, pool.fp8_ratio > in_force.upper
    low_reference, high_reference = pool.fp8_ratio < reference.lower, pool.fp8_ratio > reference.upper
    return {
        "clip_frac_low_neg_fp8": share(low, negative),
        "clip_frac_low_neg_fp8_reference": share(low_reference, negative),
        "clip_frac_high_pos_fp8": share(high, positive),
        "clip_frac_high_pos_bf16": share(~kept_high, positive),
        "overclip_low_frac": share(low & kept_low, negative),
        "overclip_high_frac": share(high & kept_high, positive),
        "overclip_low_frac_reference": share(low_reference & kept_low, negative),
        "overclip_high_frac_reference": share(high_reference & kept_high, positive),
    }
