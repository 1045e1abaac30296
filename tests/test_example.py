# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The example script as a user runs it: without arguments (shortened), from its configs, and with wrong arguments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from trl_calclip import CalibratedDAPOConfig, CalibratedGRPOConfig
from trl_calclip.checkpoint import read_state


ROOT = Path(__file__).parents[1]
NOISE = ("Triton", "Warning", "WARNING", "deprecated", "Failed to load", "Traceback")


def run_example(*arguments: str, script: str = "grpo_fp8.py") -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "examples" / script), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_LOGGING")}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.vllm
@pytest.mark.slow
def test_demo_end_to_end_and_resume(tmp_path):
    short = ["--output_dir", str(tmp_path), "--config", str(ROOT / "configs" / "grpo_demo.yaml"), "--save_steps", "8"]
    short += ["--calibration_interval", "2", "--calibration_min_tokens", "10", "--per_device_train_batch_size", "8"]
    first = run_example(*short, "--max_steps", "8")
    assert first.returncode == 0, first.stderr[-3000:]
    noisy = [line for line in (first.stdout + first.stderr).splitlines() if any(word in line for word in NOISE)]
    assert not noisy
    for text in ("Run summary", "Mean reward", "Clip range", "over-clipped", "Time in BF16 passes", "run.png"):
        assert text in first.stdout
    assert (tmp_path / "run.png").stat().st_size > 20_000
    assert read_state(tmp_path)["num_calibrations"] == 1

    second = run_example(*short, "--max_steps", "16", "--resume_from_checkpoint", "latest")
    assert second.returncode == 0, second.stderr[-3000:]
    state = read_state(tmp_path)
    assert state["num_rollouts"] == 4 and state["num_calibrations"] == 2
    assert state["calibration_history"][0] == read_state(tmp_path / "checkpoint-8")["calibration_history"][0]

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    output = model.generate(**tokenizer("2+3-4=", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert output.shape[1] > 6


@pytest.mark.vllm
@pytest.mark.slow
def test_dapo_demo(tmp_path):
    short = ["--output_dir", str(tmp_path), "--config", str(ROOT / "configs" / "dapo_demo.yaml"), "--max_steps", "8"]
    short += ["--calibration_interval", "2", "--calibration_min_tokens", "10", "--per_device_train_batch_size", "8"]
    run = run_example(*short, "--save_strategy", "no", script="dapo_fp8.py")
    assert run.returncode == 0, run.stderr[-3000:]
    noisy = [line for line in (run.stdout + run.stderr).splitlines() if any(word in line for word in NOISE)]
    assert not noisy
    state = read_state(tmp_path)
    assert state["num_calibrations"] == 1 and state["dynamic_sampling"]["position"] >= 8


def test_half_a_task_is_refused():
    result = run_example("--model_name_or_path", "some/model", "--output_dir", "unused", "--steps_per_generation", "4")
    assert result.returncode != 0
    assert "`--model_name_or_path`, `--dataset_name` and `--reward_funcs` together" in result.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_loads(path, tmp_path):
    arguments = ["--config", str(path), "--output_dir", str(tmp_path)]
    if not torch.cuda.is_available():
        arguments += ["--use_cpu", "true"]
    config_class = CalibratedDAPOConfig if path.name.startswith("dapo") else CalibratedGRPOConfig
    parser = TrlParser((GRPOScriptArguments, config_class, ModelConfig))
    _, config, _ = parser.parse_args_and_config(arguments)
    assert not config.calibrated_clip or config.updates_per_rollout >= 2
    assert path.read_text().startswith("#")
