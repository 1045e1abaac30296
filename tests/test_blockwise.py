# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Blockwise FP8 emulation against torchao's reference quantizers, bit for bit, and the same maths in float64."""

import pytest
import torch
from torch.nn import functional as F

from trl_calclip.fp8.blockwise import (
    blockwise_linear,
    dequantize_blocks,
    dequantize_groups,
    quantize_blocks,
    quantize_groups,
)


def bits(payload: torch.Tensor) -> torch.Tensor:
    return payload.contiguous().view(torch.uint8)


def sample(rows: int, columns: int, seed: int) -> torch.Tensor:
    """BF16 with very different magnitudes, a block of zeros and a tiny entry."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    values *= torch.exp(2 * torch.randn(rows, columns, generator=generator))
    values[: rows // 2, : columns // 2] = 0
    values[-1, -1] = 1e-20
    return values.bfloat16()


def round_trip(values: torch.Tensor, block_rows: int, block_columns: int) -> torch.Tensor:
    """The quantized values in float64, block by block, by the definition: an implementation that shares no code."""
    result = torch.empty(values.shape, dtype=torch.float64)
    for top in range(0, values.shape[0], block_rows):
        for left in range(0, values.shape[1], block_columns):
            where = (slice(top, top + block_rows), slice(left, left + block_columns))
            amax = max(values[where].abs().max().item(), 1e-12)
            multiplier = torch.tensor(448.0 / amax, dtype=torch.float32)
            payload = (values[where].float() * multiplier).to(torch.float8_e4m3fn)
            result[where] = payload.double() / multiplier.double()
    return result


def assert_close_to_bf16(actual: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """`actual` is BF16 of `expected`, up to float32 summation of terms whose absolute sum is `magnitude`."""
    assert actual.dtype == torch.bfloat16
    error = (actual.double() - expected).abs()
    assert (error <= 2**-8 * expected.abs() + 2**-18 * magnitude).all()


SHAPES = [(128, 128, 128), (256, 384, 256), (37, 200, 72), (130, 64, 300), (1, 16, 16)]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rows, columns", [(128, 128), (256, 640)])
class TestTorchaoQuantizers:
    def test_groups_of_activations(self, rows, columns, seed):
        pytest.importorskip("triton")
        from torchao.prototype.blockwise_fp8_training.kernels import torch_blockwise_scale_act_quant_lhs

        values = sample(rows, columns, seed)
        payload, scale = quantize_groups(values)
        expected_payload, expected_scale = torch_blockwise_scale_act_quant_lhs(values)
        assert torch.equal(bits(payload), bits(expected_payload))
        assert torch.equal(scale, expected_scale)

    def test_groups_of_tokens(self, rows, columns, seed):
        pytest.importorskip("triton")
        from torchao.prototype.blockwise_fp8_training.kernels import torch_blockwise_scale_act_quant_rhs

        values = sample(rows, columns, seed)
        payload, scale = quantize_groups(values.t())
        expected_payload, expected_scale = torch_blockwise_scale_act_quant_rhs(values)
        assert torch.equal(bits(payload.t()), bits(expected_payload))
        # This reference floors groups of zeros at 1e-12 in BF16, the others at 1e-12 in float64.
        nonzero = expected_scale > 1e-14
        assert nonzero.any()
        assert torch.equal(scale.t()[nonzero], expected_scale[nonzero])

    def test_blocks_of_weights(self, rows, columns, seed):
        pytest.importorskip("triton")
        from torchao.prototype.blockwise_fp8_training.kernels import torch_blockwise_scale_weight_quant

        values = sample(rows, columns, seed)
        payload, scale = quantize_blocks(values)
        expected_payload, expected_scale = torch_blockwise_scale_weight_quant(values)
        assert torch.equal(bits(payload), bits(expected_payload))
        assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("rows, columns", [(128, 256), (200, 300), (1, 130), (130, 1)])
def test_quantizers_follow_the_definition(rows, columns):
    values = sample(rows, columns, seed=3)
    groups = dequantize_groups(*quantize_groups(values)).double()
    blocks = dequantize_blocks(*quantize_blocks(values)).double()
    # Float32 of the scale's reciprocal and of the product.
    torch.testing.assert_close(groups, round_trip(values, 1, 128), rtol=2**-22, atol=0)
    torch.testing.assert_close(blocks, round_trip(values, 128, 128), rtol=2**-22, atol=0)


def test_partial_blocks_equal_zero_padding():
    values = sample(200, 300, seed=4)
    padded = F.pad(values, (0, 84, 0, 56))
    for quantize in (quantize_groups, quantize_blocks):
        payload, scale = quantize(values)
        padded_payload, padded_scale = quantize(padded)
        assert torch.equal(bits(payload), bits(padded_payload[:200, :300]))
        assert torch.equal(scale, padded_scale[: scale.shape[0]])
        assert (padded_payload[200:].float() == 0).all() and (padded_payload[:, 300:].float() == 0).all()


@pytest.mark.parametrize("tokens, in_features, out_features", SHAPES)
def test_forward_and_gradients_match_float64(tokens, in_features, out_features):
    input = sample(tokens, in_features, seed=5).requires_grad_()
    weight = (sample(out_features, in_features, seed=6) * 0.1).requires_grad_()
    grad_output = sample(tokens, out_features, seed=7)
    output = blockwise_linear(input, weight, emulate=True)
    output.backward(grad_output)

    with torch.no_grad():
        x, w, g = round_trip(input, 1, 128), round_trip(weight, 128, 128), round_trip(grad_output, 1, 128)
        x_tokens, g_tokens = round_trip(input, 128, 1), round_trip(grad_output, 128, 1)
    assert_close_to_bf16(output.detach(), x @ w.t(), x.abs() @ w.abs().t())
    assert_close_to_bf16(input.grad, g @ w, g.abs() @ w.abs())
    assert_close_to_bf16(weight.grad, g_tokens.t() @ x_tokens, g_tokens.abs().t() @ x_tokens.abs())


def test_gradient_blocks_matter():
    """The weight's gradient quantizes along tokens. With the forward's groups it would be another number."""
    input = sample(256, 256, seed=8)
    weight = sample(128, 256, seed=9).requires_grad_()
    grad_output = sample(256, 128, seed=10)
    blockwise_linear(input, weight, emulate=True).backward(grad_output)
    along_features = round_trip(grad_output, 1, 128).t() @ round_trip(input, 1, 128)
    assert (weight.grad.double() - along_features).abs().max() > 0.01 * along_features.abs().max()


def test_leading_dimensions():
    input, weight = sample(12, 160, seed=11), sample(48, 160, seed=12)
    flat = blockwise_linear(input, weight, emulate=True)
    assert torch.equal(blockwise_linear(input.reshape(3, 4, 160), weight, emulate=True), flat.reshape(3, 4, 48))
    assert blockwise_linear(input[0], weight, emulate=True).shape == (48,)


def test_autocast_does_not_round_the_operands():
    """Autocast would turn the emulation's float32 product into a BF16 one."""
    input, weight = sample(64, 256, seed=13).requires_grad_(), sample(128, 256, seed=14).requires_grad_()
    expected = blockwise_linear(input, weight, emulate=True)
    expected_grads = torch.autograd.grad(expected.sum(), (input, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = blockwise_linear(input, weight, emulate=True)
        actual_grads = torch.autograd.grad(actual.sum(), (input, weight))
    assert torch.equal(actual, expected)
    assert all(map(torch.equal, actual_grads, expected_grads))


def test_frozen_weight_gets_no_gradient():
    input, weight = sample(10, 128, seed=15).requires_grad_(), sample(64, 128, seed=16)
    blockwise_linear(input, weight, emulate=True).sum().backward()
    assert weight.grad is None
    assert input.grad.abs().sum() > 0


def test_no_tokens():
    input = torch.empty(0, 96, dtype=torch.bfloat16, requires_grad=True)
    weight = sample(32, 96, seed=17).requires_grad_()
    output = blockwise_linear(input, weight, emulate=True)
    output.sum().backward()
    assert output.shape == (0, 32)
    assert input.grad.shape == (0, 96) and (weight.grad == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_token_spoils_itself_alone(bad):
    input, weight = sample(4, 256, seed=18), sample(32, 256, seed=19)
    clean = blockwise_linear(input, weight, emulate=True)
    input[2, 5] = bad
    output = blockwise_linear(input, weight, emulate=True)
    assert output[2].isnan().all()
    assert torch.equal(output[[0, 1, 3]], clean[[0, 1, 3]])


def test_refuses_what_is_not_bf16():
    input, weight = sample(4, 128, seed=20), sample(128, 128, seed=21)
    with pytest.raises(TypeError, match="Cast both first"):
        blockwise_linear(input, weight.float(), emulate=True)
    with pytest.raises(TypeError, match="torch.float32"):
        blockwise_linear(input.float(), weight, emulate=True)


def test_refuses_kernels_without_their_gpu():
    with pytest.raises(ValueError, match="fp8_emulate=True"):
        blockwise_linear(sample(4, 128, seed=22), sample(128, 128, seed=23), emulate=False)
