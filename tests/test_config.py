# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Wrong configurations and the sentence that each gets, before any model is loaded."""

import pytest
import torch
from trl import GRPOConfig, TrlParser

from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer, ClipRange
from trl_calclip.fp8.recipes import get_recipe


BASE = {"use_cpu": True, "steps_per_generation": 4, "report_to": "none"}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_iterations": 2, "steps_per_generation": 1},
        {"calibrated_clip": False, "steps_per_generation": 1},
        {"calibrated_clip": False, "fp8_recipe": None, "loss_type": "cispo", "delta": 2.0},
        {"calibrated_clip": False, "loss_type": "cispo"},
        {"calibration_start_at_reference": True},
        {"calibration_upper_limits": [1.05, 3.0], "epsilon_high": 0.1},
        {"fp8_emulate": False},
        {"use_vllm": True, "fp8_rollout": "off"},
        {"use_vllm": True, "vllm_mode": "server"},
        {
            "use_vllm": True,
            "vllm_mode": "server",
            "fp8_weight_transfer_dir": "/dev/shm",
            "fp8_rollout": "blockwise",
            "fp8_allow_mismatch": True,
        },
        {"use_vllm": True, "fp8_rollout": "rowwise", "fp8_recipe": None, "calibrated_clip": False},
    ],
    ids=str,
)
def test_accepted(tmp_path, overrides):
    config = CalibratedGRPOConfig(output_dir=str(tmp_path), **{**BASE, **overrides})
    assert all(vars(config)[name] == value for name, value in overrides.items())


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_every_recipe_trains_rolls_out_or_both(tmp_path, name):
    def build(**overrides):
        return CalibratedGRPOConfig(output_dir=str(tmp_path), **{**BASE, "use_vllm": True, **overrides})

    both = build(fp8_recipe=name)
    assert both.training_recipe is both.rollout_recipe is get_recipe(name)
    rollout = build(fp8_recipe=None, fp8_rollout=name, calibrated_clip=False)
    assert rollout.training_recipe is None and rollout.rollout_recipe is get_recipe(name)
    trainer = build(fp8_recipe=name, fp8_rollout="off")
    assert trainer.training_recipe is get_recipe(name) and trainer.rollout_recipe is None


def test_pairs_of_recipes(tmp_path):
    def build(**overrides):
        return CalibratedGRPOConfig(output_dir=str(tmp_path), **{**BASE, "use_vllm": True, **overrides})

    build(fp8_recipe="rowwise", fp8_rollout="rowwise_with_gw_hp")  # one forward, two gradients
    build(fp8_recipe="rowwise_with_gw_hp", fp8_rollout="rowwise")
    with pytest.warns(UserWarning, match=r"Trainer \(rowwise\) and rollout \(blockwise\) quantize by different rules"):
        build(fp8_recipe="rowwise", fp8_rollout="blockwise", fp8_allow_mismatch=True)


def test_recipes_of_the_two_sides(tmp_path):
    def build(**overrides):
        return CalibratedGRPOConfig(output_dir=str(tmp_path), **{**BASE, **overrides})

    assert build().rollout_recipe is None  # no vLLM: the trainer's own model generates
    assert build(use_vllm=True).rollout_recipe.vllm_quantization == "fp8_per_channel"
    assert build(use_vllm=True, fp8_rollout="off").rollout_recipe is None
    baseline = build(use_vllm=True, fp8_recipe=None, fp8_rollout="rowwise", calibrated_clip=False)
    assert baseline.training_recipe is None and baseline.rollout_recipe.name == "rowwise" and baseline.fp8_active
    assert build().reference_clip_range == ClipRange(0.8, 1.24)
    assert build(gradient_accumulation_steps=2, num_iterations=3).updates_per_rollout == 6


def test_own_generation_only_where_it_is_asked_for(tmp_path):
    def build(**overrides):
        return CalibratedGRPOConfig(output_dir=str(tmp_path), **{**BASE, **overrides}).checked_vllm

    plain = {"fp8_recipe": None, "calibrated_clip": False}
    server = {"use_vllm": True, "vllm_mode": "server"}
    assert not build() and not build(**plain, use_vllm=True) and not build(**plain, **server)
    assert build(use_vllm=True) and build(**server) and build(**server, fp8_rollout="off")
    assert build(**plain, **server, fp8_weight_transfer="filesystem")
    assert build(**plain, **server, fp8_weight_transfer_dir="/dev/shm")


def test_masking_rollout_correction_warns(tmp_path):
    with pytest.warns(UserWarning, match="drops tokens or whole completions"):
        CalibratedGRPOConfig(
            output_dir=str(tmp_path), **BASE, use_vllm=True, vllm_importance_sampling_mode="sequence_mask"
        )


def test_accelerates_own_fp8_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ValueError, match="Launch with `--mixed_precision bf16`"):
        CalibratedGRPOConfig(output_dir=str(tmp_path), **BASE)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    CalibratedGRPOConfig(output_dir=str(tmp_path), **BASE)
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    with pytest.raises(ValueError, match="without `fp8_config`"):
        CalibratedGRPOConfig(output_dir=str(tmp_path), **BASE)


def test_yaml_and_command_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"output_dir: {tmp_path}\nuse_cpu: true\nsteps_per_generation: 4\nfp8_recipe: rowwise\n"
        "calibration_lower_limits: [0.55, 0.85]\nuse_vllm: true\nfp8_rollout: off\n"
    )
    parser = TrlParser(CalibratedGRPOConfig)
    (config,) = parser.parse_args_and_config(["--config", str(path), "--calibration_upper_limits", "1.1", "1.9"])
    assert config.calibration_lower_limits == [0.55, 0.85]
    assert config.calibration_upper_limits == [1.1, 1.9]
    assert config.fp8_rollout == "off"
    arguments = ["--config", str(path), "--calibrated_clip", "false", "--fp8_recipe", "none"]
    arguments += ["--vllm_importance_sampling_clip_max", "none", "--vllm_importance_sampling_mode", "token_mask"]
    (config,) = parser.parse_args_and_config(arguments)
    assert config.fp8_recipe is None and config.vllm_importance_sampling_clip_max is None


def test_yaml_typo_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nsteps_per_generation: 4\ncalibration_intervall: 4\n")
    with pytest.raises(ValueError, match="calibration_intervall"):
        TrlParser(CalibratedGRPOConfig).parse_args_and_config(["--config", str(path)])


def test_trainer_wants_our_config(tmp_path, toy_path, toy_dataset):
    with pytest.raises(TypeError, match="CalibratedGRPOConfig"):
        CalibratedGRPOTrainer(
            toy_path, lambda completions, **_: [0.0] * len(completions),
            GRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none"), train_dataset=toy_dataset,
        )  # fmt: skip


def test_neither_autocast_nor_bf16_weights(make_trainer):
    with pytest.raises(ValueError, match="`bf16=False` and the weights are torch.float32"):
        make_trainer(bf16=False)
    trainer = make_trainer(bf16=False, model_init_kwargs={"dtype": "bfloat16"})
    assert trainer.model.dtype == torch.bfloat16


def test_dropout_is_refused(make_trainer, make_config):
    with pytest.raises(ValueError, match="self_attn.attention_dropout"):
        make_trainer(model_init_kwargs={"attention_dropout": 0.1})
    with pytest.raises(ValueError, match="attention_dropout"):
        make_trainer(model_init_kwargs={"attention_dropout": 0.1}, disable_dropout=True)
    make_trainer(model_init_kwargs={"attention_dropout": 0.1}, calibrated_clip=False)


def test_calibration_defaults_for_tokens_and_for_completions(tmp_path):
    def build(**overrides):
        return CalibratedGRPOConfig(output_dir=str(tmp_path), **{**BASE, **overrides})

    token = build()
    assert token.calibration_lower_limits == [0.5, 0.9] and token.calibration_upper_limits == [1.2, 2.0]
    assert (token.calibration_max_lower_step, token.calibration_max_upper_step) == (0.05, 0.10)
    assert token.calibration_start == [0.6, 1.8] and token.calibration_min_tokens == 1000
    token.calibration_start.append(0.0)
    assert build().calibration_start == [0.6, 1.8]

    sequence = build(importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4, loss_type="grpo")
    assert sequence.calibration_lower_limits == pytest.approx([0.97, 0.99985])
    assert sequence.calibration_upper_limits == pytest.approx([1.0002, 1.04])
    assert sequence.calibration_max_lower_step == pytest.approx(3e-3)
    assert sequence.calibration_max_upper_step == pytest.approx(4e-3)
    assert sequence.calibration_start == pytest.approx([0.994, 1.008]) and sequence.calibration_min_tokens == 100
    # with reference bounds made for tokens, nothing gets wider than it is for tokens
    wide = build(importance_sampling_level="sequence", loss_type="grpo")
    assert wide.calibration_lower_limits == pytest.approx([0.5, 0.9]) and wide.calibration_max_lower_step == 0.05
    assert wide.calibration_upper_limits == pytest.approx([1.12, 2.0]) and wide.calibration_start == [0.5, 2.0]
    own = build(importance_sampling_level="sequence", calibration_min_tokens=7, calibration_start=[0.7, 1.5])
    assert own.calibration_min_tokens == 7 and own.calibration_start == [0.7, 1.5]


def test_bounds_before_the_first_calibration(tmp_path):
    def start(**settings):
        return CalibratedGRPOConfig(output_dir=str(tmp_path), **{**BASE, **settings}).start_clip_range

    assert start() == ClipRange(0.6, 1.8)
    assert start(calibration_start=[0.7, 1.5]) == ClipRange(0.7, 1.5)
    assert start(calibration_start_at_reference=True) == ClipRange.from_epsilons(0.2, 0.24)
    assert start(calibrated_clip=False) == ClipRange.from_epsilons(0.2, 0.24)


def test_nothing_is_emulated_without_a_recipe(tmp_path):
    settings = {**BASE, "fp8_recipe": None, "calibrated_clip": False}
    config = CalibratedGRPOConfig(output_dir=str(tmp_path), **settings)
    assert config.emulate_on("cpu") is False and config.emulate_on("cuda") is False
