# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Start a script on several gloo ranks, as a user would with torchrun."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def torchrun(directory: Path, script: str, *arguments: str, ranks: int) -> None:
    """Run `script` as `launch` does; it must succeed."""
    run = launch(directory, script, *arguments, ranks=ranks)
    assert run.returncode == 0, run.stderr[-5000:]


def launch(directory: Path, script: str, *arguments: str, ranks: int) -> subprocess.CompletedProcess:
    """
    Run `script` on so many CPU processes of this machine and wait for them.

    Args:
        directory (`Path`): Where the script is put.
        script (`str`): Its text.
        *arguments (`str`): What it finds in `sys.argv[1:]`.
        ranks (`int`): Number of processes.
    """
    path = directory / "run.py"
    path.write_text(textwrap.dedent(script))
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", "0"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0", str(path), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)
