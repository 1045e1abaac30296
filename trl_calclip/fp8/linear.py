# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Float8 linears that can also run in BF16, and the context manager of the BF16 pass.

torchao's `Float8Linear` is the module. The subclass here departs from it in four points: the weight is rounded to BF16
before it is quantized (vLLM quantizes the BF16 copy, so quantizing FP32 masters would be another weight), the forward
quantizes with vLLM's arithmetic, autocast is read from the input's own device (torchao reads the GPU's), and a flag
sends the forward through `nn.Linear`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from .matmul import aligned_matmul
from .quantizers import packed_linear_names, shared_weight_amax
from .recipes import Recipe
from .selection import canonical_name, select_linears


class SwitchableFloat8Linear(Float8Linear):
    """
    A torchao float8 linear that runs as a plain `nn.Linear` while `fp8_enabled` is `False`.

    Shapes are those of `nn.Linear`: input `(..., in_features)`, output `(..., out_features)`, with `nn.Linear`'s
    output dtype. In FP8 input and weight are rounded to BF16 before they are quantized. Non-finite input gives
    non-finite output.

    Attributes:
        recipe (`Recipe`): How it quantizes and multiplies.
        scale_group (`tuple[SwitchableFloat8Linear, ...]`):
            Linears that share this one's weight scale, itself included; empty where scales are not shared.
    """

    fp8_enabled: bool = True
    recipe: Recipe
    scale_group: tuple["SwitchableFloat8Linear", ...] = ()

    @classmethod
    def from_float(cls, mod: nn.Linear, config: Float8LinearConfig, recipe: Recipe) -> "SwitchableFloat8Linear":
        linear = super().from_float(mod, config=config)
        linear.recipe = recipe
        linear.aligned_matmul = aligned_matmul(linear)
        return linear

    def weight_amax(self) -> torch.Tensor | None:
        """Largest magnitude among the weights that share a scale, one element; `None` where the weight has its own."""
        return shared_weight_amax(self.scale_group) if self.scale_group else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        device_type = input.device.type
        autocast = torch.is_autocast_enabled(device_type)
        output_dtype = torch.get_autocast_dtype(device_type) if autocast else input.dtype
        if not self.fp8_enabled:
            # Cast here what autocast would cast: it keeps its copies of FP32 weights until it ends, all of them at
            # once.
            weight = self.weight.to(output_dtype) if autocast else self.weight
            return F.linear(input, weight, self.bias)
        # Straight-through: the cast's backward hands the gradient to the master weight.
        weight = self.weight.to(torch.bfloat16)
        output = self.recipe.matmul(input.to(torch.bfloat16), weight, self)
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output.to(output_dtype)


def convert_to_fp8(model: nn.Module, recipe: Recipe, *, emulate: bool, ignore: Sequence[str] = ()) -> list[str]:
    """
    Replace the linears of `model` by float8 linears, in place; parameters stay the same objects.

    The output head and the embeddings keep their precision, as they do in vLLM's online FP8. Call it before Accelerate
    wraps the model.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): Model to convert.
        recipe (`Recipe`): How to quantize.
        emulate (`bool`): Whether to multiply in float32 instead of the float8 GEMM.
        ignore (`Sequence[str]`, *optional*): `fnmatch` patterns on names of linears that stay in BF16.

    Returns:
        `list[str]`: Names of the converted linears, in the model's order.

    Raises:
        ValueError: If nothing can be converted, a pattern is wrong (see [`select_linears`]), or the float8 GEMM cannot
            take a linear's dimensions or bias.
    """
    names = select_linears(model, ignore).fp8
    if not emulate:
        _check_kernel_limits({name: model.get_submodule(name) for name in names}, recipe)
    config = recipe.torchao_config(emulate=emulate)
    chosen = set(names)
    # torchao's conversion comes first: it also patches a fault of torch.compile that would corrupt float8 stores.
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)
    for name in names:
        model.set_submodule(name, SwitchableFloat8Linear.from_float(model.get_submodule(name), config, recipe))
    if recipe.shares_weight_scale:
        linears = {canonical_name(name): model.get_submodule(name) for name in names}
        for group in packed_linear_names(linears):
            members = tuple(linears[name] for name in group)
            for member in members:
                member.scale_group = members
    return names


def _check_kernel_limits(linears: dict[str, nn.Linear], recipe: Recipe) -> None:
    multiple = recipe.dim_multiple
    odd = [
        f"{name} ({linear.in_features} -> {linear.out_features})"
        for name, linear in linears.items()
        if linear.in_features % multiple or linear.out_features % multiple
    ]
    if odd:
        raise ValueError(
            f"The float8 GEMM of recipe {recipe.name!r} needs in and out features that are multiples of {multiple}; "
            f"these linears have others: {', '.join(odd)}. Leave them in BF16 (`fp8_ignore`), use another recipe, or "
            "set `fp8_emulate=True` (slower than BF16)."
        )
    biased = [name for name, linear in linears.items() if linear.bias is not None]
    if biased and not recipe.kernel_takes_bias:
        raise ValueError(
            f"The float8 GEMM of recipe {recipe.name!r} takes linears without a bias only; these have one: "
            f"{', '.join(biased)}. Leave them in BF16 (`fp8_ignore`), use another recipe, or set `fp8_emulate=True` "
            "(slower than BF16)."
        )


def fp8_linears(model: nn.Module) -> list[SwitchableFloat8Linear]:
    """The float8 linears of `model`, in its order. Works on wrapped (DDP, FSDP, PEFT) models too."""
    return [module for module in model.modules() if isinstance(module, SwitchableFloat8Linear)]


@contextmanager
def bf16_pass(model: nn.Module) -> Iterator[None]:
    """
    Run the float8 linears of `model` in BF16 inside the context.

    Under BF16 autocast, or with BF16 weights, the model then computes bit for bit what it would compute had it never
    been converted. Weights, gradients, training mode and random generators are not touched; leaving the context, by an
    exception too, puts every linear back as it was. Keep backward passes outside: gradient checkpointing would
    recompute in FP8.
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
