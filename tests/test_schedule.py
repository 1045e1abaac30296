# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Fewer BF16 passes: a drawn share of the micro-batches, and a schedule that watches FP8's clip share."""

import pytest
import torch

from trl_calclip import CalibrationCallback
from trl_calclip.calibration import draw_micro_batches
from trl_calclip.callbacks import AdaptiveCalibrationCallback
from trl_calclip.checkpoint import read_state


pytest_plugins = ["recording"]


def schedule(interval=4, max_interval=20, band=0.5):
    return AdaptiveCalibrationCallback(interval, 4, max_interval, band)


def run(callback, shares, tokens=10_000):
    """Rollouts that calibrate, with a target of 1 %, when `shares` are what FP8 clips in the others."""
    calibrated = []
    for rollout, share in enumerate(shares):
        if callback.is_due(rollout):
            callback.calibrated(rollout, 0.01)
            calibrated.append(rollout)
        else:
            callback.watched(rollout, round(share * tokens), tokens)
    return calibrated


def test_distance_doubles_while_flat_up_to_the_longest():
    assert run(schedule(), [0.01] * 80) == [0, 4, 12, 28, 48, 68]


def test_departure_calibrates_at_the_next_rollout_and_shortens_the_distance():
    shares = [0.01] * 60
    shares[30] = 0.016  # outside 1 % plus or minus a half
    assert run(schedule(), shares) == [0, 4, 12, 28, 31, 35, 43, 59]
    shares[30] = 0.014
    assert run(schedule(), shares) == [0, 4, 12, 28, 48]
    shares[30] = 0.004
    assert run(schedule(), shares) == [0, 4, 12, 28, 31, 35, 43, 59]


def test_longest_distance_holds_whatever_is_watched():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        shares = (0.01 * (0.5 * torch.randn(200, generator=generator)).exp()).tolist()
        rollouts = run(schedule(), shares)
        gaps = [b - a for a, b in zip(rollouts, rollouts[1:], strict=False)]
        assert rollouts[0] == 0 and max(gaps) <= 20 and min(gaps) >= 1


def test_few_tokens_are_no_departure():
    callback = schedule()
    callback.calibrated(0, 0.01)
    # 3 of 100: two standard errors of 3 % are 3.4 points; 3 % of 10,000 are a departure
    assert not callback.outside_band(3, 100)
    assert callback.outside_band(300, 10_000)
    assert not callback.outside_band(0, 0)
    callback.calibrated(4, 0.0)
    assert not callback.outside_band(0, 10_000) and callback.outside_band(10, 10_000)


def test_skipped_calibration_is_tried_again_in_its_own_time():
    callback = schedule()
    callback.calibrated(0, 0.01)
    callback.calibrated(4, None)
    callback.watched(5, 10_000, 10_000)
    assert [rollout for rollout in range(5, 12) if callback.is_due(rollout)][0] == 8


def test_state_round_trip():
    callback, other = schedule(), schedule()
    run(callback, [0.01] * 30 + [0.03])
    other.load_state(callback.state())
    assert other.state() == callback.state() and other.is_due(31)
    other.load_state({})  # from a run on a fixed schedule
    assert other.state() == callback.state()
    short = schedule(max_interval=5)
    short.load_state(callback.state())
    assert short.distance <= 5


def test_defaults_of_the_adaptive_schedule(make_config):
    config = make_config(calibration_schedule="adaptive", calibration_interval=3)
    assert (config.calibration_max_interval, config.calibration_band) == (12, 0.5)
    assert make_config(calibration_fraction=0.25).calibration_max_interval is None


@pytest.mark.slow
def test_schedule_beside_a_callback_of_the_users_is_refused(make_trainer):
    with pytest.raises(ValueError, match="no effect beside a `CalibrationCallback`"):
        make_trainer(trainer={"callbacks": [CalibrationCallback(3, 4)]}, calibration_schedule="adaptive")


@pytest.mark.slow
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_fraction_scores_drawn_micro_batches_only(make_recorder, num_iterations):
    trainer = make_recorder(
        calibration_fraction=0.4, calibration_interval=2, num_iterations=num_iterations,
        max_steps=12 * num_iterations,
    )  # fmt: skip
    trainer.train()
    per_rollout = 4 * num_iterations
    expected = []
    for rollout in (0, 2):
        drawn = draw_micro_batches(0.4, 1, per_rollout, (7, rollout))
        assert len(drawn) == round(0.4 * (per_rollout - 1))
        expected.append((rollout, drawn))
        forwards = trainer.forwards[rollout * per_rollout : (rollout + 1) * per_rollout]
        assert {number for number, forward in enumerate(forwards) if forward.collected is not None} == drawn
        for number in drawn:
            takes_part = forwards[number].mask & (forwards[number].advantages != 0)
            ratio = forwards[number].ratio[takes_part].double()
            assert torch.equal(forwards[number].collected.fp8_ratio, ratio)
    assert all(forward.collected is None for forward in trainer.forwards[per_rollout : 2 * per_rollout])
    # one pass for each drawn micro-batch and one of the old policy for each buffered one among them
    passes = sum(len(drawn) + len({number % 4 for number in drawn}) for _, drawn in expected)
    assert len(trainer.scored) == passes
    assert trainer.num_calibrations == 2


@pytest.mark.slow
def test_adaptive_schedule_counts_as_the_loss_clips(make_recorder):
    """Narrow bounds and a band that nothing leaves: the watched shares are those of the recorded forwards."""
    trainer = make_recorder(
        calibration_schedule="adaptive", calibration_interval=3, calibration_band=1e6, max_steps=24,
        calibration_max_interval=3,
    )  # fmt: skip
    trainer.train()
    calibrated = [record["rollout"] for record in trainer.calibration_history]
    assert calibrated == [0, 3]
    logs = {entry["step"]: entry for entry in trainer.state.log_history if "calclip/lower" in entry}
    clipped_in_all = 0
    for rollout in (1, 2, 4, 5):
        clipped = total = 0
        for forward in trainer.forwards[4 * rollout + 1 : 4 * rollout + 4]:
            negative = forward.mask & (forward.advantages < 0)
            clipped += (forward.ratio[negative] < torch.tensor(1 - forward.epsilons[0])).sum().item()
            total += negative.sum().item()
        watched = logs[4 * rollout + 4]["calclip/watched_clip_frac"]
        assert watched == pytest.approx(clipped / total, abs=1e-12) and logs[4]["calclip/interval"] == 3
        clipped_in_all += clipped
    assert clipped_in_all > 0
    assert len(trainer.scored) == 2 * (3 + 3)  # no pass beyond those of the two calibrations


@pytest.mark.slow
def test_adaptive_schedule_survives_a_resume(make_trainer, tmp_path):
    settings = {
        "max_steps": 32, "save_strategy": "steps", "save_steps": 16, "calibration_schedule": "adaptive",
        "calibration_interval": 2, "calibration_fraction": 0.34, "learning_rate": 3e-3,
    }  # fmt: skip
    whole = make_trainer(**settings)
    whole.train()
    saved = read_state(tmp_path / "run" / "checkpoint-16")["schedule"]
    assert saved["next_rollout"] > 3 and saved["target_share"] is not None
    resumed = make_trainer(**settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-16"))
    assert resumed._schedule.state() == whole._schedule.state() != saved
    assert resumed.clip_range == whole.clip_range

    def rollouts(trainer):
        return [(record["rollout"], record["lower"], record["num_pooled_tokens"]) for record in
                trainer.calibration_history]  # fmt: skip

    assert rollouts(resumed) == rollouts(whole) and len(rollouts(whole)) >= 3
