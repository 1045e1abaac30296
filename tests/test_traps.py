# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Where a hook into TRL's trainer goes wrong without notice: one test or more for each such place."""

import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import digits_reward
from peft import LoraConfig
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from trl_calclip import CalibrationCallback
from trl_calclip.calibration import TokenCollector
from trl_calclip.embedded import build_tokenizer
from trl_calclip.fp8.linear import fp8_linears


pytest_plugins = ["recording"]
pytestmark = pytest.mark.slow


class NeverCalibrate(CalibrationCallback):
    """A schedule on which nothing is due."""

    def is_due(self, rollout):
        return False


def noisy_reward(completions, **kwargs) -> list[float]:
    """Draws from every random generator on the CPU, so that whatever moves one of them changes the run."""
    rewards = digits_reward(completions)
    return [reward + random.random() + np.random.rand() + torch.rand(()).item() for reward in rewards]


def random_states() -> list:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def assert_same_run(trainer, other) -> None:
    assert trainer.clip_range == other.clip_range
    assert len(trainer.forwards) == len(other.forwards) > 0
    for forward, expected in zip(trainer.forwards, other.forwards, strict=True):
        assert torch.equal(forward.inputs["completion_ids"], expected.inputs["completion_ids"])
    for (name, param), expected in zip(trainer.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(param, expected), name


# The forward that serves four policies


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
def test_collected_policy_is_the_current_one(make_recorder, toy_dataset, adapters):
    """The same function scores the old policy, the KL anchor (adapters: with the same model) and evaluation."""
    settings = {"eval_dataset": toy_dataset.select(range(2))}
    if adapters:
        settings["peft_config"] = LoraConfig(r=4, lora_dropout=0.0)
    trainer = make_recorder(
        trainer=settings, beta=0.1, eval_strategy="steps", eval_steps=1, learning_rate=3e-2 if adapters else 3e-3
    )
    trainer.train()
    trainer.assert_calibrated()  # ratios are those of the log-probabilities that TRL's loss got
    assert len(trainer.forwards) == 4
    for forward in trainer.forwards[1:]:
        for other in ("old_per_token_logps", "ref_per_token_logps"):
            moved = (forward.per_token_logps - forward.inputs[other])[forward.mask].abs()
            assert moved.max() > 1e-3, other


# The rows of the BF16 passes


def test_without_drift_every_ratio_is_one(make_recorder):
    trainer = make_recorder(learning_rate=0.0)
    trainer.train()
    assert trainer.num_calibrations == 1
    collected = [forward.collected for forward in trainer.forwards[1:]]
    assert all(len(pool.advantages) > 10 for pool in collected)
    for pool in collected:
        assert (pool.bf16_ratio == 1).all()
        assert (pool.fp8_ratio == 1).all()


def test_bf16_passes_have_the_rows_of_the_loss(make_recorder):
    trainer = make_recorder()
    trainer.train()
    trainer.assert_calibrated()
    for (inputs, _), forward in zip(trainer.scored, 2 * trainer.forwards[1:], strict=True):
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
            assert torch.equal(inputs[name], forward.inputs[name]), name
    old, current = [logps for _, logps in trainer.scored[:3]], [logps for _, logps in trainer.scored[3:]]
    for forward, before, now in zip(trainer.forwards[1:], old, current, strict=True):
        ratio = torch.exp(now - before)[forward.mask & (forward.advantages != 0)].double()
        assert torch.equal(forward.collected.bf16_ratio, ratio)
        assert 0 < (forward.collected.fp8_ratio - ratio).abs().mean() < 0.1
    # TRL shuffled the rows, so that a pass over them before the split would have had other micro-batches.
    prompts = torch.cat([inputs["prompt_ids"][:, 0] for inputs, _ in trainer.scored[:3]])
    assert (prompts.view(3, 4) != prompts.view(3, 4)[:, :1]).any()


def test_micro_batches_keep_nothing_of_the_current_policy(make_recorder):
    """Several iterations hand out the same dictionaries again."""
    trainer = make_recorder(num_iterations=2, steps_per_generation=2)
    trainer.train()
    trainer.assert_calibrated()
    assert torch.equal(trainer.forwards[0].inputs["completion_ids"], trainer.forwards[2].inputs["completion_ids"])
    for inputs, before in zip(trainer._buffered_inputs, trainer.rollouts[-1], strict=True):
        assert inputs.keys() == before.keys()
        assert all(torch.equal(inputs[name], value) for name, value in before.items())
    first, again = trainer.forwards[0], trainer.forwards[2]
    assert not torch.equal(first.per_token_logps, again.per_token_logps)


# Off-policy is what comes after an optimizer step


@pytest.mark.parametrize(
    ("steps_per_generation", "gradient_accumulation_steps", "num_iterations", "passes", "off_policy"),
    [
        (4, 1, 1, 3 + 3, [False, True, True, True]),
        (4, 2, 1, 2 + 2, [False, False, True, True]),
        (2, 1, 2, 2 + 3, [False, True, True, True]),
        (2, 2, 2, 2 + 2, [False, False, True, True]),
        (1, 1, 2, 1 + 1, [False, True]),
    ],
)
def test_bf16_passes_are_as_few_as_can_be(
    make_recorder, steps_per_generation, gradient_accumulation_steps, num_iterations, passes, off_policy
):
    """One after the first optimizer step, which is what gives tokens, and one of the old policy for each of these."""
    trainer = make_recorder(
        steps_per_generation=steps_per_generation,
        gradient_accumulation_steps=gradient_accumulation_steps,
        num_iterations=num_iterations,
        max_steps=2 * len(off_policy) // gradient_accumulation_steps,
    )
    bf16_forwards = []
    first = fp8_linears(trainer.model)[0]
    first.register_forward_hook(lambda linear, *_: bf16_forwards.append(1) if not linear.fp8_enabled else None)
    trainer.train()
    trainer.assert_calibrated()
    assert trainer.num_rollouts == 2  # of which the first calibrates
    assert len(trainer.scored) == len(bf16_forwards) == passes
    expected = off_policy + [False] * len(off_policy)
    assert [forward.collected is not None for forward in trainer.forwards] == expected


@pytest.mark.parametrize(("steps_per_generation", "gradient_accumulation_steps"), [(3, 2), (4, 3), (2, 4)])
def test_rollouts_inside_an_accumulation_window_are_refused(
    make_config, steps_per_generation, gradient_accumulation_steps
):
    with pytest.raises(ValueError, match="inside an accumulation window"):
        make_config(steps_per_generation=steps_per_generation, gradient_accumulation_steps=gradient_accumulation_steps)


def test_bounds_are_fixed_within_a_rollout(make_recorder):
    trainer = make_recorder(
        steps_per_generation=2, calibration_interval=2, calibration_start_at_reference=False, max_steps=10
    )
    trainer.train()
    in_force = [{forward.epsilons for forward in trainer.forwards if forward.rollout == i} for i in range(5)]
    calibrated = [(1 - record["lower"], record["upper"] - 1) for record in trainer.calibration_history]
    start = (1 - 0.6, 1.8 - 1)
    assert len({start, *calibrated}) == 4
    assert [record["rollout"] for record in trainer.calibration_history] == [0, 2, 4]
    assert in_force == [{start}, {calibrated[0]}, {calibrated[0]}, {calibrated[1]}, {calibrated[1]}]
    assert (trainer.epsilon_low, trainer.epsilon_high) == calibrated[2]


# Evaluation and BF16 passes leave the run as it was


def test_evaluation_inside_a_rollout_changes_nothing(make_recorder, toy_dataset):
    settings = {"max_steps": 8, "calibration_interval": 1, "max_completion_length": 5}
    plain = make_recorder(trainer={"reward_funcs": noisy_reward}, **settings)
    plain.train()
    evaluated = make_recorder(
        trainer={"reward_funcs": noisy_reward, "eval_dataset": toy_dataset.select(range(2))},
        eval_strategy="steps", eval_steps=1, eval_on_start=True, **settings,
    )  # fmt: skip
    evaluated.train()
    evaluated.assert_calibrated()
    assert sum("eval_loss" in entry for entry in evaluated.state.log_history) == 9
    assert evaluated.num_rollouts == len(evaluated.rollouts) == 2
    assert len(evaluated.scored) == len(plain.scored) == 2 * (3 + 3)
    assert_same_run(evaluated, plain)


def test_evaluation_leaves_the_random_generators(make_recorder, toy_dataset):
    calls = []

    def failing(completions, **kwargs):
        calls.append(len(completions))
        if len(calls) == 2:
            raise RuntimeError("no reward")
        return noisy_reward(completions)

    trainer = make_recorder(trainer={"reward_funcs": failing, "eval_dataset": toy_dataset.select(range(2))})
    before = random_states()
    first = trainer.evaluate()
    assert random_states() == before
    with pytest.raises(RuntimeError, match="no reward"):
        trainer.evaluate()
    assert random_states() == before
    assert trainer.evaluate()["eval_loss"] == first["eval_loss"]
    assert trainer.num_rollouts == 0


def test_bf16_passes_change_nothing(make_recorder):
    """Calibrations that all skip, against none: the bounds are the same, and so must be the weights."""
    settings = {"max_steps": 8, "calibration_interval": 1, "calibration_min_tokens": 10**6}
    passes = make_recorder(trainer={"reward_funcs": noisy_reward}, **settings)
    with pytest.warns(UserWarning, match="fewer than `min_tokens` = 1000000"):
        passes.train()
    never = NeverCalibrate(interval=1, updates_per_rollout=4)
    none = make_recorder(trainer={"reward_funcs": noisy_reward, "callbacks": [never]}, **settings)
    none.train()
    assert (passes.num_calibrations, passes.num_skipped_calibrations, len(passes.scored)) == (0, 2, 12)
    assert (none.num_skipped_calibrations, len(none.scored)) == (0, 0)
    assert_same_run(passes, none)


# Precision


def test_policy_runs_under_the_cpus_autocast(make_recorder):
    """`torch.is_autocast_enabled()` alone asks about CUDA: FP8 would then quantize what autocast had not cast."""
    trainer = make_recorder()
    linear = fp8_linears(trainer.model)[0]
    seen = []

    def compare(module, args, output):
        if module.fp8_enabled and torch.is_grad_enabled():
            uncast = not torch.equal(args[0], args[0].bfloat16().float())
            with torch.no_grad():
                same = torch.equal(output, module.forward(args[0].bfloat16()))
            enabled = (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
            seen.append((uncast, same, output.dtype, enabled))

    linear.register_forward_hook(compare)
    trainer.train()
    assert seen == [(True, True, torch.bfloat16, (True, False))] * 4


@pytest.mark.parametrize("variable", ["ACCELERATE_MIXED_PRECISION", "ACCELERATE_FP8_BACKEND"])
def test_fp8_of_accelerate_is_refused(make_config, monkeypatch, variable):
    monkeypatch.setenv(variable, {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "AO"}[variable])
    with pytest.raises(ValueError, match="--mixed_precision bf16"):
        make_config()
    make_config(fp8_recipe=None, calibrated_clip=False)


# Dropout


SIZES = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}


def gpt_neox(**overrides):
    sizes = {**SIZES, "intermediate_size": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**{**sizes, **overrides}))


def opt(**overrides):
    return OPTForCausalLM(
        OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, pad_token_id=0, **overrides)
    )


def mixtral(**overrides):
    sizes = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 1, "num_local_experts": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **overrides))


@pytest.mark.parametrize(
    ("build", "named", "overrides"),
    [
        (lambda: gpt_neox(attention_dropout=0.1), r"attention\.attention_dropout \(0\.1\)", {}),
        (lambda: opt(layerdrop=0.1), "layerdrop", {}),
        (lambda: mixtral(router_jitter_noise=0.1), "jitter", {"fp8_allow_moe": True}),
    ],
    ids=["attention", "layer drop", "router jitter"],
)
def test_noise_that_disable_dropout_does_not_reach_is_refused(make_recorder, build, named, overrides):
    model = {"model": build(), "processing_class": build_tokenizer()}
    with pytest.raises(ValueError, match=named):
        make_recorder(trainer=model, disable_dropout=True, **overrides)


def test_dropout_modules_are_refused_unless_disabled(make_recorder):
    model = gpt_neox(hidden_dropout=0.1)
    arguments = {"model": model, "processing_class": build_tokenizer()}
    with pytest.raises(ValueError, match=r"emb_dropout \(p=0\.1\).*disable_dropout=True"):
        make_recorder(trainer=arguments)
    assert not fp8_linears(model)  # a refused model is left as it was: the advice can be followed at once
    trainer = make_recorder(trainer=arguments, disable_dropout=True, learning_rate=1e-2)
    trainer.train()
    trainer.assert_calibrated()


def test_attention_dropout_by_the_models_arguments_is_refused(make_recorder):
    with pytest.raises(ValueError, match=r"self_attn\.attention_dropout \(0\.1\).*model_init_kwargs"):
        make_recorder(model_init_kwargs={"attention_dropout": 0.1}, disable_dropout=True)


# Masks


def test_padding_is_not_counted(make_recorder):
    """The number of tokens follows from the completions alone: up to the first end token, that one included."""
    trainer = make_recorder(generation_kwargs={"sequence_bias": [[[1], 2.5]]})
    trainer.train()
    trainer.assert_calibrated()
    negative, padding = 0, 0
    for forward in trainer.forwards[1:]:
        ended = (forward.inputs["completion_ids"] == trainer._tokenizer.eos_token_id).int()
        alive = ended.cumsum(1) - ended == 0
        negative += (alive & (forward.advantages < 0)).sum().item()
        padding += (~alive).sum().item()
        assert (forward.ratio[~alive] == 1).all()  # which would count as kept
    assert padding > 20
    assert [record["num_negative_tokens"] for record in trainer.calibration_history] == [negative]


def test_collector_reads_no_masked_token_and_broadcasts_sequence_weights():
    collector = TokenCollector()
    nan = float("nan")
    logps = torch.tensor([[-1.0, nan, -2.0], [-3.0, -1.0, nan]])
    collector.add(
        per_token_logps=logps,
        old_per_token_logps=logps - 0.5,
        bf16_per_token_logps=logps,
        bf16_old_per_token_logps=logps - 0.25,
        advantages=torch.tensor([1.0, -2.0]),
        mask=torch.tensor([[1, 0, 1], [1, 1, 0]]),
        importance_sampling_ratio=torch.tensor([[0.5], [1.5]]),
        sampling_per_token_logps=torch.tensor([[-1.0, -1.0, nan], [-2.0, -2.0, -2.0]]),
    )
    pool = collector.pool(Accelerator(cpu=True))
    assert pool.fp8_ratio.tolist() == pytest.approx([np.exp(0.5)] * 4)
    assert pool.bf16_ratio.tolist() == pytest.approx([np.exp(0.25)] * 4)
    assert pool.advantages.tolist() == [1, 1, -2, -2]
    assert pool.tis_weights.tolist() == [0.5, 0.5, 1.5, 1.5]
    assert pool.sampling_probs.tolist() == pytest.approx(np.exp([-1.0, -2.5, -2.0, -2.0]).tolist())
    assert pool.completions.tolist() == [0, 0, 1, 1]


def test_bounds_and_counters_are_logged_as_they_are_and_a_calibration_once(make_trainer):
    """Trap 15: TRL averages over its logging window. Calibrations at steps 4 and 12, a log entry every 3 steps."""
    trainer = make_trainer(max_steps=16, logging_steps=3)
    trainer.train()
    logs = {entry["step"]: entry for entry in trainer.state.log_history if "calclip/lower" in entry}
    first, second = trainer.calibration_history
    assert sorted(logs) == [3, 6, 9, 12, 15]
    assert [logs[step]["calclip/calibrations"] for step in sorted(logs)] == [0, 1, 1, 2, 2]
    expected = [0.6, first["lower"], first["lower"], second["lower"], second["lower"]]
    assert [logs[step]["calclip/lower"] for step in sorted(logs)] == pytest.approx(expected, abs=1e-7)
    assert logs[6]["calclip/rho_bf16"] == first["rho_bf16"] and logs[12]["calclip/rho_bf16"] == second["rho_bf16"]
    assert not any("calclip/rho_bf16" in logs[step] for step in (3, 9, 15))
