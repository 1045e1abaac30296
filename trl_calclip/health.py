# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Alarms: what in the log history of a run says that it is going wrong, what it usually means, and what to look at.

[`HealthMonitor`] reads log entries and holds no trainer: the callback feeds it during a run, the report afterwards.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from .health_settings import EXPLANATIONS, HealthArguments


logger = logging.getLogger(__name__)


# A surge is at least this many nats, so that a policy of almost no entropy may double it.
MIN_ENTROPY_RISE = 0.1
# Part of the search's range that counts as its edge.
EDGE = 0.02


@dataclass(frozen=True)
class Alarm:
    """
    One alarm.

    Args:
        name (`str`): Its name, a key of `EXPLANATIONS`.
        step (`int`): Optimizer step of the log entry.
        seen (`str`): What was seen, with numbers.
    """

    name: str
    step: int
    seen: str

    @property
    def message(self) -> str:
        """What was seen, what it usually means, and what to look at."""
        meaning, hints = EXPLANATIONS[self.name]
        lines = [f"Alarm `{self.name}` at step {self.step}: {self.seen} {meaning} Look at, in this order:"]
        labels = ("sync", "recipe", "clip", "learning rate")
        lines += [
            f"  {number}. {label}: {hint}" for number, (label, hint) in enumerate(zip(labels, hints, strict=True), 1)
        ]
        return "\n".join(lines)


class HealthMonitor:
    """
    Reads log entries one by one and says which alarms begin with each. An alarm that goes on is not repeated; once its
    number is back in the band, it can begin again.

    Args:
        settings ([`HealthArguments`]): Thresholds.
        lower_limits, upper_limits (`tuple[float, float]`, *optional*):
            The search's limits; default to [`CalibratedGRPOConfig`]'s.
    """

    def __init__(
        self,
        settings: HealthArguments,
        lower_limits: tuple[float, float] = (0.5, 0.9),
        upper_limits: tuple[float, float] = (1.2, 2.0),
    ):
        self.settings = settings
        self.limits = {"lower": lower_limits, "upper": upper_limits}
        self._entropies: deque[float] = deque(maxlen=settings.alarm_entropy_window)
        self._entropy_start: float | None = None
        self._entropy_low = math.inf
        self._at_limit = {"lower": 0, "upper": 0}
        self._active: set[str] = set()

    def update(self, entry: Mapping[str, Any], step: int) -> list[Alarm]:
        """
        Alarms that begin with a log entry.

        Args:
            entry (`Mapping[str, Any]`): What the trainer logged; metrics that are missing or `None` are not judged.
            step (`int`): Optimizer step.
        """
        begun = []
        for name, seen in self._findings(entry):
            if seen is None:
                self._active.discard(name)
            elif name not in self._active and vars(self.settings)[f"alarm_{name}"] != "off":
                self._active.add(name)
                begun.append(Alarm(name, step, seen))
        return begun

    def _findings(self, entry: Mapping[str, Any]):
        """`(alarm, what was seen)` for each alarm that the entry has numbers for; `None` where they are healthy."""
        settings = self.settings
        yield from self._entropy(entry.get("entropy"))
        yield from self._bounds(entry)
        shares = {side: entry.get(f"calclip/overclip_{side}_frac") for side in ("low", "high")}
        overclip = {side: value for side, value in shares.items() if value is not None}
        if overclip:
            side = max(overclip, key=overclip.__getitem__)
            seen = (
                f"{overclip[side]:.1%} of the tokens with {'negative' if side == 'low' else 'positive'} advantage are "
                f"over-clipped ({side} side), more than {settings.alarm_overclip_limit:.1%}."
            )
            yield "overclip", seen if overclip[side] > settings.alarm_overclip_limit else None
        value = entry.get("rollout_corr/k3_kl")
        if value is not None:
            limit = settings.alarm_mismatch_kl_limit
            seen = f"the KL of rollout and trainer is {value:.4f} nats per token, more than {limit:g}."
            yield "mismatch_kl", None if value <= limit else seen
        value = entry.get("rollout_corr/rollout_is_eff_sample_size")
        if value is not None:
            limit = settings.alarm_sample_size_limit
            seen = f"the effective sample size is {value:.3f} of the tokens, less than {limit:g}."
            yield "sample_size", None if value >= limit else seen
        yield from self._finite(entry)
        value = entry.get("calclip/garbled_frac")
        if value is not None:
            limit = settings.alarm_garbled_limit
            seen = (
                f"{value:.1%} of the completions have over 1 nat of entropy per token and negative advantage, more "
                f"than {limit:.1%}."
            )
            yield "garbled", seen if value > limit else None

    def _entropy(self, value: float | None):
        if value is None or not math.isfinite(value):
            return
        window = self._entropies
        window.append(value)
        assert window.maxlen is not None
        if len(window) < window.maxlen:
            return
        mean = sum(window) / len(window)
        if self._entropy_start is None:
            self._entropy_start = mean
        surge, low = self.settings.alarm_entropy_surge_factor, self._entropy_low
        seen = f"entropy rose to {mean:.3f} nats per token, from {low:.3f} at its lowest."
        yield "entropy_surge", seen if mean > surge * low and mean - low >= MIN_ENTROPY_RISE else None
        seen = f"entropy fell to {mean:.4f} nats per token, from {self._entropy_start:.3f} at the start."
        collapsed = mean < self.settings.alarm_entropy_collapse_factor * self._entropy_start
        yield "entropy_collapse", seen if collapsed else None
        self._entropy_low = min(low, mean)

    def _bounds(self, entry: Mapping[str, Any]):
        targets: dict[str, Any] = {side: entry.get(f"calclip/{side}_target") for side in self.limits}
        # A skipped calibration has no share of BF16 and says nothing of the search.
        if None in targets.values() or entry.get("calclip/alpha_low_bf16") is None:
            return
        for side, limits in self.limits.items():
            # Between two ratios the solve takes the bound nearest to the reference, so it stops just short of a limit.
            near = EDGE * (limits[1] - limits[0])
            at_edge = not limits[0] + near < targets[side] < limits[1] - near
            self._at_limit[side] = self._at_limit[side] + 1 if at_edge else 0
        side = max(self._at_limit, key=self._at_limit.__getitem__)
        times = self._at_limit[side]
        seen = (
            f"the search for the {side} bound ended at the edge of its limits, {targets[side]:g}, in {times} "
            "calibrations in a row."
        )
        yield "bounds_at_limit", seen if times >= self.settings.alarm_bounds_at_limit_patience else None

    def _finite(self, entry: Mapping[str, Any]):
        bad = [name for name in ("loss", "grad_norm") if not math.isfinite(entry.get(name, 0.0))]
        share = entry.get("calclip/nonfinite_frac", 0.0)
        seen = []
        if bad:
            seen.append(f"{' and '.join(bad)} not finite.")
        if share > self.settings.alarm_nonfinite_limit:
            seen.append(f"{share:.2%} of the importance ratios are not finite.")
        if "loss" in entry:
            yield "nonfinite", " ".join(seen) or None


class HealthCallback(TrainerCallback):
    """
    Watches a run and raises alarms as the config says. `stop` saves a checkpoint at the end of the rollout, where a
    resume can go on, and ends the training there.

    Args:
        args ([`CalibratedGRPOConfig`]): Thresholds, actions and the search's limits.

    Attributes:
        alarms (`list[Alarm]`): What was raised, in order.
    """

    def __init__(self, args):
        self.settings = args
        self.updates_per_rollout = max(1, args.updates_per_rollout)
        self.alarms: list[Alarm] = []
        self._monitor = self._new_monitor()
        self._stop_due = False

    def _new_monitor(self) -> HealthMonitor:
        limits = self.settings.calibration_lower_limits, self.settings.calibration_upper_limits
        return HealthMonitor(self.settings, *limits)

    def on_train_begin(self, args, state, control, **kwargs):
        # After a resume the entries before it are known: what had begun then is not raised again.
        self._monitor, self._stop_due = self._new_monitor(), False
        for entry in state.log_history:
            self._monitor.update(entry, entry["step"])

    def on_log(self, args, state, control, logs=None, **kwargs):
        for alarm in self._monitor.update(logs, state.global_step):
            self.alarms.append(alarm)
            stop = vars(self.settings)[f"alarm_{alarm.name}"] == "stop"
            self._stop_due = self._stop_due or stop
            if state.is_world_process_zero:
                ending = "\nTraining stops at the end of this rollout, after a checkpoint." if stop else ""
                logger.warning("%s%s", alarm.message, ending)
        return self._stop_at_boundary(state, control)

    def on_step_end(self, args, state, control, **kwargs):
        return self._stop_at_boundary(state, control)

    def _stop_at_boundary(self, state, control):
        # A checkpoint inside a rollout would repeat prompts after a resume and lose the calibration's tokens.
        if self._stop_due and state.global_step % self.updates_per_rollout == 0:
            control.should_save = control.should_training_stop = True
            self._stop_due = False
        return control
