# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""When things happen: which rollout batches calibrate, and at which steps a checkpoint may be taken."""

import math
from typing import Any

from transformers import TrainerCallback


class RolloutBoundaryCallback(TrainerCallback):
    """
    Keeps checkpoints at the boundaries of rollouts: one that is due inside a rollout is taken at its end.

    Args:
        updates_per_rollout (`int`): Optimizer steps that use one rollout batch.
    """

    def __init__(self, updates_per_rollout: int):
        self.updates_per_rollout = updates_per_rollout
        self._save_due = False

    def on_step_end(self, args, state, control, **kwargs):
        # TRL restores neither its step counter nor the buffered rollout, so a checkpoint inside a rollout would repeat
        # prompts after a resume and lose the calibration's tokens. The last step saves as it is: nothing follows.
        if control.should_save and state.global_step % self.updates_per_rollout and not control.should_training_stop:
            control.should_save = False
            self._save_due = True
        elif self._save_due and state.global_step % self.updates_per_rollout == 0:
            control.should_save = True
            self._save_due = False
        return control


class CalibrationCallback(RolloutBoundaryCallback):
    """
    Schedules calibrations, and keeps checkpoints at the boundaries of rollouts.

    It says when and holds no calibrated value: those are the trainer's. Pass a subclass in `callbacks` to calibrate at
    other rollouts.

    Args:
        interval (`int`): Rollout batches from one calibration to the next; the first rollout batch calibrates.
        updates_per_rollout (`int`): Optimizer steps that use one rollout batch.
    """

    # Whether `watched` wants the clip share of the rollout batches that do not calibrate.
    watches = False

    def __init__(self, interval: int, updates_per_rollout: int):
        super().__init__(updates_per_rollout)
        self.interval = interval

    def is_due(self, rollout: int) -> bool:
        """Whether rollout batch `rollout`, counted from 0 over all resumes, is a calibration batch."""
        return rollout % self.interval == 0

    def calibrated(self, rollout: int, target_share: float | None) -> None:
        """
        Called after a calibration.

        Args:
            rollout (`int`): Number of the rollout batch.
            target_share (`float` or `None`):
                Share of negative tokens that FP8 clips at the target, which is BF16's share as near as the limits
                allow; `None` where the calibration was skipped.
        """

    def watched(self, rollout: int, num_clipped: int, num_negative: int) -> None:
        """Called after a rollout batch that did not calibrate, if `watches`: negative tokens that FP8 clipped."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the schedule."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""


class AdaptiveCalibrationCallback(CalibrationCallback):
    """
    Calibrates early when FP8's clip share leaves a band around the last target, and ever more rarely while it stays.

    The band is `target * (1 ± band)`, or two standard errors of the watched share where they are more: a handful of
    tokens is no reason to calibrate. After an early calibration the next is due after `interval` rollout batches; each
    further one that came in its own time doubles the distance, up to `max_interval`.

    Args:
        interval (`int`): Shortest distance of two calibrations that no departure from the band calls for.
        updates_per_rollout (`int`): Optimizer steps that use one rollout batch.
        max_interval (`int`): Longest distance, in rollout batches.
        band (`float`): Half the width of the band, as a share of the target.
    """

    watches = True

    def __init__(self, interval: int, updates_per_rollout: int, max_interval: int, band: float):
        super().__init__(interval, updates_per_rollout)
        self.max_interval = max_interval
        self.band = band
        self.target_share: float | None = None
        self.distance = interval
        self.next_rollout = 0
        self.early = True

    def is_due(self, rollout: int) -> bool:
        return rollout >= self.next_rollout

    def calibrated(self, rollout: int, target_share: float | None) -> None:
        # Without a target there is no band to leave: the next try comes in its own time.
        self.target_share = target_share
        flat = not self.early and target_share is not None
        self.distance = min(2 * self.distance, self.max_interval) if flat else self.interval
        self.next_rollout = rollout + self.distance
        self.early = False

    def watched(self, rollout: int, num_clipped: int, num_negative: int) -> None:
        if self.target_share is not None and self.outside_band(num_clipped, num_negative):
            self.next_rollout = rollout + 1
            self.early = True

    def outside_band(self, num_clipped: int, num_negative: int) -> bool:
        """Whether the share of clipped tokens has left the band; `False` for no tokens."""
        if num_negative == 0:
            return False
        share = num_clipped / num_negative
        likely = max(share, self.target_share)
        noise = 2 * math.sqrt(likely * (1 - likely) / num_negative)
        return abs(share - self.target_share) > max(self.band * self.target_share, noise)

    def state(self) -> dict[str, Any]:
        return {
            "target_share": self.target_share,
            "distance": self.distance,
            "next_rollout": self.next_rollout,
            "early": self.early,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        # Empty where the run was on a fixed schedule: the next rollout batch then calibrates.
        if state:
            self.target_share = state["target_share"]
            self.distance = min(state["distance"], self.max_interval)
            self.next_rollout = state["next_rollout"]
            self.early = state["early"]
