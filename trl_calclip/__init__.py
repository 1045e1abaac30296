# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Full-pipeline FP8 reinforcement learning for TRL, with calibrated clip bounds."""

from .calibrated_grpo_config import CalibratedGRPOConfig
from .calibrated_grpo_trainer import CalibratedGRPOTrainer
from .callbacks import CalibrationCallback
from .clip_range import CalibrationResult, ClipRange, calibrate_clip_range


__all__ = [
    "CalibratedGRPOConfig",
    "CalibratedGRPOTrainer",
    "CalibrationCallback",
    "CalibrationResult",
    "ClipRange",
    "calibrate_clip_range",
]
