# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""When things happen: which rollout batches calibrate, and at which steps a checkpoint may be taken."""

import logging
import math
import signal
import threading
from collections.abc import Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from .calibrated_grpo_config import CalibratedGRPOConfig


logger = logging.getLogger(__name__)


class RolloutBoundaryCallback(TrainerCallback):
    """
    Keeps checkpoints at the boundaries of rollouts: one that is due inside a rollout is taken at its end.

    SIGTERM is such a request too: at the end of the rollout a checkpoint is taken, whatever `save_strategy` says, and
    training stops as if its last step had come. A second SIGTERM does what it did before training began. Where there
    is more than one process, all of them must stop at the same step, and a signal reaches them at different ones: they
    agree by one reduction of a single number per rollout; one process communicates nothing. Python lets only the main
    thread handle signals: training in another one is ended by SIGTERM as ever, with a notice at the start.

    Args:
        updates_per_rollout (`int`): Optimizer steps that use one rollout batch.
    """

    def __init__(self, updates_per_rollout: int):
        self.updates_per_rollout = updates_per_rollout
        self._save_due = False
        self._first_step = 0
        self._terminated = False
        self._previous_handler = None

    def on_train_begin(self, args, state, control, **kwargs):
        # TRL counts rollouts from where it resumes. That is a boundary, unless a run ended inside a rollout.
        self._first_step = state.global_step
        if state.global_step % self.updates_per_rollout:
            logger.warning(
                "Resuming inside a rollout, at step %d with %d steps a rollout: the rest of that rollout was not "
                "saved, and its prompts are used again.", state.global_step, self.updates_per_rollout,
            )  # fmt: skip
        self._save_due = self._terminated = False
        previous = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread() or previous is None:
            logger.warning(
                "SIGTERM will end this run without a checkpoint: it can be handled only in Python's main thread, and "
                "only in place of a handler that Python knows."
            )
            return
        if self._previous_handler is None:
            self._previous_handler = previous
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, signum, frame):
        self._terminated = True
        self.restore_signal_handler()

    def restore_signal_handler(self) -> None:
        """Let SIGTERM do again what it did before training. Does nothing the second time."""
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
            self._previous_handler = None

    def on_train_end(self, args, state, control, **kwargs):
        self.restore_signal_handler()

    def on_step_end(self, args, state, control, **kwargs):
        inside = (state.global_step - self._first_step) % self.updates_per_rollout
        # TRL restores neither its step counter nor the buffered rollout, so a checkpoint inside a rollout would repeat
        # prompts after a resume and lose the calibration's tokens. The last step saves as it is: nothing follows.
        if control.should_save and inside and not control.should_training_stop:
            control.should_save = False
            self._save_due = True
        elif self._save_due and not inside:
            control.should_save = True
            self._save_due = False
        if not inside and self._any_terminated(args.device):
            logger.warning("SIGTERM: taking a checkpoint at step %d, then training stops.", state.global_step)
            control.should_save = control.should_training_stop = True
            # The time until a scheduler kills is short.
            control.should_evaluate = False
        return control

    def _any_terminated(self, device: torch.device) -> bool:
        """Whether SIGTERM came, on any process; the same answer on all."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self._terminated
        terminated = torch.tensor(self._terminated, dtype=torch.int32, device=device)
        torch.distributed.all_reduce(terminated, op=torch.distributed.ReduceOp.MAX)
        return bool(terminated)


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
        assert self.target_share is not None
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


def find_schedule(args: CalibratedGRPOConfig, callbacks: Sequence[TrainerCallback]) -> CalibrationCallback:
    """
    The user's [`CalibrationCallback`] among `callbacks`, or the one that the config names.

    Raises:
        ValueError: If there are both.
    """
    adaptive = args.calibration_schedule == "adaptive"
    for callback in callbacks:
        if isinstance(callback, CalibrationCallback):
            if adaptive:
                raise ValueError(
                    "`calibration_schedule='adaptive'` has no effect beside a `CalibrationCallback` in "
                    f"`callbacks`: {type(callback).__name__} says when to calibrate. Leave one of the two out."
                )
            return callback
    if adaptive:
        # The config has filled them in.
        assert args.calibration_max_interval is not None and args.calibration_band is not None
        return AdaptiveCalibrationCallback(
            args.calibration_interval, args.updates_per_rollout, args.calibration_max_interval, args.calibration_band
        )
    return CalibrationCallback(args.calibration_interval, args.updates_per_rollout)
