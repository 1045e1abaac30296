# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Each alarm on a run that has its fault, none on a healthy one, and a stop that a resume can go on from."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer
from trl_calclip.checkpoint import read_state
from trl_calclip.health import HealthCallback, HealthMonitor
from trl_calclip.health_settings import EXPLANATIONS, HealthArguments


def raised(entries, **settings) -> list[tuple[str, int]]:
    monitor = HealthMonitor(HealthArguments(**settings))
    return [(alarm.name, alarm.step) for step, entry in enumerate(entries, 1) for alarm in monitor.update(entry, step)]


def health(trainer) -> HealthCallback:
    (callback,) = [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, HealthCallback)]
    return callback


def names(trainer) -> set[str]:
    return {alarm.name for alarm in health(trainer).alarms}


class AfterStep(TrainerCallback):
    """Does something to the model after an optimizer step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            with torch.no_grad():
                self.act(model)


def sharpen(model, factor):
    """Scale what the head sees: above 1 the policy commits itself, below 1 it becomes uniform."""
    with torch.no_grad():
        model.model.norm.weight.mul_(factor)


QUIET = {"learning_rate": 1e-6, "logging_steps": 1}


# Alarms on runs that have the fault


def test_entropy_surge_in_a_run(make_trainer):
    trainer = make_trainer(max_steps=16, alarm_entropy_window=2, alarm_garbled="off", **QUIET)
    sharpen(trainer.model, 6.0)
    trainer.add_callback(AfterStep(8, lambda model: sharpen(model, 1 / 6)))
    trainer.train()
    (alarm,) = [alarm for alarm in health(trainer).alarms if alarm.name == "entropy_surge"]
    assert 9 <= alarm.step <= 10
    assert "entropy rose to" in alarm.seen and "unlearned" in alarm.message
    assert "entropy_collapse" not in names(trainer)


def test_entropy_collapse_in_a_run(make_trainer):
    trainer = make_trainer(max_steps=12, alarm_entropy_window=2, **QUIET)
    trainer.add_callback(AfterStep(4, lambda model: sharpen(model, 100.0)))
    trainer.train()
    assert "entropy_collapse" in names(trainer) and "entropy_surge" not in names(trainer)


def test_overclip_in_a_run(make_trainer):
    # Bounds so near to 1 that FP8's noise on this toy, about 0.005, steps over them where BF16 does not.
    trainer = make_trainer(
        max_steps=4, calibration_interval=1, learning_rate=3e-5, calibration_start_at_reference=True,
        epsilon=0.005, epsilon_high=0.005, calibration_lower_limits=[0.9, 0.999],
        calibration_upper_limits=[1.001, 1.1], per_device_train_batch_size=16,
    )  # fmt: skip
    trainer.train()
    (alarm,) = [alarm for alarm in health(trainer).alarms if alarm.name == "overclip"]
    assert alarm.step == 4 and "are over-clipped" in alarm.seen
    record = trainer.calibration_history[0]
    assert max(record["overclip_low_frac"], record["overclip_high_frac"]) > 0.05


def test_search_at_the_edge_of_its_limits_in_a_run(make_trainer):
    # Limits that begin at the reference bound, which is where the search ends where BF16 and FP8 clip alike.
    trainer = make_trainer(max_steps=12, calibration_interval=1, calibration_upper_limits=[1.24, 2.0], **QUIET)
    trainer.train()
    (alarm,) = [alarm for alarm in health(trainer).alarms if alarm.name == "bounds_at_limit"]
    assert alarm.step == 12 and "the search for the upper bound" in alarm.seen and "in 3 calibrations" in alarm.seen
    assert "bounds_at_limit" not in names(make_and_train(make_trainer, calibration_upper_limits=[1.2, 2.0]))


def make_and_train(make_trainer, **overrides):
    trainer = make_trainer(max_steps=12, calibration_interval=1, **overrides, **QUIET)
    trainer.train()
    return trainer


def test_nonfinite_in_a_run(make_trainer, monkeypatch):
    def far_off(self, micro_batches):
        begin_rollout(self, micro_batches)
        for inputs in micro_batches:
            if "bf16_old_per_token_logps" in inputs:
                inputs["bf16_old_per_token_logps"][:, 0] = -1e4

    begin_rollout = CalibratedGRPOTrainer.begin_rollout
    monkeypatch.setattr(CalibratedGRPOTrainer, "begin_rollout", far_off)
    trainer = make_trainer(max_steps=4, calibration_interval=1)
    with pytest.warns(UserWarning, match="skipped"):
        trainer.train()
    (alarm,) = [alarm for alarm in health(trainer).alarms if alarm.name == "nonfinite"]
    assert alarm.step == 4 and "of the importance ratios are not finite" in alarm.seen


def test_gradient_that_is_not_finite_ends_the_run_before_any_alarm(make_trainer):
    trainer = make_trainer(max_steps=4)
    trainer.add_callback(AfterStep(2, lambda model: model.model.norm.weight.fill_(math.nan)))
    with pytest.raises(RuntimeError, match="The gradient's norm is nan at step 3"):
        trainer.train()
    assert "nonfinite" not in names(trainer)


def test_garbled_output_in_a_run(make_trainer):
    # The random toy produces nothing but garbage, half of it punished.
    trainer = make_trainer(max_steps=4, calibration_interval=1)
    trainer.train()
    assert "garbled" in names(trainer)


@pytest.mark.vllm
@pytest.mark.slow
def test_engine_with_other_weights_raises_the_mismatch_alarms(make_trainer):
    """The trainer's weights change behind the engine's back: what a lost sync does."""
    trainer = make_trainer(
        max_steps=8, use_vllm=True, vllm_max_model_length=32, fp8_sync_check_interval=0,
        alarm_mismatch_kl_limit=0.1, alarm_sample_size_limit=0.9, **QUIET,
    )  # fmt: skip
    sync = trainer.vllm_generation.sync_weights
    done = []

    def sync_once():
        if not done:
            sync()
        done.append(1)

    trainer.vllm_generation.sync_weights = sync_once
    trainer.add_callback(AfterStep(4, lambda model: sharpen(model, 4.0)))
    trainer.train()
    by_name = {alarm.name: alarm for alarm in health(trainer).alarms}
    assert {"mismatch_kl", "sample_size"} <= set(by_name)
    assert by_name["mismatch_kl"].step == 5
    assert by_name["mismatch_kl"].message.index("sync:") < by_name["mismatch_kl"].message.index("recipe:")


# The monitor on histories of numbers


def test_entropy_over_windows():
    flat, high = [{"entropy": 0.3}] * 10, [{"entropy": 0.89}] * 10
    assert raised(flat * 5) == []
    assert raised(flat + high) == [("entropy_surge", 16)]  # (4 * 0.3 + 6 * 0.89) / 10 is the first over 0.6
    assert raised(flat + high, alarm_entropy_surge_factor=4.0) == []
    assert raised(flat + high + flat + high) == [("entropy_surge", 16), ("entropy_surge", 36)]  # begins anew
    assert raised([{"entropy": 0.01}] * 10 + [{"entropy": 0.04}] * 10) == []  # less than 0.1 nats
    assert raised(flat + [{"entropy": 0.01}] * 10) == [("entropy_collapse", 20)]
    assert raised([{"entropy": None}, {"entropy": math.nan}] * 20) == []


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_no_alarm_in_the_demo(seed):
    """What the demo logged, `examples/grpo_fp8.py --seed SEED`, of the metrics that alarms read, to four digits."""
    entries = json.loads((Path(__file__).parent / "data" / "healthy_demo.json").read_text())[seed]
    assert len(entries) == 320 and sum("calclip/lower_target" in entry for entry in entries) == 16
    assert raised(entries) == []


def test_limits_need_calibrations_in_a_row():
    at, inside = (
        {"calclip/lower_target": target, "calclip/upper_target": 1.4, "calclip/alpha_low_bf16": 0.01}
        for target in (0.504, 0.7)
    )
    skipped = {"calclip/lower_target": 0.5, "calclip/upper_target": 2.0, "calclip/entropy": 1.0}
    assert raised([at, at, inside, at, at]) == []
    assert raised([at, {}, at, skipped, at]) == [("bounds_at_limit", 5)]
    # A reference bound of 1.24 is not at the edge of [1.2, 2.0].
    reference = {"calclip/lower_target": 0.8, "calclip/upper_target": 1.24, "calclip/alpha_low_bf16": 0.01}
    assert raised([reference] * 5) == []
    assert raised([{**reference, "calclip/upper_target": 1.99}] * 3) == [("bounds_at_limit", 3)]


def test_bands_of_single_numbers():
    assert raised([{"calclip/overclip_low_frac": 0.01, "calclip/overclip_high_frac": 0.06}]) == [("overclip", 1)]
    assert raised([{"rollout_corr/k3_kl": 0.1}, {"rollout_corr/k3_kl": 0.11}]) == [("mismatch_kl", 2)]
    assert raised([{"rollout_corr/k3_kl": math.nan}]) == [("mismatch_kl", 1)]
    low = {"rollout_corr/rollout_is_eff_sample_size": 0.2}
    assert raised([low, low]) == [("sample_size", 1)]
    assert raised([low], alarm_sample_size="off") == []
    assert raised([{"loss": 0.1, "grad_norm": math.inf}]) == [("nonfinite", 1)]
    assert raised([{"loss": 0.1, "calclip/nonfinite_frac": 0.001}]) == [("nonfinite", 1)]
    assert raised([{"loss": 0.1, "calclip/nonfinite_frac": 0.001}], alarm_nonfinite_limit=0.01) == []
    assert raised([{"loss": 0.1, "calclip/garbled_frac": 0.26}]) == [("garbled", 1)]


def test_messages_say_what_to_look_at_in_order():
    monitor = HealthMonitor(HealthArguments())
    (alarm,) = monitor.update({"rollout_corr/k3_kl": 0.5}, 7)
    assert alarm.message.startswith("Alarm `mismatch_kl` at step 7: the KL of rollout and trainer is 0.5000 nats")
    positions = [alarm.message.index(f"{n}. {label}:") for n, label in enumerate(("sync", "recipe", "clip"), 1)]
    assert positions == sorted(positions)
    for meaning, hints in EXPLANATIONS.values():
        assert meaning.startswith("Usually") and len(hints) == 4


# Stopping


def test_stop_saves_at_the_end_of_the_rollout_and_resumes(make_trainer, caplog):
    trainer = make_trainer(max_steps=16, alarm_garbled="stop", calibration_interval=1, logging_steps=1)
    trainer.train()
    # The calibration of the first rollout is logged at its last step, step 4.
    assert trainer.state.global_step == 4
    assert "Training stops at the end of this rollout" in caplog.text
    state = read_state(f"{trainer.args.output_dir}/checkpoint-4")
    assert state["num_rollouts"] == 1
    resumed = make_trainer(max_steps=12, alarm_garbled="stop", calibration_interval=1)
    resumed.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-4")
    assert resumed.state.global_step == 12  # what had begun before is not raised again
    assert read_state(resumed.args.output_dir + "/checkpoint-4") == state


def test_stop_in_mid_rollout_waits_for_its_end(make_trainer):
    class Log(TrainerCallback):
        """At step 6 of rollouts of four, a loss that is not finite."""

        def on_log(self, args, state, control, logs=None, **kwargs):
            if state.global_step == 6:
                logs["loss"] = math.nan

    settings = {"max_steps": 16, "alarm_nonfinite": "stop", "calibration_interval": 3, "alarm_garbled": "off"}
    trainer = make_trainer(trainer={"callbacks": [Log()]}, **settings)
    trainer.train()
    assert health(trainer).alarms[0].step == 6
    assert trainer.state.global_step == 8
    assert read_state(f"{trainer.args.output_dir}/checkpoint-8")["num_rollouts"] == 2


def test_warning_neither_saves_nor_stops(make_config):
    callback = HealthCallback(make_config())
    state, control = TrainerState(global_step=4), TrainerControl()
    callback.on_log(None, state, control, logs={"rollout_corr/k3_kl": 5.0})
    assert [alarm.name for alarm in callback.alarms] == ["mismatch_kl"]
    assert not control.should_save and not control.should_training_stop


def test_everything_off_raises_nothing(make_trainer):
    off = dict.fromkeys((f"alarm_{name}" for name in EXPLANATIONS), "off")
    trainer = make_trainer(max_steps=4, calibration_interval=1, **off)
    trainer.train()
    assert health(trainer).alarms == []


# Settings


def test_settings_are_checked(make_config, tmp_path):
    assert make_config(alarm_garbled=False).alarm_garbled == "off"
    with pytest.raises(ValueError, match="`alarm_garbled` must be one of warn, stop, off, got 'halt'"):
        make_config(alarm_garbled="halt")
    with pytest.raises(ValueError, match="`alarm_entropy_window` must be at least 1"):
        make_config(alarm_entropy_window=0)
    with pytest.raises(TypeError, match="`alarm_overclip_limit` must be a number"):
        make_config(alarm_overclip_limit="5%")
    with pytest.raises(ValueError, match="`alarm_mismatch_kl='stop'` has no effect"):
        make_config(alarm_mismatch_kl="stop")
    with pytest.raises(ValueError, match="`alarm_overclip='stop'` has no effect"):
        CalibratedGRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, calibrated_clip=False, fp8_recipe=None, alarm_overclip="stop"
        )
