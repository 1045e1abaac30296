# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Collects the tokens of a calibration batch over micro-batches and optimizer steps, pools them over ranks, solves.

The order of the columns is the pool's only format: one float32 row per completion token with an advantage. One
collective moves the rows; every rank then holds the same tokens in the same order and solves for itself, in sums whose
order is fixed, so that all ranks get the same bounds bit for bit however the tokens were spread over them.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import torch
from accelerate import Accelerator

from .clip_range import CalibrationResult, ClipRange, calibrate_clip_range
from .metrics import clip_metrics, entropy_metrics, error_metrics, share


# Completions and positions are exact in a float32 column up to here.
_POSITION_BITS = 24


@dataclass(frozen=True)
class TokenPool:
    """
    Tokens of the off-policy steps of one rollout batch, each tensor of shape `(N,)`, float64, on the CPU.

    Only tokens inside the loss mask and with an advantage other than 0 are in it.

    Args:
        fp8_ratio (`torch.Tensor`): Importance ratio with both policies in FP8, as the loss computed it.
        bf16_ratio (`torch.Tensor`): Importance ratio with both policies in BF16.
        advantages (`torch.Tensor`): Advantage of the token's completion.
        tis_weights (`torch.Tensor`): Weight that the loss gives the token for the rollout mismatch.
        sampling_probs (`torch.Tensor`): Probability of the token under the rollout policy.
        completions (`torch.Tensor`): Number of the token's completion, unique over ranks and micro-batches.
        positions (`torch.Tensor`): Place of the token in its completion.
        entropies (`torch.Tensor`): Entropy of the current policy at the token, nats; NaN where it is not known.
        log_prob_errors (`torch.Tensor`): Log-probability of the token in FP8 minus BF16, current policy, nats.
    """

    fp8_ratio: torch.Tensor
    bf16_ratio: torch.Tensor
    advantages: torch.Tensor
    tis_weights: torch.Tensor
    sampling_probs: torch.Tensor
    completions: torch.Tensor
    positions: torch.Tensor
    entropies: torch.Tensor
    log_prob_errors: torch.Tensor

    @classmethod
    def from_rows(cls, rows: torch.Tensor) -> "TokenPool":
        """Pool from an `(N, NUM_COLUMNS)` tensor."""
        return cls(*rows.double().unbind(dim=1))


NUM_COLUMNS = len(fields(TokenPool))


class TokenCollector:
    """
    Gathers what calibration needs from the micro-batches of one rank.

    Where there are more than `max_tokens` tokens, on a rank or in the pool, those with the smallest keys stay. A key
    is a hash of the token's number under the seed: each token stays with the same chance, and which ones do depends
    neither on the ranks that hold them nor on what the ratios are.

    Args:
        process_index (`int`): Rank, to number completions.
        num_processes (`int`): World size, to number completions.
        max_tokens (`int`): Most tokens that a rank keeps and that the pool holds.
        max_tokens_per_rank (`int` or `None`):
            Most tokens that a rank can have, the same number on every rank; `None` where it is not known. What is
            sent has room for so many and no more.
        seed (`Sequence[int]`): What the draw depends on; the same on every rank, another for every rollout.
    """

    def __init__(
        self,
        process_index: int = 0,
        num_processes: int = 1,
        *,
        max_tokens: int = 1_000_000,
        max_tokens_per_rank: int | None = None,
        seed: Sequence[int] = (0,),
    ):
        self._rows: list[torch.Tensor] = []
        self._zero_drift: list[torch.Tensor] = []
        self._next_completion = process_index
        self._num_processes = num_processes
        self._max_tokens = max_tokens
        self._capacity = max_tokens if max_tokens_per_rank is None else min(max_tokens, max_tokens_per_rank)
        self._seed = seed

    def add(
        self,
        *,
        per_token_logps: torch.Tensor,
        old_per_token_logps: torch.Tensor,
        bf16_per_token_logps: torch.Tensor,
        bf16_old_per_token_logps: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        importance_sampling_ratio: torch.Tensor | None,
        sampling_per_token_logps: torch.Tensor | None,
        entropies: torch.Tensor | None = None,
        log_prob_errors: torch.Tensor | None = None,
    ) -> None:
        """
        Add one micro-batch.

        Args:
            per_token_logps, old_per_token_logps, bf16_per_token_logps, bf16_old_per_token_logps (`torch.Tensor`):
                Current and old policy, in FP8 and in BF16, `(B, T)`, nats.
            advantages (`torch.Tensor`): `(B,)` or `(B, T)`.
            mask (`torch.Tensor`): The loss's mask, `(B, T)`.
            importance_sampling_ratio (`torch.Tensor` or `None`): TRL's TIS weight, `(B, T)` or `(B, 1)`; `None` is 1.
            sampling_per_token_logps (`torch.Tensor` or `None`):
                Rollout policy, `(B, T)`, nats. Where it is `None` or NaN the old policy stands in for it.
            entropies (`torch.Tensor`, *optional*): Entropy of the current policy, `(B, T)`, nats.
            log_prob_errors (`torch.Tensor`, *optional*):
                FP8 minus BF16 of the current policy, `(B, T)`, nats. Defaults to the difference of the two above.
        """
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        sampling_per_token_logps = _or_old_policy(sampling_per_token_logps, old_per_token_logps)
        if importance_sampling_ratio is None:
            importance_sampling_ratio = torch.ones_like(advantages)
        if entropies is None:
            entropies = torch.full_like(per_token_logps, math.nan)
        if log_prob_errors is None:
            log_prob_errors = per_token_logps - bf16_per_token_logps
        batch_size, length = mask.shape
        completions = self._next_completion + self._num_processes * torch.arange(batch_size, device=mask.device)
        self._next_completion += self._num_processes * batch_size
        columns = torch.broadcast_tensors(
            # exp in the loss's own dtype and shape, so that these are the very ratios that the loss compares
            torch.exp(per_token_logps - old_per_token_logps),
            torch.exp(bf16_per_token_logps - bf16_old_per_token_logps),
            advantages,
            importance_sampling_ratio,
            sampling_per_token_logps.exp(),
            completions.unsqueeze(1),
            torch.arange(length, device=mask.device),
            entropies,
            log_prob_errors,
        )
        keep = mask.bool() & (columns[2] != 0)
        self._rows.append(torch.stack([column[keep].float() for column in columns], dim=1).cpu())
        if sum(map(len, self._rows)) > 2 * self._max_tokens:
            self._rows = [sample_rows(torch.cat(self._rows), self._max_tokens, self._seed)]

    def add_at_zero_drift(self, log_ratio: torch.Tensor, mask: torch.Tensor) -> None:
        """FP8 log-ratios `(B, T)`, nats, of a micro-batch before the first update: no weight has moved yet."""
        self._zero_drift.append(log_ratio[mask.bool()].double().cpu())

    def zero_drift_std(self) -> float | None:
        """
        Standard deviation of this rank's FP8 log-ratios before the first update, nats; `None` for fewer than two.

        0 where a token's numbers do not depend on its neighbours in the micro-batch, as with scales per row or block.
        """
        values = torch.cat(self._zero_drift) if self._zero_drift else torch.zeros(0)
        std = values.std().item() if values.numel() > 1 else math.nan
        return std if math.isfinite(std) else None

    def pool(self, accelerator: Accelerator) -> TokenPool:
        """
        The tokens of all ranks, at most `max_tokens`, in the order of their numbers: the same on every rank.

        A rank without tokens takes part with none. One all-gather of a `(capacity, NUM_COLUMNS)` float32 tensor,
        whose shape every rank knows beforehand; none in a single process.
        """
        rows = torch.cat(self._rows) if self._rows else torch.zeros(0, NUM_COLUMNS)
        rows = sample_rows(rows, self._max_tokens, self._seed)
        if accelerator.num_processes > 1:
            assert len(rows) <= self._capacity, f"{len(rows)} tokens, room for {self._capacity}"
            # Rows of padding are zero, and a token without an advantage takes part in nothing.
            padded = torch.zeros(self._capacity, NUM_COLUMNS, device=accelerator.device)
            padded[: len(rows)] = rows.to(accelerator.device)
            rows = accelerator.gather(padded)
            rows = sample_rows(rows[rows[:, 2] != 0].cpu(), self._max_tokens, self._seed)
        return TokenPool.from_rows(rows[_numbers(rows).argsort()])


def _or_old_policy(sampling_logps: torch.Tensor | None, old_logps: torch.Tensor) -> torch.Tensor:
    """The rollout policy's log-probabilities; the old policy's where the rollout gave none."""
    return old_logps if sampling_logps is None else torch.where(sampling_logps.isnan(), old_logps, sampling_logps)


def sample_rows(rows: torch.Tensor, max_tokens: int, seed: Sequence[int]) -> torch.Tensor:
    """
    The `max_tokens` rows with the smallest keys, in any order, or all where there are no more.

    A sample of the union of samples is the sample of the whole, however it was split.
    """
    if len(rows) <= max_tokens:
        return rows
    keys = token_keys(_numbers(rows), seed)
    return rows[torch.from_numpy(np.argpartition(keys, max_tokens - 1)[:max_tokens])]


def _numbers(rows: torch.Tensor) -> torch.Tensor:
    """One integer for each token, unique in its rollout batch: completion, then position."""
    return (rows[:, 5].long() << _POSITION_BITS) | rows[:, 6].long()


def token_keys(numbers: torch.Tensor, seed: Sequence[int]) -> np.ndarray:
    """
    Pseudo-random keys of tokens: a one-to-one function of their numbers, so that no two tokens share a key.

    Args:
        numbers (`torch.Tensor`): Unique integers, int64, `(N,)`.
        seed (`Sequence[int]`): Integers of at least 0.

    Returns:
        `np.ndarray`: `(N,)`, uint64.

    Source: the output function of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    (offset,) = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    keys = numbers.numpy().astype(np.uint64) ^ offset
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return keys ^ (keys >> np.uint64(31))


def draw_micro_batches(fraction: float, first: int, total: int, seed: Sequence[int]) -> frozenset[int]:
    """
    Which micro-batches of a rollout get BF16 passes.

    Args:
        fraction (`float`): Share to draw, above 0; at least one is drawn.
        first (`int`): Number of the first micro-batch to draw from, i.e. how many come before the first update.
        total (`int`): Micro-batches of the rollout, those that repeat a buffered one included.
        seed (`Sequence[int]`): What the draw depends on; the same on every rank.

    Returns:
        `frozenset[int]`: Numbers in `[first, total)`. No global random generator is moved.
    """
    count = num_drawn(fraction, total - first)
    return frozenset((first + np.random.default_rng(seed).permutation(total - first)[:count]).tolist())


def num_drawn(fraction: float, candidates: int) -> int:
    """How many of `candidates` micro-batches a share of `fraction` is: rounded, at least one."""
    return max(1, round(fraction * candidates))


def calibrate(
    pool: TokenPool, *, reference: ClipRange, current: ClipRange, use_sampling_probs: bool, **settings
) -> tuple[CalibrationResult, dict[str, float]]:
    """
    Solve. The same pool gives the same answer, bit for bit, in every process.

    Args:
        pool (`TokenPool`): Pooled tokens.
        reference, current (`ClipRange`): Bounds as used in BF16, and bounds in force while the tokens were collected.
        use_sampling_probs (`bool`): Whether the rollout probability weighs a token's gradient mass.
        **settings: Limits, steps and minimum of tokens, as in [`calibrate_clip_range`].

    Returns:
        `tuple[CalibrationResult, dict[str, float]]`: The result, and the diagnostics of this batch.
    """
    result = calibrate_clip_range(
        pool.fp8_ratio,
        pool.bf16_ratio,
        pool.advantages,
        tis_weights=pool.tis_weights,
        sampling_probs=pool.sampling_probs if use_sampling_probs else None,
        reference=reference,
        current=current,
        **settings,
    )
    negative = pool.fp8_ratio.isfinite() & pool.bf16_ratio.isfinite() & (pool.advantages < 0)
    bounds = {"reference": reference, "in_force": current}
    return result, {
        **clip_metrics(pool, **bounds),
        **entropy_metrics(pool, **bounds),
        **error_metrics(pool),
        "clip_frac_low_neg_fp8_target": share(pool.fp8_ratio < result.target.lower, negative),
        "num_pooled_tokens": len(pool.fp8_ratio),
    }


def calibration_record(result: CalibrationResult, shares: dict[str, float]) -> dict[str, float | None]:
    """What is logged and kept of one calibration, by metric name without its prefix; `None` where undefined."""
    values = asdict(result)
    clip_range, target = values.pop("clip_range"), values.pop("target")
    values.pop("skipped_reason")
    values = {
        "lower": clip_range["lower"],
        "upper": clip_range["upper"],
        "lower_target": target["lower"],
        "upper_target": target["upper"],
        **values,
        **shares,
    }
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def sequence_entries(
    *,
    per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor,
    bf16_per_token_logps: torch.Tensor,
    bf16_old_per_token_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_sampling_ratio: torch.Tensor | None,
    sampling_per_token_logps: torch.Tensor | None,
    entropies: torch.Tensor | None = None,
) -> dict[str, torch.Tensor | None]:
    """
    Completions in place of tokens, for a loss with one importance ratio per completion.

    The ratio is the exponential of the mean log-ratio over the completion's tokens, as in TRL's loss. A completion's
    gradient mass is `r * |A| * sum(w * s)` over its tokens: the entry's TIS weight is `sum(w)` and its probability
    under the rollout policy `sum(w * s) / sum(w)`. Beyond the paper, which knows token ratios only.

    Args:
        **all: As for [`TokenCollector.add`], `(B, T)`.

    Returns:
        `dict[str, torch.Tensor | None]`: Arguments for [`TokenCollector.add`], `(B, 1)` each; a completion without
        tokens in the mask is outside the returned mask. `entropies` is `None` where it was not given.
    """
    mask = mask.bool()
    sampling = _or_old_policy(sampling_per_token_logps, old_per_token_logps).exp()
    weights = 1.0 if importance_sampling_ratio is None else importance_sampling_ratio
    weights = torch.where(mask, weights, 0.0).double()
    total = weights.sum(-1, keepdim=True)
    probability = torch.where(total > 0, (weights * sampling).sum(-1, keepdim=True) / total, 1.0)

    log_ratio = mean_log_ratio(per_token_logps, old_per_token_logps, mask)
    return {
        "per_token_logps": log_ratio,
        "old_per_token_logps": torch.zeros_like(log_ratio),
        "bf16_per_token_logps": mean_log_ratio(bf16_per_token_logps, bf16_old_per_token_logps, mask),
        "bf16_old_per_token_logps": torch.zeros_like(log_ratio),
        "advantages": advantages,
        "mask": mask.any(-1, keepdim=True),
        "importance_sampling_ratio": total,
        "sampling_per_token_logps": probability.log(),
        "entropies": None if entropies is None else mean_log_ratio(entropies, torch.zeros_like(entropies), mask),
        "log_prob_errors": mean_log_ratio(per_token_logps, bf16_per_token_logps, mask),
    }


def mean_log_ratio(logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean difference over a completion's tokens, `(B, 1)`: in the loss's own dtype, by its own formula."""
    return (((logps - old_logps) * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)


def count_negative(
    lower: float,
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    sequence_level: bool,
) -> torch.Tensor:
    """
    How many negative-advantage tokens of a micro-batch lie below the lower bound, and how many there are, counted as a
    calibration counts them.

    Args:
        lower (`float`): Lower clip bound.
        logps, old_logps (`torch.Tensor`): Log-probabilities of the current and the old policy, `(B, T)`, nats.
        advantages (`torch.Tensor`): `(B,)` or `(B, T)`.
        mask (`torch.Tensor`): The loss mask, `(B, T)`, bool.
        sequence_level (`bool`): Whether one ratio stands for a completion, which is then counted once.

    Returns:
        `torch.Tensor`: The two counts, `(2,)`, int64, on the device of `logps`.
    """
    log_ratio = logps - old_logps
    if sequence_level:
        log_ratio, mask = mean_log_ratio(logps, old_logps, mask), mask.any(-1, keepdim=True)
    ratio = log_ratio.exp()
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    negative = (advantages < 0) & mask & ratio.isfinite()
    return torch.stack([((ratio.double() < lower) & negative).sum(), negative.sum()])
