# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Which linears become FP8, decided once for the trainer and for the rollout engine.

Output heads, classification heads, embeddings, routers and adapters never do. The user's `fp8_ignore` leaves more in
BF16. What the engine fuses goes one way as a whole: vLLM quantizes q/k/v, or gate/up, together or not at all.
"""

import dataclasses
import fnmatch
import warnings
from collections.abc import Collection, Sequence

from torch import nn
from torchao.float8.float8_linear import Float8Linear

from .quantizers import packed_linear_names


# A linear with fewer outputs (a gate, a value head) loses more by quantization than its GEMM could win: ao#1200.
MIN_OUT_FEATURES = 16

# Last parts of names: heads beside the output embedding, and routers. Small errors there change a class or an expert.
HEADS = frozenset({"lm_head", "embed_out", "score", "classifier", "v_head", "value_head", "reward_head"})
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


@dataclasses.dataclass(frozen=True)
class Selection:
    """
    The linears of a model, sorted.

    Args:
        fp8 (`list[str]`): Names of the linears that become FP8, as `named_modules` has them.
        bf16 (`list[str]`): Canonical names of what else the engine would quantize: linears that stay in BF16, experts.
    """

    fp8: list[str]
    bf16: list[str]


def canonical_name(name: str) -> str:
    """A module's or parameter's name as in a checkpoint, without what PEFT wraps around it."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".modules_to_save.default", "")


def select_linears(model: nn.Module, ignore: Sequence[str] = ()) -> Selection:
    """
    Sort the linears of `model` into FP8 and BF16. It may be converted already.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): Model.
        ignore (`Sequence[str]`, *optional*): `fnmatch` patterns on canonical names of linears that stay in BF16.

    Raises:
        ValueError: If a pattern matches no linear that could be FP8, or only a part of what the engine fuses; if
            nothing is left to convert.
    """
    head = model.get_output_embeddings()
    heads = set() if head is None else set(head.modules())
    candidates: dict[str, tuple[str, nn.Linear]] = {}
    kept: list[str] = []
    for name, module in model.named_modules():
        canonical = canonical_name(name)
        parts = canonical.split(".")
        if parts[-1] == "experts" or parts[-1] in ROUTERS:
            kept.append(canonical)  # whatever class it has: the engine's are linears
            continue
        if type(module) is not nn.Linear and not isinstance(module, Float8Linear):
            continue
        if module in heads or parts[-1] in HEADS or any(part.startswith("lora_") for part in name.split(".")):
            continue
        if "original_module" in name.split("."):
            continue  # PEFT's untrained copy of a module that it saves
        if module.out_features < MIN_OUT_FEATURES:
            kept.append(canonical)
        else:
            candidates[canonical] = (name, module)
    if not candidates:
        raise ValueError(
            f"{type(model).__name__} has no `nn.Linear` that FP8 could replace (heads, routers and adapters stay in "
            "high precision). Quantized checkpoints cannot be trained in FP8: load the BF16 model."
        )
    ignored = _match(candidates, ignore)
    fused = packed_linear_names([*candidates, *kept])
    for group in fused:
        inside = [name for name in group if name in ignored]
        if inside and len(inside) < len(group):
            raise ValueError(
                f"`fp8_ignore={list(ignore)}` leaves {', '.join(inside)} in BF16 and converts "
                f"{', '.join(name for name in group if name not in ignored)}. vLLM fuses these into one linear, which "
                "is FP8 or BF16 as a whole: name all of them, or none."
            )
        if any(name in kept for name in group):
            ignored.update(name for name in group if name in candidates)
    if len(ignored) == len(candidates):
        raise ValueError(
            f"`fp8_ignore={list(ignore)}` leaves every linear in BF16. For BF16 training set `fp8_recipe=None`, for "
            "BF16 rollout `fp8_rollout='off'`."
        )
    return Selection(
        fp8=[name for canonical, (name, _) in candidates.items() if canonical not in ignored],
        bf16=[*kept, *(canonical for canonical in candidates if canonical in ignored)],
    )


def _match(names: Collection[str], patterns: Sequence[str]) -> set[str]:
    matched: set[str] = set()
    for pattern in patterns:
        found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(
                f"The pattern {pattern!r} in `fp8_ignore` matches no linear that would be FP8. Patterns are matched "
                f"against full names such as {next(iter(names))!r}, with `*` for any text; heads, embeddings, routers "
                "and adapters are never FP8 and need no pattern."
            )
        matched.update(found)
    return matched


def expert_modules(model: nn.Module) -> list[str]:
    """Names of the modules that hold a mixture of experts, empty for a dense model."""
    return [
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts" or "Experts" in type(module).__name__
    ]


def refuse_moe(model: nn.Module, *, allow: bool) -> None:
    """
    Refuse a mixture of experts, or warn where the user allowed it.

    Raises:
        NotImplementedError: If the model has experts and `allow` is not set.
    """
    experts = expert_modules(model)
    if not experts:
        return
    found = f"{type(model).__name__} is a mixture of experts ({canonical_name(experts[0])})"
    if not allow:
        raise NotImplementedError(
            f"{found}. Trainer and rollout can route a token to different experts, and no importance weight corrects "
            "that; its experts are no `nn.Linear` and would stay in BF16. Use a dense model, `fp8_recipe=None` with "
            "`fp8_rollout='off'`, or set `fp8_allow_moe=True` to go on regardless."
        )
    warnings.warn(
        f"{found}: routers and experts stay in BF16 on both sides, only the other linears are FP8, and a token that "
        "is routed otherwise in trainer and rollout is not corrected by any importance weight. Watch the mismatch "
        "metrics.",
        stacklevel=2,
    )
