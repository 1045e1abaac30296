# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The row-wise float8 product of the trainer: forward with the numbers of vLLM's `fp8_per_channel`, backward torchao's own.

torchao's forward differs from vLLM's in the last bit of its scales, which moves a few payloads in ten thousand by one FP8
step. Quantized by the rules in `quantizers.py`, trainer and rollout multiply the same numbers, and on a CPU the emulated
product is the engine's bit for bit.
"""

import torch
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

from .quantizers import quantize_per_channel, quantize_per_token, scaled_matmul


class RowwiseMatmul(torch.autograd.Function):
    """`input @ weight.T` with both operands quantized by row. Input `(..., K)`, weight `(N, K)`, both BF16."""

    @staticmethod
    def forward(ctx, input, weight, mm_config, config):
        # High-precision operands are kept: the backward pass scales each along the dimension that it contracts.
        ctx.save_for_backward(input, weight.t())
        ctx.linear_mm_config, ctx.config = mm_config, config
        a, a_scale = quantize_per_token(input.reshape(-1, input.shape[-1]))
        b, b_scale = quantize_per_channel(weight)
        if mm_config.output.emulate:
            product = scaled_matmul(a, a_scale, b, b_scale).to(input.dtype)
        else:
            # torchao's scales multiply: they are the reciprocals of ours.
            a = Float8TrainingTensor(a, a_scale.reciprocal(), input.dtype, mm_config, GemmInputRole.INPUT, -1)
            b = Float8TrainingTensor(
                b.t(), b_scale.t().reciprocal(), weight.dtype, mm_config, GemmInputRole.WEIGHT, 0
            )
            product = torch.mm(a, b)
        return product.reshape(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad_output):
        grad_input, grad_weight_t, *_ = matmul_with_hp_or_float8_args.backward(ctx, grad_output)
        return grad_input, grad_weight_t.t(), None, None
