# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
`calclip_state.json`, the calibration's state in a checkpoint, written by rename, read with suspicion; and which
checkpoints are complete.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

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


def find_checkpoint(wanted: str | os.PathLike | bool | None, output_dir: str) -> str | None:
    """
    The checkpoint to resume from.

    Args:
        wanted (`str`, `PathLike`, `bool` or `None`):
            A checkpoint's directory; `True`, or the text `"true"` or `"latest"`, for the newest complete one in
            `output_dir`; `None`, `False`, or the text `"false"` or `"none"`, for none.
        output_dir (`str`): The run's directory. Incomplete checkpoints in it are skipped with a notice.

    Returns:
        `str` or `None`: Directory of a complete checkpoint, `None` where none is wanted.

    Raises:
        ValueError: If the directory is not a complete checkpoint, or `output_dir` holds none.
    """
    text = str(wanted).lower()
    if text in ("none", "false"):
        return None
    if text not in ("true", "latest"):
        assert wanted is not None and not isinstance(wanted, bool)  # their texts are among those above
        fault = checkpoint_fault(wanted)
        if fault is not None:
            raise ValueError(
                f"`resume_from_checkpoint={str(wanted)!r}` cannot be resumed from: {fault}. Give the directory of a "
                "complete checkpoint, or True for the newest complete one in `output_dir`."
            )
        return str(wanted)
    skipped: list[str] = []
    for path in _checkpoints_in(output_dir):
        fault = checkpoint_fault(path)
        if fault is None:
            if skipped:
                logger.warning("Resuming from %s. Skipped: %s.", path, "; ".join(skipped))
            return str(path)
        skipped.append(f"{path} ({fault})")
    raise ValueError(
        f"`resume_from_checkpoint=True` found no complete checkpoint in `output_dir={output_dir!r}`"
        + (f": {'; '.join(skipped)}. " if skipped else ", nor any other. ")
        + "Set `output_dir` to the run's directory, or start anew without `resume_from_checkpoint`."
    )


def _checkpoints_in(output_dir: str) -> list[Path]:
    """Directories named as checkpoints, the newest first; complete or not."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    found = [
        (int(path.name.removeprefix(prefix)), path)
        for path in Path(output_dir).glob(f"{prefix}*")
        if path.is_dir() and path.name.removeprefix(prefix).isdecimal()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def checkpoint_fault(directory: str | os.PathLike) -> str | None:
    """
    What is wrong with a checkpoint, `None` for a complete one.

    `trainer_state.json` is written last, when all else is there on every rank, so that its text tells. A complete
    checkpoint without `calclip_state.json` is therefore one of plain TRL, not a broken one of ours.
    """
    path = Path(directory)
    if not path.is_dir():
        return "there is no such directory"
    try:
        json.loads((path / TRAINER_STATE_NAME).read_text())["global_step"]
    except FileNotFoundError:
        return f"it has no {TRAINER_STATE_NAME}, the run ended while it was written"
    except (ValueError, KeyError, TypeError) as error:
        return f"its {TRAINER_STATE_NAME} is damaged, {error!r}"
    return None


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
