# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The scale rules on their own; `test_vllm_reference.py` compares them with vLLM, bit for bit."""

import pytest
import torch
from torch import nn

from trl_calclip.fp8.quantizers import (
    from_fp8,
    packed_linear_names,
    quantize_per_channel,
    quantize_per_tensor,
    quantize_per_token,
    scaled_matmul,
    shared_weight_amax,
)


QUANTIZERS = [quantize_per_channel, quantize_per_token, quantize_per_tensor]


def sample(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16()


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_largest_entry_becomes_448_and_the_rest_is_within_half_a_step(quantize):
    values = sample(16, 64, seed=0)
    payload, scale = quantize(values)
    assert payload.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert payload.float().abs().max() == 448
    # Three mantissa bits: half a step is 1/16 of the value at most, and 2**-10 below the smallest normal number.
    error = (payload.float() * scale - values.float()).abs()
    assert (error <= (values.float().abs() / 16).maximum(2**-10 * scale) * (1 + 1e-6)).all()


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_zeros_stay_zeros(quantize):
    payload, scale = quantize(torch.zeros(4, 8, dtype=torch.bfloat16))
    assert (payload.float() == 0).all()
    assert scale.isfinite().all() and (scale > 0).all()


@pytest.mark.parametrize(
    "quantize, spoiled_rows", [(quantize_per_channel, 1), (quantize_per_token, 1), (quantize_per_tensor, 4)]
)
def test_nan_is_not_hidden(quantize, spoiled_rows):
    values = sample(4, 8, seed=1)
    values[2, 3] = float("nan")
    payload, _ = quantize(values)
    assert payload.float().isnan().all(dim=-1).sum() == spoiled_rows


def test_every_payload_has_its_value():
    payload = torch.arange(256, dtype=torch.uint8).reshape(16, 16).view(torch.float8_e4m3fn)
    for case in (payload, payload.t(), payload[:0]):
        torch.testing.assert_close(from_fp8(case), case.float(), rtol=0, atol=0, equal_nan=True)
    assert from_fp8(payload).signbit().sum() == payload.float().signbit().sum()  # -0 too


def test_shared_scale_makes_parts_equal_to_the_fused_weight():
    linears = [nn.Linear(64, width, bias=False) for width in (32, 16, 16)]  # FP32 masters
    for seed, linear in enumerate(linears):
        nn.init.normal_(linear.weight, std=2.0**-seed, generator=torch.Generator().manual_seed(seed))
    parts = [linear.weight.detach().bfloat16() for linear in linears]
    fused_payload, fused_scale = quantize_per_tensor(torch.cat(parts))
    amax = shared_weight_amax(linears)
    payloads, scales = zip(*(quantize_per_tensor(part, amax) for part in parts), strict=True)
    assert torch.equal(torch.cat(payloads).view(torch.uint8), fused_payload.view(torch.uint8))
    assert all(torch.equal(scale, fused_scale) for scale in scales)
    assert not torch.equal(quantize_per_tensor(parts[0])[1], quantize_per_tensor(parts[1])[1])


def test_packed_linear_names():
    names = [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.gate_proj",
        "model.layers.1.self_attn.q_proj",  # its siblings are not FP8
        "gate_proj",
        "up_proj",
    ]
    assert packed_linear_names(names) == [
        tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv"),
        ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"),
        ("gate_proj", "up_proj"),
    ]
    assert packed_linear_names(names, {"qkv_proj": ["qkv_proj"]}) == []


def test_scaled_matmul_is_float32_under_autocast_too():
    input, weight, bias = sample(8, 64, seed=2), sample(16, 64, seed=3), sample(1, 16, seed=4)[0]
    operands = *quantize_per_token(input), *quantize_per_channel(weight)
    output = scaled_matmul(*operands, bias)
    payload, input_scale, weight_payload, weight_scale = (operand.double() for operand in operands)
    exact = (payload * input_scale) @ (weight_payload * weight_scale).t() + bias.double()
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(scaled_matmul(*operands, bias), output)
