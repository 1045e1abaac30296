# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""`calclip_state.json`: the calibration's state in a checkpoint, written by rename, read with suspicion."""

import json
import os
from pathlib import Path
from typing import Any

from .clip_range import ClipRange


STATE_NAME = "calclip_state.json"
STATE_VERSION = 1
_COUNTERS = ("num_rollouts", "num_calibrations", "num_skipped_calibrations")


def write_state(directory: str, state: dict[str, Any]) -> None:
    """Write `state` to `directory`. A killed process leaves the old file or the new one, nothing between."""
    path = Path(directory) / STATE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as file:
        json.dump({"version": STATE_VERSION, **state}, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_state(directory: str) -> dict[str, Any] | None:
    """
    Read the state from a checkpoint directory, `None` where there is none.

    Raises:
        ValueError: If the file is damaged, of another version, or lacks what a resume needs.
    """
    path = Path(directory) / STATE_NAME
    if not path.exists():
        return None
    remedy = "Resume from another checkpoint, or delete the file to start from `calibration_start`."
    try:
        state = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}). {remedy}") from error
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        raise ValueError(f"{path} is not a calibration state of version {STATE_VERSION}. {remedy}")
    try:
        ClipRange(*state["clip_range"])
        counters = [state[name] for name in _COUNTERS]
        history = state["calibration_history"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} lacks what a resume needs ({error!r}). {remedy}") from error
    if any(type(count) is not int or count < 0 for count in counters) or not isinstance(history, list):
        raise ValueError(
            f"{path} holds counters or a history that cannot be: {dict(zip(_COUNTERS, counters, strict=True))}. "
            f"{remedy}"
        )
    return state
