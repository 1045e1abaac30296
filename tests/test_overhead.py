# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""With everything off the trainer adds nothing to TRL's, counted in tensor operations."""

import collections
import dataclasses

from conftest import digits_reward
from torch.utils._python_dispatch import TorchDispatchMode
from trl import GRPOConfig, GRPOTrainer


class CountOperations(TorchDispatchMode):
    """Every tensor operation of this thread: forwards, allocations, copies, synchronizing reads, collectives."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def operations(trainer) -> collections.Counter:
    with CountOperations() as mode:
        trainer.train()
    return mode.counts


def plain_trl(config, toy_path, toy_dataset, **changes) -> GRPOTrainer:
    names = {field.name for field in dataclasses.fields(GRPOConfig) if field.init}
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name in names}
    settings |= {"generation_batch_size": None, **changes}
    return GRPOTrainer(toy_path, digits_reward, GRPOConfig(**settings), train_dataset=toy_dataset)


def test_everything_off_adds_no_operation(make_trainer, make_config, toy_path, toy_dataset):
    off = {"calibrated_clip": False, "fp8_recipe": None, "max_steps": 8, "num_iterations": 2}
    ours = operations(make_trainer(**off))
    theirs = operations(plain_trl(make_config(**off), toy_path, toy_dataset, epsilon_high=None))
    assert ours["aten.mm.default"] > 100 and ours["aten._local_scalar_dense.default"] > 100
    assert ours == theirs, {name: (ours[name], theirs[name]) for name in ours | theirs if ours[name] != theirs[name]}
