# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
A trainer's arguments, checked before a model is loaded or an engine started.

What TRL finds out only at the first rollout, or never: without a reward function it trains on advantages of 0.
"""

import inspect
import os

from datasets import Dataset, IterableDataset
from torch import nn
from trl import GRPOTrainer


_SIGNATURE = inspect.signature(GRPOTrainer.__init__)


def check_arguments(*args, **kwargs) -> None:
    """
    Check what `GRPOTrainer` is about to be called with.

    Raises:
        TypeError: If the model, a reward function or the training dataset is of no type that can serve, or an argument
            does not exist.
        ValueError: If the model's directory does not exist, there is no reward, or the dataset has no prompts.
    """
    arguments = _SIGNATURE.bind(None, *args, **kwargs).arguments
    has_environment = arguments.get("environment_factory") is not None
    _check_model(arguments["model"])
    _check_rewards(arguments.get("reward_funcs"), has_environment)
    _check_dataset(arguments.get("train_dataset"), has_environment)


def _check_model(model) -> None:
    if not isinstance(model, (str, nn.Module)):
        raise TypeError(
            f"`model` must be a name, a directory or a loaded model, got {type(model).__name__}. Use the name of a "
            "causal language model, such as 'Qwen/Qwen3-0.6B'."
        )
    if not isinstance(model, str):
        return
    if os.path.isdir(model) and not os.path.exists(os.path.join(model, "config.json")):
        raise ValueError(
            f"`model={model!r}` is a directory without `config.json`. Give one that `save_pretrained` wrote; of an "
            "adapter load the model with `peft` and pass it."
        )
    if model.startswith(("/", "./", "../")) and not os.path.isdir(model):
        raise ValueError(
            f"`model={model!r}` is a path, and there is no such directory. Give the directory of a saved model, or "
            "its name on the Hub."
        )


def _check_rewards(reward_funcs, has_environment: bool) -> None:
    functions = reward_funcs if isinstance(reward_funcs, list) else [] if reward_funcs is None else [reward_funcs]
    if not functions and not has_environment:
        raise ValueError(
            f"`reward_funcs={reward_funcs!r}`: without a reward every advantage is 0 and nothing is learned. Give a "
            "function, a reward model, or a list of them."
        )
    for function in functions:
        if not (callable(function) or isinstance(function, str)):
            raise TypeError(
                f"`reward_funcs` must hold functions, reward models or their names, got {function!r}. Give a function "
                "that returns a list with one number for each completion."
            )


def _check_dataset(dataset, has_environment: bool) -> None:
    if not isinstance(dataset, (Dataset, IterableDataset)):
        if dataset is None and has_environment:
            return
        raise TypeError(
            f"`train_dataset` must be a `datasets.Dataset` or `IterableDataset`, got {type(dataset).__name__}. Load "
            "one with `datasets.load_dataset`; of a dictionary of splits pass one, e.g. `dataset['train']`."
        )
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(
            "`train_dataset` is empty: there is nothing to roll out. Give one with examples; a filter may have "
            "dropped all of them."
        )
    columns = dataset.column_names
    if columns is not None and "prompt" not in columns and not has_environment:
        raise ValueError(
            f"`train_dataset` has no column `prompt`, it has {', '.join(columns) or 'none'}. Use "
            "`dataset.rename_column(name, 'prompt')` for the one that holds the prompts."
        )
