# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Proof that trainer and rollout engine hold the same numbers: which layers are FP8 on each side, payload bits and
scales.

Log-probabilities of a probe tell a broken sync from a sound one, but not a stale weight from a fresh one after an
update of 1e-6, nor a scale rule that differs in the last bit. Stored bits tell both.
"""

import dataclasses
import math

import torch
from torch import nn

from .._trl_compat import engine_model, engine_quantization, engine_weight_names, merged_adapters
from .linear import SwitchableFloat8Linear
from .quantizers import FP8_DTYPE
from .recipes import Recipe, recipe_of_scheme
from .selection import canonical_name


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """
    How far the two sides may be apart.

    Args:
        payload_share (`float`): Largest share of a layer's payloads that differ.
        payload_steps (`int`): Largest difference of one payload, in FP8 steps.
        scale (`float`): Largest relative difference of a scale.
    """

    payload_share: float = 0.0
    payload_steps: int = 0
    scale: float = 0.0


EXACT = Tolerance()
# vLLM's compiled per-block quantizer multiplies by 1/448, and torchao's kernels by 448/amax: a scale may be one unit
# in the last place off, and a payload next to a midpoint then goes the other way.
GPU_TOLERANCE = Tolerance(payload_share=1e-3, payload_steps=1, scale=2**-22)


@dataclasses.dataclass(frozen=True)
class LayerAlignment:
    """
    One weight on both sides.

    Args:
        name (`str`): Name as in a checkpoint, without `.weight`.
        trainer_fp8 (`bool`): Whether the trainer computes with it in FP8.
        engine_fp8 (`bool`): Whether the engine does.
        payload_share (`float`): Share of stored numbers that are not the trainer's; NaN if the engine's cannot be
            read.
        payload_steps (`int`): Largest difference of a payload in FP8 steps, 0 for a BF16 weight.
        scale (`float`): Largest relative difference of a scale, 0 for a BF16 weight, NaN if it cannot be read.
    """

    name: str
    trainer_fp8: bool
    engine_fp8: bool
    payload_share: float
    payload_steps: int = 0
    scale: float = 0.0

    @property
    def readable(self) -> bool:
        """Whether the engine keeps the weight in a form that can be compared."""
        return not math.isnan(self.payload_share)

    def within(self, tolerance: Tolerance) -> bool:
        """
        Whether the stored numbers agree. A BF16 weight must agree exactly; one that cannot be read counts as equal.
        """
        if not self.readable:
            return True
        if not self.engine_fp8:
            return self.payload_share == 0
        return (
            self.payload_share <= tolerance.payload_share
            and self.payload_steps <= tolerance.payload_steps
            and self.scale <= tolerance.scale
        )


@dataclasses.dataclass(frozen=True)
class AlignmentReport:
    """
    What trainer and engine hold, weight by weight. `str()` of it is one line.

    Args:
        layers (`list[LayerAlignment]`): Weights, in the engine's order.
        trainer_recipe (`str` or `None`): Recipe of the trainer's float8 linears, `None` in BF16.
        engine_recipe (`str` or `None`): Recipe whose weights the engine stores, `None` in BF16.
    """

    layers: list[LayerAlignment]
    trainer_recipe: str | None
    engine_recipe: str | None

    @property
    def one_sided(self) -> list[LayerAlignment]:
        """Layers that are FP8 on one side only, while both sides have FP8 layers."""
        if self.trainer_recipe is None or self.engine_recipe is None:
            return []
        return [layer for layer in self.layers if layer.trainer_fp8 != layer.engine_fp8]

    def different(self, tolerance: Tolerance = EXACT) -> list[LayerAlignment]:
        """Layers whose stored numbers are further apart than `tolerance`."""
        return [layer for layer in self.layers if not layer.within(tolerance)]

    def raise_on_difference(self, tolerance: Tolerance = EXACT) -> None:
        """
        Raise if the two sides do not hold the same.

        Raises:
            RuntimeError: If a layer is FP8 on one side only or its numbers differ by more than `tolerance`, with the
                layers' names.
        """
        problems = [
            f"{layer.name} is FP8 in the {'trainer' if layer.trainer_fp8 else 'engine'} only"
            for layer in self.one_sided
        ] + [
            f"{layer.name} ({layer.payload_share:.2%} of its numbers, by up to {layer.payload_steps} FP8 steps; "
            f"scales by {layer.scale:.1e})"
            for layer in self.different(tolerance)
        ]
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise RuntimeError(
                f"Trainer and rollout engine do not hold the same weights: {shown}. Rollouts come from another policy "
                "than the one trained: a weight sync was left out or did not arrive, or the two sides quantize by "
                "different rules."
            )

    def __str__(self) -> str:
        fp8 = [layer for layer in self.layers if layer.engine_fp8]
        both = sum(layer.trainer_fp8 for layer in fp8)
        unread = sum(not layer.readable for layer in self.layers)
        equal = sum(layer.within(EXACT) and layer.readable for layer in self.layers)
        return (
            f"FP8 alignment: trainer {self.trainer_recipe or 'BF16'}, engine {self.engine_recipe or 'BF16'}; "
            f"{len(fp8)} FP8 weights in the engine, {both} of them in the trainer; {equal} of {len(self.layers)} "
            "weights equal bit for bit" + (f", {unread} cannot be read back" if unread else "")
        )


@torch.no_grad()
def alignment_report(model: nn.Module, llm) -> AlignmentReport:
    """
    Compare a trainer's weights, quantized by the recipe's rule, with what an in-process vLLM engine stores.

    Adapters are merged one layer at a time, as for a weight sync, and taken out again without a trace.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): The trainer's model, not sharded.
        llm (`vllm.LLM`): Engine, without tensor parallelism.

    Returns:
        [`AlignmentReport`]: One entry per linear that is FP8 on either side and per weight that the engine keeps in
        BF16.
    """
    engine = engine_model(llm)
    quantization = engine_quantization(llm)
    engine_recipe = None if quantization is None else recipe_of_scheme(quantization)
    names = {
        engine_name: name
        for name, engine_name in engine_weight_names(
            llm, (canonical_name(name) for name, _ in model.named_parameters())
        )
    }
    trainer = {canonical_name(name): (name, param) for name, param in model.named_parameters()}
    modules = dict(engine.named_modules())
    layers: list[LayerAlignment] = []
    seen: set[str] = set()
    for engine_name, param in engine.named_parameters():
        path, _, leaf = engine_name.rpartition(".")
        if leaf.startswith("weight_scale"):
            continue
        parts = [f"{path.rpartition('.')[0]}.{part}".lstrip(".") for part in _parts(engine, path)]
        found = [names[f"{part}.{leaf}"] for part in parts if f"{part}.{leaf}" in names]
        if len(found) < len(parts):
            continue  # something of the engine's own; missing weights are found by name before a sync
        seen.update(found)
        if param.dtype is FP8_DTYPE:
            assert engine_recipe is not None, f"{engine_name} is FP8 in an engine without quantization"
            layers += _compare_fp8(model, modules[path], [trainer[name][0] for name in found], engine_recipe)
        else:
            layers += _compare_bf16(model, param, [trainer[name][0] for name in found])
    trainer_recipes = {module.recipe.name for module in model.modules() if isinstance(module, SwitchableFloat8Linear)}
    return AlignmentReport(
        layers, next(iter(trainer_recipes), None), None if engine_recipe is None else engine_recipe.name
    )


def _parts(engine: nn.Module, path: str) -> list[str]:
    """Last parts of the names of the linears that an engine's module is made of."""
    leaf = path.rpartition(".")[2]
    return list(engine.packed_modules_mapping.get(leaf, [leaf]))


def _merged_weight(model: nn.Module, name: str) -> torch.Tensor:
    """A parameter as a sync hands it over: adapters merged, BF16, a copy."""
    with merged_adapters(model, name):
        return model.get_parameter(name).detach().to(torch.bfloat16, copy=True)


def _trainer_module(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _compare_fp8(model: nn.Module, layer: nn.Module, names: list[str], recipe: Recipe) -> list[LayerAlignment]:
    weights = [_merged_weight(model, name) for name in names]
    modules = [_trainer_module(model, name) for name in names]
    blocks = "weight_scale_inv" in dict(layer.named_parameters(recurse=False))
    payload = layer.weight if blocks else layer.weight.t()
    scale = layer.weight_scale_inv if blocks else layer.weight_scale
    rows = sum(weight.shape[0] for weight in weights)
    readable = tuple(payload.shape) == (rows, weights[0].shape[1]) and scale.dtype is torch.float32
    amax = None
    if recipe.shares_weight_scale:
        plain = [isinstance(m, SwitchableFloat8Linear) and m.recipe.matches(recipe) for m in modules]
        if all(plain) and not any(".base_layer." in name for name in names):
            amax = modules[0].weight_amax()  # what the trainer itself computes with
        else:  # the trainer runs in BF16, or with another weight: a base beside its adapter
            amax = torch.stack([weight.abs().amax() for weight in weights]).amax()
    result, row, scale_row = [], 0, 0
    for name, module, weight in zip(names, modules, weights, strict=True):
        trainer_fp8 = isinstance(module, SwitchableFloat8Linear)
        label = canonical_name(name).removesuffix(".weight")
        if not readable:
            result.append(LayerAlignment(label, trainer_fp8, True, math.nan, 0, math.nan))
            continue
        expected, expected_scale = recipe.quantize_weight(weight, amax)
        stored = payload[row : row + weight.shape[0]]
        row += weight.shape[0]
        stored_scale = scale.reshape(-1)
        if not recipe.shares_weight_scale:
            count = expected_scale.shape[0]
            stored_scale = scale[scale_row : scale_row + count].reshape(-1)
            scale_row += count
        steps = (_ordinal(stored) - _ordinal(expected)).abs()
        wanted = expected_scale.reshape(-1)
        result.append(
            LayerAlignment(
                label,
                trainer_fp8,
                True,
                (steps > 0).float().mean().item(),
                int(steps.max().item()),
                ((stored_scale - wanted).abs() / wanted).max().item()
                if stored_scale.shape == wanted.shape
                else math.inf,
            )
        )
    return result


def _ordinal(payload: torch.Tensor) -> torch.Tensor:
    """FP8 numbers as integers in their order, so that a difference counts steps."""
    bits = payload.contiguous().view(torch.uint8).to(torch.int16)
    magnitude = bits & 0x7F
    return torch.where(bits >= 0x80, -magnitude, magnitude)


def _compare_bf16(model: nn.Module, param: torch.Tensor, names: list[str]) -> list[LayerAlignment]:
    result, row = [], 0
    for name in names:
        weight = _merged_weight(model, name)
        label = canonical_name(name).removesuffix(".weight")
        trainer_fp8 = isinstance(_trainer_module(model, name), SwitchableFloat8Linear) and name.endswith("weight")
        stored = param[row : row + weight.shape[0]]
        row += weight.shape[0]
        # vLLM pads vocabularies, and on a CPU packs BF16 linears into a form of their own.
        readable = stored.shape == weight.shape and param.dtype is torch.bfloat16
        share = (stored != weight).float().mean().item() if readable else math.nan
        result.append(LayerAlignment(label, trainer_fp8, False, share))
    return result
