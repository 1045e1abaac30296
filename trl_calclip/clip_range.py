# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Clip bounds and how to calibrate them: pure functions of the ratios, in plain torch.

The method is Calibrated Clipping (Chen et al., arXiv 2609.22870), without public code. The lower bound is set so that
FP8 clips as many negative-advantage tokens as BF16 does at the reference bound; the upper bound then restores the
balance of positive to negative gradient mass. Where this file departs from the paper or settles what it leaves open:

- both bounds are found exactly, from one sort each, not on a grid;
- of all bounds that clip the same tokens, the one nearest to the reference bound is the target, so that calibration is
  the identity where FP8 equals BF16;
- the upper bound is balanced against the lower bound that will be in force, not against the lower target;
- the solve runs in float64 on the CPU wherever the inputs live: it costs a fraction of a second, takes no accelerator
  memory, and gives the same numbers on every device.
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch


# More unusable tokens than this share of the tokens that could move the policy, and the bounds stay.
MAX_DROPPED_SHARE = 0.01


@dataclass(frozen=True)
class ClipRange:
    """
    The two bounds of a clipped importance ratio, as ratios.

    A token with negative advantage is clipped when its ratio is under `lower`, one with positive advantage when its
    ratio is over `upper`.

    Args:
        lower (`float`):
            Lower bound, `0 < lower <= 1`.
        upper (`float`):
            Upper bound, `upper >= 1`.

    Raises:
        `TypeError`: a bound is not a real number.
        `ValueError`: a bound is not finite or lies on the wrong side of 1.
    """

    lower: float
    upper: float

    def __post_init__(self):
        for name in ("lower", "upper"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"ClipRange: `{name}` must be a real number, got {value!r}.")
            object.__setattr__(self, name, float(value))
        if not (math.isfinite(self.lower) and math.isfinite(self.upper) and 0.0 < self.lower <= 1.0 <= self.upper):
            raise ValueError(
                "ClipRange: the bounds are ratios and must satisfy 0 < lower <= 1 <= upper < infinity, or a token "
                f"whose ratio has not moved would be clipped; got lower={self.lower}, upper={self.upper}. Distances "
                "from 1, such as TRL's `epsilon` and `epsilon_high`, go through `ClipRange.from_epsilons`."
            )

    @classmethod
    def from_epsilons(cls, epsilon_low: float, epsilon_high: float) -> "ClipRange":
        """Range whose bounds lie `epsilon_low` under 1 and `epsilon_high` over 1."""
        return cls(1.0 - epsilon_low, 1.0 + epsilon_high)

    @property
    def epsilon_low(self) -> float:
        """Distance of the lower bound from 1 (`1 - epsilon_low` gives a float32 `lower` back exactly)."""
        return 1.0 - self.lower

    @property
    def epsilon_high(self) -> float:
        """Distance of the upper bound from 1 (`1 + epsilon_high` gives a float32 `upper` back exactly)."""
        return self.upper - 1.0


@dataclass(frozen=True)
class CalibrationResult:
    """
    What one calibration found. Numbers that a skipped calibration did not get to are NaN.

    Args:
        clip_range (`ClipRange`):
            The range in force next: float32 numbers, `lower` rounded up and `upper` rounded down, so that a float32
            comparison clips the very tokens counted here. The very `current` when skipped.
        target (`ClipRange`):
            Solution before damping, in float64 and not rounded: compare it with ratios in float64. `current` when
            skipped.
        alpha_low_bf16 (`float`):
            Share of the negative-advantage tokens that BF16 clips at the reference bound.
        rho_bf16 (`float`):
            Kept positive over kept negative gradient mass, BF16 ratios at the reference range.
        rho_fp8 (`float`):
            The same of the FP8 ratios at `clip_range`.
        num_negative_tokens (`int`):
            Negative-advantage tokens that took part.
        num_dropped_tokens (`int`):
            Tokens inside the mask, with an advantage other than 0, left out because an input is not finite.
        skipped_reason (`str` or `None`):
            Why the bounds stayed; `None` when it calibrated.
    """

    clip_range: ClipRange
    target: ClipRange
    alpha_low_bf16: float
    rho_bf16: float
    rho_fp8: float
    num_negative_tokens: int
    num_dropped_tokens: int
    skipped_reason: str | None


@torch.no_grad()
def calibrate_clip_range(
    fp8_ratio: torch.Tensor,
    bf16_ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    tis_weights: torch.Tensor | None = None,
    sampling_probs: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    reference: ClipRange,
    current: ClipRange,
    lower_limits: tuple[float, float] = (0.5, 0.9),
    upper_limits: tuple[float, float] = (1.2, 2.0),
    max_lower_step: float = 0.05,
    max_upper_step: float = 0.10,
    min_tokens: int = 1,
) -> CalibrationResult:
    """
    Moves `current` half of the way, by at most a step, towards the range that makes FP8 clip as BF16 does.

    Masked tokens and tokens whose advantage or TIS weight is 0 take part in nothing; neither do tokens with an input
    that is not finite. If those last ones, inside the mask and with an advantage other than 0, are more than 1 %,
    nothing is calibrated. Neither is it with too few negative-advantage tokens or without gradient mass on a side:
    `clip_range` is then `current` and `skipped_reason` one sentence. Empty input is the case of too few tokens.

    From a `current` inside the limits the new bounds never leave them, and never move by more than a step, but for the
    rounding to float32: a lower bound of 0.9 is handed on as 0.90000004, the nearest float32 that clips every float32
    ratio under 0.9 and no other. A `current` outside the limits walks back in damped steps.

    Args:
        fp8_ratio (`torch.Tensor`):
            Importance ratios, current over old policy, both in FP8. Any shape, `(B, T)` or flat, any float dtype,
            any device; the other tensors have the same shape.
        bf16_ratio (`torch.Tensor`):
            The same ratios, both policies in BF16.
        advantages (`torch.Tensor`):
            Advantage of each token.
        tis_weights (`torch.Tensor`, *optional*):
            Truncated importance-sampling weights, old over rollout policy; `None` means 1. For a token without a
            rollout log-probability pass 1 here and the old policy's probability below: NaN drops the token.
        sampling_probs (`torch.Tensor`, *optional*):
            Probability the rollout policy gave each token, a factor of its gradient mass; `None` means 1.
        mask (`torch.Tensor`, *optional*):
            Nonzero (or `True`) for the tokens the loss sees; `None` means all. What masked places hold is not read.
        reference (`ClipRange`):
            Range one would use in BF16. It must lie inside the limits.
        current (`ClipRange`):
            Range in force while the ratios were collected.
        lower_limits (`tuple[float, float]`, *optional*, defaults to `(0.5, 0.9)`):
            Search interval of the lower bound, both ends included.
        upper_limits (`tuple[float, float]`, *optional*, defaults to `(1.2, 2.0)`):
            Search interval of the upper bound, both ends included.
        max_lower_step (`float`, *optional*, defaults to `0.05`):
            Most that the lower bound moves in one calibration.
        max_upper_step (`float`, *optional*, defaults to `0.10`):
            Most that the upper bound moves in one calibration.
        min_tokens (`int`, *optional*, defaults to `1`):
            Fewest negative-advantage tokens to calibrate on. The default is the fewest for which a share is defined;
            how many make the share worth following depends on the run and is the caller's to say.

    Returns:
        [`CalibrationResult`]

    Raises:
        `TypeError`: a range is not a `ClipRange`, or an input is not a floating-point tensor.
        `ValueError`: shapes differ; a ratio, weight or probability that takes part is negative; limits are out of
            order; the reference lies outside them; a step is not positive; `min_tokens` is under 1.

    Source: Chen et al., arXiv 2609.22870; see `docs/method.md` for the choices made here.
    """
    _check_settings(reference, current, lower_limits, upper_limits, max_lower_step, max_upper_step, min_tokens)
    inputs = {
        "fp8_ratio": fp8_ratio,
        "bf16_ratio": bf16_ratio,
        "advantages": advantages,
        "tis_weights": tis_weights,
        "sampling_probs": sampling_probs,
        "mask": mask,
    }
    _check_inputs(inputs)
    negative, positive, num_seen, num_dropped = _split_by_sign(**inputs)
    n = len(negative.fp8)
    alpha = rho_bf16 = math.nan

    def skip(reason: str) -> CalibrationResult:
        return CalibrationResult(current, current, alpha, rho_bf16, math.nan, n, num_dropped, reason)

    if num_dropped > MAX_DROPPED_SHARE * num_seen:
        return skip(
            f"{num_dropped} of {num_seen} tokens have an input that is not finite, more than {MAX_DROPPED_SHARE:.0%}."
        )
    if n < min_tokens:
        return skip(f"Only {n} tokens have a negative advantage, fewer than `min_tokens` = {min_tokens}.")

    # Stage 1: the lower bound clips in FP8 as many negative-advantage tokens as the reference clips in BF16.
    num_clipped = int((negative.bf16 < reference.lower).sum())
    alpha = num_clipped / n
    lower_target = _solve_lower(negative.fp8, num_clipped, reference.lower, lower_limits)
    lower = _to_float32(_damped(current.lower, lower_target, max_lower_step), toward=math.inf)

    # Stage 2: the upper bound gives FP8, with that lower bound, BF16's balance of positive to negative mass.
    negative_bf16 = _kept_mass(negative.bf16, negative.weight, negative.bf16 >= reference.lower)
    positive_bf16 = _kept_mass(positive.bf16, positive.weight, positive.bf16 <= reference.upper)
    negative_fp8 = _kept_mass(negative.fp8, negative.weight, negative.fp8 >= lower)
    reachable_fp8 = _kept_mass(positive.fp8, positive.weight, positive.fp8 <= upper_limits[1])
    rho_bf16 = positive_bf16 / negative_bf16 if negative_bf16 > 0.0 else math.nan
    if negative_bf16 == 0.0 or negative_fp8 == 0.0:
        return skip("No token with a negative advantage keeps any gradient mass.")
    if positive_bf16 == 0.0 or reachable_fp8 == 0.0:
        return skip("No token with a positive advantage keeps any gradient mass.")
    # In this order of operations the target is exactly BF16's own mass where FP8 equals BF16.
    mass_target = positive_bf16 * (negative_fp8 / negative_bf16)
    if not (0.0 < mass_target < math.inf and 0.0 < rho_bf16 < math.inf and reachable_fp8 < math.inf):
        return skip("The gradient mass leaves the range of float64.")
    upper_target = _solve_upper(positive.fp8, positive.weight, mass_target, reference.upper, upper_limits)
    upper = _to_float32(_damped(current.upper, upper_target, max_upper_step), toward=-math.inf)

    positive_fp8 = _kept_mass(positive.fp8, positive.weight, positive.fp8 <= upper)
    return CalibrationResult(
        clip_range=ClipRange(lower, upper),
        target=ClipRange(lower_target, upper_target),
        alpha_low_bf16=alpha,
        rho_bf16=rho_bf16,
        rho_fp8=positive_fp8 / negative_fp8,
        num_negative_tokens=n,
        num_dropped_tokens=num_dropped,
        skipped_reason=None,
    )


def _check_settings(reference, current, lower_limits, upper_limits, max_lower_step, max_upper_step, min_tokens):
    for name, value in (("reference", reference), ("current", current)):
        if not isinstance(value, ClipRange):
            raise TypeError(f"`{name}` must be a ClipRange, a pair could be bounds or epsilons; got {value!r}.")
    if not 0.0 < lower_limits[0] <= lower_limits[1] <= 1.0:
        raise ValueError(f"`lower_limits` must be ratios in order, 0 < low <= high <= 1; got {lower_limits}.")
    if not 1.0 <= upper_limits[0] <= upper_limits[1] < math.inf:
        raise ValueError(f"`upper_limits` must be ratios in order, 1 <= low <= high; got {upper_limits}.")
    for side, bound, limits in (
        ("lower", reference.lower, lower_limits),
        ("upper", reference.upper, upper_limits),
    ):
        if not limits[0] <= bound <= limits[1]:
            raise ValueError(
                f"The reference {side} bound {bound} lies outside `{side}_limits` = {limits}, so calibration could "
                "not return to it where FP8 equals BF16; widen the limits or change the reference."
            )
    for name, step in (("max_lower_step", max_lower_step), ("max_upper_step", max_upper_step)):
        if not 0.0 < step < math.inf:
            raise ValueError(f"`{name}` must be positive and finite, or the bound could never move; got {step}.")
    if min_tokens < 1:
        raise ValueError(f"`min_tokens` must be at least 1: a share of no tokens is undefined; got {min_tokens}.")


def _check_inputs(inputs: dict[str, torch.Tensor | None]) -> None:
    shape = None
    for name, value in inputs.items():
        if value is None and name in ("tis_weights", "sampling_probs", "mask"):
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"`{name}` must be a tensor, got {type(value).__name__}.")
        if name != "mask" and not value.is_floating_point():
            raise TypeError(f"`{name}` must have a floating-point dtype, got {value.dtype}.")
        shape = value.shape if shape is None else shape
        if value.shape != shape:
            raise ValueError(
                f"`{name}` has shape {tuple(value.shape)} but `fp8_ratio` has {tuple(shape)}; every input needs one "
                "value per token, so expand what holds one value per completion."
            )


class _Side(NamedTuple):
    """Tokens of one sign of advantage that take part: flat float64 tensors on the CPU."""

    fp8: torch.Tensor
    bf16: torch.Tensor
    weight: torch.Tensor  # w * s * |A|: times the ratio, the gradient mass


def _split_by_sign(
    fp8_ratio, bf16_ratio, advantages, tis_weights, sampling_probs, mask
) -> tuple[_Side, _Side, int, int]:
    """The two sides, how many tokens the mask shows with an advantage, and how many of these are not finite."""
    fp8, bf16, advantages = (value.detach().cpu().flatten() for value in (fp8_ratio, bf16_ratio, advantages))
    seen = advantages != 0  # true for NaN, which is then dropped
    if mask is not None:
        seen &= mask.cpu().flatten() != 0
    usable = seen & fp8.isfinite() & bf16.isfinite()
    never_negative = {"fp8_ratio": fp8, "bf16_ratio": bf16}
    weight = advantages.double().abs()
    for name, factor in (("tis_weights", tis_weights), ("sampling_probs", sampling_probs)):
        if factor is not None:
            never_negative[name] = factor.detach().cpu().flatten()
            weight *= never_negative[name]
    usable &= weight.isfinite()  # a product is finite only if its factors are
    num_seen, num_usable = int(seen.sum()), int(usable.sum())
    if tis_weights is not None:
        usable &= never_negative["tis_weights"] != 0
    for name, value in never_negative.items():
        if bool(((value < 0) & usable).any()):
            raise ValueError(f"`{name}` holds negative values; no ratio, weight or probability is negative.")

    def take(side: torch.Tensor) -> _Side:
        index = side.nonzero().flatten()
        return _Side(fp8[index].double(), bf16[index].double(), weight[index])

    return take(usable & (advantages < 0)), take(usable & (advantages > 0)), num_seen, num_seen - num_usable


def _kept_mass(ratio: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> float:
    # One addition after the other, where `sum` adds in an order that depends on the number of threads and the CPU:
    # every process then gets the same number from the same tokens.
    total = torch.where(kept, ratio * weight, 0.0).cumsum(0)
    return total[-1].item() if len(total) else 0.0


def _solve_lower(ratio: torch.Tensor, num_clipped: int, reference: float, limits: tuple[float, float]) -> float:
    """
    Bound inside `limits` under which the number of ratios is nearest to `num_clipped`; the smaller number if two are
    equally near, and of the bounds that give it, the one nearest to `reference`.
    """
    ratio = ratio.sort().values
    fewest, most = _count_under(ratio, limits[0]), _count_under(ratio, limits[1])
    count = min(max(num_clipped, fewest), most)
    if fewest < count < most and ratio[count - 1] == ratio[count]:
        # Equal ratios are clipped all or none.
        none, every = _count_under(ratio, ratio[count].item()), _count_under(ratio, ratio[count].item(), closed=True)
        count = none if count - none <= every - count else every
    # The count is the same for every bound in (ratio[count - 1], ratio[count]].
    start = math.nextafter(ratio[count - 1].item(), math.inf) if count > 0 else limits[0]
    end = ratio[count].item() if count < len(ratio) else limits[1]
    return min(max(reference, start, limits[0]), end, limits[1])


def _solve_upper(
    ratio: torch.Tensor, weight: torch.Tensor, target: float, reference: float, limits: tuple[float, float]
) -> float:
    """
    Bound inside `limits` whose kept mass, the sum of `weight * ratio` over the ratios up to it, is nearest to
    `target`; the smaller mass if two are equally near, and of the bounds that give it, the one nearest to `reference`.
    """
    ratio, order = ratio.sort(stable=True)
    mass = torch.cat([ratio.new_zeros(1), (ratio * weight[order]).cumsum(0)])
    first, last = (_count_under(ratio, limit, closed=True) for limit in limits)
    # The kept mass changes at these bounds only; of equal ratios the last one carries the mass of all.
    steps = torch.cat([ratio.new_tensor(limits[:1]), ratio[first:last]])
    whole = torch.ones(len(steps), dtype=torch.bool)
    whole[1:-1] = steps[1:-1] != steps[2:]
    steps, mass = steps[whole], mass[first : last + 1][whole]

    # Sums this near to each other are the same to float64, so order of summation must not decide between them.
    target = min(max(target, mass[0].item()), mass[-1].item())
    rounding = 4 * torch.finfo(torch.float64).eps * len(ratio) * target
    gap = (mass - target).abs()
    best = mass[(gap <= gap.min() + rounding).nonzero()[0]]
    same = ((mass - best).abs() <= rounding).nonzero()
    start, after = steps[same[0]].item(), int(same[-1]) + 1
    # The kept mass is the same for every bound in [steps[i], steps[i + 1]).
    end = math.nextafter(steps[after].item(), -math.inf) if after < len(steps) else limits[1]
    return min(max(reference, start), end)


def _count_under(ratio: torch.Tensor, bound: float, closed: bool = False) -> int:
    """How many of the sorted ratios are under `bound`, or, if `closed`, not over it."""
    return int(torch.searchsorted(ratio, ratio.new_tensor([bound]), right=closed))


def _damped(bound: float, target: float, max_step: float) -> float:
    return bound + min(max((target - bound) / 2, -max_step), max_step)


def _to_float32(bound: float, toward: float) -> float:
    """The float32 nearest to `bound` on the side of `toward`."""
    rounded = torch.tensor(bound, dtype=torch.float32)
    wrong_side = rounded.item() < bound if toward > bound else rounded.item() > bound
    return torch.nextafter(rounded, torch.tensor(toward)).item() if wrong_side else rounded.item()
