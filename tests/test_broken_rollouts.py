# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Engines, reward functions and ratios that are broken: nothing of it is trained on silently. See `docs/faults.md`."""

import gc
import math
import re
import warnings

import pytest
import torch
from conftest import digits_reward
from trl.generation.vllm_generation import VLLMGeneration

from trl_calclip import CalibratedGRPOTrainer
from trl_calclip._trl_compat import engine_model


def weights(trainer):
    return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


def assert_untouched(trainer, before):
    assert all(torch.equal(param, before[name]) for name, param in trainer.model.named_parameters())


# Engine: faults are put into what TRL's own `generate` returns


@pytest.fixture(scope="module")
def engine_trainer(tmp_path_factory, toy_path, toy_dataset):
    from trl_calclip import CalibratedGRPOConfig

    args = CalibratedGRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("run")), per_device_train_batch_size=4, num_generations=4,
        steps_per_generation=4, max_completion_length=8, learning_rate=1e-3, max_steps=4, calibration_min_tokens=1,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, seed=7, use_vllm=True,
        vllm_max_model_length=32,
    )  # fmt: skip
    trainer = CalibratedGRPOTrainer(toy_path, digits_reward, args, train_dataset=toy_dataset)
    yield trainer
    del trainer.vllm_generation
    gc.collect()


def empty_completion(prompts, completions, logprobs):
    return [*completions[:-1], []], [*logprobs[:-1], []]


def completion_missing(prompts, completions, logprobs):
    return completions[:-1], logprobs[:-1]


def logprob_missing(prompts, completions, logprobs):
    return completions, [*logprobs[:-1], logprobs[-1][:-1]]


def all_nan(prompts, completions, logprobs):
    return completions, [[[None] for _ in row] for row in logprobs]


def nothing(prompts, completions, logprobs):
    return [], []


def break_engine(monkeypatch, fault):
    def generate(self, *args, original=VLLMGeneration.generate, **kwargs):
        prompts, completions, logprobs, token_ids = original(self, *args, **kwargs)
        return prompts, *fault(prompts, completions, logprobs), token_ids

    monkeypatch.setattr(VLLMGeneration, "generate", generate)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (empty_completion, "1 of the engine's 16 completions are empty. Nothing was trained on this"),
        (completion_missing, "15 completions for 16 prompts"),
        (nothing, "0 completions for 16 prompts"),
        (logprob_missing, "not as many log-probabilities as tokens"),
        (all_nan, "log-probabilities are NaN: it computes NaN"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_rollout_ends_the_run_before_it_is_trained_on(engine_trainer, monkeypatch, fault, message):
    before = weights(engine_trainer)
    break_engine(monkeypatch, fault)
    with pytest.raises(RuntimeError, match=message) as caught:
        engine_trainer.train()
    assert "Training stopped at step 0, in rollout batch 0" in " ".join(caught.value.__notes__)
    assert_untouched(engine_trainer, before)


@pytest.mark.vllm
def test_a_few_nan_log_probabilities_are_said_once_and_have_weight_one(engine_trainer, monkeypatch):
    def one_nan(prompts, completions, logprobs):
        return completions, [[[None], *logprobs[0][1:]], *logprobs[1:]]

    seen = []
    after = CalibratedGRPOTrainer.after_policy_forward

    def keep(self, inputs, per_token_logps):
        seen.append((inputs["sampling_per_token_logps"].isnan(), inputs["importance_sampling_ratio"]))
        after(self, inputs, per_token_logps)

    monkeypatch.setattr(CalibratedGRPOTrainer, "after_policy_forward", keep)
    break_engine(monkeypatch, one_nan)
    engine_trainer.args.max_steps = 8
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine_trainer.train()
    assert sum("log-probabilities are NaN" in str(warning.message) for warning in caught) == 1
    assert sum(nan.sum().item() for nan, _ in seen) == 2  # one in each of two rollouts
    assert all((ratio[nan] == 1).all() for nan, ratio in seen)
    assert all(math.isfinite(entry["loss"]) for entry in engine_trainer.state.log_history if "loss" in entry)


@pytest.mark.vllm
def test_dead_engine_ends_the_run(engine_trainer):
    """The last of the engine's tests: a layer of its model raises, and what the engine says of it is passed on."""
    before = weights(engine_trainer)
    engine_model(engine_trainer.vllm_generation.llm).model.layers[1].mlp.register_forward_pre_hook(die)
    with pytest.raises(Exception, match="CUDA error|EngineCore") as caught:
        engine_trainer.train()
    assert "Training stopped at step 0" in " ".join(caught.value.__notes__)
    assert_untouched(engine_trainer, before)


def die(*args):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


# Rewards


def raises(completions, **kwargs):
    raise ZeroDivisionError("verifier")


def gives_none(completions, **kwargs):
    return None


def too_few(completions, **kwargs):
    return [0.0] * (len(completions) - 1)


def text(completions, **kwargs):
    return ["good"] * len(completions)


def infinite(completions, **kwargs):
    return [math.inf, *digits_reward(completions)[1:]]


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        (raises, ZeroDivisionError, "verifier"),
        (gives_none, TypeError, "It must return a list with one number for each completion"),
        (too_few, ValueError, "returned 15 rewards, but 16 were expected"),
        (text, Exception, "It must return a list with one number for each completion"),
        (infinite, ValueError, "The reward function infinite returned an infinite reward.*Return a finite number"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_reward_ends_the_run(make_trainer, reward, error, message):
    trainer = make_trainer(trainer={"reward_funcs": reward})
    before = weights(trainer)
    with pytest.raises(error) as caught:
        trainer.train()
    said = f"{caught.value} {' '.join(caught.value.__notes__)}"
    assert re.search(message, said)
    assert "Training stopped at step 0" in said
    assert_untouched(trainer, before)


@pytest.mark.parametrize("missing", [None, math.nan])
def test_completions_without_a_reward_are_left_out(make_trainer, monkeypatch, missing):
    def reward(completions, **kwargs):
        return [missing, *digits_reward(completions)[1:]]

    def generate_and_score(self, inputs):
        batch = original(self, inputs)
        batches.append(batch["advantages"].clone())
        return batch

    batches, original = [], CalibratedGRPOTrainer.generate_and_score
    monkeypatch.setattr(CalibratedGRPOTrainer, "generate_and_score", generate_and_score)
    trainer = make_trainer(trainer={"reward_funcs": reward})
    trainer.train()
    assert len(batches) == 2
    for advantages in batches:
        assert advantages[0] == 0 and advantages.abs().sum() > 0
        # the baseline is that of the other three
        assert advantages[1:4].sum().item() == pytest.approx(0, abs=1e-3)
    assert trainer.num_calibrations == 1


def test_equal_rewards_skip_calibrations_and_say_so_once(make_trainer):
    equal = {"rollouts": set(range(0, 5))}

    def reward(completions, trainer_state, **kwargs):
        share = digits_reward(completions)
        return [0.5] * len(share) if trainer_state.global_step // 4 in equal["rollouts"] else share

    trainer = make_trainer(trainer={"reward_funcs": reward}, max_steps=32, calibration_interval=1)
    start = trainer.clip_range
    equal["rollouts"] |= {6, 7}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(warning.message) for warning in caught if "skipped, the clip bounds stay" in str(warning.message)]
    # five in a row, one that calibrates, two more in a row
    assert len(said) == 2 and "Calibration at step 4 skipped" in said[0] and "at step 28 skipped" in said[1]
    assert (trainer.num_calibrations, trainer.num_skipped_calibrations) == (1, 7)
    assert trainer.clip_range != start
    logs = [entry for entry in trainer.state.log_history if "calclip/skipped_calibrations" in entry]
    assert logs[19]["calclip/skipped_calibrations"] == 5 and logs[19]["calclip/lower"] == start.lower


# Ratios


def test_rollout_without_negative_tokens_leaves_the_bounds(make_trainer, monkeypatch):
    def only_positive(self, micro_batches):
        for inputs in micro_batches:
            inputs["advantages"].clamp_(min=0)
        original(self, micro_batches)

    original = CalibratedGRPOTrainer.begin_rollout
    monkeypatch.setattr(CalibratedGRPOTrainer, "begin_rollout", only_positive)
    trainer = make_trainer()
    start, before = trainer.clip_range, weights(trainer)
    with pytest.warns(UserWarning, match="Only 0 tokens have a negative advantage"):
        trainer.train()
    assert trainer.clip_range == start and trainer.num_skipped_calibrations == 1 and trainer.num_rollouts == 2
    assert any(not torch.equal(param, before[name]) for name, param in trainer.model.named_parameters())


def test_infinite_ratio_ends_the_run_with_the_weights_as_they_were(make_trainer, monkeypatch):
    def far_off(self, micro_batches):
        original(self, micro_batches)
        for inputs in micro_batches:
            inputs["old_per_token_logps"][:, 0] = -1e4

    original = CalibratedGRPOTrainer.begin_rollout
    monkeypatch.setattr(CalibratedGRPOTrainer, "begin_rollout", far_off)
    trainer = make_trainer(logging_nan_inf_filter=True)
    before = weights(trainer)
    with pytest.raises(RuntimeError, match="gradient's norm is (nan|inf) at step 1.*Resume from a checkpoint"):
        trainer.train()
    assert_untouched(trainer, before)


def test_infinite_ratio_of_plain_trl_ruins_the_weights(make_trainer, monkeypatch):
    """Why there is a guard: without FP8 and calibration the trainer is TRL's, which goes on with NaN weights."""

    def far_off(self, micro_batches):
        for inputs in micro_batches:
            inputs["old_per_token_logps"][:, 0] = -1e4

    monkeypatch.setattr(CalibratedGRPOTrainer, "begin_rollout", far_off)
    trainer = make_trainer(calibrated_clip=False, fp8_recipe=None, max_steps=1)
    trainer.train()
    assert any(param.isnan().any() for param in trainer.model.parameters())
