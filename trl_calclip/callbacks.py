# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""When things happen: which rollout batches calibrate, and at which steps a checkpoint may be taken."""

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

    def __init__(self, interval: int, updates_per_rollout: int):
        super().__init__(updates_per_rollout)
        self.interval = interval

    def is_due(self, rollout: int) -> bool:
        """Whether rollout batch `rollout`, counted from 0 over all resumes, is a calibration batch."""
        return rollout % self.interval == 0
