# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Alarms: what in the log history of a run says that it is going wrong, what it usually means, and what to look at.

[`HealthMonitor`] reads log entries and holds no trainer: the callback feeds it during a run, the report afterwards.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback


logger = logging.getLogger(__name__)


ACTIONS = ("warn", "stop", "off")
# A surge is at least this many nats, so that a policy of almost no entropy may double it.
MIN_ENTROPY_RISE = 0.1
# Part of the search's range that counts as its edge.
EDGE = 0.02

_SYNC = (
    "`sampling/sampling_logp_difference/mean` and `rollout_corr/k3_kl`: a jump after a weight sync is a broken sync, "
    "which looks like this in BF16 too. Set `fp8_sync_check_interval=1` for a while."
)
_RECIPE = (
    "`trl-calclip diagnose --per-layer`: a finer recipe (`blockwise`), or `fp8_ignore` for the layers where "
    "over-clipping falls."
)
_CLIP = "`calclip/lower`, `calclip/upper` and their targets: do they follow? Calibrate more often if they lag."
_RATE = "`grad_norm` and `learning_rate`: halve it, or use fewer updates per rollout."

# Per alarm: what it usually means, and what to look at, in the order sync, recipe, clip, learning rate.
EXPLANATIONS: dict[str, tuple[str, tuple[str, str, str, str]]] = {
    "entropy_surge": (
        "Usually FP8 noise keeps garbled completions from being unlearned: their tokens fall under the lower clip "
        "bound by accident and get no gradient.",
        (_SYNC, _RECIPE, "`calclip/overclip_low_frac`, in `entropy_bin/over-1` above all. " + _CLIP, _RATE),
    ),
    "entropy_collapse": (
        "Usually the policy has settled on few completions: groups get equal rewards and nothing is learned any more.",
        (
            _SYNC,
            "`calclip/prob_error_fp8`: tensorwise scales have made entropy fall where BF16's did not. " + _RECIPE,
            "`calclip/upper`: an upper bound that is too low keeps rare tokens from growing; raise `epsilon_high`.",
            "`frac_reward_zero_std` and `learning_rate`: lower it, or set an entropy bonus (`entropy_coef`).",
        ),
    ),
    "overclip": (
        "Usually ratio noise of FP8 is wider than the clip range: tokens lose a gradient that BF16 would give them.",
        (_SYNC, _RECIPE, _CLIP, _RATE),
    ),
    "bounds_at_limit": (
        "Usually FP8 noise is larger than the search can make up for: the bound that would clip as BF16 does lies "
        "outside the limits.",
        (
            _SYNC,
            _RECIPE,
            "`calibration_lower_limits` and `calibration_upper_limits`: widen them if the noise is accepted.",
            _RATE,
        ),
    ),
    "mismatch_kl": (
        "Usually rollout and trainer do not hold the same weights, or do not quantize them by the same rule; FP8's "
        "own noise stays below.",
        (
            _SYNC,
            "`fp8_rollout`: leave it at 'auto', and `fp8_ignore` alike on both sides (`alignment_report` compares).",
            "Nothing: no clip bound corrects a rollout mismatch.",
            "`grad_norm`: weights that move far between two syncs are no mismatch of FP8. " + _RATE,
        ),
    ),
    "sample_size": (
        "Usually a few tokens carry most of the importance weight, because rollout and trainer disagree.",
        (
            _SYNC,
            "`fp8_rollout`: leave it at 'auto'. " + _RECIPE,
            "`vllm_importance_sampling_mode` and its cap: 'token_truncate' at 2.0 keeps all tokens.",
            _RATE,
        ),
    ),
    "nonfinite": (
        "Usually an overflow: an update that was too large, or a fault in a float8 kernel.",
        (
            "Does the engine still give finite log-probabilities? Reload the last checkpoint before this step.",
            "`fp8_emulate=True` for a few steps: if it stays finite there, the kernel or `torch.compile` is at fault.",
            "Nothing: the bounds stay while tokens are not finite.",
            "`grad_norm` in the steps before, `max_grad_norm`, and `learning_rate`: lower it.",
        ),
    ),
    "garbled": (
        "Usually completions of high entropy are produced and punished, but not unlearned: the state before a surge.",
        (
            "Read some completions (`log_completions=True`). Garbled text right after a weight sync is a sync fault. "
            + _SYNC,
            _RECIPE,
            "`calclip/entropy_bin/over-1/overclip_low_frac`. " + _CLIP,
            _RATE,
        ),
    ),
}
# Alarms on what only a calibration measures, and on what only vLLM's log-probabilities show.
_NEED_CALIBRATION = ("overclip", "bounds_at_limit", "garbled")
_NEED_ROLLOUT_LOGPS = ("mismatch_kl", "sample_size")


def _action(what: str) -> Any:
    return field(
        default="warn", metadata={"help": f"What to do on {what}: 'warn', 'stop' (after a checkpoint), 'off'."}
    )


def _limit(default: float, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class HealthArguments:
    """
    Settings of the alarms. Each action is `"warn"`, `"stop"` (save a checkpoint at the end of the rollout, then stop)
    or `"off"`.

    Args:
        alarm_entropy_surge (`str`, *optional*, defaults to `"warn"`):
            On entropy above `alarm_entropy_surge_factor` times its lowest so far, by at least 0.1 nats.
        alarm_entropy_surge_factor (`float`, *optional*, defaults to `2.0`):
            Entropy is averaged over `alarm_entropy_window` entries before it is compared.
        alarm_entropy_collapse (`str`, *optional*, defaults to `"warn"`):
            On entropy below `alarm_entropy_collapse_factor` times its start.
        alarm_entropy_collapse_factor (`float`, *optional*, defaults to `0.1`):
            The start is the average over the first window.
        alarm_entropy_window (`int`, *optional*, defaults to `10`):
            Log entries that entropy is averaged over.
        alarm_overclip (`str`, *optional*, defaults to `"warn"`):
            On a share of over-clipped tokens, low or high, above `alarm_overclip_limit`.
        alarm_overclip_limit (`float`, *optional*, defaults to `0.05`):
            Share of the tokens with negative or with positive advantage.
        alarm_bounds_at_limit (`str`, *optional*, defaults to `"warn"`):
            On a search that ends at the edge of its limits for `alarm_bounds_at_limit_patience` calibrations.
        alarm_bounds_at_limit_patience (`int`, *optional*, defaults to `3`):
            Calibrations in a row, skipped ones not counted.
        alarm_mismatch_kl (`str`, *optional*, defaults to `"warn"`):
            On `rollout_corr/k3_kl` above `alarm_mismatch_kl_limit`.
        alarm_mismatch_kl_limit (`float`, *optional*, defaults to `0.1`):
            Nats per token; verl's band.
        alarm_sample_size (`str`, *optional*, defaults to `"warn"`):
            On `rollout_corr/rollout_is_eff_sample_size` below `alarm_sample_size_limit`.
        alarm_sample_size_limit (`float`, *optional*, defaults to `0.3`):
            Share of the tokens; verl's band.
        alarm_nonfinite (`str`, *optional*, defaults to `"warn"`):
            On a loss or a gradient norm that is not finite, or a share of such ratios above `alarm_nonfinite_limit`.
        alarm_nonfinite_limit (`float`, *optional*, defaults to `0.0`):
            Share of the tokens of a calibration batch.
        alarm_garbled (`str`, *optional*, defaults to `"warn"`):
            On a share of completions of over 1 nat per token and with negative advantage above `alarm_garbled_limit`.
        alarm_garbled_limit (`float`, *optional*, defaults to `0.25`):
            Share of the completions of a calibration batch.
    """

    alarm_entropy_surge: str = _action("a surge of the entropy")
    alarm_entropy_surge_factor: float = _limit(2.0, "Entropy over its lowest so far that is a surge.")
    alarm_entropy_collapse: str = _action("a collapse of the entropy")
    alarm_entropy_collapse_factor: float = _limit(0.1, "Entropy over its start that is a collapse.")
    alarm_entropy_window: int = field(default=10, metadata={"help": "Log entries that entropy is averaged over."})
    alarm_overclip: str = _action("too many over-clipped tokens")
    alarm_overclip_limit: float = _limit(0.05, "Highest share of over-clipped tokens, low or high.")
    alarm_bounds_at_limit: str = _action("a search that ends at the edge of its limits")
    alarm_bounds_at_limit_patience: int = field(
        default=3, metadata={"help": "Calibrations in a row that may end at the edge of the limits."}
    )
    alarm_mismatch_kl: str = _action("too large a mismatch KL of rollout and trainer")
    alarm_mismatch_kl_limit: float = _limit(0.1, "Highest `rollout_corr/k3_kl`, nats per token.")
    alarm_sample_size: str = _action("too small an effective sample size")
    alarm_sample_size_limit: float = _limit(0.3, "Lowest `rollout_corr/rollout_is_eff_sample_size`.")
    alarm_nonfinite: str = _action("numbers that are not finite")
    alarm_nonfinite_limit: float = _limit(0.0, "Highest share of ratios that are not finite.")
    alarm_garbled: str = _action("garbled output")
    alarm_garbled_limit: float = _limit(0.25, "Highest share of completions over 1 nat with negative advantage.")

    def check_alarms(self) -> None:
        """
        Check the settings above; a boolean `off` from YAML becomes a string.

        Raises:
            ValueError: For an action that does not exist, or a `stop` that could never come.
        """
        settings = vars(self)
        for name in EXPLANATIONS:
            value = settings[f"alarm_{name}"]
            if value is False:
                setattr(self, f"alarm_{name}", "off")
            elif value not in ACTIONS:
                raise ValueError(f"`alarm_{name}` must be one of {', '.join(ACTIONS)}, got {value!r}.")
        for name, value in settings.items():
            whole = name in ("alarm_entropy_window", "alarm_bounds_at_limit_patience")
            if not name.startswith("alarm_") or name.removeprefix("alarm_") in EXPLANATIONS:
                continue
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise TypeError(f"`{name}` must be {'an integer' if whole else 'a number'}, got {value!r}.")
            if not math.isfinite(value) or value < (1 if whole else 0):
                raise ValueError(f"`{name}` must be at least {1 if whole else 0}, got {value}.")

    def check_alarms_can_fire(self, *, calibrated: bool, rollout_logps: bool) -> None:
        """
        Refuse a `stop` on what this run does not measure.

        Args:
            calibrated (`bool`): Whether the run calibrates.
            rollout_logps (`bool`): Whether the rollout's log-probabilities are compared with the trainer's.

        Raises:
            ValueError: If an alarm could never fire.
        """
        for names, measured, remedy in (
            (_NEED_CALIBRATION, calibrated, "`calibrated_clip=True`"),
            (_NEED_ROLLOUT_LOGPS, rollout_logps, "`use_vllm=True` and `vllm_importance_sampling_correction=True`"),
        ):
            for name in names:
                if vars(self)[f"alarm_{name}"] == "stop" and not measured:
                    raise ValueError(
                        f"`alarm_{name}='stop'` has no effect: what it watches is only measured with {remedy}. Set "
                        f"that, or leave `alarm_{name}` at 'warn'."
                    )


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
        overclip = {side: entry.get(f"calclip/overclip_{side}_frac") for side in ("low", "high")}
        overclip = {side: value for side, value in overclip.items() if value is not None}
        if overclip:
            side = max(overclip, key=overclip.get)
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
        targets = {side: entry.get(f"calclip/{side}_target") for side in self.limits}
        # A skipped calibration has no share of BF16 and says nothing of the search.
        if None in targets.values() or entry.get("calclip/alpha_low_bf16") is None:
            return
        for side, limits in self.limits.items():
            # Between two ratios the solve takes the bound nearest to the reference, so it stops just short of a limit.
            near = EDGE * (limits[1] - limits[0])
            at_edge = not limits[0] + near < targets[side] < limits[1] - near
            self._at_limit[side] = self._at_limit[side] + 1 if at_edge else 0
        side = max(self._at_limit, key=self._at_limit.get)
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
