# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Settings of the alarms, and what each alarm tells the user: what it usually means, and what to look at."""

import math
from dataclasses import dataclass, field
from typing import Any


ACTIONS = ("warn", "stop", "off")
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
            On a loss that is not finite, or a share of such ratios above `alarm_nonfinite_limit`. A gradient norm that
            is not finite ends the run before the optimizer step, whatever is set here.
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
