# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
`CalibratedGRPOTrainer`: [`~trl.GRPOTrainer`] in FP8 with Calibrated Clipping.

Wiring only. The bounds go into TRL's loss through `epsilon_low` and `epsilon_high`, which it reads at call time for
the clamp and for its metrics; the loss itself is TRL's. The maths is in `clip_range.py`, the pooling in
`calibration.py`, the schedule in `callbacks.py`, saving and resuming in `checkpointed_trainer.py`, FP8 in `fp8/`.
"""

import functools
import logging
import os
import random
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ._trl_compat import substituted_vllm_generation
from .argument_checks import check_arguments
from .calibrated_grpo_config import CalibratedGRPOConfig
from .calibration import (
    TokenCollector,
    TokenPool,
    calibrate,
    calibration_record,
    count_negative,
    draw_micro_batches,
    sequence_entries,
)
from .callbacks import AdaptiveCalibrationCallback, find_schedule
from .checkpoint import STATE_NAME
from .checkpointed_trainer import CheckpointedGRPOTrainer
from .clip_range import ClipRange
from .fp8.generation import FP8VLLMGeneration
from .fp8.linear import bf16_pass, convert_to_fp8
from .fp8.selection import refuse_moe
from .fp8.server import ServerVLLMGeneration
from .guards import check_completions, check_grad_norm, check_rewards
from .health import HealthCallback
from .metrics import mismatch_metrics, mismatch_sums
from .model_card import append_section, card_section
from .model_checks import refuse_converted, refuse_dropout, refuse_quantized, refuse_tokenizer, refuse_unsuited
from .trackers import log_histograms


logger = logging.getLogger(__name__)

_MISMATCH_INPUTS = ("old_per_token_logps", "sampling_per_token_logps")


class CalibratedGRPOTrainer(CheckpointedGRPOTrainer):
    """
    Trainer for GRPO in FP8, training and rollout, with calibrated clip bounds.

    Takes what [`~trl.GRPOTrainer`] takes, with a [`CalibratedGRPOConfig`] as `args`. With `calibrated_clip=False` and
    `fp8_recipe=None` it is TRL's trainer, bit for bit.

    Attributes:
        clip_range ([`ClipRange`]): Bounds in force.
        num_rollouts (`int`): Rollout batches used up, over all resumes.
        num_calibrations (`int`): Calibrations that moved or confirmed the bounds.
        num_skipped_calibrations (`int`): Calibrations that found too little to go by; the bounds stayed.
        calibration_history (`list[dict[str, float | None]]`): One record per calibration, skipped ones too.
        fp8_modules (`list[str]`): Names of the float8 linears.

    Example:

    ```python
    from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer

    trainer = CalibratedGRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=reward,
        args=CalibratedGRPOConfig(fp8_recipe="rowwise", steps_per_generation=4, use_vllm=True),
        train_dataset=dataset,
    )
    trainer.train()
    ```
    """

    _tag_names = ["trl", "grpo", "trl-calclip", "fp8"]

    def __init__(self, model, reward_funcs=None, args: CalibratedGRPOConfig | None = None, *others, **kwargs):
        if args is None:
            args = CalibratedGRPOConfig()
        if not isinstance(args, CalibratedGRPOConfig):
            raise TypeError(
                f"`args` must be a `CalibratedGRPOConfig`, got {type(args).__name__}. It takes every argument of "
                "TRL's `GRPOConfig`: change the class name and keep the rest."
            )
        check_arguments(model, reward_funcs, args, *others, **kwargs)
        try:
            with substituted_vllm_generation(_generation_class(args)) if args.checked_vllm else nullcontext():
                super().__init__(model, reward_funcs, args, *others, **kwargs)
        except AttributeError as error:
            # TRL asks every model for what only causal ones have.
            if isinstance(error.obj, PreTrainedModel):
                refuse_unsuited(error.obj)
            raise

        # What is refused is refused before the model is changed: the user may try again with the same instance.
        if args.fp8_active:
            refuse_unsuited(self.model)
            refuse_tokenizer(self.processing_class)
        if args.calibrated_clip:
            refuse_dropout(self.model)
        self.fp8_modules: list[str] = []
        if args.training_recipe is not None:
            self._convert()

        self.reference_clip_range = args.reference_clip_range
        self.clip_range = args.start_clip_range
        self.num_rollouts = 0
        self.num_calibrations = 0
        self.num_skipped_calibrations = 0
        self.calibration_history: list[dict[str, float | None]] = []
        self._skipping = False  # whether the last calibration was skipped, and that was said
        self._unscored_said = False
        self._unlogged: dict[str, float | None] = {}
        self._collector: TokenCollector | None = None
        self._rollout_step = 0
        self._micro_batch = 0  # of the rollout
        self._drawn: frozenset[int] = frozenset()
        self._watched: torch.Tensor | None = None  # negative tokens that FP8 clipped, negative tokens; of this rank
        self._bf16_pass_seconds = 0.0
        if args.calibrated_clip:
            self._apply_clip_range()
            self._schedule = find_schedule(args, self.callback_handler.callbacks)
            if self._schedule not in self.callback_handler.callbacks:
                self.add_callback(self._schedule)

        if not any(isinstance(callback, HealthCallback) for callback in self.callback_handler.callbacks):
            self.add_callback(HealthCallback(args))

    def _convert(self) -> None:
        """Convert policy and KL anchor, before Accelerate wraps the policy."""
        args = self.args
        refuse_quantized(self.model)
        refuse_converted(self.model)
        if not args.bf16 and any(p.dtype != torch.bfloat16 for p in self.model.parameters()):
            raise ValueError(
                "FP8 training needs BF16 activations: set `bf16=True` (autocast, any master weights), or load the "
                f"model in BF16. Here `bf16=False` and the weights are {self.model.dtype}."
            )
        refuse_moe(self.model, allow=args.fp8_allow_moe)
        if self.ref_model is not None and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise NotImplementedError(
                f"`beta={args.beta}` with FSDP or DeepSpeed is not there yet in FP8: TRL has wrapped the KL anchor "
                "before it can be converted, and in another precision than the policy's it would give a KL above 0 "
                "from the start. Set `beta=0.0`, or train adapters (`peft_config`)."
            )
        emulate = args.emulate_on(self.accelerator.device.type)
        convert = functools.partial(
            convert_to_fp8, recipe=args.training_recipe, emulate=emulate, ignore=args.fp8_ignore
        )
        self.fp8_modules = convert(self.model)
        if self.ref_model is not None:
            convert(self.ref_model)
        logger.info(
            "FP8 training with recipe %s%s: %d linears, the first is %s; the output head stays in high precision.",
            args.fp8_recipe, ", emulated" if emulate else "", len(self.fp8_modules), self.fp8_modules[0],
        )  # fmt: skip

    # Calibration: what happens at TRL's moments

    def begin_rollout(self, micro_batches: list[dict[str, Any]]) -> None:
        self._log_rollout(micro_batches)
        if not self.args.calibrated_clip:
            return
        self._rollout_step = self.state.global_step
        self._micro_batch = 0
        self._collector = self._watched = None
        if not self._schedule.is_due(self.num_rollouts):
            if self._schedule.watches:
                self._watched = torch.zeros(2, dtype=torch.long, device=self.accelerator.device)
            return
        args, seed = self.args, (self.args.seed, self.num_rollouts)
        first, total = args.gradient_accumulation_steps, self.micro_batches_per_rollout
        self._drawn = draw_micro_batches(args.calibration_fraction, first, total, seed)
        # A `rollout_func` may return completions of any length.
        longest = args.max_completion_length if self.rollout_func is None else None
        self._collector = TokenCollector(
            self.accelerator.process_index,
            self.accelerator.num_processes,
            max_tokens=args.calibration_max_tokens,
            max_tokens_per_rank=None
            if longest is None
            else len(self._drawn) * args.per_device_train_batch_size * longest,
            seed=seed,
        )
        self._bf16_pass_seconds = 0.0
        for number in sorted({number % len(micro_batches) for number in self._drawn}):
            micro_batches[number]["bf16_old_per_token_logps"] = self._score_in_bf16(micro_batches[number])

    def before_policy_forward(self, inputs: dict[str, Any]) -> None:
        # Before the first update of a rollout no weight has moved: the BF16 ratio is 1 and tells nothing. Nothing is
        # drawn from there.
        self._bf16_per_token_logps = None
        if self._collector is not None and self._micro_batch in self._drawn:
            self._bf16_per_token_logps = self._score_in_bf16(inputs)

    def after_policy_forward(self, inputs: dict[str, Any], per_token_logps: torch.Tensor) -> None:
        if not self.args.calibrated_clip:
            return
        per_token_logps = per_token_logps.detach()
        off_policy = self.state.global_step != self._rollout_step
        mask = loss_mask(inputs)
        if self._collector is not None and not off_policy:
            self._collector.add_at_zero_drift(per_token_logps - inputs["old_per_token_logps"], mask)
        elif self._bf16_per_token_logps is not None:
            assert self._collector is not None and self.policy_entropies is not None
            entries: dict[str, Any] = {
                "per_token_logps": per_token_logps,
                "old_per_token_logps": inputs["old_per_token_logps"],
                "bf16_per_token_logps": self._bf16_per_token_logps,
                "bf16_old_per_token_logps": inputs["bf16_old_per_token_logps"],
                "advantages": inputs["advantages"],
                "mask": mask,
                "importance_sampling_ratio": inputs.get("importance_sampling_ratio"),
                "sampling_per_token_logps": inputs.get("sampling_per_token_logps"),
                "entropies": self.policy_entropies.detach(),
            }
            if self.importance_sampling_level == "sequence":
                entries = sequence_entries(**entries)
            self._collector.add(**entries)
            self._bf16_per_token_logps = None
        elif self._watched is not None and off_policy:
            self._watched += count_negative(
                self.clip_range.lower,
                per_token_logps,
                inputs["old_per_token_logps"],
                inputs["advantages"],
                mask.bool(),
                sequence_level=self.importance_sampling_level == "sequence",
            )
        self._micro_batch += 1

    def end_rollout(self) -> None:
        if self._collector is not None:
            self._calibrate(self._collector.pool(self.accelerator))
            self._collector = None
        elif self._watched is not None:
            clipped, negative = self.accelerator.gather(self._watched).reshape(-1, 2).sum(0).tolist()
            self._schedule.watched(self.num_rollouts, clipped, negative)
            self._unlogged["watched_clip_frac"] = clipped / negative if negative else None
            self._watched = None
        self.num_rollouts += 1

    def _log_rollout(self, micro_batches: list[dict[str, Any]]) -> None:
        """Mismatch of rollout and trainer, from what TRL has scored anyway, and the time that the rollout took."""
        if not self._describes_itself:
            return
        self.log_in_training({"time/rollout_seconds": self.rollout_seconds})
        if any(inputs.get(name) is None for inputs in micro_batches for name in _MISMATCH_INPUTS):
            return
        cap = self.args.vllm_importance_sampling_clip_max or 2.0
        sums = sum(
            mismatch_sums(**{name: inputs[name] for name in _MISMATCH_INPUTS}, mask=loss_mask(inputs), cap=cap)
            for inputs in micro_batches
        )
        self.log_in_training(mismatch_metrics(self.accelerator.reduce(sums, reduction="sum")))

    def _score_in_bf16(self, inputs: dict[str, Any]) -> torch.Tensor:
        self._synchronize()
        start = time.perf_counter()
        with bf16_pass(self.model):
            per_token_logps = self.score(inputs)
        self._synchronize()
        self._bf16_pass_seconds += time.perf_counter() - start
        return per_token_logps

    def _synchronize(self) -> None:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()

    def _calibrate(self, pool: TokenPool) -> None:
        args = self.args
        assert self._collector is not None
        result, shares = calibrate(
            pool,
            reference=self.reference_clip_range,
            current=self.clip_range,
            use_sampling_probs=args.calibration_use_sampling_probs,
            lower_limits=tuple(args.calibration_lower_limits),
            upper_limits=tuple(args.calibration_upper_limits),
            max_lower_step=args.calibration_max_lower_step,
            max_upper_step=args.calibration_max_upper_step,
            min_tokens=args.calibration_min_tokens,
        )
        if result.skipped_reason is None:
            self.num_calibrations += 1
            self._skipping = False
            # The rollout is used up: the next one is the first to see the new bounds.
            self.clip_range = result.clip_range
            self._apply_clip_range()
        else:
            self.num_skipped_calibrations += 1
            if self.accelerator.is_main_process and not self._skipping:
                warnings.warn(
                    f"Calibration at step {self.state.global_step + 1} skipped, the clip bounds stay: "
                    f"{result.skipped_reason} Further ones in a row are not said, `calclip/skipped_calibrations` "
                    "counts them.",
                    stacklevel=2,
                )
            self._skipping = True
        record = calibration_record(result, shares)
        skipped = result.skipped_reason is not None
        self._schedule.calibrated(self.num_rollouts, None if skipped else record["clip_frac_low_neg_fp8_target"])
        record["zero_drift_std_fp8"] = self._collector.zero_drift_std()
        record["bf16_pass_seconds"] = self._bf16_pass_seconds
        self._unlogged.update(record)
        if self.accelerator.is_main_process:
            ratios = {"calclip/log_ratio_fp8": pool.fp8_ratio.log(), "calclip/log_ratio_bf16": pool.bf16_ratio.log()}
            log_histograms(self.callback_handler.callbacks, ratios, self.state.global_step + 1)
        self.calibration_history.append({"step": self.state.global_step + 1, "rollout": self.num_rollouts, **record})

    def _apply_clip_range(self) -> None:
        self.epsilon_low, self.epsilon_high = self.clip_range.epsilon_low, self.clip_range.epsilon_high

    # Faults: nothing broken is trained on

    def check_completions(self, prompt_ids, completion_ids, logprobs) -> None:
        if not self._guards:
            return
        unscored = check_completions(prompt_ids, completion_ids, logprobs)
        if unscored and not self._unscored_said:
            self._unscored_said = True
            warnings.warn(
                f"{unscored:.2%} of the engine's log-probabilities are NaN. Such tokens are trained without a "
                "correction of the rollout mismatch. This is said once.",
                stacklevel=2,
            )

    def check_rewards(self, rewards_per_func: torch.Tensor) -> None:
        if self._guards:
            check_rewards(rewards_per_func, self.reward_func_names)

    def before_optimizer_step(self, grad_norm: torch.Tensor | float | None) -> None:
        if self._guards:
            check_grad_norm(grad_norm, self.state.global_step + 1)

    @property
    def _guards(self) -> bool:
        return self.args.fp8_active or self.keeps_state

    # Logging, evaluation, what a checkpoint holds

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.args.calibrated_clip and self.model.training and "train_runtime" not in logs:
            # Not through TRL's window average: a bound or a counter is what it is.
            values: dict[str, Any] = {
                **self._unlogged,
                "lower": self.clip_range.lower,
                "upper": self.clip_range.upper,
                "calibrations": self.num_calibrations,
                "skipped_calibrations": self.num_skipped_calibrations,
            }
            if isinstance(self._schedule, AdaptiveCalibrationCallback):
                values["interval"] = self._schedule.distance
            # Trackers take numbers only; what is undefined is missing.
            logs.update({f"calclip/{name}": value for name, value in values.items() if value is not None})
            self._unlogged = {}
        super().log(logs, start_time)

    def evaluate(self, *args, **kwargs):
        if not (self.args.fp8_active or self.args.calibrated_clip):
            return super().evaluate(*args, **kwargs)
        # Sampling for evaluation would otherwise move the generators that the next rollouts draw from.
        with preserved_rng(self.accelerator.device):
            return super().evaluate(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self._describes_itself and not _internal_call:
            # TRL writes the card with checkpoints only: the one at the end would say what was before.
            self.create_model_card(model_name=Path(output_dir or self.args.output_dir).name)

    @property
    def _describes_itself(self) -> bool:
        return self.args.fp8_active or self.args.calibrated_clip

    def create_model_card(self, *args, **kwargs) -> None:
        super().create_model_card(*args, **kwargs)
        if self._describes_itself and self.is_world_process_zero():
            section = card_section(self.args, self.state.log_history, self.clip_range, self.num_calibrations)
            append_section(Path(self.args.output_dir) / "README.md", section)

    @property
    def keeps_state(self) -> bool:
        """Whether checkpoints hold `calclip_state.json`."""
        return self.args.calibrated_clip

    def _state(self) -> dict[str, Any]:
        return {
            "clip_range": [self.clip_range.lower, self.clip_range.upper],
            "num_rollouts": self.num_rollouts,
            "num_calibrations": self.num_calibrations,
            "num_skipped_calibrations": self.num_skipped_calibrations,
            "calibration_history": self.calibration_history,
            "schedule": self._schedule.state() if self.args.calibrated_clip else {},
        }

    def _restore(self, state: dict[str, Any] | None) -> None:
        if state is None:
            if not self.args.calibrated_clip:
                return
            logger.warning(
                "The checkpoint has no %s: it was not written by a calibrated run. The clip bounds start at %s.",
                STATE_NAME, self.clip_range,
            )  # fmt: skip
            return
        self.clip_range = ClipRange(*state["clip_range"])
        self.num_rollouts = state["num_rollouts"]
        self.num_calibrations = state["num_calibrations"]
        self.num_skipped_calibrations = state["num_skipped_calibrations"]
        self.calibration_history = state["calibration_history"]
        if self.args.calibrated_clip:
            self._schedule.load_state(state["schedule"])
            self._apply_clip_range()


def loss_mask(inputs: dict[str, Any]) -> torch.Tensor:
    """The mask of TRL's loss, `(B, T)`."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _generation_class(args: CalibratedGRPOConfig) -> functools.partial:
    """Class of the vLLM engine or server that `args` ask for, with our own arguments."""
    checks = {
        "recipe": args.rollout_recipe,
        "ignore": args.fp8_ignore,
        "allow_moe": args.fp8_allow_moe,
        "allow_mismatch": args.fp8_allow_mismatch,
        "check_interval": args.fp8_sync_check_interval,
        "check_limit": args.fp8_sync_check_limit,
    }
    if args.vllm_mode == "colocate":
        return functools.partial(FP8VLLMGeneration, **checks)
    # The underscore keeps the files from being pushed to the hub with the rest of the output directory.
    directory = args.fp8_weight_transfer_dir or os.path.join(args.output_dir, "_weight_transfer")
    return functools.partial(ServerVLLMGeneration, **checks, transfer=args.fp8_weight_transfer, transfer_dir=directory)


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Put Python's, NumPy's and torch's random generators back as they were, those of `device` included."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
