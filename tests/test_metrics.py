# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Diagnostics on numbers that can be checked by hand, and in the logs of a run."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers.integrations import TensorBoardCallback

from trl_calclip import ClipRange
from trl_calclip.calibration import TokenPool
from trl_calclip.metrics import ENTROPY_BINS, entropy_metrics, error_metrics, mismatch_metrics, mismatch_sums
from trl_calclip.trackers import log_histograms


REFERENCE = ClipRange(0.8, 1.24)


def make_pool(fp8, bf16, advantages, completions, entropies, errors=None) -> TokenPool:
    ones = [1.0] * len(fp8)
    columns = (fp8, bf16, advantages, ones, ones, completions, ones, entropies, errors or ones)
    return TokenPool(*(torch.tensor(column, dtype=torch.float64) for column in columns))


def test_entropy_bins_by_hand():
    # Completion 3: mean entropy 0.2, on the edge; 5: mean 2; 8: unknown. All but 3's first token are negative.
    pool = make_pool(
        fp8=[0.7, 0.75, 0.79, 0.9, 0.7, 0.5],
        bf16=[0.9, 0.7, 0.9, 0.9, 0.95, 0.9],
        advantages=[-1.0, -1.0, -1.0, -1.0, -1.0, -1.0],
        completions=[3, 3, 5, 5, 5, 8],
        entropies=[0.1, 0.3, 1.0, 2.0, 3.0, math.nan],
    )
    metrics = entropy_metrics(pool, reference=REFERENCE, in_force=ClipRange(0.78, 1.24))
    assert [metrics[f"entropy_bin/{label}/completions"] for label in ENTROPY_BINS] == [0.0, 0.5, 0.0, 0.5]
    assert metrics["entropy_bin/0.2-0.5/clip_frac_low_neg_fp8"] == 1.0
    assert metrics["entropy_bin/0.2-0.5/clip_frac_low_neg_bf16"] == 0.5
    assert metrics["entropy_bin/0.2-0.5/overclip_low_frac"] == 0.5
    assert metrics["entropy_bin/over-1/overclip_low_frac"] == pytest.approx(1 / 3)  # 0.79 is kept at 0.78
    # Three tokens are over-clipped: one in each of the two bins, one in a completion without an entropy.
    assert metrics["entropy_bin/over-1/overclip_low_part"] == pytest.approx(1 / 3)
    assert metrics["garbled_frac"] == 0.5
    assert math.isnan(metrics["entropy_bin/0-0.2/overclip_low_frac"])


def test_completion_with_positive_advantage_is_not_garbled():
    pool = make_pool([1.0] * 4, [1.0] * 4, [2.0, 2.0, -0.5, -0.5], [0, 0, 1, 1], [3.0] * 4)
    assert entropy_metrics(pool, reference=REFERENCE, in_force=REFERENCE)["garbled_frac"] == 0.5


def test_empty_pool_is_all_undefined():
    metrics = {
        **entropy_metrics(make_pool([], [], [], [], []), reference=REFERENCE, in_force=REFERENCE),
        **error_metrics(make_pool([], [], [], [], [])),
    }
    assert all(math.isnan(value) for value in metrics.values())


def test_errors_by_hand():
    pool = make_pool(
        fp8=[math.exp(0.3), math.exp(-0.1), math.inf],
        bf16=[math.exp(0.1), math.exp(0.1), 1.0],
        advantages=[1.0, -1.0, 1.0],
        completions=[0, 1, 0],
        entropies=[0.0] * 3,
        errors=[0.1, -0.1, 5.0],
    )
    metrics = error_metrics(pool)
    assert metrics["prob_error_fp8"] == pytest.approx(0.1)
    assert metrics["ratio_error_fp8"] == pytest.approx(0.2)
    assert metrics["error_quotient"] == pytest.approx(2.0)
    assert metrics["ratio_noise_mean"] == pytest.approx(0.0, abs=1e-12)
    assert metrics["ratio_noise_std"] == pytest.approx(math.sqrt(0.08))
    assert metrics["nonfinite_frac"] == pytest.approx(1 / 3)


def test_mismatch_by_hand():
    old = torch.tensor([[-1.0, -2.0, 7.0], [-3.0, -1.0, -1.0]])
    sampling = torch.tensor([[-1.0 - math.log(2), -2.0, 9.0], [-3.0 + math.log(4), math.nan, -1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    # w = pi / mu over the four tokens that count: 2, 1, 1/4, 1
    metrics = mismatch_metrics(mismatch_sums(old, sampling, mask))
    assert metrics == {
        "rollout_corr/kl": pytest.approx((-math.log(2) + math.log(4)) / 4, abs=1e-6),
        "rollout_corr/k3_kl": pytest.approx((2 - 1 - math.log(2) + 0.25 - 1 + math.log(4)) / 4, abs=1e-6),
        "rollout_corr/chi2_token": pytest.approx((4 + 1 + 1 / 16 + 1) / 4 - 1, abs=1e-6),
        "rollout_corr/log_ppl_abs_diff": pytest.approx((math.log(2) / 2 + math.log(4) / 2) / 2, abs=1e-6),
        "rollout_corr/rollout_is_mean": pytest.approx(4.25 / 4, abs=1e-6),
        # 1/4 is cut to 1/2
        "rollout_corr/rollout_is_eff_sample_size": pytest.approx((4.5 / 4) ** 2 / ((4 + 1 + 0.25 + 1) / 4), abs=1e-6),
        "token_mult_prob_error": pytest.approx((2 + 1 + 4 + 1) / 4, abs=1e-6),
    }


def test_mismatch_without_tokens_is_empty():
    assert mismatch_metrics(mismatch_sums(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3))) == {}


@given(st.integers(1, 5), st.integers(0, 2**31))
def test_mismatch_sums_add_up_over_micro_batches(split, seed):
    generator = torch.Generator().manual_seed(seed)
    old, sampling = -torch.rand(6, 4, generator=generator), -torch.rand(6, 4, generator=generator)
    mask = torch.rand(6, 4, generator=generator) < 0.7
    parts = [tensor.split(split) for tensor in (old, sampling, mask)]
    whole = mismatch_metrics(mismatch_sums(old, sampling, mask))
    summed = mismatch_metrics(sum(mismatch_sums(*part) for part in zip(*parts, strict=True)))
    assert summed == pytest.approx(whole)
    if whole:
        assert whole["rollout_corr/k3_kl"] >= 0 and 0 < whole["rollout_corr/rollout_is_eff_sample_size"] <= 1
        assert whole["token_mult_prob_error"] >= 1


def test_calibration_batches_log_the_diagnostics(make_trainer):
    trainer = make_trainer(max_steps=8, calibration_interval=2)
    trainer.train()
    (first,) = [entry for entry in trainer.state.log_history if "calclip/prob_error_fp8" in entry]
    assert first["step"] == 4
    record = trainer.calibration_history[0]
    assert record["prob_error_fp8"] > 0 and record["ratio_error_fp8"] > 0 and record["nonfinite_frac"] == 0
    assert record["error_quotient"] == pytest.approx(record["ratio_error_fp8"] / record["prob_error_fp8"])
    # The random toy is close to uniform over its tokens.
    assert record["entropy_bin/over-1/completions"] == 1.0 and record["entropy_bin/0-0.2/completions"] == 0.0
    assert 0 < record["garbled_frac"] < 1
    assert first["calclip/garbled_frac"] == record["garbled_frac"]
    assert all(value is not None for value in first.values())


@pytest.mark.vllm
def test_mismatch_is_logged_once_a_rollout_and_agrees_with_trl(make_trainer):
    trainer = make_trainer(max_steps=8, use_vllm=True, vllm_max_model_length=32, vllm_gpu_memory_utilization=0.1)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "rollout_corr/kl" in entry]
    assert [entry["step"] for entry in entries] == [1, 5]
    for entry in entries:
        gap = entry["sampling/sampling_logp_difference/mean"]
        assert abs(entry["rollout_corr/kl"]) <= gap
        assert entry["token_mult_prob_error"] == pytest.approx(1 + gap, abs=0.5 * gap)
        assert 0.9 < entry["rollout_corr/rollout_is_mean"] < 1.1
        assert entry["time/rollout_seconds"] > 0


def test_tensorboard_gets_histograms(make_trainer, tmp_path):
    trainer = make_trainer(max_steps=4, calibration_interval=1, report_to="tensorboard")
    (tracker,) = [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, TensorBoardCallback)]
    trainer.train()
    events = EventAccumulator(str(tracker.logging_dir), size_guidance={"histograms": 0}).Reload()
    assert set(events.Tags()["histograms"]) == {"train/calclip/log_ratio_fp8", "train/calclip/log_ratio_bf16"}
    (event,) = events.Histograms("train/calclip/log_ratio_fp8")
    assert event.step == 4 and event.histogram_value.num > 0
    assert "train/calclip/entropy_bin/over-1/completions" in events.Tags()["scalars"]


def test_histograms_leave_out_what_is_not_finite():
    values = {"a": torch.tensor([1.0, math.inf, math.nan]), "b": torch.tensor([math.nan])}

    class Writer:
        def __init__(self):
            self.seen = {}

        def add_histogram(self, name, array, step):
            self.seen[name, step] = array.tolist()

    writer = Writer()
    assert log_histograms([TensorBoardCallback(tb_writer=writer)], values, 3) == ["tensorboard"]
    assert writer.seen == {("train/a", 3): [1.0]}
