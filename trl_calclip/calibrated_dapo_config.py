# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""`CalibratedDAPOConfig`: DAPO's defaults on [`CalibratedGRPOConfig`], dynamic sampling, overlong punishment."""

import dataclasses
from dataclasses import dataclass, field

from .calibrated_grpo_config import CalibratedGRPOConfig
from .config_checks import check_checkpoints, check_number


@dataclass
class CalibratedDAPOConfig(CalibratedGRPOConfig):
    r"""
    Configuration class for the [`CalibratedDAPOTrainer`].

    This class sets the defaults of DAPO and adds its dynamic sampling and soft overlong punishment to
    [`CalibratedGRPOConfig`]. Clip-higher (`epsilon_high=0.28`), the token-level loss (`loss_type="dapo"`), no KL term
    (`beta=0.0`) and overlong filtering (`mask_truncated_completions=True`) are TRL's own settings.

    Args:
        dynamic_sampling (`bool`, *optional*, defaults to `True`):
            Whether groups whose rewards are all equal are replaced by groups of fresh prompts.
        max_resample_rounds (`int`, *optional*, defaults to `5`):
            Rounds of generation after the first. Past them the batch is filled with uniform groups, which is counted.
        dynamic_sampling_surplus (`int`, *optional*, defaults to `0`):
            Groups generated beyond the missing ones in each resample round, so that fewer rounds are needed.
        dynamic_sampling_metric (`str` or `None`, *optional*, defaults to `None`):
            Name of the reward function by which groups are judged. `None` judges by the weighted sum of all.
        overlong_buffer_length (`int` or `None`, *optional*, defaults to `None`):
            Tokens before `max_completion_length` over which the soft overlong punishment grows from 0 to -1. `None`
            punishes nothing.
        overlong_penalty (`float`, *optional*, defaults to `1.0`):
            Weight of the soft overlong punishment among the rewards.

    Source: DAPO (Yu et al., arXiv 2503.14476).
    """

    epsilon_high: float | None = field(
        default=0.28, metadata={"help": "Upper reference bound, as a distance from 1 (clip-higher)."}
    )
    loss_type: str = field(default="dapo", metadata={"help": "Loss. DAPO's is a mean over the batch's tokens."})
    mask_truncated_completions: bool = field(
        default=True,
        metadata={"help": "Whether completions cut off at the maximal length are left out of the loss."},
    )

    # Parameters that control DAPO
    dynamic_sampling: bool = field(
        default=True,
        metadata={"help": "Whether groups whose rewards are all equal are replaced by groups of fresh prompts."},
    )
    max_resample_rounds: int = field(
        default=5,
        metadata={"help": "Rounds of generation after the first. Past them uniform groups fill the batch."},
    )
    dynamic_sampling_surplus: int = field(
        default=0, metadata={"help": "Groups generated beyond the missing ones in each resample round."}
    )
    dynamic_sampling_metric: str | None = field(
        default=None,
        metadata={"help": "Reward function by which groups are judged. `None`: the weighted sum of all."},
    )
    overlong_buffer_length: int | None = field(
        default=None,
        metadata={"help": "Tokens before `max_completion_length` over which the soft punishment grows to -1."},
    )
    overlong_penalty: float = field(
        default=1.0, metadata={"help": "Weight of the soft overlong punishment among the rewards."}
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_dynamic_sampling()
        self._check_overlong()

    def _check_dynamic_sampling(self) -> None:
        if not isinstance(self.dynamic_sampling, bool):
            raise TypeError(f"`dynamic_sampling` must be True or False, got {self.dynamic_sampling!r}.")
        check_number("max_resample_rounds", self.max_resample_rounds, 1, integer=True)
        check_number("dynamic_sampling_surplus", self.dynamic_sampling_surplus, 0, integer=True)
        if self.dynamic_sampling_metric is not None and not isinstance(self.dynamic_sampling_metric, str):
            raise TypeError(
                "`dynamic_sampling_metric` must be the name of a reward function or None, got "
                f"{self.dynamic_sampling_metric!r}."
            )
        if not self.dynamic_sampling:
            for name in ("max_resample_rounds", "dynamic_sampling_surplus", "dynamic_sampling_metric"):
                if vars(self)[name] != _DEFAULTS[name]:
                    raise ValueError(
                        f"`{name}={vars(self)[name]!r}` has no effect with `dynamic_sampling=False`. Leave it at "
                        f"{_DEFAULTS[name]!r}, or switch dynamic sampling on."
                    )
            return
        check_checkpoints(self, "dynamic_sampling")
        # Rows of several rounds form one batch: nothing about a row may depend on which rows it was generated with.
        if self.scale_rewards == "batch":
            raise ValueError(
                "`scale_rewards='batch'` does not go with dynamic sampling: advantages would be scaled by the rewards "
                "of a generation round, not of the batch that is trained. Use 'group' or 'none'."
            )
        if self.multi_objective_aggregation == "normalize_then_sum":
            raise ValueError(
                "`multi_objective_aggregation='normalize_then_sum'` does not go with dynamic sampling: it normalizes "
                "over a generation round, not over the batch that is trained. Use 'sum_then_normalize'."
            )
        per_rollout = self.steps_per_generation * self.num_iterations
        accumulation = self.gradient_accumulation_steps
        if per_rollout % accumulation and accumulation % per_rollout:
            raise ValueError(
                f"A rollout serves {per_rollout} micro-batches (`steps_per_generation` * `num_iterations`) and an "
                f"optimizer step takes {accumulation} (`gradient_accumulation_steps`): neither divides the other, and "
                "a checkpoint could not be taken between two rollouts. Make one a multiple of the other."
            )

    def _check_overlong(self) -> None:
        check_number("overlong_penalty", self.overlong_penalty, 0, open_end=True)
        if self.overlong_buffer_length is None:
            if self.overlong_penalty != _DEFAULTS["overlong_penalty"]:
                raise ValueError(
                    f"`overlong_penalty={self.overlong_penalty}` has no effect without `overlong_buffer_length`. Set "
                    "it, to a quarter of `max_completion_length` for example."
                )
            return
        check_number("overlong_buffer_length", self.overlong_buffer_length, 1, integer=True)
        if self.max_completion_length is None:
            raise ValueError(
                f"`overlong_buffer_length={self.overlong_buffer_length}` needs `max_completion_length`: the "
                "punishment counts back from it. Set it."
            )
        if self.overlong_buffer_length >= self.max_completion_length:
            raise ValueError(
                f"`overlong_buffer_length={self.overlong_buffer_length}` must be below "
                f"`max_completion_length={self.max_completion_length}`: otherwise every completion is punished."
            )


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(CalibratedDAPOConfig)}
