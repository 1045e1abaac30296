# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""What an engine generated, a reward function returned and a backward pass left, checked before it is trained on."""

import math

import torch


def check_completions(
    prompt_ids: list[list[int]], completion_ids: list[list[int]], logprobs: list[list[float | None]] | None
) -> float:
    """
    Check one rollout, or a part of it.

    Args:
        prompt_ids, completion_ids (`list[list[int]]`): Token ids, one completion per prompt.
        logprobs (`list[list[float | None]]` or `None`):
            Log-probability of each completion token, nats. `None` for a token stands for NaN.

    Returns:
        `float`: Share of tokens whose log-probability is NaN; 0 without log-probabilities.

    Raises:
        RuntimeError: If completions are missing or empty, if there are not as many log-probabilities as tokens, or if
            more than half of them are NaN.
    """
    remedy = (
        "Nothing was trained on this. Either the engine is broken, look at its log, or an option in "
        "`generation_kwargs` is: run without it."
    )
    if len(completion_ids) != len(prompt_ids):
        raise RuntimeError(
            f"The engine gave {len(completion_ids)} completions for {len(prompt_ids)} prompts. {remedy}"
        )
    empty = sum(len(ids) == 0 for ids in completion_ids)
    if empty:
        raise RuntimeError(f"{empty} of the engine's {len(completion_ids)} completions are empty. {remedy}")
    if logprobs is None:
        return 0.0
    if [len(ids) for ids in completion_ids] != [len(row) for row in logprobs]:
        raise RuntimeError(f"The engine gave not as many log-probabilities as tokens. {remedy}")
    unscored = [value is None or math.isnan(value) for row in logprobs for value in row]
    if 2 * sum(unscored) > len(unscored):
        raise RuntimeError(
            f"{sum(unscored)} of the engine's {len(unscored)} log-probabilities are NaN: it computes NaN, and what it "
            f"samples is noise. {remedy}"
        )
    return sum(unscored) / len(unscored) if unscored else 0.0


def check_rewards(rewards_per_func: torch.Tensor, names: list[str]) -> None:
    """
    Check rewards; NaN is fine and stands for a completion that was not judged.

    Args:
        rewards_per_func (`torch.Tensor`): `(completions, reward functions)`.
        names (`list[str]`): The functions' names.

    Raises:
        ValueError: If a reward is infinite.
    """
    infinite = rewards_per_func.isinf().any(dim=0).tolist()
    found = [name for name, is_infinite in zip(names, infinite, strict=True) if is_infinite]
    if found:
        raise ValueError(
            f"The reward function {', '.join(found)} returned an infinite reward, which makes the advantages of its "
            "group infinite or NaN. Return a finite number, or None for a completion that cannot be judged."
        )


def check_grad_norm(grad_norm: torch.Tensor | float | None, step: int) -> None:
    """
    Check a gradient's norm before the optimizer uses it; `None` where it is not known.

    Raises:
        RuntimeError: If it is not finite. The weights are then as they were, on every rank.
    """
    if grad_norm is not None and not math.isfinite(grad_norm):
        raise RuntimeError(
            f"The gradient's norm is {float(grad_norm)} at step {step}: a log-probability, an importance ratio or an "
            "activation is not finite. The weights were not touched. Resume from a checkpoint; if it comes again at "
            "the same place, lower `learning_rate`, or set `fp8_recipe=None` to see whether FP8 is the cause."
        )
