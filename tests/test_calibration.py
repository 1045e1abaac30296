# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Collecting, pooling, solving and the shares that are reported, on numbers that can be checked by hand."""

import math

import pytest
import torch
from accelerate import Accelerator

from trl_calclip import ClipRange
from trl_calclip.calibration import (
    TokenCollector,
    TokenPool,
    calibrate,
    calibration_record,
    count_negative,
    sequence_entries,
)
from trl_calclip.metrics import clip_metrics


REFERENCE = ClipRange(0.8, 1.24)


def micro_batch(**overrides):
    """Two completions of three tokens, the second with one padding token; log-ratios of 0.1, 0.2, ... in FP8."""
    old = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -2.0, 0.0]])
    ratio = torch.tensor([[0.1, 0.2, 0.3], [-0.1, -0.2, 0.0]])
    return {
        "per_token_logps": old + ratio,
        "old_per_token_logps": old,
        "bf16_per_token_logps": old + ratio / 2,
        "bf16_old_per_token_logps": old,
        "advantages": torch.tensor([1.5, -0.5]),
        "mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "importance_sampling_ratio": None,
        "sampling_per_token_logps": None,
        **overrides,
    }


def pooled(*batches):
    collector = TokenCollector()
    for batch in batches:
        collector.add(**batch)
    return collector.pool(Accelerator(cpu=True))


def test_only_tokens_of_the_loss_with_an_advantage_are_taken():
    pool = pooled(micro_batch())
    torch.testing.assert_close(
        pool.fp8_ratio.log(), torch.tensor([0.1, 0.2, 0.3, -0.1, -0.2]).double(), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(pool.bf16_ratio.log(), pool.fp8_ratio.log() / 2, atol=1e-6, rtol=0)
    assert pool.advantages.tolist() == [1.5, 1.5, 1.5, -0.5, -0.5]
    assert pool.completions.tolist() == [0, 0, 0, 1, 1]
    assert pooled(micro_batch(advantages=torch.tensor([0.0, -0.5]))).advantages.tolist() == [-0.5, -0.5]


def test_ratios_are_the_losss_own_float32_numbers():
    batch = micro_batch()
    expected = torch.exp(batch["per_token_logps"] - batch["old_per_token_logps"])
    assert torch.equal(pooled(batch).fp8_ratio, expected[batch["mask"].bool()].double())


def test_without_rollout_log_probabilities_the_old_policy_stands_in():
    pool = pooled(micro_batch())
    torch.testing.assert_close(pool.sampling_probs.log(), torch.tensor([-1.0, -2.0, -3.0, -1.0, -2.0]).double())
    assert pool.tis_weights.tolist() == [1.0] * 5


def test_token_that_the_rollout_could_not_score_is_kept_as_trl_keeps_it():
    sampling = torch.tensor([[-1.1, math.nan, -3.1], [-1.1, -2.1, 0.0]])
    weights = torch.tensor([[1.1, 1.0, 1.1], [1.1, 1.1, 1.0]])  # TRL's: 1 where the difference is NaN
    pool = pooled(micro_batch(sampling_per_token_logps=sampling, importance_sampling_ratio=weights))
    torch.testing.assert_close(
        pool.sampling_probs.log(), torch.tensor([-1.1, -2.0, -3.1, -1.1, -2.1]).double(), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(pool.tis_weights, torch.tensor([1.1, 1.0, 1.1, 1.1, 1.1]).double(), atol=1e-6, rtol=0)


def test_sequence_weights_and_token_advantages_broadcast():
    pool = pooled(
        micro_batch(
            importance_sampling_ratio=torch.tensor([[2.0], [0.5]]),
            advantages=torch.tensor([[1.0, 0.0, 3.0], [-1.0, -2.0, -3.0]]),
        )
    )
    assert pool.tis_weights.tolist() == [2.0, 2.0, 0.5, 0.5]
    assert pool.advantages.tolist() == [1.0, 3.0, -1.0, -2.0]


def test_completions_are_numbered_over_micro_batches_and_ranks():
    assert pooled(micro_batch(), micro_batch()).completions.unique().tolist() == [0, 1, 2, 3]
    numbers = []
    for rank in range(3):
        collector = TokenCollector(rank, 3)
        collector.add(**micro_batch())
        collector.add(**micro_batch())
        numbers += collector.pool(Accelerator(cpu=True)).completions.unique().tolist()
    assert sorted(numbers) == list(range(12))


def test_no_tokens_give_an_empty_pool_and_a_skipped_calibration():
    pool = pooled()
    assert pool.fp8_ratio.shape == (0,)
    current = ClipRange(0.6, 1.8)
    result, shares = calibrate(pool, reference=REFERENCE, current=current, use_sampling_probs=True, min_tokens=5)
    assert result.clip_range == current and result.skipped_reason
    record = calibration_record(result, shares)
    assert record["lower"] == 0.6 and record["alpha_low_bf16"] is None and record["overclip_low_frac"] is None


def make_pool(fp8, bf16, advantages):
    ones = torch.ones(len(fp8), dtype=torch.float64)
    return TokenPool(*(torch.tensor(x, dtype=torch.float64) for x in (fp8, bf16, advantages)), *6 * [ones])


def test_clip_metrics_by_hand():
    pool = make_pool(
        # clipped by both; over-clipped; over-clipped at the reference only; kept; NaN takes part in nothing
        fp8=[0.5, 0.5, 0.75, 1.0, math.nan, 1.9, 1.3, 1.0],
        bf16=[0.7, 0.9, 0.9, 1.0, 0.5, 1.1, 1.3, 1.0],
        advantages=[-1, -1, -1, -1, -1, 1, 1, 1],
    )
    metrics = clip_metrics(pool, reference=REFERENCE, in_force=ClipRange(0.6, 1.8))
    expected = {
        "clip_frac_low_neg_fp8": 2 / 4,
        "clip_frac_low_neg_fp8_reference": 3 / 4,
        "clip_frac_high_pos_fp8": 1 / 3,
        "clip_frac_high_pos_bf16": 1 / 3,
        "overclip_low_frac": 1 / 4,
        "overclip_high_frac": 1 / 3,
        "overclip_low_frac_reference": 2 / 4,
        "overclip_high_frac_reference": 1 / 3,
    }
    assert metrics == pytest.approx(expected)


def test_bounds_are_exclusive_as_in_the_loss():
    pool = make_pool(fp8=[0.6, 1.8], bf16=[0.8, 1.24], advantages=[-1, 1])
    metrics = clip_metrics(pool, reference=REFERENCE, in_force=ClipRange(0.6, 1.8))
    assert metrics["clip_frac_low_neg_fp8"] == metrics["clip_frac_high_pos_fp8"] == 0
    assert metrics["clip_frac_high_pos_bf16"] == 0


def test_zero_drift_spread_by_hand():
    collector = TokenCollector()
    assert collector.zero_drift_std() is None
    collector.add_at_zero_drift(torch.tensor([[0.1, 9.0]]), torch.tensor([[1, 0]]))
    assert collector.zero_drift_std() is None
    collector.add_at_zero_drift(torch.tensor([[-0.1, 0.0]]), torch.tensor([[1, 1]]))
    assert collector.zero_drift_std() == pytest.approx(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "noisy"), [("rowwise", False), ("tensorwise", True)])
def test_zero_drift_is_noise_only_where_scales_depend_on_the_micro_batch(make_trainer, recipe, noisy):
    trainer = make_trainer(fp8_recipe=recipe, max_steps=4)
    trainer.train()
    (record,) = trainer.calibration_history
    assert (record["zero_drift_std_fp8"] > 1e-4) is noisy
    assert any(
        entry.get("calclip/zero_drift_std_fp8") == record["zero_drift_std_fp8"] for entry in trainer.state.log_history
    )


def test_sequence_entries_by_hand():
    """Two completions of two and one tokens, one without any: ratios, masses and masks as worked out on paper."""
    log = math.log
    entries = sequence_entries(
        per_token_logps=torch.tensor([[log(0.5), log(0.2)], [log(0.9), 0.0], [0.0, 0.0]]),
        old_per_token_logps=torch.tensor([[log(0.4), log(0.4)], [log(0.6), 0.0], [0.0, 0.0]]),
        bf16_per_token_logps=torch.tensor([[log(0.4), log(0.1)], [log(0.6), 0.0], [0.0, 0.0]]),
        bf16_old_per_token_logps=torch.tensor([[log(0.4), log(0.4)], [log(0.6), 0.0], [0.0, 0.0]]),
        advantages=torch.tensor([-1.0, 2.0, 3.0]),
        mask=torch.tensor([[1, 1], [1, 0], [0, 0]]),
        importance_sampling_ratio=torch.tensor([[2.0, 0.5], [1.5, 9.0], [1.0, 1.0]]),
        sampling_per_token_logps=torch.tensor([[log(0.3), math.nan], [log(0.8), 0.0], [0.0, 0.0]]),
    )
    collector = TokenCollector()
    collector.add(**entries)
    pool = collector.pool(Accelerator(cpu=True))
    # (0.5 / 0.4 * 0.2 / 0.4) ** (1 / 2), and 0.9 / 0.6; the masked completion is left out
    torch.testing.assert_close(pool.fp8_ratio, torch.tensor([0.625**0.5, 1.5]).double())
    torch.testing.assert_close(pool.bf16_ratio, torch.tensor([0.5, 1.0]).double())
    assert pool.advantages.tolist() == [-1.0, 2.0]
    # sum(w) and sum(w * s) / sum(w); where the rollout gave no probability, the old policy's stands in
    torch.testing.assert_close(pool.tis_weights, torch.tensor([2.5, 1.5]).double())
    torch.testing.assert_close(pool.sampling_probs, torch.tensor([(2 * 0.3 + 0.5 * 0.4) / 2.5, 0.8]).double())


def test_sequence_entries_without_a_rollout_weight():
    logps = torch.tensor([[math.log(0.5), math.log(0.25)]])
    zeros = torch.zeros(1, 2)
    entries = sequence_entries(
        per_token_logps=logps, old_per_token_logps=logps, bf16_per_token_logps=zeros, bf16_old_per_token_logps=zeros,
        advantages=torch.ones(1), mask=torch.ones(1, 2), importance_sampling_ratio=None, sampling_per_token_logps=None,
    )  # fmt: skip
    assert entries["importance_sampling_ratio"].item() == 2.0
    assert entries["sampling_per_token_logps"].exp().item() == pytest.approx(0.375)


def test_negative_tokens_are_counted_as_the_calibration_counts_them():
    old = torch.zeros(3, 4)
    ratio = torch.tensor([[0.79, 0.81, 0.5, 0.9], [0.1, 0.1, 0.1, 0.1], [0.7, 0.8, 0.6, math.inf]])
    advantages = torch.tensor([-1.0, 2.0, -0.5])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]]).bool()
    # First row: 0.79 and 0.5 of three tokens. Second: no negative ones. Third: 0.7 and 0.6, without the infinite one.
    assert count_negative(0.8, ratio.log(), old, advantages, mask, sequence_level=False).tolist() == [4, 5]
    assert count_negative(0.8, ratio.log(), old, advantages[:, None], mask, sequence_level=False).tolist() == [4, 5]
    # One ratio a completion: the geometric mean of the first row's three tokens is 0.684; the third's is infinite.
    assert count_negative(0.8, ratio.log(), old, advantages, mask, sequence_level=True).tolist() == [1, 1]
    assert count_negative(0.68, ratio.log(), old, advantages, mask, sequence_level=True).tolist() == [0, 1]
