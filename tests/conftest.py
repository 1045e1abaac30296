# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Fixtures: a small random model on disk, and short ways to a config and a trainer on it."""

import os


# Before any import of vLLM, which reads them once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
# One thread: the models are too small for two, and on a busy machine threads wait for one another at every operation.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402

from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer  # noqa: E402
from trl_calclip.embedded import build_model, build_tokenizer  # noqa: E402


# Four updates per rollout, of which every second calibrates.
SETTINGS = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "steps_per_generation": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "max_steps": 8,
    "calibration_interval": 2,
    "calibration_min_tokens": 1,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "seed": 7,
}


@pytest.fixture(autouse=True)
def no_launcher_variables():
    """TRL leaves a launcher's variables behind when it builds an engine; later trainers would heed them."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        os.environ.pop(name, None)
    yield
    for name in names:
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def toy_path(tmp_path_factory) -> str:
    """Directory of a random two-layer Qwen3 with the embedded character tokenizer."""
    path = str(tmp_path_factory.mktemp("toy"))
    model = build_model(seed=0, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 2:
                param.div_(3)  # near-uniform next tokens: completions differ, and so do their rewards
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def toy_dataset() -> Dataset:
    """Sixty-four sums as plain-text prompts."""
    return Dataset.from_dict({"prompt": [f"{i % 10}+{i // 10}=" for i in range(64)]})


def digits_reward(completions, **kwargs) -> list[float]:
    """Share of even digits: differs between the completions of a random model, so that advantages do."""
    return [sum(text.count(digit) for digit in "02468") / max(len(text), 1) for text in completions]


@pytest.fixture
def make_config(tmp_path):
    """Function from overrides to a config with four updates per rollout, of which every second calibrates."""

    def build(**overrides) -> CalibratedGRPOConfig:
        return CalibratedGRPOConfig(**{"output_dir": str(tmp_path / "run"), **SETTINGS, **overrides})

    return build


@pytest.fixture
def make_trainer(make_config, toy_path, toy_dataset):
    """Function from overrides of the config to a trainer on the toy model. Trainer arguments go in `trainer={...}`."""

    def build(trainer: dict | None = None, **overrides) -> CalibratedGRPOTrainer:
        arguments = {"model": toy_path, "reward_funcs": digits_reward, "train_dataset": toy_dataset, **(trainer or {})}
        return CalibratedGRPOTrainer(args=make_config(**overrides), **arguments)

    return build
