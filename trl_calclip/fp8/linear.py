# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Float8 linears that can also run in BF16, and the context manager of the BF16 pass.

torchao's `Float8Linear` is the module. The subclass here departs from it in four points: the weight is rounded to BF16
before it is quantized (vLLM quantizes the BF16 copy, so quantizing FP32 masters would be another weight), the forward
quantizes with vLLM's arithmetic, autocast is read from the input's own device (torchao reads the GPU's), and a flag sends
the forward through `nn.Linear`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_linear_utils import swap_linear_layers

from .recipes import Recipe
from .rowwise import RowwiseMatmul


# A linear with fewer outputs (a gate, a value head) loses more by quantization than its GEMM could win: ao#1200.
MIN_OUT_FEATURES = 16


class SwitchableFloat8Linear(Float8Linear):
    """
    A torchao float8 linear that runs as a plain `nn.Linear` while `fp8_enabled` is `False`.

    Shapes are those of `nn.Linear`: input `(..., in_features)`, output `(..., out_features)`, with `nn.Linear`'s output dtype.
    In FP8 input and weight are rounded to BF16 before they are quantized. Non-finite input gives non-finite output.
    """

    fp8_enabled: bool = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.fp8_enabled:
            return nn.Linear.forward(self, input)
        device_type = input.device.type
        autocast = torch.is_autocast_enabled(device_type)
        output_dtype = torch.get_autocast_dtype(device_type) if autocast else input.dtype
        # Straight-through: the cast's backward hands the gradient to the master weight.
        weight = self.weight.to(torch.bfloat16)
        output = RowwiseMatmul.apply(input.to(torch.bfloat16), weight, self.linear_mm_config, self.config)
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output.to(output_dtype)


def is_convertible(module: nn.Module, name: str, skip: frozenset[nn.Module]) -> bool:
    """Whether `module` becomes a float8 linear: a plain `nn.Linear`, no head, no adapter, not tiny."""
    return (
        type(module) is nn.Linear
        and module not in skip
        and module.out_features >= MIN_OUT_FEATURES
        and not any(part.startswith("lora_") for part in name.split("."))
    )


def convert_to_fp8(model: nn.Module, recipe: Recipe, *, emulate: bool) -> list[str]:
    """
    Replace the linears of `model` by float8 linears, in place; parameters stay the same objects.

    The output head and the embeddings keep their precision, as they do in vLLM's online FP8. Call it before Accelerate
    wraps the model.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): Model to convert.
        recipe (`Recipe`): How to quantize.
        emulate (`bool`): Whether to multiply in float32 instead of the float8 GEMM.

    Returns:
        `list[str]`: Names of the converted linears, in the model's order.

    Raises:
        ValueError: If nothing can be converted, or if the float8 GEMM cannot take a linear's dimensions.
    """
    head = model.get_output_embeddings()
    skip = frozenset() if head is None else frozenset([head])
    names = [name for name, module in model.named_modules() if is_convertible(module, name, skip)]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no `nn.Linear` that FP8 could replace (the output head stays in high precision). "
            "Quantized checkpoints cannot be trained in FP8: load the BF16 model."
        )
    if not emulate:
        multiple = recipe.dim_multiple
        odd = [
            f"{name} ({linear.in_features} -> {linear.out_features})"
            for name, linear in model.named_modules()
            if name in set(names) and (linear.in_features % multiple or linear.out_features % multiple)
        ]
        if odd:
            raise ValueError(
                f"The float8 GEMM of recipe {recipe.name!r} needs in and out features that are multiples of {multiple}; "
                f"these linears have others: {', '.join(odd)}."
            )
    config = recipe.torchao_config(emulate=emulate)
    chosen = set(names)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)
    swap_linear_layers(
        model,
        lambda linear: SwitchableFloat8Linear.from_float(linear, config=config),
        module_filter_fn=lambda module, _: type(module) is Float8Linear,
    )
    return names


def fp8_linears(model: nn.Module) -> list[SwitchableFloat8Linear]:
    """The float8 linears of `model`, in its order. Works on wrapped (DDP, FSDP, PEFT) models too."""
    return [module for module in model.modules() if isinstance(module, SwitchableFloat8Linear)]


@contextmanager
def bf16_pass(model: nn.Module) -> Iterator[None]:
    """
    Run the float8 linears of `model` in BF16 inside the context.

    Under BF16 autocast, or with BF16 weights, the model then computes bit for bit what it would compute had it never been
    converted. Weights, gradients, training mode and random generators are not touched; leaving the context, by an exception
    too, puts every linear back as it was. Keep backward passes outside: gradient checkpointing would recompute in FP8.
    """
    linears = fp8_linears(model)
    before = [linear.fp8_enabled for linear in linears]
    try:
        for linear in linears:
            linear.fp8_enabled = False
        yield
    finally:
        for linear, enabled in zip(linears, before, strict=True):
            linear.fp8_enabled = enabled
