# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Clip bounds and their calibration: stored cases, a brute-force solver, properties, errors."""

import dataclasses
import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_calclip.clip_range import ClipRange, calibrate_clip_range


GRPO = ClipRange(0.8, 1.24)
START = ClipRange(0.6, 1.8)
LOWER_LIMITS, UPPER_LIMITS = (0.5, 0.9), (1.2, 2.0)
ULP = 2.0**-23  # spacing of float32 in [1, 2), and more than that under 1
CASES = json.loads((Path(__file__).parent / "data" / "calibration.json").read_text())
FIELDS = ("ratio_fp8", "ratio_bf16", "advantage", "tis_weight", "sampling_prob", "mask")


def solve(fp8, bf16, advantages, weights=None, probs=None, mask=None, **overrides):
    options = {"reference": GRPO, "current": START} | overrides
    return calibrate_clip_range(fp8, bf16, advantages, tis_weights=weights, sampling_probs=probs, mask=mask, **options)


def load_case(case):
    numbers = ([math.nan if x is None else x for x in case[field]] for field in FIELDS)
    return [torch.tensor(values, dtype=torch.float32) for values in numbers]


def random_tokens(seed, n=400, noise=0.25, drift=0.12):
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(n, generator=generator)

    bf16 = torch.exp(drift * normal())
    fp8 = bf16 * torch.exp(noise * normal())
    weights = torch.exp(0.2 * normal()).clamp(max=2.0)
    probs = torch.rand(n, generator=generator)
    mask = torch.rand(n, generator=generator) < 0.9
    return [fp8, bf16, normal(), weights, probs, mask]


# --- the range itself -------------------------------------------------------------------------------------------


def test_range_speaks_ratios_and_epsilons():
    assert ClipRange.from_epsilons(0.2, 0.24) == GRPO
    assert (GRPO.epsilon_low, GRPO.epsilon_high) == pytest.approx((0.2, 0.24), abs=1e-15)
    assert ClipRange(1, 1) == ClipRange(1.0, 1.0) and isinstance(ClipRange(1, 1).lower, float)
    with pytest.raises(dataclasses.FrozenInstanceError):
        GRPO.lower = 0.7


@given(st.floats(0.5, 0.875, width=32), st.floats(1.25, 2.0, width=32))
def test_float32_bounds_survive_as_epsilons(lower, upper):
    bounds = ClipRange(lower, upper)
    assert (1 - bounds.epsilon_low, 1 + bounds.epsilon_high) == (lower, upper)


@pytest.mark.parametrize(
    "lower, upper", [(0.0, 1.2), (-0.2, 0.24), (1.1, 1.2), (0.8, 0.9), (math.nan, 1.2), (0.8, math.inf), (0.2, 0.28)]
)
def test_range_refuses_what_are_not_ratio_bounds(lower, upper):
    with pytest.raises(ValueError, match="0 < lower <= 1 <= upper.*from_epsilons"):
        ClipRange(lower, upper)


@pytest.mark.parametrize("bound", ["0.8", None, True, torch.tensor(0.8)])
def test_range_refuses_other_types(bound):
    with pytest.raises(TypeError, match="`lower` must be a real number"):
        ClipRange(bound, 1.2)


# --- stored cases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_stored_case(case):
    tokens = load_case(case)
    result = solve(*tokens, reference=ClipRange(*case["reference"]), current=ClipRange(*case["start"]))
    expected = case["expected"]
    assert result.skipped_reason is None
    assert result.target.lower == pytest.approx(expected["lower_target"], abs=1e-5)
    assert result.target.upper == pytest.approx(expected["upper_target"], abs=1e-5)
    assert result.clip_range.lower == pytest.approx(expected["lower"], abs=1e-5)
    assert result.clip_range.upper == pytest.approx(expected["upper"], abs=1e-5)
    assert result.rho_bf16 == pytest.approx(expected["rho_bf16"], abs=1e-5)
    assert result.rho_fp8 == pytest.approx(expected["rho_fp8"], abs=1e-5)
    assert result.alpha_low_bf16 * result.num_negative_tokens == pytest.approx(expected["n_clipped_bf16"])
    fp8, _, advantages, weights, _, mask = tokens
    negative = (mask != 0) & (advantages < 0) & (weights != 0) & torch.stack(tokens).isfinite().all(0)
    assert int(negative.sum()) == result.num_negative_tokens
    clipped = fp8[negative].double() < result.target.lower
    assert int(clipped.sum()) == expected["n_clipped_fp8_at_target"]


# --- brute force ------------------------------------------------------------------------------------------------


def exact(masses):
    """Exact sum of floats, as an integer number of the smallest positive float64."""
    return sum(int(Fraction(mass) * 2**1074) for mass in masses)


def brute_force(tokens, reference, current):
    """The method by trying every bound at which anything can change. No sorting, no cumulative sum."""
    rows = [tuple(float(x) for x in row) for row in zip(*tokens, strict=True)]
    rows = [row for row in rows if row[5] and row[2] != 0 and row[3] != 0 and all(math.isfinite(x) for x in row)]
    negative = [(f, b, w * s * abs(a)) for f, b, a, w, s, _ in rows if a < 0]
    positive = [(f, b, w * s * abs(a)) for f, b, a, w, s, _ in rows if a > 0]

    def candidates(side, limits, bound):
        ratios = [f for f, _, _ in side]
        around = [y for x in ratios for y in (x, math.nextafter(x, math.inf), math.nextafter(x, -math.inf))]
        return [x for x in (*limits, bound, *around) if limits[0] <= x <= limits[1]]

    def damp(bound, target, step):
        return bound + min(max((target - bound) / 2, -step), step)

    k = sum(b < reference.lower for _, b, _ in negative)

    def lower_cost(bound):
        count = sum(f < bound for f, _, _ in negative)
        return abs(count - k), count, abs(bound - reference.lower)

    lower_target = min(candidates(negative, LOWER_LIMITS, reference.lower), key=lower_cost)
    lower = damp(current.lower, lower_target, 0.05)

    negative_bf16 = exact(b * g for _, b, g in negative if b >= reference.lower)
    positive_bf16 = exact(b * g for _, b, g in positive if b <= reference.upper)
    negative_fp8 = exact(f * g for f, _, g in negative if f >= lower)
    masses = [(f, exact([f * g])) for f, _, g in positive]

    def upper_cost(bound):
        mass = sum(m for f, m in masses if f <= bound)
        # |mass - positive_bf16 / negative_bf16 * negative_fp8|, times a constant to stay with integers
        gap = abs(mass * negative_bf16 - positive_bf16 * negative_fp8)
        return gap, mass, abs(bound - reference.upper)

    if not (negative_bf16 and positive_bf16 and negative_fp8 and any(m for f, m in masses if f <= UPPER_LIMITS[1])):
        return None
    upper_target = min(candidates(positive, UPPER_LIMITS, reference.upper), key=upper_cost)
    upper = damp(current.upper, upper_target, 0.10)
    rho_bf16 = Fraction(positive_bf16, negative_bf16)
    rho_fp8 = Fraction(sum(m for f, m in masses if f <= upper), negative_fp8)
    return lower_target, upper_target, lower, upper, k / len(negative), float(rho_bf16), float(rho_fp8)


def dyadic_tokens(seed, n):
    """Ratios, weights and advantages that are small dyadic numbers: heavy ties, and all sums exact."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, unit):
        return torch.randint(low, high + 1, (n,), generator=generator) * unit

    bf16, fp8 = draw(20, 44, 1 / 32), draw(12, 72, 1 / 32)
    return [fp8, bf16, draw(-2, 2, 0.5), draw(0, 4, 0.5), draw(0, 4, 0.25), draw(0, 3, 1)]


def extreme_tokens(seed, n):
    """Ratios over forty orders of magnitude, masses over twelve: smaller ones vanish in any float64 sum."""
    tokens = random_tokens(seed, n, noise=1.0)
    generator = torch.Generator().manual_seed(seed + 1)
    wild = torch.randint(-4, 5, (3, n), generator=generator)
    tokens[0] = torch.where(wild[0] == 4, tokens[0] * 1e20, torch.where(wild[0] == -4, tokens[0] * 1e-20, tokens[0]))
    tokens[2] = tokens[2] * 10.0 ** wild[1]
    tokens[4] = tokens[4] * 10.0 ** -wild[2].abs()
    return tokens


def spoilt_tokens(seed, n):
    """NaN and infinities: under one per cent where the mask shows them, many where it hides them."""
    tokens = random_tokens(seed, n)
    tokens[0][200], tokens[1][210 + seed], tokens[0][220] = math.nan, math.inf, 0.0
    for i, token in enumerate(tokens[:5]):
        token[20 * i : 20 * i + 10] = -math.inf if i % 2 else math.nan
        tokens[5][20 * i : 20 * i + 10] = False
    return tokens


MAKERS = {
    "generic": lambda seed: random_tokens(seed, n=20 + seed),
    "ties": lambda seed: dyadic_tokens(seed, n=5 + seed % 60),
    "tiny": lambda seed: random_tokens(seed, n=2 + seed % 6),
    "extreme": lambda seed: extreme_tokens(seed, n=10 + seed % 40),
    "spoilt": lambda seed: spoilt_tokens(seed, n=400),
}


@pytest.mark.parametrize(
    "kind, cases", [("generic", 60), ("ties", 150), ("tiny", 100), ("extreme", 60), ("spoilt", 8)]
)
def test_equals_brute_force(kind, cases):
    calibrated = 0
    for seed in range(cases):
        tokens = MAKERS[kind](seed)
        reference = (GRPO, ClipRange(0.8, 1.28), ClipRange(0.875, 1.25))[seed % 3]
        current = (START, reference)[seed % 2]
        result = solve(*tokens, reference=reference, current=current)
        expected = brute_force(tokens, reference, current) if result.num_negative_tokens else None
        if expected is None:
            assert result.skipped_reason is not None and result.clip_range is current, seed
            continue
        calibrated += 1
        lower_target, upper_target, lower, upper, *shares = expected
        assert dataclasses.astuple(result.target) == (lower_target, upper_target), seed
        assert 0.0 <= result.clip_range.lower - lower <= ULP, seed
        assert 0.0 <= upper - result.clip_range.upper <= ULP, seed
        assert (result.alpha_low_bf16, result.rho_bf16, result.rho_fp8) == pytest.approx(shares, rel=1e-9), seed
    assert calibrated > cases // 2


def test_bounds_just_beyond_a_ratio():
    # FP8 must clip 0.85, so the nearest lower bound to 0.8 is just over it; it must not keep 1.22, so just under that.
    fp8 = torch.tensor([0.85, 0.95, 1.1, 1.22])
    bf16 = torch.tensor([0.7, 0.95, 1.1, 1.3])
    tokens = [fp8, bf16, torch.tensor([-0.01, -1.0, 1.0, 1.0])]
    target = solve(*tokens).target
    assert target == ClipRange(math.nextafter(fp8[0].item(), 1.0), math.nextafter(fp8[3].item(), 1.0))
    in_force = solve(*tokens, current=target).clip_range
    assert (fp8 < in_force.lower).tolist() == [True, False, False, False]
    assert (fp8 > in_force.upper).tolist() == [False, False, False, True]


def test_equally_near_masses_give_the_smaller_one_whatever_the_rounding():
    # The upper bound can keep 0, 0.3 or 0.6, and should keep 0.45. In float64, 0.6 looks nearer.
    fp8, bf16, advantages = [0.9, 1.25, 2.0, 3.0], [0.9, 1.5, 1.5, 0.9], [-1.0, 0.24, 0.15, 0.5]
    assert abs(1.25 * 0.24 + 2.0 * 0.15 - 0.9 * 0.5) < abs(1.25 * 0.24 - 0.9 * 0.5)
    result = solve(*(torch.tensor(values, dtype=torch.float64) for values in (fp8, bf16, advantages)))
    assert result.target.upper == 1.25


# --- properties -------------------------------------------------------------------------------------------------

property_test = settings(max_examples=100, deadline=None)
RATIO = st.sampled_from([0.5, 0.75, 0.8, 0.9, 1.0, 1.2, 1.24, 1.5, 2.0]) | st.floats(0.0, 4.0, width=32)
TOKEN = st.tuples(
    RATIO,
    RATIO,
    st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0]) | st.floats(-8.0, 8.0, width=32),
    st.sampled_from([0.0, 1.0, 2.0]) | st.floats(0.0, 2.0, width=32),
    st.sampled_from([0.5, 1.0]) | st.floats(0.0, 1.0, width=32),
    st.sampled_from([True, True, True, False]),
)
TOKENS = st.lists(TOKEN, min_size=4, max_size=40)
JUNK = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-38, 3e38])
RANGES = st.builds(ClipRange, st.floats(*LOWER_LIMITS), st.floats(*UPPER_LIMITS))


def to_tensors(rows, dtype=torch.float32):
    return [torch.tensor(column, dtype=dtype) for column in zip(*rows, strict=True)]


def assert_same(one, other):
    assert one.skipped_reason == other.skipped_reason
    one, other = (dataclasses.asdict(result) | {"skipped_reason": None} for result in (one, other))
    for name in one.keys() - {"skipped_reason"}:
        assert one[name] == pytest.approx(other[name], rel=1e-9, nan_ok=True), name


@property_test
@given(TOKENS, RANGES, RANGES, st.lists(st.tuples(JUNK, st.integers(0, 4), st.integers(0, 39)), max_size=3))
def test_bounds_are_sane_whatever_comes_in(rows, reference, current, spoilt):
    tokens = to_tensors(rows * 10)
    for value, column, row in spoilt:
        tokens[column][row % len(rows)] = abs(value) if column != 2 else value
    result = solve(*tokens, reference=reference, current=current)
    new, target = result.clip_range, result.target
    assert 0 <= result.num_dropped_tokens <= len(spoilt)
    if result.skipped_reason is not None:
        assert new is current and target is current and math.isnan(result.rho_fp8)
        return
    assert LOWER_LIMITS[0] <= target.lower <= LOWER_LIMITS[1] and UPPER_LIMITS[0] <= target.upper <= UPPER_LIMITS[1]
    assert LOWER_LIMITS[0] <= new.lower <= LOWER_LIMITS[1] + ULP
    assert UPPER_LIMITS[0] - ULP <= new.upper <= UPPER_LIMITS[1]
    assert abs(new.lower - current.lower) <= 0.05 + ULP and abs(new.upper - current.upper) <= 0.10 + ULP
    assert 0.0 <= result.alpha_low_bf16 <= 1.0 and math.isfinite(result.rho_bf16) and math.isfinite(result.rho_fp8)


@property_test
@given(TOKENS, RANGES)
def test_float32_comparison_clips_what_the_solve_counted(rows, current):
    tokens = to_tensors(rows)
    fp8 = tokens[0]
    result = solve(*tokens, current=current)
    if result.skipped_reason is not None:
        return
    damped_lower = current.lower + min(max((result.target.lower - current.lower) / 2, -0.05), 0.05)
    damped_upper = current.upper + min(max((result.target.upper - current.upper) / 2, -0.10), 0.10)
    # The right sides compare float64 with float64, the left sides float32 with float32.
    assert torch.equal(fp8 < 1 - result.clip_range.epsilon_low, fp8.double() < damped_lower)
    assert torch.equal(fp8 > 1 + result.clip_range.epsilon_high, fp8.double() > damped_upper)
    # A bound at its target is handed on so that it clips what the target clips, at open ends of intervals too.
    settled = solve(*tokens, current=result.target)
    assert settled.target.lower == result.target.lower
    assert torch.equal(fp8 < 1 - settled.clip_range.epsilon_low, fp8.double() < result.target.lower)


@property_test
@given(TOKENS, st.randoms(use_true_random=False))
def test_order_of_tokens_does_not_matter(rows, random):
    shuffled = random.sample(rows, len(rows))
    assert_same(solve(*to_tensors(shuffled)), solve(*to_tensors(rows)))


@property_test
@given(TOKENS, st.lists(st.tuples(*[JUNK] * 5, st.just(False)), min_size=1, max_size=60))
def test_masked_junk_does_not_matter(rows, junk):
    assert_same(solve(*to_tensors(rows + junk)), solve(*to_tensors(rows)))


@property_test
@given(TOKENS, st.sampled_from([2.0**-20, 0.1, 3.0, 1e6]))
def test_scale_of_advantages_does_not_matter(rows, scale):
    scaled = [(f, b, a * scale, w, s, m) for f, b, a, w, s, m in rows]
    assert_same(solve(*to_tensors(scaled, torch.float64)), solve(*to_tensors(rows, torch.float64)))


@property_test
@given(TOKENS, RANGES)
def test_identity_without_noise(rows, reference):
    tokens = to_tensors([(b, b, a, w, s, m) for _, b, a, w, s, m in rows])
    result = solve(*tokens, reference=reference, current=reference)
    if result.skipped_reason is None:
        assert result.target == reference
        assert result.rho_fp8 == result.rho_bf16
        assert 0.0 <= result.clip_range.lower - reference.lower <= ULP
        assert 0.0 <= reference.upper - result.clip_range.upper <= ULP
        again = solve(*tokens, reference=reference, current=result.clip_range)
        assert again.clip_range == result.clip_range


def test_mass_that_float64_cannot_see_does_not_move_the_bound():
    ratio = torch.tensor([0.9, 1.1, 1.21, 1.22, 1.23])
    advantages = torch.tensor([-1.0, 1.0, 1e-20, 1e-20, 1e-20])
    assert solve(ratio, ratio, advantages).target == GRPO


def test_repeated_calibration_settles_on_its_target():
    tokens, current = random_tokens(seed=3, n=5000), START
    for _ in range(60):
        result = solve(*tokens, current=current)
        current = result.clip_range
    assert dataclasses.astuple(current) == pytest.approx(dataclasses.astuple(result.target), abs=4 * ULP)
    assert result.rho_fp8 == pytest.approx(result.rho_bf16, rel=2e-3)


# --- inputs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_only_a_container(dtype):
    tokens = [token.to(dtype) for token in random_tokens(seed=0)]
    result = solve(*tokens)
    assert result.skipped_reason is None
    assert result == solve(*[token.float() for token in tokens])
    numbers = (*dataclasses.astuple(result.target), *dataclasses.astuple(result.clip_range), result.rho_fp8)
    assert all(type(number) is float for number in numbers)


def test_float64_ratios_are_compared_in_float64():
    fp8 = torch.tensor([0.7, 0.7 + 1e-12, 0.95, 1.1], dtype=torch.float64)
    bf16 = torch.tensor([0.7, 0.85, 0.95, 1.1], dtype=torch.float64)
    result = solve(fp8, bf16, torch.tensor([-1.0, -1.0, -1.0, 1.0]))
    assert result.target.lower == 0.7 + 1e-12 and result.alpha_low_bf16 == pytest.approx(1 / 3)


def test_shape_gradients_and_inputs_are_left_alone():
    tokens = random_tokens(seed=1)
    flat = solve(*tokens)
    shaped = [token.clone().reshape(8, 5, 10) for token in tokens]
    shaped[0].requires_grad_()
    transposed = [token.transpose(0, 2) for token in shaped]
    assert solve(*shaped) == flat
    assert_same(solve(*transposed), flat)
    assert all(torch.equal(after.reshape(-1), before) for after, before in zip(shaped, tokens, strict=True))


def test_left_out_weights_probabilities_and_mask_are_ones():
    fp8, bf16, advantages, *_ = random_tokens(seed=2)
    ones = torch.ones_like(fp8)
    assert solve(fp8, bf16, advantages) == solve(fp8, bf16, advantages, ones, ones, ones)
    assert solve(fp8, bf16, advantages, probs=ones * 0.5).target == solve(fp8, bf16, advantages).target


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_numbers():
    tokens = random_tokens(seed=4, n=10_000)
    assert solve(*[token.cuda() for token in tokens]) == solve(*tokens)


# --- when the bounds stay ---------------------------------------------------------------------------------------


def test_more_than_one_per_cent_non_finite_keeps_the_bounds():
    tokens = random_tokens(seed=5, n=1000)[:3]
    tokens[2][900:] = 0.0  # 900 tokens are left to count; NaN among the others is not held against them
    tokens[0][900:] = math.nan
    tokens[0][:9] = math.nan
    at_the_limit = solve(*tokens)
    assert at_the_limit.skipped_reason is None and at_the_limit.num_dropped_tokens == 9
    tokens[2][9] = math.nan
    over = solve(*tokens)
    assert over.clip_range is START and over.target is START and over.num_dropped_tokens == 10
    assert over.skipped_reason.startswith("10 of 900 tokens have an input that is not finite, more than 1%")
    assert math.isnan(over.alpha_low_bf16) and math.isnan(over.rho_bf16) and math.isnan(over.rho_fp8)


def test_too_few_negative_tokens_keep_the_bounds():
    fp8, bf16, advantages, *_ = random_tokens(seed=6)
    n = int((advantages < 0).sum())
    assert solve(fp8, bf16, advantages, min_tokens=n).skipped_reason is None
    result = solve(fp8, bf16, advantages, min_tokens=n + 1)
    assert result.clip_range is START and result.num_negative_tokens == n
    assert result.skipped_reason == f"Only {n} tokens have a negative advantage, fewer than `min_tokens` = {n + 1}."
    empty = torch.empty(0)
    assert solve(empty, empty, empty).skipped_reason.startswith("Only 0 tokens")


@pytest.mark.parametrize(
    "fp8, bf16, probs, side",
    [
        ([0.9, 1.1], [0.9, 1.3], [1.0, 1.0], "positive"),  # BF16 clips the one positive token
        ([0.9, 2.1], [0.9, 1.1], [1.0, 1.0], "positive"),  # no bound inside the limits keeps it in FP8
        ([0.9, 1.1], [0.7, 1.1], [1.0, 1.0], "negative"),
        ([0.4, 1.1], [0.9, 1.1], [1.0, 1.0], "negative"),
        ([0.9, 1.1], [0.9, 1.1], [1.0, 0.0], "positive"),
        ([0.9, 1.1], [0.9, 1.1], [0.0, 1.0], "negative"),
    ],
)
def test_no_mass_on_a_side_keeps_the_bounds(fp8, bf16, probs, side):
    fp8, bf16, probs = (torch.tensor(values) for values in (fp8, bf16, probs))
    result = solve(fp8, bf16, torch.tensor([-1.0, 1.0]), probs=probs)
    assert result.clip_range is START
    assert result.skipped_reason == f"No token with a {side} advantage keeps any gradient mass."
    assert result.alpha_low_bf16 in (0.0, 1.0)  # the first stage was reached


def test_mass_beyond_float64_keeps_the_bounds():
    fp8 = bf16 = torch.tensor([0.9, 1.1, 1.1], dtype=torch.float64)
    result = solve(fp8, bf16, torch.tensor([-1e-300, 1e308, 1e308], dtype=torch.float64))
    assert result.clip_range is START and result.skipped_reason == "The gradient mass leaves the range of float64."


# --- errors -----------------------------------------------------------------------------------------------------

THREE = torch.tensor([0.9, 1.0, 1.1])


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"reference": (0.8, 1.24)}, TypeError, "`reference` must be a ClipRange"),
        ({"current": (0.8, 1.24)}, TypeError, "`current` must be a ClipRange"),
        ({"fp8_ratio": [0.9, 1.0, 1.1]}, TypeError, "`fp8_ratio` must be a tensor, got list"),
        ({"bf16_ratio": None}, TypeError, "`bf16_ratio` must be a tensor, got NoneType"),
        ({"advantages": torch.tensor([-1, 0, 1])}, TypeError, "`advantages` must have a floating-point dtype.*int64"),
        ({"advantages": torch.ones(1)}, ValueError, r"`advantages` has shape \(1,\) but `fp8_ratio` has \(3,\)"),
        ({"bf16_ratio": torch.ones(3, 1)}, ValueError, "`bf16_ratio` has shape"),
        ({"tis_weights": torch.ones(2)}, ValueError, "`tis_weights` has shape"),
        ({"sampling_probs": torch.ones(4)}, ValueError, "`sampling_probs` has shape"),
        ({"mask": torch.ones(1, 3)}, ValueError, "`mask` has shape"),
        ({"fp8_ratio": -THREE}, ValueError, "`fp8_ratio` holds negative values"),
        ({"tis_weights": -THREE}, ValueError, "`tis_weights` holds negative values"),
        ({"sampling_probs": THREE - 1}, ValueError, "`sampling_probs` holds negative values"),
        ({"lower_limits": (0.9, 0.5)}, ValueError, r"`lower_limits` must be ratios in order.*\(0.9, 0.5\)"),
        ({"lower_limits": (0.5, 1.1)}, ValueError, "`lower_limits` must be ratios in order"),
        ({"lower_limits": (math.nan, 0.9)}, ValueError, "`lower_limits` must be ratios in order"),
        ({"upper_limits": (2.0, 1.2)}, ValueError, "`upper_limits` must be ratios in order"),
        ({"upper_limits": (0.2, 2.0)}, ValueError, "`upper_limits` must be ratios in order"),
        ({"reference": ClipRange(0.95, 1.24)}, ValueError, "reference lower bound 0.95 lies outside `lower_limits`"),
        ({"reference": ClipRange(0.8, 1.1)}, ValueError, "reference upper bound 1.1 lies outside `upper_limits`"),
        ({"max_lower_step": 0.0}, ValueError, "`max_lower_step` must be positive"),
        ({"max_upper_step": math.nan}, ValueError, "`max_upper_step` must be positive"),
        ({"min_tokens": 0}, ValueError, "`min_tokens` must be at least 1"),
    ],
)
def test_errors_name_what_is_wrong(change, error, message):
    arguments = {"fp8_ratio": THREE, "bf16_ratio": THREE, "advantages": torch.tensor([-1.0, -1.0, 1.0])}
    arguments |= {"reference": GRPO, "current": START}
    assert calibrate_clip_range(**arguments).skipped_reason is None
    with pytest.raises(error, match=message):
        calibrate_clip_range(**(arguments | change))


def test_what_takes_no_part_may_be_negative():
    junk = torch.tensor([-5.0, 1.0, 1.1])
    mask = torch.tensor([0, 1, 1])
    advantages = torch.tensor([-1.0, -1.0, 1.0])
    assert solve(junk, junk, advantages, junk, junk, mask) == solve(
        *(x[1:] for x in (junk, junk, advantages, junk, junk))
    )
