# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The example script as a user runs it: without arguments (shortened), from its configs, and with wrong arguments."""

import os
import shutil
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


def short_demo(directory: Path, name: str, steps: int) -> list[str]:
    arguments = ["--output_dir", str(directory), "--config", str(ROOT / "configs" / f"{name}_demo.yaml")]
    arguments += ["--calibration_interval", "2", "--calibration_min_tokens", "10"]
    return [*arguments, "--per_device_train_batch_size", "8", "--save_steps", "8", "--max_steps", str(steps)]


def assert_ended_well(run: subprocess.CompletedProcess) -> None:
    assert run.returncode == 0, run.stderr[-3000:]
    assert not [line for line in (run.stdout + run.stderr).splitlines() if any(word in line for word in NOISE)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's output directory and what it printed, after two of its rollouts."""
    directory = tmp_path_factory.mktemp("demo")
    return directory, run_example(*short_demo(directory, "grpo", 8))


@pytest.mark.vllm
@pytest.mark.slow
def test_demo_end_to_end_and_resume(demo):
    directory, first = demo
    assert_ended_well(first)
    for text in ("Run summary", "Mean reward", "Clip range", "over-clipped", "Time in BF16 passes", "run.png"):
        assert text in first.stdout
    assert (directory / "run.png").stat().st_size > 20_000
    assert read_state(directory)["num_calibrations"] == 1

    second = run_example(*short_demo(directory, "grpo", 16), "--resume_from_checkpoint", "latest")
    assert_ended_well(second)
    state = read_state(directory)
    assert state["num_rollouts"] == 4 and state["num_calibrations"] == 2
    assert state["calibration_history"][0] == read_state(directory / "checkpoint-8")["calibration_history"][0]

    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    output = model.generate(**tokenizer("2+3-4=", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert output.shape[1] > 6


@pytest.mark.vllm
@pytest.mark.slow
def test_dapo_demo(demo, tmp_path):
    shutil.copytree(demo[0] / "warm_start", tmp_path / "warm_start")  # it is the same one, and takes a minute
    run = run_example(*short_demo(tmp_path, "dapo", 8), script="dapo_fp8.py")
    assert_ended_well(run)
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
