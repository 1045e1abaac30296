# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The memory estimate against bytes of a real model, optimizer and pass, and the documentation's table against it."""

from pathlib import Path

import pytest
import torch
from test_memory import PeakMemory
from transformers import Qwen3Config, Qwen3ForCausalLM

from trl_calclip.fp8.linear import bf16_pass, convert_to_fp8
from trl_calclip.fp8.recipes import RECIPES
from trl_calclip.memory import SETTINGS, estimate_memory, memory_table


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def config():
    return Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=False,
    )  # fmt: skip


def test_weights_gradients_and_optimizer_are_the_real_bytes(config):
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    weights = sum(param.nbytes for param in model.parameters())
    gradients = sum(param.grad.nbytes for param in model.parameters())
    moments = sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim()
    )  # the step counters are scalars
    estimate = estimate_memory(config)
    assert (estimate.weights, estimate.gradients, estimate.optimizer) == (weights, gradients, moments)
    sharded = estimate_memory(config, num_gpus=4, parallelism="fsdp2")
    assert (sharded.weights, sharded.gradients, sharded.optimizer) == (weights / 4, gradients / 4, moments / 4)
    # DeepSpeed: BF16 weights whole or split, BF16 gradients split, FP32 masters and two moments split
    zero2 = estimate_memory(config, num_gpus=4, parallelism="zero2")
    assert (zero2.weights, zero2.gradients, zero2.optimizer) == (weights / 2, weights / 8, 3 * weights / 4)
    assert estimate_memory(config, num_gpus=4, parallelism="zero3").weights == weights / 8


def test_engine_holds_a_byte_for_each_fp8_weight(config):
    model = Qwen3ForCausalLM(config)
    names = convert_to_fp8(model, RECIPES["rowwise"], emulate=True)
    fp8 = sum(model.get_submodule(name).weight.numel() for name in names)
    rest = sum(param.numel() for param in model.parameters()) - fp8
    estimate = estimate_memory(config, kv_cache_tokens=1000, tensor_parallel_size=2)
    assert estimate.vllm_weights == (fp8 + 2 * rest) / 2
    assert estimate_memory(config, fp8_rollout=False).vllm_weights == 2 * (fp8 + rest)
    # keys and values of six layers, two heads of 32, in BF16
    assert estimate.vllm_kv_cache == 2 * 6 * 2 * 32 * 2 * 1000 / 2


@pytest.mark.parametrize(("rows", "length"), [(2, 64), (4, 96)])
def test_bf16_pass_is_about_what_is_estimated(config, rows, length):
    """The tile of log-probabilities is left out: here the head makes all logits at once."""
    model = Qwen3ForCausalLM(config)
    convert_to_fp8(model, RECIPES["rowwise"], emulate=True)
    tokens = torch.zeros(rows, length, dtype=torch.long)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), bf16_pass(model), PeakMemory() as memory:
        model.model(tokens, use_cache=False)
    estimate = estimate_memory(config, micro_batch_size=rows, sequence_length=length)
    tile = 2 * rows * length * config.vocab_size
    assert 0.5 < memory.peak / (estimate.bf16_pass - tile) < 1.5


def test_what_grows_with_what(config):
    base = estimate_memory(config, micro_batch_size=2, sequence_length=256, kv_cache_tokens=100)
    doubled = estimate_memory(config, micro_batch_size=4, sequence_length=256, kv_cache_tokens=200)
    assert doubled.weights == base.weights and doubled.vllm_weights == base.vllm_weights
    assert doubled.vllm_kv_cache == 2 * base.vllm_kv_cache
    assert 1.5 < doubled.bf16_pass / base.bf16_pass < 2
    states = base.weights + base.gradients + base.optimizer
    rest = base.training_activations + base.vllm_weights + base.vllm_kv_cache
    assert base.total == states + rest and base.training_activations > base.bf16_pass
    with pytest.raises(ValueError, match="`parallelism` must be one of ddp, fsdp2, zero2, zero3, got 'fsdp'"):
        estimate_memory(config, parallelism="fsdp")


def test_models_of_the_paper_have_their_size():
    # as published: 8.19, 14.77 and 32.76 thousand millions
    sizes = {name: estimate_memory(config).weights / 4e9 for name, config, _, _ in SETTINGS}
    expected = {"Qwen3-8B-Base": 8.19, "Qwen3-14B-Base": 14.77, "Qwen2.5-32B": 32.76}
    assert sizes == pytest.approx(expected, abs=0.005)


def test_table_of_the_documentation_is_computed():
    assert memory_table() in (ROOT / "docs" / "scaling.md").read_text()
