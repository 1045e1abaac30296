# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
[`~trl.GRPOTrainer`] that saves a state of its own with each checkpoint and resumes from the newest complete one.

What the file holds and which checkpoint is complete is in `checkpoint.py`; at which steps one is taken, in
`callbacks.py`.
"""

from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from ._trl_compat import HookedGRPOTrainer, RolloutServerError
from .callbacks import RolloutBoundaryCallback
from .checkpoint import check_world, find_checkpoint, read_state, write_state


class CheckpointedGRPOTrainer(HookedGRPOTrainer):
    """
    Base of the trainers. Subclasses say what the state is, in `keeps_state`, `_state` and `_restore`.

    Attributes:
        num_rollouts (`int`): Rollout batches used up, over all resumes.
    """

    num_rollouts = 0

    @property
    def keeps_state(self) -> bool:
        """Whether checkpoints hold `calclip_state.json`. If not, this is TRL's trainer."""
        return False

    def _state(self) -> dict[str, Any]:
        """What `calclip_state.json` holds, beside what the place in the dataset is counted in."""
        return {}

    def _restore(self, state: dict[str, Any] | None) -> None:
        """Take back what `_state` gave; `None` where the checkpoint has no state."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """
        Train, as [`~transformers.Trainer.train`] does.

        With calibration or dynamic sampling, `resume_from_checkpoint=True`, or `"latest"`, is the newest complete
        checkpoint in `output_dir`, incomplete ones are skipped with a notice, and SIGTERM takes a checkpoint (see
        [`RolloutBoundaryCallback`]).

        Raises:
            ValueError: If there is no complete checkpoint to resume from.
        """
        if not self.keeps_state:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        checkpoint = find_checkpoint(resume_from_checkpoint, self.args.output_dir)
        try:
            return super().train(checkpoint, *args, **kwargs)
        except Exception as error:
            error.add_note(
                f"Training stopped at step {self.state.global_step}, in rollout batch {self.num_rollouts}. "
                "`resume_from_checkpoint=True` goes on from the newest complete checkpoint in "
                f"{self.args.output_dir}, if there is one."
            )
            raise
        finally:
            # After an exception no callback is told that training is over.
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, RolloutBoundaryCallback):
                    callback.restore_signal_handler()

    def write_checkpoint(self, model, trial) -> None:
        try:
            super().write_checkpoint(model, trial)
        except Exception as error:
            error.add_note(
                f"The checkpoint of step {self.state.global_step} could not be written to its end; a resume skips it "
                "where it is incomplete. Earlier ones are as they were. Is the disk full? Free space, set "
                "`save_total_limit`, and resume with `resume_from_checkpoint=True`."
            )
            raise

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # Checkpoints pass here too, before `trainer_state.json` is written: a complete checkpoint never lacks the
        # state. One of an earlier run in the same place would make a half-written checkpoint look complete.
        if self.keeps_state and self.args.should_save and _internal_call and output_dir is not None:
            (Path(output_dir) / TRAINER_STATE_NAME).unlink(missing_ok=True)
        super().save_model(output_dir, _internal_call)
        if self.keeps_state and self.args.should_save:
            write_state(output_dir or self.args.output_dir, {**self._state(), "world": self._world()})

    def load_checkpoint(self, checkpoint: str) -> None:
        if self.keeps_state:
            state = read_state(checkpoint)
            if state is not None:
                check_world(state["world"], self._world())
            self._restore(state)

    def rollout_failed(self, error: RolloutServerError) -> None:
        """Leave a checkpoint of the state before the failed rollout, from which a run goes on as if it had not."""
        if not self.had_a_rollout:
            raise error  # nothing was trained since the start, or since the checkpoint that the run resumed from
        path = self.save_checkpoint()
        raise RolloutServerError(
            f"{error} The run stopped before the rollout of step {self.state.global_step + 1} and is saved in {path}: "
            "start the server and resume with `trainer.train(resume_from_checkpoint=True)`."
        ) from error

    def _world(self) -> dict[str, int]:
        """What the position in the dataset is counted in."""
        per_step = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return {
            "num_processes": self.accelerator.num_processes,
            "completions_per_rollout": self.args.generation_batch_size,
            "completions_per_step": per_step * self.accelerator.num_processes,
        }
