# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""`calclip_state.json`: the calibration's state in a checkpoint, written by rename, read with suspicion."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from .clip_range import ClipRange


logger = logging.getLogger(__name__)

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
        mappings = [state["schedule"], state["world"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} lacks what a resume needs ({error!r}). {remedy}") from error
    sound = isinstance(history, list) and all(isinstance(mapping, dict) for mapping in mappings)
    if any(type(count) is not int or count < 0 for count in counters) or not sound:
        raise ValueError(
            f"{path} holds counters or a history that cannot be: {dict(zip(_COUNTERS, counters, strict=True))}. "
            f"{remedy}"
        )
    return state


def check_world(saved: dict[str, int], current: dict[str, int]) -> None:
    """
    Check that a run on `current` processes can go on where one on `saved` processes stopped.

    The trainer skips as many batches of the dataset as it has done steps, so a step and a rollout must hold as many
    completions as before. Optimizer, bounds, schedule and place in the dataset then go on; the random generators of
    the processes, which a checkpoint keeps one by one, start anew.

    Args:
        saved, current (`dict[str, int]`):
            `num_processes`, `completions_per_rollout` and `completions_per_step` over all processes.

    Raises:
        ValueError: If the number of processes differs and the other two are not the same.
    """
    if saved["num_processes"] == current["num_processes"]:
        return
    for name, setting in (
        ("completions_per_rollout", "`generation_batch_size`, or `steps_per_generation`"),
        ("completions_per_step", "`per_device_train_batch_size` and `gradient_accumulation_steps`"),
    ):
        if saved[name] != current[name]:
            raise ValueError(
                f"The checkpoint comes from {saved['num_processes']} processes with {saved[name]} "
                f"{name.replace('_', ' ')}, and this run has {current['num_processes']} processes with "
                f"{current[name]}: the place in the dataset would be lost. Choose {setting} so that there are "
                f"{saved[name]} over all processes, or resume on {saved['num_processes']} processes."
            )
    logger.warning(
        "Resuming on %d processes from a checkpoint of %d: optimizer, bounds, schedule and place in the dataset go "
        "on, the random generators start anew, so that completions are other ones than in an unbroken run.",
        current["num_processes"], saved["num_processes"],
    )  # fmt: skip
