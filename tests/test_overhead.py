# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
What the trainer adds to TRL's, counted: nothing with everything off; for a calibration the forwards that
`docs/method.md` names and one collective.
"""

import collections
import dataclasses
import json

import pytest
import torch
from conftest import digits_reward
from launching import torchrun
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


# Calibration: forwards

FIXED = {"calibrated_clip": False}
SAME_LENGTH = {"generation_kwargs": {"min_new_tokens": 8}}  # so that every arm generates as many tokens


def forwards(trainer) -> collections.Counter:
    """Forwards of the model in a run, by what they are for."""
    counts = collections.Counter()

    def count(module, args, kwargs):
        scores = "training" if torch.is_grad_enabled() else "scoring"
        counts["generation" if kwargs.get("use_cache") else scores] += 1

    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.train()
    return counts


def extra_forwards(make_trainer, **overrides) -> tuple[collections.Counter, collections.Counter]:
    """Of a calibrated run: how many more forwards than with fixed bounds, and those of fixed bounds."""
    uncalibrated = {name: value for name, value in overrides.items() if not name.startswith("calibration_")}
    fixed = make_trainer(**FIXED, **SAME_LENGTH, calibration_interval=20, calibration_min_tokens=300, **uncalibrated)
    calibrated = make_trainer(**SAME_LENGTH, **{"calibration_interval": 20, **overrides})
    base, counts = forwards(fixed), forwards(calibrated)
    assert len(calibrated.calibration_history) == 1
    assert min(base[kind] for kind in ("training", "scoring", "generation")) > 0
    return collections.Counter({kind: counts[kind] - base[kind] for kind in base}), base


@pytest.mark.parametrize(
    ("overrides", "old", "current"),
    [
        # Micro-batches after the first optimizer step; what comes before it is left out for both policies.
        ({}, 3, 3),
        ({"gradient_accumulation_steps": 2}, 2, 2),
        ({"steps_per_generation": 2, "num_iterations": 2}, 2, 3),  # the old policy once for each buffered micro-batch
        ({"calibration_fraction": 0.34}, 1, 1),
    ],
    ids=["four updates", "accumulation", "two iterations", "fraction"],
)
def test_calibration_adds_the_forwards_that_are_named(make_trainer, overrides, old, current):
    extra, _ = extra_forwards(make_trainer, max_steps=4, **overrides)
    assert extra == {"training": 0, "generation": 0, "scoring": old + current}


@pytest.mark.slow
def test_at_interval_20_the_extra_forwards_are_under_five_percent(make_trainer):
    extra, base = extra_forwards(make_trainer, max_steps=80)  # twenty rollouts, one calibration
    assert extra == {"training": 0, "generation": 0, "scoring": 6}
    assert base["training"] == base["scoring"] == 80
    backwards = 2 * base["training"]  # a backward counts as two forwards; generation is not counted at all
    assert extra["scoring"] / (base["training"] + base["scoring"] + backwards) <= 0.05


# Calibration: collectives

COLLECTIVES = """
import collections, dataclasses, json, sys
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode
from trl import GRPOConfig, GRPOTrainer
from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer

model, output_dir, arms = sys.argv[1:]


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.counts[function._schema.name.removeprefix("c10d::").strip("_")] += 1
        return function(*args, **(kwargs or {}))


def counted(function, into):
    def call(*args, **kwargs):
        with Collectives() as mode:
            result = function(*args, **kwargs)
        into.append(mode.counts)
        return result
    return call


def reward(completions, **_):
    return [sum(c.count(d) for d in "02468") / max(len(c), 1) for c in completions]


common = dict(
    output_dir=output_dir, per_device_train_batch_size=4, num_generations=4, steps_per_generation=4,
    max_completion_length=8, learning_rate=1e-3, max_steps=16, save_strategy="no", report_to="none", use_cpu=True,
    disable_tqdm=True, seed=7, gradient_checkpointing=False,
)
off = {"fp8_recipe": None, "calibrated_clip": False}
calibrated = {"calibration_interval": 2, "calibration_min_tokens": 1}
settings = {"trl": {}, "off": off, "fixed": {"calibrated_clip": False}, "calibrated": calibrated,
            "vllm": {**calibrated, "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 80}}
dataset = Dataset.from_dict({"prompt": [f"{i % 10}+{i // 10}=" for i in range(64)]})
result = {}
for arm in arms.split(","):
    kind, config = (GRPOTrainer, GRPOConfig) if arm == "trl" else (CalibratedGRPOTrainer, CalibratedGRPOConfig)
    trainer = kind(model, reward, config(**common, **settings[arm]), train_dataset=dataset)
    result[arm] = {"begin_rollout": [], "end_rollout": [], "sync_weights": []}
    if arm != "trl":
        trainer.begin_rollout = counted(trainer.begin_rollout, result[arm]["begin_rollout"])
        trainer.end_rollout = counted(trainer.end_rollout, result[arm]["end_rollout"])
    if arm == "vllm":
        generation = trainer.vllm_generation
        generation.sync_weights = counted(generation.sync_weights, result[arm]["sync_weights"])
    with Collectives() as mode:
        trainer.train()
    result[arm]["all"] = mode.counts
    if arm in ("calibrated", "vllm"):
        assert len(trainer.calibration_history) == 2
with open(f"{output_dir}/rank{trainer.accelerator.process_index}.json", "w") as file:
    json.dump(result, file)
"""


@pytest.mark.slow
def test_a_calibration_is_one_collective(toy_path, tmp_path):
    torchrun(tmp_path, COLLECTIVES, toy_path, tmp_path, "trl,off,fixed,calibrated", ranks=2)
    for rank in (0, 1):
        arms = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert sum(arms["trl"]["all"].values()) > 16  # gradients and metrics: they are seen
        assert arms["off"]["all"] == arms["fixed"]["all"] == arms["trl"]["all"]
        added = collections.Counter(arms["calibrated"]["all"])
        added.subtract(arms["fixed"]["all"])
        # Two calibrations, one all-gather each. And one integer for each of four rollouts, calibrated or not: whether
        # any rank was told to stop, so that all stop at the same one (`RolloutBoundaryCallback`).
        assert {name: number for name, number in added.items() if number} == {"allgather": 2, "allreduce": 4}
        assert arms["calibrated"]["end_rollout"] == [{"allgather": 1}, {}, {"allgather": 1}, {}]
        assert not any(arms["calibrated"]["begin_rollout"])


@pytest.mark.slow
@pytest.mark.vllm
def test_with_engines_a_rollout_has_one_more_and_a_self_check_another(toy_path, tmp_path):
    torchrun(tmp_path, COLLECTIVES, toy_path, tmp_path, "vllm", ranks=2)
    for rank in (0, 1):
        counts = json.loads((tmp_path / f"rank{rank}.json").read_text())["vllm"]
        assert counts["begin_rollout"] == [{"allreduce": 1}] * 4  # the mismatch metrics, with fixed bounds too
        assert counts["end_rollout"] == [{"allgather": 1}, {}, {"allgather": 1}, {}]
        assert counts["sync_weights"] == [{"allgather": 1}, {}, {}, {}]  # the self-check of the first sync
