# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""What TRL's trainer can do, ours does unchanged, with calibration on."""

import asyncio
import math

import pytest
import torch
from conftest import digits_reward
from peft import LoraConfig
from tokenizers.models import WordLevel

from trl_calclip.embedded import build_tokenizer
from trl_calclip.fp8.linear import bf16_pass, fp8_linears


pytest_plugins = ["recording"]
pytestmark = pytest.mark.slow


def short_reward(completions, **kwargs) -> list[float]:
    """Prefers few characters."""
    return [-float(len(text)) for text in completions]


def logged(trainer, name: str) -> list[float]:
    """Values of metric `name` over the run."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


def assert_same_weights(trainer, other) -> None:
    for (name, weight), expected in zip(weights(trainer).items(), weights(other).values(), strict=True):
        assert torch.equal(weight, expected), name


# Rewards


def test_reward_functions_with_weights(make_recorder):
    trainer = make_recorder(trainer={"reward_funcs": [digits_reward, short_reward]}, reward_weights=[2.0, -0.5])
    trainer.train()
    trainer.assert_calibrated()
    digits, short = logged(trainer, "rewards/digits_reward/mean"), logged(trainer, "rewards/short_reward/mean")
    assert logged(trainer, "reward") == pytest.approx([2.0 * digits[0] - 0.5 * short[0]])


def test_async_reward_function(make_recorder):
    async def even_digits(completions, **kwargs):
        await asyncio.sleep(0)
        return digits_reward(completions)

    trainer = make_recorder(trainer={"reward_funcs": even_digits})
    trainer.train()
    trainer.assert_calibrated()
    plain = make_recorder()
    plain.train()
    assert logged(trainer, "rewards/even_digits/mean") == logged(plain, "rewards/digits_reward/mean")
    assert_same_weights(trainer, plain)


def test_groups_of_equal_rewards_take_no_part(make_recorder):
    def half(prompts, completions, **kwargs):
        rewards = digits_reward(completions)
        return [reward if int(prompt[0]) % 2 else 0.5 for prompt, reward in zip(prompts, rewards, strict=True)]

    trainer = make_recorder(trainer={"reward_funcs": half})
    trainer.train()
    trainer.assert_calibrated()
    (equal,) = logged(trainer, "frac_reward_zero_std")
    assert 0 < equal < 1
    collected = [forward for forward in trainer.forwards if forward.collected is not None]
    left_out = sum((forward.mask & (forward.advantages == 0)).sum().item() for forward in collected)
    assert left_out > 0
    assert sum(len(forward.collected.advantages) for forward in collected) == (
        sum(forward.mask.sum().item() for forward in collected) - left_out
    )


def test_rewards_without_a_difference_leave_the_bounds(make_recorder):
    trainer = make_recorder(trainer={"reward_funcs": lambda completions, **kwargs: [1.0] * len(completions)})
    start = trainer.clip_range
    with pytest.warns(UserWarning, match="Only 0 tokens have a negative advantage"):
        trainer.train()
    assert (trainer.num_calibrations, trainer.num_skipped_calibrations) == (0, 1)
    assert trainer.clip_range == start


@pytest.mark.parametrize(
    "overrides",
    [
        {"scale_rewards": "batch"},
        {"scale_rewards": "none"},
        {"multi_objective_aggregation": "normalize_then_sum"},
    ],
    ids=["batch", "none", "normalize then sum"],
)
def test_scaling_of_rewards(make_recorder, overrides):
    trainer = make_recorder(trainer={"reward_funcs": [digits_reward, short_reward]}, **overrides)
    trainer.train()
    trainer.assert_calibrated()
    if overrides.get("scale_rewards") == "none":
        advantages = torch.cat([inputs["advantages"] for inputs in trainer.rollouts[0]])
        assert advantages.sum().abs() < 1e-4 < advantages.std()


# Losses


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_loss_types(make_recorder, loss_type):
    trainer = make_recorder(loss_type=loss_type)
    trainer.train()
    trainer.assert_calibrated()
    assert all(value > 0 for value in logged(trainer, "grad_norm"))


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
def test_kl_to_the_anchor_starts_at_zero(make_recorder, adapters):
    peft = {"peft_config": LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "down_proj"])}
    trainer = make_recorder(trainer=peft if adapters else {}, beta=0.1, learning_rate=3e-2 if adapters else 3e-3)
    trainer.train()
    trainer.assert_calibrated()
    kl = logged(trainer, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert kl[-1] > 1e-5
    if adapters:
        return

    # A BF16 anchor would have charged the policy for its own quantization.
    first = trainer.forwards[0]
    with bf16_pass(trainer.ref_model), torch.no_grad():
        ids = torch.cat([first.inputs["prompt_ids"], first.inputs["completion_ids"]], dim=1)
        attention = torch.cat([first.inputs["prompt_mask"], first.inputs["completion_mask"]], dim=1)
        anchor, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.ref_model, ids, attention, first.inputs["completion_ids"].size(1)
        )
    log_ratio = (anchor - first.per_token_logps)[first.mask]
    assert (log_ratio.exp() - log_ratio - 1).mean() > 1e-6
    assert torch.equal(first.inputs["ref_per_token_logps"][first.mask], first.per_token_logps[first.mask])


def test_anchor_follows_the_policy_when_synced(make_recorder):
    trainer = make_recorder(beta=0.1, sync_ref_model=True, ref_model_sync_steps=4, ref_model_mixup_alpha=1.0)
    trainer.train()
    trainer.assert_calibrated()
    assert len(fp8_linears(trainer.ref_model)) == len(trainer.fp8_modules)
    for weight, anchor in zip(trainer.model.parameters(), trainer.ref_model.parameters(), strict=True):
        assert torch.equal(weight, anchor)


def test_gradient_accumulation(make_recorder):
    trainer = make_recorder(gradient_accumulation_steps=2, max_steps=4, calibration_interval=1)
    trainer.train()
    trainer.assert_calibrated()
    assert (trainer.num_rollouts, trainer.num_calibrations) == (2, 2)
    collected = [forward.collected is not None for forward in trainer.forwards]
    assert collected == [False, False, True, True] * 2


@pytest.mark.parametrize("steps_per_generation", [1, 2])
def test_several_iterations(make_recorder, steps_per_generation):
    trainer = make_recorder(num_iterations=2, steps_per_generation=steps_per_generation)
    trainer.train()
    trainer.assert_calibrated()
    assert trainer.num_rollouts == 4 // (2 * steps_per_generation)
    assert [forward.rollout for forward in trainer.forwards] == [i // (2 * steps_per_generation) for i in range(4)]


def test_gradient_checkpointing_changes_nothing(make_recorder):
    plain = make_recorder()
    plain.train()
    checkpointed = make_recorder(gradient_checkpointing=True)
    checkpointed.train()
    checkpointed.assert_calibrated()
    assert checkpointed.model.is_gradient_checkpointing
    assert checkpointed.clip_range == plain.clip_range
    assert_same_weights(checkpointed, plain)


def test_masked_truncated_completions(make_recorder):
    # The bias on the end token makes most completions end in time.
    trainer = make_recorder(mask_truncated_completions=True, generation_kwargs={"sequence_bias": [[[1], 2.5]]})
    trainer.train()
    trainer.assert_calibrated()
    (truncated,) = logged(trainer, "completions/clipped_ratio")
    assert 0 < truncated < 1
    completions = torch.cat([inputs["completion_mask"] for inputs in trainer.rollouts[0]])
    assert (completions.sum(1) == 0).float().mean() == truncated


# Adapters


def test_adapters(make_recorder):
    trainer = make_recorder(trainer={"peft_config": LoraConfig(r=4, lora_dropout=0.0)}, learning_rate=3e-2)
    before = weights(trainer)
    trainer.train()
    trainer.assert_calibrated()
    assert len(trainer.fp8_modules) == 14
    assert not any("lora" in name for name in trainer.fp8_modules)
    for name, weight in weights(trainer).items():
        assert torch.equal(weight, before[name]) is not ("lora_" in name), name


def test_adapters_with_dropout_are_refused_unless_it_is_disabled(make_recorder):
    dropout = LoraConfig(r=4, lora_dropout=0.05)
    with pytest.raises(ValueError, match=r"lora_dropout.*p=0.05.*disable_dropout=True"):
        make_recorder(trainer={"peft_config": dropout})
    trainer = make_recorder(trainer={"peft_config": dropout}, disable_dropout=True, learning_rate=3e-2)
    trainer.train()
    trainer.assert_calibrated()


# Prompts and data


def test_conversational_prompts(make_recorder, toy_dataset):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.append((prompts[0], completions[0]))
        return digits_reward([completion[0]["content"] for completion in completions])

    conversations = toy_dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    chat = {"processing_class": tokenizer, "train_dataset": conversations, "reward_funcs": reward}
    trainer = make_recorder(trainer=chat)
    trainer.train()
    trainer.assert_calibrated()
    ((prompt, completion),) = seen
    assert prompt[0]["role"] == "user" and completion[0]["role"] == "assistant"

    plain = make_recorder()  # the template adds nothing, so that the same text is a plain prompt
    plain.train()
    plain.assert_calibrated()
    assert_same_weights(trainer, plain)


def test_streaming_dataset(make_recorder, toy_dataset):
    stream = {"train_dataset": toy_dataset.to_iterable_dataset()}
    streaming = make_recorder(trainer=stream, shuffle_dataset=False, max_steps=8)
    streaming.train()
    streaming.assert_calibrated()
    assert streaming.num_rollouts == 2
    indexed = make_recorder(shuffle_dataset=False, max_steps=8)
    indexed.train()
    assert_same_weights(streaming, indexed)


@pytest.mark.parametrize("streaming", [False, True], ids=["indexed", "streaming"])
def test_evaluation(make_recorder, toy_dataset, streaming):
    held_out = toy_dataset.select(range(2))
    if streaming:
        held_out = held_out.to_iterable_dataset()
    trainer = make_recorder(trainer={"eval_dataset": held_out}, eval_strategy="steps", eval_steps=2)
    trainer.train()
    trainer.assert_calibrated()
    assert len(logged(trainer, "eval_reward")) == 2
    assert all(math.isfinite(value) for value in logged(trainer, "eval_loss"))
    assert (trainer.num_rollouts, len(trainer.forwards)) == (1, 4)
    assert not any(name.startswith("eval_calclip") for entry in trainer.state.log_history for name in entry)


# Rollouts that are not the trainer's own


def rollout_of(logprob, **extra_fields):
    """`rollout_func`: digits of random length, each with log-probability `logprob(position)`."""

    def rollout(prompts, trainer):
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        lengths = torch.randint(3, 9, (len(prompts),)).tolist()
        completion_ids = [torch.randint(2, 12, (length,)).tolist() for length in lengths]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": [[logprob(position) for position in range(length)] for length in lengths],
            **{name: [value(length) for length in lengths] for name, value in extra_fields.items()},
        }

    return rollout


def test_rollout_function(make_recorder):
    """Its log-probabilities weigh the gradient mass; where one is missing, the old policy's stands in."""
    seen = []

    def reward(completions, length, **kwargs):
        seen.extend(length)
        return digits_reward(completions)

    rollout = rollout_of(lambda position: None if position == 1 else -0.5 * position, length=lambda length: length)
    trainer = make_recorder(trainer={"rollout_func": rollout, "reward_funcs": reward})
    trainer.train()
    trainer.assert_calibrated()
    assert seen and min(seen) >= 3
    for forward in trainer.forwards:
        if forward.collected is None:
            continue
        expected = torch.exp(-0.5 * torch.arange(forward.mask.size(1))).repeat(len(forward.mask), 1)
        expected[:, 1] = forward.inputs["old_per_token_logps"][:, 1].exp()
        takes_part = forward.mask & (forward.advantages != 0)
        assert torch.equal(forward.collected.sampling_probs, expected[takes_part].double())
        assert (forward.collected.tis_weights == 1).all()


def test_environment_mask_of_a_rollout_function(make_recorder):
    rollout = rollout_of(lambda position: -1.0, env_mask=lambda length: [1, 0] + [1] * (length - 2))
    trainer = make_recorder(trainer={"rollout_func": rollout})
    trainer.train()
    trainer.assert_calibrated()
    collected = [forward for forward in trainer.forwards if forward.collected is not None]
    assert not any(forward.mask[:, 1].any() for forward in collected)
    assert all(forward.inputs["completion_mask"][:, 1].all() for forward in collected)


def add(first: int, second: int) -> int:
    """
    Adds two numbers.

    Args:
        first: One number.
        second: The other.

    Returns:
        Their sum.
    """
    return first + second


def test_tools(make_recorder, toy_dataset):
    """The toy calls a tool wherever it happens to write a bracket or a letter; what the tool answers is masked."""
    tokenizer = build_tokenizer()
    # Letters outside of the alphabet, which a template that shows tool calls needs, become question marks.
    tokenizer.backend_tokenizer.model = WordLevel(tokenizer.get_vocab(), unk_token="?")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}"
        "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
        "{% if message['role'] == 'tool' %};{% endif %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"first": 40, "second": 2}}}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "=",
        "fields": {
            "tool_calls": {"open_pattern": "[(<>|a-c]", "close_pattern": "$", "repeats": True, "content": "text",
                           "transform": call},
            "content": {"close_pattern": "$", "content": "text"},
        },
    }  # fmt: skip
    answers = []

    def reward(completions, **kwargs):
        messages = [message for completion in completions for message in completion]
        answers.extend(message["content"] for message in messages if message["role"] == "tool")
        return digits_reward(["".join(message.get("content", "") for message in each) for each in completions])

    conversations = toy_dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    chat = {"processing_class": tokenizer, "train_dataset": conversations, "reward_funcs": reward, "tools": [add]}
    trainer = make_recorder(
        trainer=chat,
        max_completion_length=12,
        generation_kwargs={"max_new_tokens": 4},
        max_tool_calling_iterations=1,
    )
    trainer.train()
    trainer.assert_calibrated()
    assert answers and set(answers) == {"42"}
    (frequency,) = logged(trainer, "tools/call_frequency")
    assert 0 < frequency < 1
    collected = [forward for forward in trainer.forwards if forward.collected is not None]
    answered = tokenizer("42;")["input_ids"]
    masked = [
        forward.inputs["completion_ids"][row][forward.inputs["tool_mask"][row] == 0].tolist()
        for forward in collected
        for row in range(len(forward.mask))
    ]
    assert answered in masked
    assert all(ids in ([], answered) for ids in masked)
