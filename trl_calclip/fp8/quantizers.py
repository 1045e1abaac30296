# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The scale and rounding rules of vLLM's online FP8, in plain torch, for the trainer's side and for reference engines.

Whether a value next to the middle of two FP8 numbers goes up or down hangs on the last bit of its scale, and on
whether it was divided by the scale or multiplied by the reciprocal. torchao and vLLM differ in both, by one FP8 step
on up to 7 in 10,000 elements. The functions here follow vLLM bit for bit, so that both sides hold the same numbers.
Blockwise scales have a module of their own, `blockwise`.

Payloads are `torch.float8_e4m3fn`, scales float32, and a value is worth `payload * scale`.

Source: vLLM 0.31, `layers/quantization/online/fp8.py`, `layers/quantization/input_quant_fp8.py` and the CUDA kernels
they call.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn


FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max

# vLLM's floor for scales of rows: a row whose largest entry is under 1/512 does not use the whole range of FP8.
MIN_ROW_SCALE = 1.0 / (FP8_MAX * 512.0)

# torchao's floor for the largest magnitude of whatever shares a scale.
_MIN_AMAX = 1e-12

# Projections that vLLM fuses into one linear, hence under one per-tensor scale. The names are those of a loaded
# engine's `packed_modules_mapping` for the Llama, Mistral, Qwen, Gemma and SmolLM families.
PACKED_PROJECTIONS: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def to_fp8(scaled: torch.Tensor) -> torch.Tensor:
    """Round float32 values to FP8, the nearest even one, saturating at +-448. NaN stays NaN."""
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)


def from_fp8(payload: torch.Tensor) -> torch.Tensor:
    """Float32 values of an FP8 payload, exactly; NaN stays NaN."""
    if payload.device.type != "cpu":
        return payload.float()
    # torch converts FP8 on a CPU one element at a time, which takes as long as the product; looking values up is
    # several times faster.
    table = torch.arange(256, dtype=torch.uint8).view(FP8_DTYPE).float()
    return table.index_select(0, payload.view(torch.uint8).reshape(-1).int()).view(payload.shape)


def scale_from_amax(amax: torch.Tensor) -> torch.Tensor:
    """`amax / 448` in float32, correctly rounded on every device."""
    # A tensor as divisor: a Python number would become a multiplication by 1/448 on a GPU.
    return amax.float() / torch.full((), FP8_MAX, device=amax.device)


def multiplier_from_amax(amax: torch.Tensor) -> torch.Tensor:
    """torchao's rule: `448 / amax`, divided in float64, then float32. Zeros get a finite one."""
    return (FP8_MAX / amax.double().clamp(min=_MIN_AMAX)).float()


def quantize_per_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Quantize a weight with one scale per output channel, as vLLM's `fp8_per_channel` does.

    Args:
        weight (`torch.Tensor` of shape `(N, K)`): Weight, already rounded to BF16.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Payload `(N, K)` and scale `(N, 1)`. A NaN makes its row NaN.
    """
    scale = scale_from_amax(weight.abs().amax(dim=-1, keepdim=True)).clamp(min=MIN_ROW_SCALE)
    return to_fp8(weight.float() / scale), scale


def quantize_per_token(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Quantize activations with one scale per token, as vLLM's `fp8_per_channel` and `fp8_per_tensor` do.

    vLLM's CUDA kernel divides by the scale, its CPU code multiplies by the reciprocal. So does this function.

    Args:
        input (`torch.Tensor` of shape `(..., K)`): Activations.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Payload `(..., K)` and scale `(..., 1)`. A NaN makes its token NaN.
    """
    scale = scale_from_amax(input.abs().amax(dim=-1, keepdim=True)).clamp(min=MIN_ROW_SCALE)
    scaled = input.float() * scale.reciprocal() if input.device.type == "cpu" else input.float() / scale
    return to_fp8(scaled), scale


def quantize_per_tensor(weight: torch.Tensor, amax: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Quantize a weight with one scale, as vLLM's `fp8_per_tensor` does.

    Args:
        weight (`torch.Tensor` of shape `(N, K)`): Weight, already rounded to BF16.
        amax (`torch.Tensor` of one element, *optional*): Largest magnitude of everything that shares the scale, see
            [`shared_weight_amax`]. Defaults to the weight's own.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Payload `(N, K)` and scale `(1,)`. A NaN makes everything NaN; a weight of
        zeros stays zeros.
    """
    amax = weight.abs().amax() if amax is None else amax
    # The floor is there for weights of zeros alone: vLLM has none, and makes NaN of them.
    scale = scale_from_amax(amax.reshape(1)).clamp(min=torch.finfo(torch.float32).tiny)
    return to_fp8(weight.float() * scale.reciprocal()), scale


def quantize_input_per_tensor(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Quantize activations with one scale, as torchao's tensor-wise recipe does. vLLM has no counterpart on FP8 GPUs.

    Args:
        input (`torch.Tensor` of shape `(M, K)`): Activations of a micro-batch.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Payload `(M, K)` and scale `(1,)`. A NaN makes everything NaN.
    """
    multiplier = multiplier_from_amax(input.abs().amax().reshape(1))
    return to_fp8(input.float() * multiplier), multiplier.reciprocal()


def float32_matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left @ right` of two float32 matrices, in float32 under autocast too (which would round both to BF16)."""
    with torch.autocast(left.device.type, enabled=False):
        return torch.mm(left, right)


def scaled_matmul(
    input: torch.Tensor,
    input_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    FP8 linear in float32: payloads are multiplied first, scales and bias come after.

    In this order, and with payloads from this module, the result equals bit for bit what vLLM computes on a CPU for
    the same rows. Multiplying dequantized values instead rounds otherwise in 1 to 3 of 10,000 BF16 outputs.

    Args:
        input (`torch.Tensor` of shape `(M, K)`): FP8 payload of the activations.
        input_scale (`torch.Tensor` of shape `(M, 1)` or `(1,)`): Its scale.
        weight (`torch.Tensor` of shape `(N, K)`): FP8 payload of the weight.
        weight_scale (`torch.Tensor` of shape `(N, 1)` or `(1,)`): Its scale.
        bias (`torch.Tensor` of shape `(N,)`, *optional*): Bias.

    Returns:
        `torch.Tensor` of shape `(M, N)`: Float32 output, for the caller to round.
    """
    output = float32_matmul(from_fp8(input), from_fp8(weight).t())
    output = output * input_scale * weight_scale.t()
    return output if bias is None else output + bias


def packed_linear_names(
    names: Iterable[str], packed: Mapping[str, Sequence[str]] = PACKED_PROJECTIONS
) -> list[tuple[str, ...]]:
    """
    Group the names of a model's linears as vLLM fuses them.

    Args:
        names (`Iterable[str]`): Names of linears, such as `"model.layers.0.self_attn.q_proj"`.
        packed (`Mapping[str, Sequence[str]]`, *optional*, defaults to `PACKED_PROJECTIONS`): Fused name to the names
            of its parts, in order. A loaded engine has it as `model.packed_modules_mapping`.

    Returns:
        `list[tuple[str, ...]]`: Groups of two or more names, in the order of `packed`'s parts. A linear whose siblings
        are not all there is in no group.
    """
    present = dict.fromkeys(names)
    groups = []
    for name in present:
        parent, _, leaf = name.rpartition(".")
        for parts in packed.values():
            if len(parts) > 1 and leaf == parts[0]:
                group = tuple(f"{parent}.{part}" if parent else part for part in parts)
                if all(member in present for member in group):
                    groups.append(group)
    return groups


def shared_weight_amax(linears: Sequence[nn.Linear]) -> torch.Tensor:
    """
    Largest magnitude among the weights of linears that share a per-tensor scale, after rounding to BF16.

    Args:
        linears (`Sequence[nn.Linear]`): The linears of one group of [`packed_linear_names`].

    Returns:
        `torch.Tensor`: One element, BF16, without gradient, on the weights' device. NaN if a weight holds one.
    """
    with torch.no_grad():
        # Rounding is monotonic: the rounded maximum is the maximum of the rounded weights.
        return torch.stack([linear.weight.abs().amax() for linear in linears]).amax().to(torch.bfloat16)
