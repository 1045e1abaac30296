# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The statistics behind the benchmarks' claims, on counts whose answer is known."""

import sys
from pathlib import Path

import numpy as np
import pytest


sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.clip_counts import paired_bootstrap  # noqa: E402


def test_shares_and_gain_by_hand():
    # tokens, clipped in BF16, in FP8 at the reference, in FP8 calibrated
    counts = np.array([[10, 1, 3, 1], [30, 1, 5, 3]])
    result = paired_bootstrap(counts, draws=1000)
    assert result["completions"] == 2 and result["tokens"] == 40
    assert (result["bf16"], result["fp8_reference"], result["fp8_in_force"]) == (2 / 40, 8 / 40, 4 / 40)
    assert result["gain"] == pytest.approx((8 - 2) / 40 - (4 - 2) / 40)
    assert (result["multiple_reference"], result["multiple_in_force"]) == (4, 2)
    assert result["difference_reference"] == pytest.approx(6 / 40) and result["bf16_clipped"] == 2


def test_no_multiple_of_nothing():
    result = paired_bootstrap(np.array([[10, 0, 3, 1], [30, 0, 5, 3]]), draws=1000)
    assert result["multiple_reference"] is None and result["multiple_in_force_low"] is None
    assert result["difference_in_force"] == 4 / 40 and result["difference_in_force_low"] > 0


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        tokens = rng.integers(5, 30, size=150)
        shares = rng.beta(1, 20, size=150)  # tokens of a completion share their fate
        columns = [tokens, rng.binomial(tokens, 0.02), rng.binomial(tokens, shares), rng.binomial(tokens, 0.02)]
        result = paired_bootstrap(np.stack(columns, axis=1), draws=1000)
        # |1/21 - 0.02| - |0.02 - 0.02|; the second term is small and never negative
        covered += result["gain_low"] <= 1 / 21 - 0.02 <= result["gain_high"] + 0.005
    assert covered >= 85


def test_no_gain_without_a_difference():
    rng = np.random.default_rng(1)
    tokens = rng.integers(5, 30, size=200)
    bf16, fp8 = rng.binomial(tokens, 0.02), rng.binomial(tokens, 0.05)
    result = paired_bootstrap(np.stack([tokens, bf16, fp8, fp8], axis=1), draws=500)
    assert result["gain"] == result["gain_low"] == result["gain_high"] == 0
