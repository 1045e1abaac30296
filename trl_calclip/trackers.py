# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Histograms for the trackers that take them, through the callbacks by which `report_to` reaches the trackers."""

from collections.abc import Iterable, Mapping

import torch
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback


def log_histograms(callbacks: Iterable[TrainerCallback], values: Mapping[str, torch.Tensor], step: int) -> list[str]:
    """
    Send histograms to TensorBoard, Weights & Biases and Trackio, where they are reported to.

    Call it on the main process. Before a tracker's first log entry TensorBoard has no writer yet and is left out.

    Args:
        callbacks (`Iterable[TrainerCallback]`): The trainer's callbacks.
        values (`Mapping[str, torch.Tensor]`): One-dimensional tensors on the CPU by metric name. Numbers that are not
            finite are left out, and so is a tensor without finite numbers.
        step (`int`): Optimizer step that they belong to.

    Returns:
        `list[str]`: Trackers that took them.
    """
    arrays = {name: tensor[tensor.isfinite()].float().numpy() for name, tensor in values.items()}
    arrays = {f"train/{name}": array for name, array in arrays.items() if array.size > 0}
    taken = []
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            for name, array in arrays.items():
                callback.tb_writer.add_histogram(name, array, step)
            taken.append("tensorboard")
        elif isinstance(callback, WandbCallback):
            import wandb

            if wandb.run is not None:
                histograms = {name: wandb.Histogram(array) for name, array in arrays.items()}
                wandb.log({**histograms, "train/global_step": step})
                taken.append("wandb")
        elif isinstance(callback, TrackioCallback):
            import trackio

            histograms = {name: trackio.Histogram(array) for name, array in arrays.items()}
            trackio.log({**histograms, "train/global_step": step})
            taken.append("trackio")
    return taken
