# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""What TRL's trainer can do, ours does unchanged, with calibration on."""

import pytest
import torch
from conftest import digits_reward
from datasets import Dataset
from peft import LoraConfig
from tokenizers.models import WordLevel

from trl_calclip.embedded import build_tokenizer
from trl_calclip.fp8.linear import bf16_pass


pytest_plugins = ["recording"]
pytestmark = pytest.mark.slow


def short_reward(completions, **kwargs) -> list[float]:
    """Prefers short completions."""
    return [-float(len(text)) for text in completions]


def logged(trainer, name: str) -> list[float]:
    """Values of metric `name` over the run."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_plain_prompts(make_recorder):
    trainer = make_recorder()
    trainer.train()
    trainer.assert_calibrated()
