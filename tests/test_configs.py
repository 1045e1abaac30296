# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Every file under `configs/` loads, says what it is for, and its numbers are the paper's and the memory table's."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from datasets import Dataset, load_dataset
from trl import ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from trl_calclip import CalibratedDAPOConfig, CalibratedGRPOConfig
from trl_calclip.memory import SETTINGS, estimate_memory


ROOT = Path(__file__).parents[1]
RUNS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if "qwen" in path.name)
ACCELERATE = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))


def load(path: Path, tmp_path: Path, *overrides: str):
    arguments = ["--config", str(path), "--output_dir", str(tmp_path), *overrides]
    if not torch.cuda.is_available():
        arguments += ["--use_cpu", "true"]
    config_class = CalibratedDAPOConfig if path.name.startswith("dapo") else CalibratedGRPOConfig
    parser = TrlParser((GRPOScriptArguments, config_class, ModelConfig))
    return parser.parse_args_and_config(arguments)


def test_what_must_be_there():
    names = {path.stem for path in RUNS}
    assert names == {
        *(f"grpo_qwen3_8b_{kind}" for kind in ("rowwise", "tensorwise", "blockwise", "bf16", "fp8_rollout")),
        "grpo_qwen25_32b",
        "dapo_qwen3_14b",
    }
    assert {path.stem for path in ACCELERATE} == {"one_gpu", "ddp", "fsdp2", "zero3", "two_nodes"}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_run_file(path, tmp_path):
    script_args, args, model_args = load(path, tmp_path)
    header = "".join(line[1:] for line in path.read_text().splitlines() if line.startswith("#"))
    gpus = int(re.search(r"Hardware: (\d+) GPUs", header)[1])
    assert "Memory: about" in header and "Written, not run" in header and f"configs/{path.name}" in header
    assert args.output_dir == str(tmp_path) and script_args.reward_funcs == ["accuracy_reward"]
    assert model_args.dtype == "float32"

    # 256 prompts in mini-batches of 64, four updates
    completions = gpus * args.per_device_train_batch_size * args.steps_per_generation
    per_update = gpus * args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert (completions, per_update) == (256 * args.num_generations, 64 * args.num_generations)
    assert args.updates_per_rollout == 4
    dapo = path.stem.startswith("dapo")
    assert (args.num_generations, args.max_steps) == ((16, 200) if dapo else (8, 500))
    assert (args.epsilon, args.epsilon_high) == (0.2, 0.28 if dapo else 0.24)
    assert (args.learning_rate, args.beta) == (1e-6, 0.0)
    assert args.vllm_importance_sampling_mode == "token_truncate" and args.vllm_importance_sampling_clip_max == 2.0
    assert args.max_completion_length + 1024 <= args.vllm_max_model_length

    # the memory estimate in the header is that of the table's settings, which are the file's
    name = model_args.model_name_or_path.split("/")[1]
    config, settings = next(
        (config, settings) for model, config, _, settings in SETTINGS
        if model == name and settings["parallelism"] == "fsdp2"
    )  # fmt: skip
    assert settings["num_gpus"] == gpus and settings["micro_batch_size"] == args.per_device_train_batch_size
    assert settings["sequence_length"] == args.vllm_max_model_length
    assert settings.get("tensor_parallel_size", 1) == args.vllm_tensor_parallel_size
    estimate = estimate_memory(config, **settings, fp8_rollout=args.rollout_recipe is not None)
    stated = float(re.search(r"Memory: about (\d+) GiB", header)[1])
    assert stated == pytest.approx(estimate.total / 2**30, abs=1)
    engine = (estimate.vllm_weights + estimate.vllm_kv_cache) / 2**30
    assert engine < 80e9 / 2**30 * args.vllm_gpu_memory_utilization


def test_recipes_of_the_run_files(tmp_path):
    for path in RUNS:
        _, args, _ = load(path, tmp_path)
        recipes = (
            args.training_recipe and args.training_recipe.name,
            args.rollout_recipe and args.rollout_recipe.name,
        )
        kind = path.stem.removeprefix("grpo_qwen3_8b_")
        expected = {"bf16": (None, None), "fp8_rollout": (None, "rowwise")}
        recipe = kind if kind in ("rowwise", "tensorwise") else "blockwise"
        assert recipes == expected.get(kind, (recipe, recipe))
        assert args.calibrated_clip is (kind not in expected)


@pytest.mark.parametrize("name", ["grpo_qwen25_32b", "dapo_qwen3_14b"])
def test_overrides_that_the_headers_name(tmp_path, name):
    path = ROOT / "configs" / f"{name}.yaml"
    header = " ".join(line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
    overrides = [text for text in re.findall(r"`(--[^`]+)`", header)]
    assert len(overrides) == 4
    seen = set()
    for text in overrides:
        _, args, _ = load(path, tmp_path, *text.split())
        seen.add((args.fp8_recipe, args.rollout_recipe and args.rollout_recipe.name, args.calibrated_clip))
    assert seen == {
        ("rowwise", "rowwise", True),
        ("blockwise", "blockwise", False),
        (None, None, False),
        (None, "blockwise", False),
    }


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_file(path):
    config = load_config_from_file(str(path))
    assert config.mixed_precision == "bf16" and not config.fp8_config
    text = path.read_text()
    assert text.startswith("#") and f"configs/accelerate/{path.name}" in text and "ritten, not run" in text
    raw = yaml.safe_load(text)
    distributed = {"one_gpu": "NO", "ddp": "MULTI_GPU", "zero3": "DEEPSPEED"}.get(path.stem, "FSDP")
    assert config.distributed_type.value == raw["distributed_type"] == distributed
    machines, processes = {"one_gpu": (1, 1), "two_nodes": (2, 16)}.get(path.stem, (1, 8))
    assert (config.num_machines, config.num_processes) == (machines, processes)
    if distributed == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2
    if distributed == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == 3


def test_prepared_data_are_in_trls_form(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import prepare_maths

    rows = {"problem": ["What is 1+1?"], "answer": ["2"], "solution": ["Long."]}
    data = Dataset.from_dict(rows)
    data = data.map(
        prepare_maths.to_example, fn_kwargs={"question": "problem", "answer": "answer"},
        remove_columns=data.column_names,
    )  # fmt: skip
    data.to_parquet(tmp_path / "train.parquet")
    (row,) = load_dataset(str(tmp_path))["train"]
    assert row["solution"] == "$2$" and set(row) == {"prompt", "solution"}
    assert row["prompt"][0]["role"] == "user" and row["prompt"][0]["content"].startswith("What is 1+1?\n\nPlease")
