# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""`torch.compile` with the BF16 switch: compiled once for each mode and not in the steps that follow, same numbers."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import TrainerCallback

from trl_calclip.embedded import build_model
from trl_calclip.fp8.linear import bf16_pass, convert_to_fp8
from trl_calclip.fp8.recipes import RECIPES


pytest_plugins = ["recording"]
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def step(model, length: int) -> list[torch.Tensor]:
    """What a step of a calibration batch runs: a BF16 pass, an FP8 pass for the old policy, FP8 forward, backward."""
    tokens = torch.randint(2, 20, (2, length), generator=torch.Generator().manual_seed(length))
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            with bf16_pass(model):
                bf16 = model(tokens, use_cache=False).logits.float()
            old = model(tokens, use_cache=False).logits.float()
        logits = model(tokens, use_cache=False).logits.float()
    model.zero_grad()
    logits.log_softmax(-1)[..., 3].mean().backward()
    return [bf16, old, logits.detach(), *(param.grad.clone() for param in model.parameters())]


@pytest.mark.parametrize(
    ("recipe", "checkpointing"), [("tensorwise", False), ("rowwise", False), ("blockwise", False), ("rowwise", True)]
)
def test_compiled_layers_are_compiled_once_for_each_mode(recipe, checkpointing):
    eager = build_model(seed=0, hidden_size=64, intermediate_size=128, num_hidden_layers=3)
    convert_to_fp8(eager, RECIPES[recipe], emulate=True)
    compiled = copy.deepcopy(eager)
    for layer in compiled.model.layers:
        layer.compile(backend="aot_eager", dynamic=True)
    for model in (eager, compiled):
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    seen = []
    for length in (8, 9, 11, 8, 13):
        for value, expected in zip(step(compiled, length), step(eager, length), strict=True):
            assert torch.equal(value, expected)
        seen.append(num_graphs())
    assert seen[0] >= 2 and seen[1:] == seen[:1] * 4, seen
    # far below the limit at which torch stops compiling without a word, for three layers as for one
    assert seen[0] <= 6, seen


class CountGraphs(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(num_graphs())


def test_torch_compile_of_the_training_arguments(make_recorder):
    settings = {"max_steps": 16, "calibration_interval": 1, "torch_compile_backend": "aot_eager"}
    count = CountGraphs()
    trainer = make_recorder(trainer={"callbacks": [count]}, torch_compile=True, **settings)
    trainer.train()
    trainer.assert_calibrated()
    assert count.seen[-1] > 0
    assert count.seen[8:] == count.seen[7:8] * 8, count.seen
    assert all(record["zero_drift_std_fp8"] == 0 for record in trainer.calibration_history)
