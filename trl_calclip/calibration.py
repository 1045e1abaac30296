# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Collects the tokens of a calibration batch over micro-batches and optimizer steps, pools them over ranks, solves once.

The order of the columns is the pool's only format: one row per completion token with an advantage, in float64.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from .clip_range import CalibrationResult, ClipRange, calibrate_clip_range
from .metrics import clip_metrics


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
    """

    fp8_ratio: torch.Tensor
    bf16_ratio: torch.Tensor
    advantages: torch.Tensor
    tis_weights: torch.Tensor
    sampling_probs: torch.Tensor
    completions: torch.Tensor

    @classmethod
    def from_rows(cls, rows: torch.Tensor) -> "TokenPool":
        """Pool from an `(N, 6)` tensor."""
        return cls(*rows.unbind(dim=1))


class TokenCollector:
    """
    Gathers what calibration needs from the micro-batches of one rank.

    Args:
        process_index (`int`): Rank, to number completions.
        num_processes (`int`): World size, to number completions.
    """

    def __init__(self, process_index: int = 0, num_processes: int = 1):
        self._rows: list[torch.Tensor] = []
        self._zero_drift: list[torch.Tensor] = []
        self._next_completion = process_index
        self._num_processes = num_processes

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
        """
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        if sampling_per_token_logps is None:
            sampling_per_token_logps = old_per_token_logps
        else:
            sampling_per_token_logps = torch.where(
                sampling_per_token_logps.isnan(), old_per_token_logps, sampling_per_token_logps
            )
        if importance_sampling_ratio is None:
            importance_sampling_ratio = torch.ones_like(advantages)
        batch_size = mask.size(0)
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
        )
        keep = mask.bool() & (columns[2] != 0)
        self._rows.append(torch.stack([column[keep].double() for column in columns], dim=1).cpu())

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
        """The tokens of all ranks, the same on every rank. A rank without tokens takes part with none."""
        rows = torch.cat(self._rows) if self._rows else torch.zeros(0, 6, dtype=torch.float64)
        if accelerator.num_processes > 1:
            # Padding rows are zero, and a token without an advantage takes part in nothing.
            rows = accelerator.pad_across_processes(rows.to(accelerator.device), dim=0)
            rows = accelerator.gather(rows).cpu()
            rows = rows[rows[:, 2] != 0]
        return TokenPool.from_rows(rows)


def calibrate(
    pool: TokenPool,
    accelerator: Accelerator,
    *,
    reference: ClipRange,
    current: ClipRange,
    use_sampling_probs: bool,
    **settings,
) -> tuple[CalibrationResult, dict[str, float]]:
    """
    Solve on the main process and hand the answer to all, so that every rank holds the same bounds bit for bit.

    Args:
        pool (`TokenPool`): Pooled tokens.
        accelerator (`Accelerator`): For the broadcast.
        reference, current (`ClipRange`): Bounds as used in BF16, and bounds in force while the tokens were collected.
        use_sampling_probs (`bool`): Whether the rollout probability weighs a token's gradient mass.
        **settings: Limits, steps and minimum of tokens, as in [`calibrate_clip_range`].

    Returns:
        `tuple[CalibrationResult, dict[str, float]]`: The result, and the shares of clipped tokens in this batch.
    """
    answer: list[Any] = [None]
    if accelerator.is_main_process:
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
        answer = [(result, clip_metrics(pool, reference=reference, in_force=current))]
    broadcast_object_list(answer)
    return answer[0]


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
) -> dict[str, torch.Tensor]:
    """
    Completions in place of tokens, for a loss with one importance ratio per completion.

    The ratio is the exponential of the mean log-ratio over the completion's tokens, as in TRL's loss. A completion's
    gradient mass is `r * |A| * sum(w * s)` over its tokens: the entry's TIS weight is `sum(w)` and its probability
    under the rollout policy `sum(w * s) / sum(w)`. Beyond the paper, which knows token ratios only.

    Args:
        **all: As for [`TokenCollector.add`], `(B, T)`.

    Returns:
        `dict[str, torch.Tensor]`: Arguments for [`TokenCollector.add`], `(B, 1)` each; a completion without tokens in
        the mask is outside the returned mask.
    """
    mask = mask.bool()
    if sampling_per_token_logps is None:
        sampling_per_token_logps = old_per_token_logps
    sampling = torch.where(sampling_per_token_logps.isnan(), old_per_token_logps, sampling_per_token_logps).exp()
    weights = 1.0 if importance_sampling_ratio is None else importance_sampling_ratio
    weights = torch.where(mask, weights, 0.0).double()
    total = weights.sum(-1, keepdim=True)
    probability = torch.where(total > 0, (weights * sampling).sum(-1, keepdim=True) / total, 1.0)

    def mean_log_ratio(logps: torch.Tensor, old_logps: torch.Tensor) -> torch.Tensor:
        # In the loss's own dtype, by its own formula, so that the ratios are the loss's.
        return (((logps - old_logps) * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)

    log_ratio = mean_log_ratio(per_token_logps, old_per_token_logps)
    return {
        "per_token_logps": log_ratio,
        "old_per_token_logps": torch.zeros_like(log_ratio),
        "bf16_per_token_logps": mean_log_ratio(bf16_per_token_logps, bf16_old_per_token_logps),
        "bf16_old_per_token_logps": torch.zeros_like(log_ratio),
        "advantages": advantages,
        "mask": mask.any(-1, keepdim=True),
        "importance_sampling_ratio": total,
        "sampling_per_token_logps": probability.log(),
    }
