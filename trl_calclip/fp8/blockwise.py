# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Blockwise FP8 linear: torchao's kernels on a GPU that has them, the same numbers in plain torch on any other device.

Blocks are those of torchao's blockwise training: 128x128 for weights, 128 features of one token for activations and
gradients, and 128 tokens of one feature for both operands of the weight's gradient. Scales are exact, not rounded to
powers of two. vLLM's `fp8_per_block` has the same blocks and scales that differ in the last bit, and floors a weight
block's largest entry at 1e-4. The emulation follows torchao bit for bit, since on a GPU torchao's kernels are what
trains.

Source: torchao 0.18, `prototype/blockwise_fp8_training/{linear,kernels}.py`.
"""

import torch
from torch.nn import functional as F

from .quantizers import float32_matmul, from_fp8, multiplier_from_amax, to_fp8


BLOCK = 128


def _pad_last(values: torch.Tensor) -> torch.Tensor:
    return F.pad(values, (0, -values.shape[-1] % BLOCK))


def quantize_groups(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Quantize a matrix with one scale for each 128 neighbours in a row.

    Args:
        values (`torch.Tensor` of shape `(M, K)`): Matrix. Where 128 does not divide `K` the last group is shorter,
            which is the same as padding with zeros.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: FP8 payload `(M, K)` and float32 scale `(M, ceil(K / 128))`; a value is
        worth `payload * scale`. A non-finite value makes its group NaN.
    """
    rows, columns = values.shape
    padded = _pad_last(values)
    groups = padded.reshape(rows, padded.shape[1] // BLOCK, BLOCK)
    multiplier = multiplier_from_amax(groups.abs().amax(dim=-1, keepdim=True))
    payload = to_fp8(groups.float() * multiplier).reshape(padded.shape)
    return payload[:, :columns], multiplier.squeeze(-1).reciprocal()


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Quantize a weight with one scale for each 128x128 block.

    Args:
        weight (`torch.Tensor` of shape `(N, K)`): Weight, already rounded to BF16. Blocks at the edges may be smaller.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: FP8 payload `(N, K)` and float32 scale `(ceil(N / 128), ceil(K / 128))`. A
        non-finite value makes its block NaN.
    """
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    multiplier = multiplier_from_amax(blocks.abs().amax(dim=(1, 3), keepdim=True))
    payload = to_fp8(blocks.float() * multiplier).reshape(padded.shape)
    return payload[:rows, :columns], multiplier[:, 0, :, 0].reciprocal()


def dequantize_groups(payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float32 values `(M, K)` of what [`quantize_groups`] gave."""
    return from_fp8(payload) * scale.repeat_interleave(BLOCK, dim=1)[:, : payload.shape[1]]


def dequantize_blocks(payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float32 values `(N, K)` of what [`quantize_blocks`] gave."""
    rows = scale.repeat_interleave(BLOCK, dim=0)[: payload.shape[0]]
    return from_fp8(payload) * rows.repeat_interleave(BLOCK, dim=1)[:, : payload.shape[1]]


def _round_trip_groups(values: torch.Tensor) -> torch.Tensor:
    return dequantize_groups(*quantize_groups(values))


class _EmulatedBlockwiseLinear(torch.autograd.Function):
    """`input (M, K) @ weight (N, K).t()` with FP8 operands, multiplied and summed in float32, in both directions."""

    @staticmethod
    def forward(ctx, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        output = float32_matmul(_round_trip_groups(input), dequantize_blocks(*quantize_blocks(weight)).t())
        return output.to(input.dtype)

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        input, weight = ctx.saved_tensors
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            weight = dequantize_blocks(*quantize_blocks(weight))
            grad_input = float32_matmul(_round_trip_groups(grad_output), weight).to(grad_output.dtype)
        if ctx.needs_input_grad[1]:
            # Tokens are what is summed here, so groups run along the tokens.
            grad_weight = float32_matmul(_round_trip_groups(grad_output.t()), _round_trip_groups(input.t()).t())
            grad_weight = grad_weight.to(grad_output.dtype)
        return grad_input, grad_weight


@torch.compiler.allow_in_graph
def _emulated_linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`_EmulatedBlockwiseLinear`, taken whole into a compiled graph."""
    return _EmulatedBlockwiseLinear.apply(rows, weight)


def blockwise_linear(input: torch.Tensor, weight: torch.Tensor, *, emulate: bool) -> torch.Tensor:
    """
    `input @ weight.t()` in blockwise FP8, forward and backward.

    Args:
        input (`torch.Tensor` of shape `(..., K)`): Activations, BF16.
        weight (`torch.Tensor` of shape `(N, K)`): Weight, BF16.
        emulate (`bool`): `True` computes the numbers in float32 torch, on any device and for any `N` and `K`. `False`
            calls torchao's kernels: a CUDA device of compute capability 9.0 or higher, `N` and `K` multiples of 128.
            Tokens are padded to a multiple of 128 there, with zeros, which changes no number.

    Returns:
        `torch.Tensor` of shape `(..., N)`: BF16 output, without bias. A token that holds a non-finite value gives NaN.

    Raises:
        TypeError: If input or weight is not BF16: quantizing FP32 masters would be another weight than the rollout's.
        ValueError: If `emulate=False` and the device or the dimensions are not what the kernels take.
    """
    if input.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise TypeError(
            f"Blockwise FP8 quantizes BF16 tensors, got input {input.dtype} and weight {weight.dtype}. Cast both "
            "first: the rollout engine quantizes the BF16 weight, and the trainer must quantize the same one."
        )
    rows = input.reshape(-1, input.shape[-1])
    if emulate:
        output = _emulated_linear(rows, weight)
    else:
        output = _kernel_linear(rows, weight)
    return output.reshape(*input.shape[:-1], weight.shape[0])


def _kernel_linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if rows.device.type != "cuda" or torch.cuda.get_device_capability(rows.device) < (9, 0):
        raise ValueError(
            "Blockwise FP8 kernels run on CUDA GPUs of compute capability 9.0 or higher, this tensor is on "
            f"{rows.device}. Set `fp8_emulate=True` to compute the same numbers without them."
        )
    if weight.shape[0] % BLOCK or weight.shape[1] % BLOCK:
        raise ValueError(
            f"Blockwise FP8 kernels need in and out features that are multiples of {BLOCK}, got a weight of shape "
            f"{tuple(weight.shape)} (out, in). Leave this linear in BF16 (`fp8_ignore`), or set `fp8_emulate=True`."
        )
    # torchao's module needs Triton when it is imported, so not before the kernels are asked for.
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    tokens = rows.shape[0]
    # The weight's gradient sums over tokens in blocks of 128.
    padded = F.pad(rows, (0, 0, 0, -tokens % BLOCK)).contiguous()
    # torch's own GEMM has these scales on compute capability 9.0 only; torchao's Triton GEMM is for the others.
    use_triton = torch.cuda.get_device_capability(rows.device) != (9, 0)
    return fp8_blockwise_mm.apply(padded, weight.contiguous(), BLOCK, torch.bfloat16, use_triton)[:tokens]
