# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The table of bad input: what is wrong, the exception, what it says. `docs/faults.md` counts its rows.

Each message names the argument and what to do about it. What a config alone shows is said when it is built, before any
model is loaded.
"""

import re
from pathlib import Path

import pytest
import torch
import transformers
from conftest import digits_reward
from datasets import Dataset
from trl import GRPOConfig, TrlParser

from trl_calclip import CalibratedDAPOConfig, CalibratedDAPOTrainer, CalibratedGRPOConfig, CalibratedGRPOTrainer
from trl_calclip.callbacks import CalibrationCallback
from trl_calclip.embedded import build_model, build_tokenizer


BASE = {"use_cpu": True, "steps_per_generation": 4, "report_to": "none"}
ADAPTIVE = {"calibration_schedule": "adaptive"}
REMEDY = re.compile(
    r"\b(set|use|must|leave|unset|widen|load|raise|choose|give|make|lower|launch|look|select|should|unknown)\b", re.I
)

CONFIGS = [
    # one update per rollout
    ({"steps_per_generation": 1}, ValueError, r"one optimizer step per rollout.*`steps_per_generation=4`"),
    (
        {"steps_per_generation": 4, "gradient_accumulation_steps": 4},
        ValueError,
        r"one optimizer step per rollout.*`steps_per_generation=16`",
    ),
    ({"steps_per_generation": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}, ValueError,
    "accumulation window"),
    # losses and ratios
    ({"loss_type": "cispo"}, ValueError, "`loss_type='cispo'` cannot be calibrated.*grpo, bnpo, dr_grpo, dapo"),
    ({"loss_type": "sapo"}, ValueError, "cannot be calibrated"),
    ({"loss_type": "vespo"}, ValueError, "cannot be calibrated"),
    ({"loss_type": "luspo"}, ValueError, "cannot be calibrated"),
    ({"loss_type": "grop"}, ValueError, "cannot be calibrated"),
    ({"importance_sampling_level": "sentence"}, ValueError, "must be 'token' or 'sequence', got 'sentence'"),
    ({"delta": 2.0}, ValueError, "`delta=2.0`"),
    ({"off_policy_mask_threshold": 0.5}, ValueError, "`off_policy_mask_threshold=0.5`"),
    ({"top_entropy_quantile": 0.2}, ValueError, "`top_entropy_quantile=0.2`"),
    # FP8
    ({"fp8_recipe": None}, ValueError, "`calibrated_clip=True` needs FP8 in the trainer"),
    ({"fp8_recipe": "none"}, ValueError, "needs FP8 in the trainer"),
    ({"fp8_recipe": "rowwize"}, ValueError, "Unknown FP8 recipe 'rowwize'.*rowwise"),
    ({"fp8_recipe": ""}, ValueError, "Unknown FP8 recipe ''"),
    ({"fp8_recipe": 8}, TypeError, "`fp8_recipe`"),
    ({"fp8_rollout": "fp8"}, ValueError, "'fp8'"),
    ({"fp8_rollout": "fp8", "use_vllm": True}, ValueError, "Unknown FP8 recipe 'fp8'"),
    ({"fp8_rollout": None, "use_vllm": True}, ValueError, "Use 'off' for BF16"),
    ({"fp8_rollout": "off"}, ValueError, "no effect without vLLM"),
    ({"fp8_rollout": "rowwise"}, ValueError, "no effect without vLLM"),
    ({"fp8_emulate": "yes"}, TypeError, "`fp8_emulate`"),
    ({"fp8_emulate": False, "fp8_recipe": "blockwise"}, ValueError, "'blockwise'` has kernels for CUDA GPUs only"),
    ({"fp8_rollout": "blockwise", "use_vllm": True}, ValueError, "'rowwise'.*'blockwise'.*different rules"),
    (
        {"fp8_recipe": "tensorwise", "fp8_rollout": "rowwise", "use_vllm": True},
        ValueError,
        "different rules.*`fp8_allow_mismatch=True`",
    ),
    ({"fp8_allow_mismatch": True, "use_vllm": True}, ValueError, "`fp8_allow_mismatch=True` has no effect"),
    ({"fp8_allow_mismatch": 1}, TypeError, "`fp8_allow_mismatch`"),
    ({"fp8_allow_moe": "yes"}, TypeError, "`fp8_allow_moe`"),
    ({"fp8_ignore": "*.o_proj"}, TypeError, "`fp8_ignore` must be a list"),
    ({"fp8_ignore": [3]}, TypeError, "`fp8_ignore` must be a list"),
    (
        {"fp8_ignore": ["*.o_proj"], "fp8_recipe": None, "calibrated_clip": False},
        ValueError,
        "`fp8_ignore=.*has no effect",
    ),
    ({"fp8_kv_cache": True}, NotImplementedError, "`fp8_kv_cache=True` is refused: vLLM 0.31 computes no scales"),
    ({"fp8_recipe": None, "calibrated_clip": False, "fp8_emulate": True}, ValueError, "no effect with `fp8_rec"),
    ({"fp16": True, "bf16": False}, ValueError, "`fp16=True`"),
    ({"use_transformers_continuous_batching": True}, ValueError, "master weights are lost"),
    # server
    ({"fp8_weight_transfer": "ftp", "use_vllm": True, "vllm_mode": "server"}, ValueError, "'filesystem', got 'ftp'"),
    ({"fp8_weight_transfer": "nccl", "use_vllm": True, "vllm_mode": "server"}, ValueError, "needs a GPU"),
    ({"fp8_weight_transfer": "filesystem"}, ValueError, "no effect without a vLLM server"),
    ({"fp8_weight_transfer": "filesystem", "use_vllm": True}, ValueError, "no effect without a vLLM server"),
    ({"fp8_weight_transfer_dir": "/x", "use_vllm": True}, ValueError, "`fp8_weight_transfer_dir='/x'` has no effect"),
    ({"fp8_weight_transfer_dir": 3, "use_vllm": True, "vllm_mode": "server"}, TypeError, "must be a path, got 3"),
    (
        {"fp8_weight_transfer_dir": "/x", "fp8_weight_transfer": "nccl", "use_vllm": True, "vllm_mode": "server"},
        ValueError,
        "has no effect: weights go by NCCL",
    ),
    ({"use_vllm": True, "vllm_enable_sleep_mode": True}, NotImplementedError, "`vllm_enable_sleep_mode"),
    ({"fp8_sync_check_interval": -1}, ValueError, "`fp8_sync_check_interval`"),
    ({"fp8_sync_check_interval": 2.5}, TypeError, "`fp8_sync_check_interval`"),
    ({"fp8_sync_check_limit": 0.0}, ValueError, "`fp8_sync_check_limit`"),
    ({"fp8_sync_check_limit": float("nan")}, ValueError, "`fp8_sync_check_limit`"),
    ({"vllm_importance_sampling_clip_max": "two"}, ValueError, "`vllm_importance_sampling_clip_max`.*'two'"),
    # calibration
    ({"calibration_interval": 0}, ValueError, "`calibration_interval` must be at least 1"),
    ({"calibration_interval": 2.5}, TypeError, "`calibration_interval`"),
    ({"calibration_interval": True}, TypeError, "`calibration_interval`"),
    ({"calibration_min_tokens": 0}, ValueError, "`calibration_min_tokens`"),
    ({"calibration_max_lower_step": 0.0}, ValueError, "`calibration_max_lower_step` must be above 0"),
    ({"calibration_max_upper_step": -0.1}, ValueError, "`calibration_max_upper_step`"),
    ({"calibration_max_upper_step": "0.1"}, TypeError, "`calibration_max_upper_step`"),
    ({"calibration_lower_limits": [0.9, 0.5]}, ValueError, "`calibration_lower_limits`.*increasing"),
    ({"calibration_lower_limits": [0.5]}, TypeError, "`calibration_lower_limits`"),
    ({"calibration_lower_limits": 0.5}, TypeError, "`calibration_lower_limits`"),
    ({"calibration_lower_limits": [0.5, 1.1]}, ValueError, "at most 1"),
    ({"calibration_upper_limits": [2.0, 1.2]}, ValueError, "`calibration_upper_limits`.*increasing"),
    ({"calibration_upper_limits": [0.9, 1.5]}, ValueError, "above 1"),
    ({"calibration_upper_limits": [1.2, float("inf")]}, ValueError, "`calibration_upper_limits`"),
    ({"calibration_upper_limits": [1.2, "2"]}, TypeError, "`calibration_upper_limits`"),
    ({"calibration_start": [1.8, 0.6]}, ValueError, "`calibration_start`"),
    ({"calibration_start": [0.4, 1.8]}, ValueError, "lower start bound is 0.4, outside"),
    ({"calibration_start": [0.6, 2.5]}, ValueError, "upper start bound is 2.5, outside"),
    ({"epsilon": 0.05}, ValueError, r"lower reference bound `1 - epsilon` is 0.95, outside its calibration limits"),
    ({"epsilon": 0.6}, ValueError, "lower reference bound"),
    ({"epsilon_high": 0.1}, ValueError, r"upper reference bound `1 \+ epsilon_high` is 1.1, outside"),
    ({"epsilon_high": 1.5}, ValueError, "upper reference bound"),
    ({"calibration_lower_limits": [0.85, 0.9], "calibration_start": [0.86, 1.8]}, ValueError, "lower reference bound"),
    # switches and numbers
    ({"calibrated_clip": "false"}, TypeError, "`calibrated_clip` must be True or False, got 'false'"),
    ({"calibrated_clip": None}, TypeError, "`calibrated_clip`"),
    ({"calibration_use_sampling_probs": "no"}, TypeError, "`calibration_use_sampling_probs` must be True or False"),
    ({"calibration_start_at_reference": 1}, TypeError, "`calibration_start_at_reference` must be True or False"),
    ({"steps_per_generation": 0}, ValueError, "`steps_per_generation` must be at least 1, got 0"),
    ({"steps_per_generation": 2.5}, TypeError, "`steps_per_generation` must be an integer"),
    ({"steps_per_generation": "4"}, TypeError, "`steps_per_generation` must be an integer"),
    ({"num_iterations": 0}, ValueError, "`num_iterations` must be at least 1"),
    ({"num_iterations": 1.5}, TypeError, "`num_iterations` must be an integer"),
    ({"gradient_accumulation_steps": 0}, ValueError, "`gradient_accumulation_steps` must be at least 1"),
    ({"per_device_train_batch_size": 0}, ValueError, "`per_device_train_batch_size` must be at least 1"),
    ({"max_completion_length": 0}, ValueError, "`max_completion_length` must be at least 1"),
    ({"max_completion_length": "long"}, TypeError, "`max_completion_length` must be an integer"),
    ({"epsilon": "0.2"}, TypeError, "`epsilon` must be a number"),
    ({"epsilon": None}, TypeError, "`epsilon` must be a number"),
    ({"epsilon": -0.1}, ValueError, "`epsilon` must be at least 0"),
    ({"epsilon": float("nan")}, ValueError, "`epsilon` must be at least 0, got nan"),
    ({"epsilon": 0.0}, ValueError, "lower reference bound `1 - epsilon` is 1"),
    ({"epsilon_high": "high"}, TypeError, "`epsilon_high` must be a number"),
    ({"epsilon_high": float("inf")}, ValueError, "`epsilon_high` must be at least 0, got inf"),
    ({"beta": -0.1}, ValueError, "`beta` must be at least 0"),
    ({"learning_rate": "1e-6"}, TypeError, "`learning_rate` must be a number, got '1e-6'"),
    ({"learning_rate": -1e-6}, ValueError, "`learning_rate` must be at least 0"),
    ({"temperature": 0.0}, ValueError, "`temperature` must be above 0"),
    ({"temperature": "hot"}, TypeError, "`temperature` must be a number"),
    ({"top_entropy_quantile": "all"}, TypeError, "`top_entropy_quantile` must be a number"),
    ({"fp8_sync_check_limit": "low"}, TypeError, "`fp8_sync_check_limit` must be a number"),
    # choices
    ({"loss_type": None}, ValueError, "`loss_type=None` cannot be calibrated"),
    ({"importance_sampling_level": None}, ValueError, "`importance_sampling_level` must be 'token' or 'sequence'"),
    ({"scale_rewards": "stdev"}, ValueError, "`scale_rewards` must be one of 'group', 'batch', 'none'"),
    ({"multi_objective_aggregation": "sum"}, ValueError, "`multi_objective_aggregation` must be one of"),
    ({"use_vllm": True, "vllm_mode": "colocated"}, ValueError, "`vllm_mode` must be one of 'colocate', 'server'"),
    ({"vllm_importance_sampling_mode": "token"}, ValueError, "`vllm_importance_sampling_mode` must be one of"),
    ({"vllm_importance_sampling_clip_max": 0.0}, ValueError, "`vllm_importance_sampling_clip_max` must be above 0"),
    ({"vllm_importance_sampling_clip_min": -1.0}, ValueError, "`vllm_importance_sampling_clip_min` must be at least"),
    # schedule and cost
    ({"calibration_max_tokens": 0}, ValueError, "`calibration_max_tokens` must be at least 1"),
    ({"calibration_max_tokens": 1e6}, TypeError, "`calibration_max_tokens`"),
    ({"calibration_max_tokens": 10, "calibration_min_tokens": 11}, ValueError, "every calibration would be skipped"),
    ({"calibration_fraction": 0.0}, ValueError, "`calibration_fraction` must be above 0"),
    ({"calibration_fraction": 1.5}, ValueError, "`calibration_fraction` is a share"),
    ({"calibration_fraction": "half"}, TypeError, "`calibration_fraction`"),
    ({"calibration_fraction": 0.9}, ValueError, "no effect: a rollout has 3 micro-batches"),
    ({"steps_per_generation": 2, "calibration_fraction": 0.25}, ValueError, "no effect: a rollout has 1 micro"),
    ({"calibration_schedule": "adaptiv"}, ValueError, "`calibration_schedule` must be one of 'fixed', 'adaptive'"),
    ({"calibration_max_interval": 30}, ValueError, "`calibration_max_interval=30` has no effect with"),
    ({"calibration_band": 0.3}, ValueError, "`calibration_band=0.3` has no effect with"),
    ({"calibration_schedule": "adaptive", "calibration_band": 0.0}, ValueError, "`calibration_band` must be above 0"),
    (
        {"calibration_schedule": "adaptive", "calibration_interval": 20, "calibration_max_interval": 10},
        ValueError,
        "`calibration_max_interval=10` is less than `calibration_interval=20`",
    ),
    ({**ADAPTIVE, "calibration_max_interval": 40.5}, TypeError, "`calibration_max_interval` must be an integer"),
    ({"calibration_start": "0.6, 1.8"}, TypeError, "`calibration_start` must be two numbers"),
    ({"calibration_lower_limits": [0.5, None]}, TypeError, "`calibration_lower_limits` must be two numbers"),
    ({"calibration_max_lower_step": float("inf")}, ValueError, "`calibration_max_lower_step` must be above 0"),
    # combinations
    ({"enable_jit_checkpoint": True}, ValueError, "`enable_jit_checkpoint=True` does not go.*SIGTERM takes a"),
    ({"num_generations": 5}, ValueError, r"must be divisible by num_generations \(5\)"),
    ({"num_generations": 1}, ValueError, "GRPO requires at least 2 generations"),
    ({"auto_find_batch_size": True}, ValueError, "Set auto_find_batch_size=False"),
    ({"generation_batch_size": 16}, ValueError, "'generation_batch_size' and 'steps_per_generation' can not be both"),
    ({"save_strategy": "step"}, ValueError, "step is not a valid SaveStrategy, please select one of"),
]  # fmt: skip

DAPO_CONFIGS = [
    ({"dynamic_sampling": "yes"}, TypeError, "`dynamic_sampling` must be True or False"),
    ({"max_resample_rounds": 0}, ValueError, "`max_resample_rounds` must be at least 1"),
    ({"max_resample_rounds": 2.5}, TypeError, "`max_resample_rounds` must be an integer"),
    ({"dynamic_sampling_surplus": -1}, ValueError, "`dynamic_sampling_surplus` must be at least 0"),
    ({"dynamic_sampling_metric": 3}, TypeError, "`dynamic_sampling_metric` must be the name"),
    ({"dynamic_sampling": False, "max_resample_rounds": 9}, ValueError, "`max_resample_rounds=9` has no effect"),
    ({"dynamic_sampling": False, "dynamic_sampling_surplus": 2}, ValueError, "has no effect"),
    ({"dynamic_sampling": False, "dynamic_sampling_metric": "x"}, ValueError, "has no effect"),
    ({"scale_rewards": "batch"}, ValueError, "`scale_rewards='batch'`.*'group' or 'none'"),
    ({"multi_objective_aggregation": "normalize_then_sum"}, ValueError, "Use 'sum_then_normalize'"),
    (
        {"calibrated_clip": False, "steps_per_generation": 4, "gradient_accumulation_steps": 3,
         "per_device_train_batch_size": 8},
        ValueError, "neither divides the other",
    ),
    ({"overlong_penalty": 0.0}, ValueError, "`overlong_penalty` must be above 0"),
    ({"overlong_penalty": 0.5}, ValueError, "no effect without `overlong_buffer_length`"),
    ({"overlong_buffer_length": 0}, ValueError, "`overlong_buffer_length` must be at least 1"),
    ({"overlong_buffer_length": 64, "max_completion_length": 64}, ValueError, "below `max_completion_length=64`"),
    ({"overlong_buffer_length": 64, "max_completion_length": None}, ValueError, "needs `max_completion_length`"),
    ({"overlong_buffer_length": "64"}, TypeError, "`overlong_buffer_length` must be an integer"),
    ({"calibrated_clip": False, "enable_jit_checkpoint": True}, ValueError,
     "`enable_jit_checkpoint=True` does not go with `dynamic_sampling=True`"),
    ({"dynamic_sampling_surplus": "some"}, TypeError, "`dynamic_sampling_surplus` must be an integer"),
    ({"overlong_penalty": "hard"}, TypeError, "`overlong_penalty` must be a number"),
]  # fmt: skip
# What TRL and transformers say in their own words, which name a class or a number in place of a field or a remedy.
THEIR_WORDS = ("num_generations", "save_strategy", "generation_batch_size")


@pytest.mark.parametrize(
    ("config", "overrides", "error", "message"),
    [(CalibratedGRPOConfig, *row) for row in CONFIGS] + [(CalibratedDAPOConfig, *row) for row in DAPO_CONFIGS],
    ids=[str(row[0]) for row in CONFIGS + DAPO_CONFIGS],
)
def test_config(tmp_path, config, overrides, error, message):
    with pytest.raises(error, match=message) as caught:
        config(output_dir=str(tmp_path), **{**BASE, **overrides})
    if not any(name in overrides for name in THEIR_WORDS):
        assert any(name in str(caught.value) for name in overrides)
        assert REMEDY.search(str(caught.value))


# The command line and YAML, through TRL's parser

FILES = [
    ("calibration_intervall: 4", ValueError, "calibration_intervall"),
    ("fp8_recipie: rowwise", ValueError, "fp8_recipie"),
    ("calibrated_clip: maybe", SystemExit, "argument --calibrated_clip.*got maybe"),
    ("calibration_interval: 2.5", TypeError, "`calibration_interval` must be an integer"),
    ("calibration_lower_limits: 0.5", TypeError, "`calibration_lower_limits` must be two numbers"),
    ("calibration_lower_limits: [0.5, 0.9, 1.0]", TypeError, "`calibration_lower_limits` must be two numbers"),
    ("fp8_recipe: rowwize", ValueError, "Unknown FP8 recipe 'rowwize'"),
    ("fp8_rollout: none", ValueError, "Unknown FP8 recipe 'none'"),
    ("loss_type: cispo", ValueError, "`loss_type='cispo'` cannot be calibrated"),
    ("calibration_fraction: .nan", ValueError, "`calibration_fraction` must be above 0, got nan"),
]
COMMANDS = [
    (["--config", "nowhere.yaml"], FileNotFoundError, "nowhere.yaml"),
    (["--calibration_interval", "often"], SystemExit, "argument --calibration_interval.*invalid int value: 'often'"),
    (["--calibration_schedule", "adaptiv"], SystemExit, "argument --calibration_schedule.*invalid choice: 'adaptiv'"),
    (["--calibrated_clip", "perhaps"], SystemExit, "argument --calibrated_clip.*perhaps"),
    (["--calibration_start", "0.6"], TypeError, "`calibration_start` must be two numbers"),
    (["--calibration_intervall", "4"], ValueError, "--calibration_intervall"),
]


@pytest.mark.parametrize(("text", "error", "message"), FILES, ids=[row[0] for row in FILES])
def test_yaml(tmp_path, capsys, text, error, message):
    path = tmp_path / "run.yaml"
    path.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nsteps_per_generation: 4\n{text}\n")
    assert_refused(["--config", str(path)], capsys, error, message)


@pytest.mark.parametrize(("arguments", "error", "message"), COMMANDS, ids=[" ".join(row[0]) for row in COMMANDS])
def test_command_line(tmp_path, capsys, arguments, error, message):
    given = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--steps_per_generation", "4", *arguments]
    assert_refused(given, capsys, error, message)


def assert_refused(arguments, capsys, error, message):
    with pytest.raises(error) as caught:
        TrlParser(CalibratedGRPOConfig).parse_args_and_config(arguments)
    assert re.search(message, capsys.readouterr().err if error is SystemExit else str(caught.value))


# The trainer's arguments. Each row makes what differs from a trainer that works.


def tokenizer_without(*names):
    tokenizer = build_tokenizer()
    for name in names:
        setattr(tokenizer, name, None)
    return tokenizer


def saved(directory, model):
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return str(directory)


def encoder(directory):
    config = transformers.BertConfig(
        vocab_size=48, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    return saved(directory, transformers.BertForSequenceClassification(config))


def encoder_decoder(directory):
    config = transformers.T5Config(vocab_size=48, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    return saved(directory, transformers.T5ForConditionalGeneration(config))


def headless(directory):
    return saved(directory, build_model(hidden_size=32, intermediate_size=32, num_hidden_layers=1).model)


def vision_model():
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14,
        projection_dim=16,
    )  # fmt: skip
    text = transformers.LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(vision_config=vision, text_config=text))


def quantized():
    model = build_model(hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


def odd(width):
    return build_model(hidden_size=32, intermediate_size=width, num_hidden_layers=1)


def prompts(name="prompt", count=8):
    return Dataset.from_dict({name: ["1+1="] * count})


WITH_TOKENIZER = {"processing_class": build_tokenizer()}
ARGUMENTS = {
    "model is None": (lambda d: {"model": None}, TypeError, "`model` must be a name.*Use the name"),
    "model is a number": (lambda d: {"model": 7}, TypeError, "`model` must be a name.*got int"),
    "model's path is missing": (
        lambda d: {"model": "/nowhere/model"}, ValueError, "`model='/nowhere/model'` is a path.*Give"),
    "model's directory is empty": (lambda d: {"model": str(d)}, ValueError, "`model=.*without `config.json`. Give"),
    "model is an encoder": (
        lambda d: {"model": encoder(d)}, ValueError, "`model` must be a causal language model.*Use"),
    "model is an encoder-decoder": (
        lambda d: {"model": encoder_decoder(d)}, ValueError, "T5ForConditionalGeneration is none.*Use a checkpoint"),
    "model has no head": (lambda d: {"model": headless(d)}, ValueError, "Qwen3Model is none.*Use"),
    "model reads images": (
        lambda d: {"model": vision_model(), **WITH_TOKENIZER}, NotImplementedError, "with a vision tower.*Use a text"),
    "weights are FP16": (
        lambda d: {"model_init_kwargs": {"dtype": "float16"}}, ValueError, "`model` has FP16 weights.*Load it"),
    "weights are FP32, autocast is off": (
        lambda d: {"bf16": False}, ValueError, "set `bf16=True`.*weights are torch.float32"),
    "dtype is unknown": (lambda d: {"model_init_kwargs": {"dtype": "fp8"}}, ValueError, "Invalid `dtype`"),
    "checkpoint is quantized": (
        lambda d: {"model": quantized(), **WITH_TOKENIZER}, ValueError, "quantized.*load the BF16 checkpoint"),
    "dropout in attention": (
        lambda d: {"model_init_kwargs": {"attention_dropout": 0.1}}, ValueError, "without dropout.*Set"),
    "width is odd for the kernel": (
        lambda d: {"model": odd(40), **WITH_TOKENIZER, "fp8_emulate": False}, ValueError,
        "multiples of 16.*mlp.gate_proj.*`fp8_ignore`"),
    "pattern matches nothing": (
        lambda d: {"fp8_ignore": ["*.out_proj"]}, ValueError, "`fp8_ignore` matches no linear"),
    "pattern matches all": (lambda d: {"fp8_ignore": ["*"]}, ValueError, "`fp8_ignore=.*every linear.*set"),
    "pattern matches a part of q/k/v": (
        lambda d: {"fp8_ignore": ["*.k_proj"]}, ValueError, "`fp8_ignore=.*name all of them"),
    "tokenizer has no EOS": (
        lambda d: {"processing_class": tokenizer_without("eos_token")}, ValueError, "`processing_class`.*no EOS.*Set"),
    "tokenizer has neither EOS nor padding": (
        lambda d: {"processing_class": tokenizer_without("eos_token", "pad_token")}, ValueError, "no EOS.*Set"),
    "tokenizer is a name": (lambda d: {"processing_class": "toy"}, TypeError, "`processing_class` must be"),
    "no dataset": (lambda d: {"train_dataset": None}, TypeError, "`train_dataset` must be.*NoneType"),
    "dataset is a list": (lambda d: {"train_dataset": ["1+1="]}, TypeError, "`train_dataset` must be.*got list"),
    "dataset is a dictionary of splits": (
        lambda d: {"train_dataset": {"train": prompts()}}, TypeError, "`train_dataset`.*pass one"),
    "dataset is empty": (lambda d: {"train_dataset": prompts(count=0)}, ValueError, "`train_dataset` is empty.*Give"),
    "dataset has no prompts": (
        lambda d: {"train_dataset": prompts("question")}, ValueError, "no column `prompt`, it has question. Use"),
    "stream has no prompts": (
        lambda d: {"train_dataset": prompts("text").to_iterable_dataset()}, ValueError, "no column `prompt`"),
    "no rewards": (lambda d: {"reward_funcs": None}, ValueError, "`reward_funcs=None`.*Give"),
    "empty list of rewards": (lambda d: {"reward_funcs": []}, ValueError, r"`reward_funcs=\[\]`.*Give"),
    "reward is a number": (lambda d: {"reward_funcs": 1.0}, TypeError, "`reward_funcs` must hold functions"),
    "a reward of two is None": (
        lambda d: {"reward_funcs": [digits_reward, None]}, TypeError, "`reward_funcs`.*got None. Give"),
    "weights of rewards do not fit": (lambda d: {"reward_weights": [1.0, 2.0]}, ValueError, "reward weights .2. must"),
    "argument is misspelled": (lambda d: {"training_dataset": None}, TypeError, "'training_dataset'"),
    "args are TRL's": (
        lambda d: {"args": GRPOConfig(str(d), use_cpu=True, report_to="none")}, TypeError, "`args` must be a"),
    "args are a dictionary": (lambda d: {"args": {}}, TypeError, "`args` must be a `CalibratedGRPOConfig`, got dict"),
    "adapters are a dictionary": (lambda d: {"peft_config": {"r": 8}}, TypeError, "`peft_config` must be"),
    "evaluation without data": (lambda d: {"eval_strategy": "steps"}, ValueError, "eval_dataset|evaluation"),
    "two schedules": (
        lambda d: {**ADAPTIVE, "callbacks": [CalibrationCallback(2, 4)]}, ValueError,
        "`calibration_schedule='adaptive'` has no effect.*Leave one"),
}  # fmt: skip
TRAINER_ARGUMENTS = {
    *(
        "model",
        "processing_class",
        "train_dataset",
        "reward_funcs",
        "peft_config",
        "callbacks",
        "training_dataset",
        "args",
    )
}


@pytest.fixture
def build(make_config, toy_path, toy_dataset):
    def build(trainer=CalibratedGRPOTrainer, **settings):
        given = {name: settings.pop(name) for name in list(settings) if name in TRAINER_ARGUMENTS}
        arguments = {"model": toy_path, "reward_funcs": digits_reward, "train_dataset": toy_dataset}
        if "args" not in given:
            arguments["args"] = make_config(**settings)
        return trainer(**{**arguments, **given})

    return build


@pytest.mark.parametrize("name", ARGUMENTS)
def test_argument(build, tmp_path, name):
    settings, error, message = ARGUMENTS[name]
    with pytest.raises(error, match=message):
        build(**settings(tmp_path))


def test_what_needs_no_model_is_said_before_one_is_loaded(build):
    """With a model that does not exist on the Hub, nor here: loading it would be another error."""
    for name in ("dataset is empty", "dataset has no prompts", "no rewards", "a reward of two is None", "no dataset"):
        settings, error, message = ARGUMENTS[name]
        with pytest.raises(error, match=message):
            build(model="nobody/nothing", **settings(None))


def test_arguments_of_dapo(make_config, build, toy_path, toy_dataset, tmp_path):
    with pytest.raises(TypeError, match="must be a `CalibratedDAPOConfig`, got CalibratedGRPOConfig"):
        build(CalibratedDAPOTrainer)
    args = CalibratedDAPOConfig(str(tmp_path), **BASE, dynamic_sampling_metric="accuracy")
    with pytest.raises(ValueError, match="must name one reward function.*digits_reward"):
        build(CalibratedDAPOTrainer, args=args)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_embeddings_are_fine(build, tmp_path, tied):
    model = build_model(hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    trainer = build(model=model, **WITH_TOKENIZER, max_steps=1, calibrated_clip=False)
    trainer.train()
    assert len(trainer.fp8_modules) == 7 and "lm_head" not in trainer.fp8_modules


RESUMES = 4  # in test_faults.py: nothing there, only a half checkpoint, a half one by its path, no such path
NUM_ROWS = len(CONFIGS) + len(DAPO_CONFIGS) + len(FILES) + len(COMMANDS) + len(ARGUMENTS) + 2 + RESUMES


def test_docs_count_the_rows():
    text = (Path(__file__).parents[1] / "docs" / "faults.md").read_text()
    assert f"**{NUM_ROWS} rows**" in text and NUM_ROWS >= 80
