# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""How the benchmarks repeat and time: fresh processes, peak memory, seconds by part, medians with their spread."""

import multiprocessing
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch


def fresh(function: Callable, *args) -> Any:
    """
    Result of `function(*args)` in a process of its own, so that nothing of an earlier run is left in it.

    On a CPU the process is forked from one that has imported `function`'s module and done nothing else, which saves
    the seconds of the import; a process that uses CUDA cannot be forked.
    """
    if torch.cuda.is_available():
        context = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([function.__module__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def _memory_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}: peak memory is measured on Linux only.")


@contextmanager
def peak_memory() -> Iterator[dict[str, float]]:
    """
    Memory at its highest inside the context, above what was held at its start, in `["MiB"]` after it: of the GPU where
    there is one, of this process otherwise. Use a fresh process: memory that an earlier computation gave back to the
    allocator hides what a later one takes.
    """
    result: dict[str, float] = {}
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew from what is held now
        before = 1024 * _memory_kib("VmRSS")
    yield result
    peak = torch.cuda.max_memory_allocated() if cuda else 1024 * _memory_kib("VmHWM")
    result["MiB"] = (peak - before) / 2**20


class Clock:
    """
    Seconds by part. Parts may be nested: time counts for the innermost one only.

    Args:
        now (`Callable[[], float]`): What time it is, in seconds.

    Attributes:
        seconds (`dict[str, float]`): By part.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self.seconds: dict[str, float] = defaultdict(float)
        self._parts: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge the time inside the context to `name`."""
        self._charge()
        self._parts.append(name)
        try:
            yield
        finally:
            self._charge()
            self._parts.pop()

    def timed(self, name: str, function: Callable) -> Callable:
        """`function`, its time charged to `name`."""

        def call(*args, **kwargs):
            with self.part(name):
                return function(*args, **kwargs)

        return call

    def _charge(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = self.now()
        if self._parts:
            self.seconds[self._parts[-1]] += now - self._since
        self._since = now


class Turns:
    """
    Lets threads run one after the other: each waits for its turn, and hands over when it is done with it.

    What is compared then runs within seconds of one another, in the same process, whatever else the machine does.

    Args:
        order (`Sequence[int]`): Whose turns come, one by one.
    """

    def __init__(self, order: Sequence[int]):
        self._order = deque(order)
        self._changed = threading.Condition()
        self._broken = False

    def wait(self, who: int) -> None:
        """Return when it is the turn of `who`; raise `RuntimeError` if another thread gave up."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._order[0] == who)
            if self._broken:
                raise RuntimeError("Another thread failed.")

    def hand_over(self) -> None:
        """Let the next one run."""
        with self._changed:
            self._order.popleft()
            self._changed.notify_all()

    def give_up(self) -> None:
        """Let nobody wait for ever for a thread that failed."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()


def rotated(items: Sequence, repeat: int) -> list:
    """`items` in the order of repeat number `repeat`: each comes first in turn, and every second repeat backwards."""
    turned = [*items[repeat % len(items) :], *items[: repeat % len(items)]]
    return turned[::-1] if repeat % 2 else turned


def interval(statistic: Callable[[np.ndarray], np.ndarray], values: np.ndarray, draws: int = 10_000) -> tuple:
    """
    95 % interval by a bootstrap over the rows of `values`; as wide as they are where there are few.

    Args:
        statistic (`Callable`): From `(draws, rows, ...)` to `(draws,)`.
        values (`np.ndarray`): `(rows, ...)`.
        draws (`int`, *optional*, defaults to `10_000`): Bootstrap samples.
    """
    drawn = np.random.default_rng(0).integers(len(values), size=(draws, len(values)))
    low, high = np.quantile(statistic(values[drawn]), [0.025, 0.975])
    return float(low), float(high)


def median_interval(values: Sequence[float], draws: int = 10_000) -> tuple[float, float]:
    """95 % interval of the median."""
    return interval(lambda drawn: np.median(drawn, axis=1), np.asarray(values), draws)


def total_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """Ratio of the sums of paired values, and its 95 % interval."""
    pairs = np.stack([numerators, denominators], axis=1)
    low, high = interval(lambda drawn: drawn[..., 0].sum(1) / drawn[..., 1].sum(1), pairs)
    return float(pairs[:, 0].sum() / pairs[:, 1].sum()), low, high
