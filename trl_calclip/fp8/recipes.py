# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The one table of FP8 recipes: how the trainer multiplies, what vLLM rolls out with, and what the hardware must offer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig

from .blockwise import BLOCK, quantize_blocks
from .matmul import blockwise_matmul, rowwise_matmul, tensorwise_matmul
from .quantizers import quantize_per_channel, quantize_per_tensor


@dataclasses.dataclass(frozen=True)
class Recipe:
    """
    One FP8 recipe, for the trainer and for the rollout engine.

    Args:
        name (`str`): Value of `fp8_recipe` and `fp8_rollout`.
        scale_rule (`str`): What shares a scale, in words.
        torchao_recipe (`str` or `None`):
            Name for `Float8LinearConfig.from_recipe_name`. `None` where torchao has kernels and no recipe.
        matmul (`Callable`): `(input, weight, linear) -> output`, the trainer's product, in BF16 and without bias.
        quantize_weight (`Callable`):
            `(weight, amax) -> (payload, scale)`: the weight as the trainer quantizes it in the forward pass and the
            engine stores it. `amax` is that of [`SwitchableFloat8Linear.weight_amax`], `None` unless scales are
            shared.
        shares_weight_scale (`bool`): Whether linears that the engine fuses have one weight scale together.
        vllm_quantization (`str`): vLLM's online quantization scheme with the same scales.
        vllm_cpu_quantization (`str`): The scheme that an engine on a CPU runs: vLLM's, or this package's stand-in.
        min_capability (`tuple[int, int]`): Lowest CUDA compute capability with the training kernel.
        dim_multiple (`int`): What the kernel wants the in and out features of a linear to be a multiple of.
        kernel_takes_bias (`bool`): Whether linears with a bias can use the kernel.
    """

    name: str
    scale_rule: str
    torchao_recipe: str | None
    matmul: Callable[[torch.Tensor, torch.Tensor, nn.Linear], torch.Tensor]
    quantize_weight: Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
    vllm_quantization: str
    vllm_cpu_quantization: str
    min_capability: tuple[int, int]
    dim_multiple: int = 16
    shares_weight_scale: bool = False
    kernel_takes_bias: bool = True

    def torchao_config(self, *, emulate: bool) -> Float8LinearConfig:
        """
        torchao's configuration of this recipe.

        Scales are exact, not rounded to powers of two as torchao's rowwise default has them: vLLM's are exact too, and
        BF16 weights sit on FP8 midpoints under power-of-two scales, so that the first small update flips many at once.
        Contracted dimensions are padded for the GPU's GEMM: one of them is the micro-batch's number of tokens, which
        is whatever the completions made it. A recipe without a name in torchao uses nothing of it but `emulate`.
        """
        if self.torchao_recipe is None:
            return Float8LinearConfig(emulate=emulate)
        config = Float8LinearConfig.from_recipe_name(self.torchao_recipe)
        return dataclasses.replace(
            config, emulate=emulate, pad_inner_dim=not emulate, round_scales_to_power_of_2=False
        )

    def matches(self, other: "Recipe") -> bool:
        """
        Whether a trainer with this recipe and an engine with the other quantize weights and activations by one rule.
        """
        return self.vllm_quantization == other.vllm_quantization


_ROWWISE: dict[str, Any] = {
    "scale_rule": "one scale per output channel of a weight and per token",
    "matmul": rowwise_matmul,
    "quantize_weight": lambda weight, amax: quantize_per_channel(weight),
    "vllm_quantization": "fp8_per_channel",
    "vllm_cpu_quantization": "fp8_per_channel",
    "min_capability": (9, 0),
}

RECIPES = {
    recipe.name: recipe
    for recipe in [
        Recipe(
            name="tensorwise",
            scale_rule="one scale per weight, shared by the linears that the engine fuses, and one per micro-batch in "
            "the trainer, per token in the engine",
            torchao_recipe="tensorwise",
            matmul=tensorwise_matmul,
            quantize_weight=quantize_per_tensor,
            shares_weight_scale=True,
            vllm_quantization="fp8_per_tensor",
            vllm_cpu_quantization="calclip_fp8_per_tensor",
            min_capability=(8, 9),
        ),
        Recipe(name="rowwise", torchao_recipe="rowwise", **_ROWWISE),
        # The weight's gradient in high precision; the forward pass is rowwise's.
        Recipe(name="rowwise_with_gw_hp", torchao_recipe="rowwise_with_gw_hp", **_ROWWISE),
        Recipe(
            name="blockwise",
            scale_rule=f"one scale per {BLOCK}x{BLOCK} block of a weight and per {BLOCK} features of a token",
            torchao_recipe=None,
            matmul=blockwise_matmul,
            quantize_weight=lambda weight, amax: quantize_blocks(weight),
            vllm_quantization="fp8_per_block",
            vllm_cpu_quantization="calclip_fp8_per_block",
            min_capability=(9, 0),
            dim_multiple=BLOCK,
            kernel_takes_bias=False,
        ),
    ]
}


def get_recipe(name: str) -> Recipe:
    """
    The recipe called `name`.

    Raises:
        ValueError: For an unknown name.
    """
    if name not in RECIPES:
        raise ValueError(f"Unknown FP8 recipe {name!r}. Use one of {sorted(RECIPES)}, or None for no FP8 training.")
    return RECIPES[name]


def recipe_of_scheme(quantization: str) -> Recipe:
    """
    The recipe whose weights an engine with this quantization stores; `rowwise` stands for both row-wise recipes.

    Raises:
        ValueError: For a scheme that no recipe has.
    """
    for recipe in RECIPES.values():
        if quantization in (recipe.vllm_quantization, recipe.vllm_cpu_quantization):
            return recipe
    raise ValueError(f"No FP8 recipe rolls out with vLLM's quantization {quantization!r}.")


def cuda_capability() -> tuple[int, int] | None:
    """Compute capability of the current CUDA device, `None` without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def resolve_emulate(
    recipe: Recipe, device_type: str, capability: tuple[int, int] | None, emulate: bool | None
) -> bool:
    """
    Whether float8 GEMMs are emulated: quantized operands, multiplied in float32.

    Args:
        recipe (`Recipe`): The training recipe.
        device_type (`str`): `"cpu"` or `"cuda"`.
        capability (`tuple[int, int]` or `None`): Compute capability of the CUDA device.
        emulate (`bool` or `None`): The user's `fp8_emulate`. `None` emulates on a CPU and nowhere else.

    Raises:
        ValueError: On a device without the kernel and without a word from the user: emulation there is slower than
            BF16, so it is never chosen silently. Blockwise has no kernel on a CPU at all.
    """
    if emulate is not None:
        if not emulate and device_type == "cuda" and (capability is None or capability < recipe.min_capability):
            raise ValueError(_no_kernel(recipe, capability) + " Set `fp8_emulate=True`, or `fp8_recipe=None`.")
        if not emulate and device_type == "cpu" and recipe.torchao_recipe is None:
            raise ValueError(
                f"`fp8_recipe={recipe.name!r}` has kernels for CUDA GPUs only, and this run uses a CPU. Set "
                "`fp8_emulate=None` or `fp8_emulate=True` to compute the same numbers without them."
            )
        return emulate
    if device_type == "cpu":
        return True
    if device_type == "cuda" and capability is not None and capability >= recipe.min_capability:
        return False
    if device_type == "cuda":
        raise ValueError(
            _no_kernel(recipe, capability) + " Set `fp8_emulate=True` to compute the same numbers without it (slower "
            "than BF16, for study only), or `fp8_recipe=None` to train in BF16."
        )
    raise ValueError(
        f"`fp8_recipe={recipe.name!r}` runs on CUDA GPUs and, emulated, on CPUs; this run uses a {device_type!r} "
        "device. Set `fp8_emulate=True` to emulate there, or `fp8_recipe=None` to train in BF16."
    )


def _no_kernel(recipe: Recipe, capability: tuple[int, int] | None) -> str:
    have = "none" if capability is None else ".".join(map(str, capability))
    need = ".".join(map(str, recipe.min_capability))
    return (
        f"`fp8_recipe={recipe.name!r}` needs a GPU with compute capability {need} or higher for its float8 GEMM; this "
        f"one has {have}."
    )
