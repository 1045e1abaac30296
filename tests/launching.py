# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Start a script on several gloo ranks under torchrun's agent.

The ranks are forked from a process that holds the libraries and has done nothing with them: importing these once per
rank would take half of the time.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path


PRELOADED = ["trl_calclip", "trl_calclip.fp8.vllm_reference", "vllm"]


@dataclass(frozen=True)
class Launched:
    """How a launch ended, and what its ranks and the agent wrote."""

    returncode: int
    stderr: str


def torchrun(directory: Path, script: str, *arguments: str, ranks: int) -> None:
    """Run `script` as `launch` does; it must succeed."""
    run = launch(directory, script, *arguments, ranks=ranks)
    assert run.returncode == 0, run.stderr[-5000:]


def launch(directory: Path, script: str, *arguments: str, ranks: int) -> Launched:
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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.NamedTemporaryFile() as log:
        agent = context.Process(
            target=_run_agent, args=([str(path), *map(str, arguments)], ranks, dict(os.environ), log.name)
        )
        agent.start()
        agent.join()
        return Launched(agent.exitcode, Path(log.name).read_text(errors="replace"))


def _run_agent(argv: list[str], ranks: int, environment: dict[str, str], log: str) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.clear()
    os.environ.update(environment, ACCELERATE_USE_CPU="1", OMP_NUM_THREADS="1")
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        max_restarts=0, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, _run_script)(argv)


def _run_script(argv: list[str]) -> None:
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
