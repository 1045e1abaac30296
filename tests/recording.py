# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""A trainer that keeps what passes its hooks, and the check that calibration took the loss's own tokens and ratios."""

import dataclasses
from typing import Any

import pytest
import torch
from conftest import digits_reward

from trl_calclip import CalibratedGRPOTrainer
from trl_calclip.calibration import TokenPool


@dataclasses.dataclass
class Forward:
    """One training forward of the policy."""

    rollout: int
    step: int  # optimizer steps done before it
    inputs: dict[str, Any]
    per_token_logps: torch.Tensor  # what TRL's loss got
    epsilons: tuple[float, float]  # in force
    collected: TokenPool | None  # what this forward added to the calibration's tokens

    @property
    def mask(self) -> torch.Tensor:
        """The mask of TRL's loss, `(B, T)`, boolean."""
        mask = self.inputs["completion_mask"]
        return (mask * self.inputs["tool_mask"] if "tool_mask" in self.inputs else mask).bool()

    @property
    def advantages(self) -> torch.Tensor:
        """`(B, T)`."""
        return self.inputs["advantages"].unsqueeze(1).expand(self.mask.shape)

    @property
    def ratio(self) -> torch.Tensor:
        """The loss's importance ratio, `(B, T)`."""
        return torch.exp(self.per_token_logps - self.inputs["old_per_token_logps"])


class RecordingTrainer(CalibratedGRPOTrainer):
    """Changes nothing; keeps every rollout, training forward and BF16 pass."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rollouts: list[list[dict[str, Any]]] = []
        self.forwards: list[Forward] = []
        self.scored: list[tuple[dict[str, Any], torch.Tensor]] = []

    def begin_rollout(self, micro_batches):
        super().begin_rollout(micro_batches)
        self.rollouts.append([{key: value.clone() for key, value in inputs.items()} for inputs in micro_batches])

    def score(self, inputs):
        per_token_logps = super().score(inputs)
        self.scored.append((inputs, per_token_logps))
        return per_token_logps

    def _get_per_token_logps_and_entropies(self, *args, compute_entropy=False, **kwargs):
        result = super()._get_per_token_logps_and_entropies(*args, compute_entropy=compute_entropy, **kwargs)
        if compute_entropy and self.model.training:  # TRL asks for the entropy in its loss and nowhere else
            self._loss_logps = result[0].detach()
        return result

    def after_policy_forward(self, inputs, per_token_logps):
        rows = [] if self._collector is None else self._collector._rows
        before = len(rows)
        super().after_policy_forward(inputs, per_token_logps)
        added = rows[before:]
        self.forwards.append(
            Forward(
                rollout=len(self.rollouts) - 1,
                step=self.state.global_step,
                inputs=dict(inputs),
                per_token_logps=self._loss_logps,
                epsilons=(self.epsilon_low, self.epsilon_high),
                collected=TokenPool.from_rows(torch.cat(added)) if added else None,
            )
        )

    def assert_calibrated(self) -> None:
        """
        Calibrations happened, on the very tokens that the loss used after the first optimizer step of each calibration
        batch, with the loss's own ratios; TRL's own clip metrics count the same.
        """
        interval = self.args.calibration_interval
        history = {record["rollout"]: record for record in self.calibration_history}
        assert self.num_calibrations == len(history) >= 1
        assert self.num_skipped_calibrations == 0
        first_step: dict[int, int] = {}
        num_negative = dict.fromkeys(history, 0)
        for forward in self.forwards:
            on_policy = first_step.setdefault(forward.rollout, forward.step) == forward.step
            if on_policy or forward.rollout % interval:
                assert forward.collected is None
                continue
            takes_part = forward.mask & (forward.advantages != 0)
            assert torch.equal(forward.collected.fp8_ratio, forward.ratio[takes_part].double())
            assert torch.equal(forward.collected.advantages, forward.advantages[takes_part].double())
            num_negative[forward.rollout] += (forward.collected.advantages < 0).sum().item()
        assert num_negative == {rollout: record["num_negative_tokens"] for rollout, record in history.items()}
        assert all(num_negative.values())
        self.assert_clip_metrics()

    def assert_clip_metrics(self) -> None:
        """TRL's logged shares of clipped tokens are those of the collected tokens at the bounds in force."""
        logs = {entry["step"]: entry for entry in self.state.log_history if "clip_ratio/low_mean" in entry}
        clipped = 0
        for step in {forward.step for forward in self.forwards if forward.collected is not None}:
            low, high = [], []
            for forward in [forward for forward in self.forwards if forward.step == step]:
                collected, (epsilon_low, epsilon_high) = forward.collected, forward.epsilons
                total = max(forward.mask.sum().item(), 1)
                clipped_low = (collected.fp8_ratio < 1 - epsilon_low) & (collected.advantages < 0)
                clipped_high = (collected.fp8_ratio > 1 + epsilon_high) & (collected.advantages > 0)
                low.append(clipped_low.sum().item() / total)
                high.append(clipped_high.sum().item() / total)
            assert logs[step + 1]["clip_ratio/low_mean"] == pytest.approx(sum(low) / len(low), abs=1e-6)
            assert logs[step + 1]["clip_ratio/high_mean"] == pytest.approx(sum(high) / len(high), abs=1e-6)
            clipped += sum(low) + sum(high)
        assert clipped > 0


@pytest.fixture
def make_recorder(make_config, toy_path, toy_dataset):
    """
    Function from overrides of the config to a `RecordingTrainer`, as `make_trainer`. One rollout of four updates, and
    narrow reference bounds in force from the start, so that a part of the tokens is clipped.
    """

    def build(trainer: dict | None = None, **overrides) -> RecordingTrainer:
        narrow = {"epsilon": 0.1, "epsilon_high": 0.2, "calibration_start_at_reference": True}
        moving = {"max_steps": 4, "learning_rate": 3e-3}
        arguments = {"model": toy_path, "reward_funcs": digits_reward, "train_dataset": toy_dataset, **(trainer or {})}
        return RecordingTrainer(args=make_config(**{**narrow, **moving, **overrides}), **arguments)

    # The toy gains nothing from more threads, and on a busy machine they wait for one another at every operation.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield build
    torch.set_num_threads(threads)
