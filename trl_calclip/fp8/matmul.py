# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The trainer's float8 products with scales per row or per tensor: forward with vLLM's numbers, backward torchao's own.

torchao's forward differs from vLLM's in the last bit of its scales, which moves a few payloads in ten thousand by one
FP8 step. Quantized by the rules in `quantizers.py`, trainer and rollout multiply the same numbers, and on a CPU the
emulated row-wise product is the engine's bit for bit. `blockwise.py` has the third product.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, LinearMMConfig

from .blockwise import blockwise_linear
from .quantizers import (
    quantize_input_per_tensor,
    quantize_per_channel,
    quantize_per_tensor,
    quantize_per_token,
    scaled_matmul,
)


class AlignedMatmul(torch.autograd.Function):
    """
    `input @ weight.T` from operands that are quantized already. Input `(..., K)`, weight `(N, K)`, both BF16.

    Scales are `(M, 1)` and `(N, 1)` for rows, `(1,)` for tensors.
    """

    @staticmethod
    def forward(ctx, input, weight, a, a_scale, b, b_scale, mm_config, config):
        # High-precision operands are kept: the backward pass scales each along the dimension that it contracts.
        ctx.save_for_backward(input, weight.t())
        ctx.linear_mm_config, ctx.config = mm_config, config
        if mm_config.output.emulate:
            product = scaled_matmul(a, a_scale, b, b_scale).to(input.dtype)
        else:
            by_row = a_scale.dim() == 2
            # torchao's scales multiply: they are the reciprocals of ours.
            a = Float8TrainingTensor(
                a, a_scale.reciprocal(), input.dtype, mm_config, GemmInputRole.INPUT, -1 if by_row else None
            )
            b = Float8TrainingTensor(
                b.t(), b_scale.t().reciprocal(), weight.dtype, mm_config, GemmInputRole.WEIGHT, 0 if by_row else None
            )
            product = torch.mm(a, b)
        return product.reshape(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad_output):
        grad_input, grad_weight_t, *_ = matmul_with_hp_or_float8_args.backward(ctx, grad_output)
        return grad_input, grad_weight_t.t(), *[None] * 6


@functools.cache
def _in_graph(mm_config: LinearMMConfig, config: Float8LinearConfig) -> Callable[..., torch.Tensor]:
    """
    `AlignedMatmul` for one configuration, as a function of tensors alone that `torch.compile` takes into its graph
    whole: it cannot trace a backward that calls another `autograd.Function`'s. The same one for every linear, so that
    layers share what is compiled.
    """

    def aligned_matmul(input, weight, a, a_scale, b, b_scale):
        return AlignedMatmul.apply(input, weight, a, a_scale, b, b_scale, mm_config, config)

    return torch.compiler.allow_in_graph(aligned_matmul)


def aligned_matmul(linear: Float8Linear) -> Callable[..., torch.Tensor]:
    """The product of a linear as a function of input, weight, and their quantized forms with scales."""
    return _in_graph(linear.linear_mm_config, linear.config)


def rowwise_matmul(input: torch.Tensor, weight: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """Product of `linear` with one scale per token and per output channel."""
    with torch.no_grad():
        operands = *quantize_per_token(input.reshape(-1, input.shape[-1])), *quantize_per_channel(weight)
    return linear.aligned_matmul(input, weight, *operands)


def tensorwise_matmul(input: torch.Tensor, weight: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """
    Product of `linear` with one scale per operand, for the fast tensor-wise GEMM.

    The weight's scale is shared by the linears that the rollout engine fuses. Activations have one scale per
    micro-batch, as torchao's recipe says, where the engine has one per token: that part of the mismatch stays.
    """
    with torch.no_grad():
        operands = (
            *quantize_input_per_tensor(input.reshape(-1, input.shape[-1])),
            *quantize_per_tensor(weight, linear.weight_amax()),
        )
    return linear.aligned_matmul(input, weight, *operands)


def blockwise_matmul(input: torch.Tensor, weight: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """Product of `linear` with 1x128 and 128x128 blocks."""
    return blockwise_linear(input, weight, emulate=linear.config.emulate)
