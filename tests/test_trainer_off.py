# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""With everything off the trainer is TRL's, bit for bit."""

import dataclasses

import pytest
import torch
from conftest import digits_reward
from trl import GRPOConfig, GRPOTrainer

from trl_calclip import CalibratedGRPOConfig


def run(trainer):
    trainer.train()
    logs = [
        {key: value for key, value in entry.items() if "time" not in key and "per_second" not in key}
        for entry in trainer.state.log_history
    ]
    return logs, {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_iterations": 2, "beta": 0.1},
        {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
    ],
    ids=["plain", "two iterations and KL", "accumulation and evaluation"],
)
def test_off_equals_trl(make_trainer, make_config, toy_path, toy_dataset, overrides):
    overrides = {"calibrated_clip": False, "fp8_recipe": None, "max_steps": 5, **overrides}
    data = {"eval_dataset": toy_dataset.select(range(8))} if "eval_steps" in overrides else {}
    # One after the other: building a trainer seeds the global generators, training draws from them.
    our_logs, our_weights = run(make_trainer(trainer=data, **overrides))
    settings = dataclasses.asdict(make_config(**overrides))
    names = {field.name for field in dataclasses.fields(GRPOConfig) if field.init}
    settings = {name: value for name, value in settings.items() if name in names}
    settings["generation_batch_size"] = None
    settings["epsilon_high"] = None
    plain = GRPOTrainer(
        model=toy_path, reward_funcs=digits_reward, args=GRPOConfig(**settings), train_dataset=toy_dataset, **data
    )

    plain_logs, plain_weights = run(plain)

    assert len(our_logs) >= 6
    assert our_logs == plain_logs
    assert any(entry.get("grad_norm", 0) > 0 for entry in our_logs)
    for name, weight in plain_weights.items():
        assert torch.equal(our_weights[name], weight), name


def test_off_has_trl_defaults(tmp_path):
    ours = CalibratedGRPOConfig(output_dir=str(tmp_path), calibrated_clip=False, fp8_recipe=None, use_cpu=True)
    plain = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    for field in dataclasses.fields(GRPOConfig):
        if field.name in ("logging_dir", "run_name", "accelerator_config", "distributed_state"):
            continue
        assert getattr(ours, field.name) == getattr(plain, field.name), field.name


def test_on_has_the_methods_defaults(tmp_path):
    config = CalibratedGRPOConfig(output_dir=str(tmp_path), steps_per_generation=4, use_cpu=True)
    assert (config.epsilon, config.epsilon_high) == (0.2, 0.24)
    assert (config.vllm_importance_sampling_mode, config.vllm_importance_sampling_clip_max) == ("token_truncate", 2.0)
    chosen = CalibratedGRPOConfig(
        output_dir=str(tmp_path), steps_per_generation=4, use_cpu=True, epsilon=0.15, epsilon_high=0.3,
        vllm_importance_sampling_mode="sequence_truncate", vllm_importance_sampling_clip_max=3.0,
    )  # fmt: skip
    assert (chosen.epsilon, chosen.epsilon_high) == (0.15, 0.3)
    assert (chosen.vllm_importance_sampling_mode, chosen.vllm_importance_sampling_clip_max) == (
        "sequence_truncate",
        3.0,
    )
