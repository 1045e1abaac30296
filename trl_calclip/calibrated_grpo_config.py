# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""`CalibratedGRPOConfig`: the added settings of FP8 and Calibrated Clipping; `config_checks.py` checks them."""

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from . import config_checks
from .clip_range import ClipRange
from .config_checks import CALIBRATION_SCHEDULES
from .fp8.recipes import Recipe, cuda_capability, get_recipe, resolve_emulate
from .health_settings import HealthArguments


# The paper's, for one ratio per token.
TOKEN_DEFAULTS: dict[str, Any] = {
    "min_tokens": 1000,
    "lower_limits": [0.5, 0.9],
    "upper_limits": [1.2, 2.0],
    "max_lower_step": 0.05,
    "max_upper_step": 0.10,
    "start": [0.6, 1.8],
}
# For one ratio per completion, as multiples of the reference bounds' distances from 1. FP8's noise is 20 to 180 times
# GSPO's lower distance where it was measured (docs/dapo.md); the bounds have to get far, and back.
SEQUENCE_NEAR = 0.5
SEQUENCE_FAR = 100.0
SEQUENCE_MAX_STEP = 10.0
SEQUENCE_START = 20.0

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
        config_checks.check_fp8_names(self)
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
            config_checks.check_what_trl_reads(self)

        super().__post_init__()

        self.check_alarms()
        self.check_alarms_can_fire(
            calibrated=self.calibrated_clip,
            rollout_logps=self.use_vllm and self.vllm_importance_sampling_correction,
        )
        config_checks.check_server(self)
        if active:
            config_checks.check_fp8(self)
        if self.calibrated_clip:
            config_checks.check_checkpoints(self, "calibrated_clip")
            self._set_calibration_defaults()
            config_checks.check_calibration(self)
            config_checks.check_calibration_cost(self)

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
