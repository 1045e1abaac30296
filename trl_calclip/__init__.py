# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Full-pipeline FP8 reinforcement learning for TRL, with calibrated clip bounds.

Names are imported when they are first asked for: vLLM loads this package's plugin in each of its processes, and those
have no use for TRL.
"""

import importlib
from typing import TYPE_CHECKING

from ._versions import require_version


if TYPE_CHECKING:
    from .calibrated_dapo_config import CalibratedDAPOConfig
    from .calibrated_dapo_trainer import CalibratedDAPOTrainer
    from .calibrated_grpo_config import CalibratedGRPOConfig
    from .calibrated_grpo_trainer import CalibratedGRPOTrainer
    from .callbacks import CalibrationCallback
    from .clip_range import CalibrationResult, ClipRange, calibrate_clip_range
    from .fp8.alignment import AlignmentReport, alignment_report
    from .health import HealthCallback


_MODULES = {
    "AlignmentReport": ".fp8.alignment",
    "CalibratedDAPOConfig": ".calibrated_dapo_config",
    "CalibratedDAPOTrainer": ".calibrated_dapo_trainer",
    "CalibratedGRPOConfig": ".calibrated_grpo_config",
    "CalibratedGRPOTrainer": ".calibrated_grpo_trainer",
    "CalibrationCallback": ".callbacks",
    "CalibrationResult": ".clip_range",
    "ClipRange": ".clip_range",
    "HealthCallback": ".health",
    "alignment_report": ".fp8.alignment",
    "calibrate_clip_range": ".clip_range",
}

__all__ = [
    "AlignmentReport",
    "CalibratedDAPOConfig",
    "CalibratedDAPOTrainer",
    "CalibratedGRPOConfig",
    "CalibratedGRPOTrainer",
    "CalibrationCallback",
    "CalibrationResult",
    "ClipRange",
    "HealthCallback",
    "alignment_report",
    "calibrate_clip_range",
]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULES[name] != ".clip_range":  # pure mathematics
        # First of all: another version may fail anywhere while it is imported, or lack a hook and say nothing.
        require_version("trl", needed_for="`trl_calclip`")
        require_version("transformers", needed_for="`trl_calclip`")
    value = getattr(importlib.import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
