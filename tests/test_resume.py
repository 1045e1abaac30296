# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints: where they are taken, what they hold, and that a resumed run is the unbroken one."""

import json
import os
import shutil

import pytest
import torch
from launching import torchrun

from trl_calclip import ClipRange
from trl_calclip.checkpoint import STATE_NAME, check_world, read_state, write_state


STATE = {
    "clip_range": [0.65, 1.7],
    "num_rollouts": 3,
    "num_calibrations": 2,
    "num_skipped_calibrations": 0,
    "calibration_history": [{"step": 4, "lower": 0.65, "rho_fp8": None}],
    "schedule": {},
    "world": {"num_processes": 2, "completions_per_rollout": 32, "completions_per_step": 8},
}


def test_state_round_trip(tmp_path):
    write_state(tmp_path, STATE)
    assert {name: value for name, value in read_state(tmp_path).items() if name != "version"} == STATE
    assert os.listdir(tmp_path) == [STATE_NAME]
    assert read_state(tmp_path / "elsewhere") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged"),
        (json.dumps({**STATE, "version": 1})[:50], "is damaged"),
        ("[]", "version 1"),
        (json.dumps(STATE), "version 1"),
        (json.dumps({**STATE, "version": 2}), "version 1"),
        (json.dumps({"version": 1}), "lacks what a resume needs"),
        (json.dumps({**STATE, "version": 1, "clip_range": [1.7, 0.65]}), "lacks what a resume needs"),
        (json.dumps({**STATE, "version": 1, "clip_range": [0.65]}), "lacks what a resume needs"),
        (json.dumps({**STATE, "version": 1, "num_rollouts": -1}), "cannot be"),
        (json.dumps({**STATE, "version": 1, "num_rollouts": 1.5}), "cannot be"),
        (json.dumps({**STATE, "version": 1, "calibration_history": {}}), "cannot be"),
        (json.dumps({**STATE, "version": 1, "world": 2}), "cannot be"),
    ],
)
def test_damaged_state_is_refused(tmp_path, text, message):
    (tmp_path / STATE_NAME).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_state(tmp_path)


def test_nan_never_reaches_the_file(tmp_path):
    with pytest.raises(ValueError, match="Out of range float"):
        write_state(tmp_path, {"clip_range": [float("nan"), 1.0]})
    assert read_state(tmp_path) is None


def weights(trainer):
    return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


def without_timing(history):
    return [{name: value for name, value in record.items() if name != "bf16_pass_seconds"} for record in history]


@pytest.mark.parametrize("route", ["path", "latest"])
def test_resumed_run_equals_the_unbroken_one(make_trainer, tmp_path, route):
    settings = {"max_steps": 16, "save_strategy": "steps", "save_steps": 8}
    whole = make_trainer(**settings)
    whole.train()
    assert whole.num_calibrations == 2 and whole.num_rollouts == 4
    checkpoint = tmp_path / "run" / "checkpoint-8"
    state = read_state(checkpoint)
    assert state["num_rollouts"] == 2 and state["num_calibrations"] == 1

    if route == "latest":
        shutil.rmtree(tmp_path / "run" / "checkpoint-16")
    resumed = make_trainer(**settings)
    resumed.train(resume_from_checkpoint=True if route == "latest" else str(checkpoint))

    assert resumed.clip_range == whole.clip_range
    assert without_timing(resumed.calibration_history) == without_timing(whole.calibration_history)
    assert (resumed.num_rollouts, resumed.num_calibrations) == (4, 2)
    for name, weight in weights(whole).items():
        assert torch.equal(weights(resumed)[name], weight), name
    assert resumed.epsilon_low == resumed.clip_range.epsilon_low


def test_checkpoints_wait_for_the_end_of_a_rollout(make_trainer, tmp_path):
    trainer = make_trainer(max_steps=10, save_strategy="steps", save_steps=3)
    trainer.train()
    saved = sorted(int(name.split("-")[1]) for name in os.listdir(tmp_path / "run") if name.startswith("checkpoint"))
    # asked for at 3, 6, 9 and at the last step; four updates per rollout
    assert saved == [4, 8, 10]


def test_resume_from_inside_a_rollout_is_said_and_counts_from_there(make_trainer, tmp_path, caplog):
    """Training ended at step 10 of rollouts of four. TRL begins a rollout with the resume: they end at 14 and 18."""
    make_trainer(max_steps=10, save_strategy="steps", save_steps=3).train()
    trainer = make_trainer(max_steps=19, save_strategy="steps", save_steps=3)
    trainer.train(resume_from_checkpoint=True)
    assert "Resuming inside a rollout, at step 10 with 4 steps a rollout" in caplog.text
    saved = sorted(int(name.split("-")[1]) for name in os.listdir(tmp_path / "run") if name.startswith("checkpoint"))
    assert saved == [4, 8, 10, 14, 18, 19]


def test_state_is_complete_before_trainer_state(make_trainer, tmp_path):
    trainer = make_trainer(max_steps=4, save_strategy="steps", save_steps=4)
    trainer.train()
    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert (checkpoint / STATE_NAME).stat().st_mtime_ns <= (checkpoint / "trainer_state.json").stat().st_mtime_ns


def test_final_model_and_state_load(make_trainer, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = make_trainer(max_steps=4)
    trainer.train()
    trainer.save_model()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    AutoTokenizer.from_pretrained(tmp_path / "run")
    for (name, param), ours in zip(model.named_parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(param, ours), name
    assert ClipRange(*read_state(tmp_path / "run")["clip_range"]) == trainer.clip_range


def test_checkpoint_of_plain_trl_is_adopted_with_a_notice(make_trainer, tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 4}
    make_trainer(max_steps=4, calibrated_clip=False, **settings).train()
    assert not (tmp_path / "run" / "checkpoint-4" / STATE_NAME).exists()
    trainer = make_trainer(max_steps=8, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert "has no calclip_state.json" in caplog.text
    assert trainer.num_rollouts == 1 and trainer.num_calibrations == 1


def test_damaged_state_stops_the_resume(make_trainer, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 4}
    make_trainer(max_steps=4, **settings).train()
    (tmp_path / "run" / "checkpoint-4" / STATE_NAME).write_text("{")
    with pytest.raises(ValueError, match="is damaged.*Resume from another checkpoint"):
        make_trainer(max_steps=8, **settings).train(resume_from_checkpoint=True)


WORLD = {"num_processes": 2, "completions_per_rollout": 32, "completions_per_step": 8}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"completions_per_rollout": 16}, r"2 processes with 32 completions per rollout, and this run has 1 .* 16"),
        ({"completions_per_step": 4}, "8 over all processes, or resume on 2 processes"),
    ],
)
def test_another_world_size_needs_the_same_batches(changed, message, caplog):
    with pytest.raises(ValueError, match=message):
        check_world(WORLD, {**WORLD, "num_processes": 1, **changed})
    check_world(WORLD, {**WORLD, **changed})  # the user's own change, on as many processes
    assert not caplog.records
    check_world(WORLD, {**WORLD, "num_processes": 1})
    assert "Resuming on 1 processes from a checkpoint of 2" in caplog.text


TWO_RANKS = """
import sys
from datasets import Dataset
from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer

args = CalibratedGRPOConfig(
    output_dir=sys.argv[2], per_device_train_batch_size=4, num_generations=4, steps_per_generation=4,
    max_completion_length=8, learning_rate=1e-3, lr_scheduler_type="constant", max_steps=8, calibration_interval=2,
    calibration_min_tokens=1, save_strategy="steps", save_steps=8, report_to="none", use_cpu=True, disable_tqdm=True,
    seed=7, gradient_checkpointing=False,
)
trainer = CalibratedGRPOTrainer(
    sys.argv[1],
    lambda completions, **_: [sum(c.count(d) for d in "02468") / max(len(c), 1) for c in completions],
    args,
    train_dataset=Dataset.from_dict({"prompt": [f"{i % 10}+{i // 10}=" for i in range(64)]}),
)
trainer.train()
"""


@pytest.mark.slow
def test_checkpoint_of_two_ranks_on_one(make_trainer, toy_path, tmp_path):
    """Bounds, schedule, optimizer and place in the dataset go on; with other batch sizes the resume is refused."""
    torchrun(tmp_path, TWO_RANKS, toy_path, tmp_path / "run", ranks=2)
    checkpoint = tmp_path / "run" / "checkpoint-8"
    state = read_state(checkpoint)
    assert state["world"] == {"num_processes": 2, "completions_per_rollout": 32, "completions_per_step": 8}
    assert (state["num_rollouts"], state["num_calibrations"]) == (2, 1)

    settings = {"max_steps": 16, "save_strategy": "no"}
    with pytest.raises(ValueError, match="this run has 1 processes with 16: the place in the dataset would be lost"):
        make_trainer(**settings).train(resume_from_checkpoint=str(checkpoint))

    seen: list[list[str]] = []

    def reward(prompts, completions, **kwargs):
        seen.append(list(prompts))
        return [float(len(text)) for text in completions]

    def prompts_of(resume: bool, **others) -> list[set[str]]:
        seen.clear()
        trainer = make_trainer(trainer={"reward_funcs": reward}, per_device_train_batch_size=8, **settings, **others)
        first = dict(trainer.model.named_parameters())["model.norm.weight"].detach().clone()
        trainer.train(resume_from_checkpoint=str(checkpoint) if resume else None)
        assert trainer.state.global_step == 16 and trainer.num_rollouts == 4
        assert torch.equal(first, torch.ones_like(first))
        moments = [state["step"].item() for state in trainer.optimizer.state.values()]
        assert set(moments) == {16.0}  # of which eight were those of the checkpoint
        assert [record["rollout"] for record in trainer.calibration_history] == [0, 2]
        if resume:
            assert trainer.calibration_history[0] == state["calibration_history"][0]
        return [set(batch) for batch in seen]

    whole, resumed = prompts_of(False), prompts_of(True)
    assert len(whole) == 4 and len(resumed) == 2
    assert resumed == whole[2:] and not resumed[0] & whole[0]
