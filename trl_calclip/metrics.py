# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
What FP8 does to the clip, in numbers: clip shares, by entropy too, errors of probabilities and ratios, and the
mismatch between rollout and trainer.

Numbers only, computed from tensors that a run has anyway. `docs/diagnostics.md` says what each means.
"""

import math
from typing import TYPE_CHECKING

import torch

from .clip_range import ClipRange


if TYPE_CHECKING:
    from .calibration import TokenPool


# Bins of a completion's entropy, nats per token: lower edges are in, upper edges are not. Source: arXiv 2609.22870.
ENTROPY_EDGES = (0.2, 0.5, 1.0)
ENTROPY_BINS = ("0-0.2", "0.2-0.5", "0.5-1", "over-1")


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


def entropy_metrics(pool: "TokenPool", *, reference: ClipRange, in_force: ClipRange) -> dict[str, float]:
    """
    In which completions the lower bound clips, by their entropy under the current policy.

    A completion's entropy is the mean over its tokens in the pool, and all its tokens are in its bin. Low-entropy text
    is fluent text; over-clipping in the top bin is how garbled text escapes being unlearned.

    Args:
        pool ([`TokenPool`]): Pooled tokens of the batch. Completions without a finite entropy are in no bin.
        reference ([`ClipRange`]): Bounds as used in BF16.
        in_force ([`ClipRange`]): Bounds under which the batch was trained.

    Returns:
        `dict[str, float]`: Shares in [0, 1], NaN where there is nothing to take a share of. Per bin of `ENTROPY_BINS`:
        `completions` (of all completions), `clip_frac_low_neg_fp8`, `clip_frac_low_neg_bf16` and `overclip_low_frac`
        (of the bin's tokens with negative advantage), `overclip_low_part` (of all over-clipped tokens). `garbled_frac`
        is the share of completions in the top bin with negative advantage.
    """
    numbers, completion = pool.completions.unique(return_inverse=True)
    lengths = torch.bincount(completion, minlength=len(numbers))
    entropy = torch.bincount(completion, weights=pool.entropies, minlength=len(numbers)) / lengths
    advantage = torch.bincount(completion, weights=pool.advantages, minlength=len(numbers))
    known = entropy.isfinite()
    bins = torch.bucketize(entropy, torch.tensor(ENTROPY_EDGES, dtype=entropy.dtype), right=True)
    bins[~known] = -1

    negative = pool.fp8_ratio.isfinite() & pool.bf16_ratio.isfinite() & (pool.advantages < 0)
    low, low_bf16 = pool.fp8_ratio < in_force.lower, pool.bf16_ratio < reference.lower
    over = low & ~low_bf16
    token_bins = bins[completion]
    metrics = {}
    for index, label in enumerate(ENTROPY_BINS):
        inside = token_bins == index
        metrics[f"entropy_bin/{label}/completions"] = share(bins == index, known)
        metrics[f"entropy_bin/{label}/clip_frac_low_neg_fp8"] = share(low, negative & inside)
        metrics[f"entropy_bin/{label}/clip_frac_low_neg_bf16"] = share(low_bf16, negative & inside)
        metrics[f"entropy_bin/{label}/overclip_low_frac"] = share(over, negative & inside)
        metrics[f"entropy_bin/{label}/overclip_low_part"] = share(inside, negative & over)
    metrics["garbled_frac"] = share((bins == len(ENTROPY_EDGES)) & (advantage < 0), known)
    return metrics


def error_metrics(pool: "TokenPool") -> dict[str, float]:
    """
    How far FP8 is from BF16, in the probabilities and in their ratio.

    Errors are differences of logarithms, in nats, which for small ones are relative errors. The two policies of a
    ratio err together: were their errors the same, the quotient would be 0, and independent ones of equal size would
    give 1.41. The paper reports 1.65 to 2.9 without saying how its errors are measured.

    Args:
        pool ([`TokenPool`]): Pooled tokens of the batch.

    Returns:
        `dict[str, float]`: `prob_error_fp8`, mean of `|log pi_fp8 - log pi_bf16|` of the current policy;
        `ratio_error_fp8`, mean of `|log r_fp8 - log r_bf16|`; `error_quotient`, the second over the first;
        `ratio_noise_mean` and `ratio_noise_std` of `log r_fp8 - log r_bf16`; `nonfinite_frac`, the share of tokens
        with a ratio that is not finite, which the others leave out. NaN where undefined.
    """
    finite = pool.fp8_ratio.isfinite() & pool.bf16_ratio.isfinite() & pool.log_prob_errors.isfinite()
    noise = (pool.fp8_ratio[finite] / pool.bf16_ratio[finite]).log()
    noise = noise[noise.isfinite()]  # a ratio of 0 has no logarithm
    prob_error = pool.log_prob_errors[finite].abs().mean().item()
    ratio_error = noise.abs().mean().item()
    ratios = pool.fp8_ratio.isfinite() & pool.bf16_ratio.isfinite()
    return {
        "prob_error_fp8": prob_error,
        "ratio_error_fp8": ratio_error,
        "error_quotient": ratio_error / prob_error if prob_error else math.nan,
        "ratio_noise_mean": noise.mean().item(),
        "ratio_noise_std": noise.std().item() if len(noise) > 1 else math.nan,
        "nonfinite_frac": share(~ratios, torch.ones_like(ratios)),
    }


def mismatch_sums(
    old_per_token_logps: torch.Tensor, sampling_per_token_logps: torch.Tensor, mask: torch.Tensor, cap: float = 2.0
) -> torch.Tensor:
    """
    What `mismatch_metrics` needs of one micro-batch. Sums over micro-batches and ranks may be added.

    Args:
        old_per_token_logps (`torch.Tensor`): The trainer's log-probabilities before the first update, `(B, T)`, nats.
        sampling_per_token_logps (`torch.Tensor`):
            The rollout's, `(B, T)`, nats. Tokens that it could not score (NaN) are left out.
        mask (`torch.Tensor`): The loss's mask, `(B, T)`.
        cap (`float`, *optional*, defaults to `2.0`): Where weights are cut for the effective sample size.

    Returns:
        `torch.Tensor`: `(10,)`, float64, on the inputs' device.
    """
    mask = mask.bool() & ~sampling_per_token_logps.isnan()
    d = torch.where(mask, old_per_token_logps.double() - sampling_per_token_logps.double(), 0.0)
    weight = d.clamp(-20, 20).exp()
    cut = weight.clamp(1 / cap, cap)
    lengths = mask.sum(-1)
    sequences = torch.where(lengths > 0, (d.sum(-1) / lengths.clamp(min=1)).abs(), 0.0)
    zero = torch.zeros_like(d)
    per_token = [torch.ones_like(d), -d, d.exp() - 1 - d, weight.square(), weight, cut, cut.square(), d.abs().exp()]
    sums = [torch.where(mask, values, zero).sum() for values in per_token]
    return torch.stack([*sums, (lengths > 0).sum().double(), sequences.sum()])


def mismatch_metrics(sums: torch.Tensor) -> dict[str, float]:
    """
    Mismatch of rollout and trainer, under the names and by the formulas of verl and NeMo-RL.

    With `mu` the rollout policy, `pi` the trainer's old policy, `d = log pi - log mu` per token, `w = exp(d)` with `d`
    cut to [-20, 20], and means over the tokens in the loss:

        rollout_corr/kl                          mean(-d)                                   KL(mu || pi), direct
        rollout_corr/k3_kl                       mean(exp(d) - 1 - d)                       the same, never negative
        rollout_corr/chi2_token                  mean(w^2) - 1
        rollout_corr/log_ppl_abs_diff            mean over completions of |mean over the completion of d|
        rollout_corr/rollout_is_mean             mean(w), before truncation
        rollout_corr/rollout_is_eff_sample_size  mean(c)^2 / mean(c^2), with c = w cut to [1 / cap, cap]
        token_mult_prob_error                    mean(exp(|d|))

    Source: verl, `compute_offpolicy_metrics` and `compute_is_metrics` in `verl/trainer/ppo/rollout_corr_helper.py`;
    NeMo-RL, section Metrics of `docs/guides/grpo.md`.

    Args:
        sums (`torch.Tensor`): Added results of `mismatch_sums`.

    Returns:
        `dict[str, float]`: Values by full metric name; empty without tokens.
    """
    tokens, kl, k3, square, weight, cut, cut_square, mult, sequences, ppl = sums.tolist()
    if not tokens:
        return {}
    return {
        "rollout_corr/kl": kl / tokens,
        "rollout_corr/k3_kl": k3 / tokens,
        "rollout_corr/chi2_token": square / tokens - 1,
        "rollout_corr/log_ppl_abs_diff": ppl / sequences,
        "rollout_corr/rollout_is_mean": weight / tokens,
        "rollout_corr/rollout_is_eff_sample_size": (cut / tokens) ** 2 / (cut_square / tokens),
        "token_mult_prob_error": mult / tokens,
    }
