# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The one table of FP8 recipes: what torchao trains with, what vLLM rolls out with, and what the hardware must offer."""

import dataclasses

import torch
from torchao.float8 import Float8LinearConfig


@dataclasses.dataclass(frozen=True)
class Recipe:
    """
    One FP8 recipe, for the trainer and for the rollout engine.

    Args:
        name (`str`): Value of `fp8_recipe` and `fp8_rollout`.
        torchao_recipe (`str`): Name for `Float8LinearConfig.from_recipe_name`.
        vllm_quantization (`str`): vLLM's online quantization scheme with the same scales.
        min_capability (`tuple[int, int]`): Lowest CUDA compute capability with the training kernel.
        dim_multiple (`int`): What the kernel wants the in and out features of a linear to be a multiple of.
    """

    name: str
    torchao_recipe: str
    vllm_quantization: str
    min_capability: tuple[int, int]
    dim_multiple: int

    def torchao_config(self, *, emulate: bool) -> Float8LinearConfig:
        """
        torchao's configuration of this recipe.

        Scales are exact, not rounded to powers of two as torchao's rowwise default has them: vLLM's are exact too, and
        BF16 weights sit on FP8 midpoints under power-of-two scales, so that the first small update flips many at once.
        Contracted dimensions are padded for the GPU's GEMM: one of them is the micro-batch's number of tokens, which
        is whatever the completions made it.
        """
        config = Float8LinearConfig.from_recipe_name(self.torchao_recipe)
        return dataclasses.replace(
            config, emulate=emulate, pad_inner_dim=not emulate, round_scales_to_power_of_2=False
        )


RECIPES = {
    recipe.name: recipe
    for recipe in [
        Recipe(
            name="rowwise",
            torchao_recipe="rowwise",
            vllm_quantization="fp8_per_channel",
            min_capability=(9, 0),
            dim_multiple=16,
        ),
    ]
}

# Named by the method, not there yet: refused with a sentence of their own.
PLANNED_RECIPES = ("tensorwise", "rowwise_with_gw_hp", "blockwise")


def get_recipe(name: str) -> Recipe:
    """
    The recipe called `name`.

    Raises:
        NotImplementedError: For a recipe that is planned and not there yet.
        ValueError: For any other unknown name.
    """
    if name in RECIPES:
        return RECIPES[name]
    if name in PLANNED_RECIPES:
        raise NotImplementedError(f"The FP8 recipe {name!r} is not there yet. Use one of {sorted(RECIPES)}.")
    raise ValueError(f"Unknown FP8 recipe {name!r}. Use one of {sorted(RECIPES)}, or None for no FP8 training.")


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
            BF16, so it is never chosen silently.
    """
    if emulate is not None:
        if not emulate and device_type == "cuda" and (capability is None or capability < recipe.min_capability):
            raise ValueError(_no_kernel(recipe, capability) + " Set `fp8_emulate=True`, or `fp8_recipe=None`.")
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
        f"`fp8_recipe={recipe.name!r}` runs on CUDA GPUs and, emulated, on CPUs; this run uses a {device_type!r} device. "
        "Set `fp8_emulate=True` to emulate there, or `fp8_recipe=None` to train in BF16."
    )


def _no_kernel(recipe: Recipe, capability: tuple[int, int] | None) -> str:
    have = "none" if capability is None else ".".join(map(str, capability))
    need = ".".join(map(str, recipe.min_capability))
    return (
        f"`fp8_recipe={recipe.name!r}` needs a GPU with compute capability {need} or higher for its float8 GEMM; this "
        f"one has {have}."
    )
