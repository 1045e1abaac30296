# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Weights for a server by way of a file system: safetensors in a private directory, whole or not there at all.

A run has one directory of its own in the user's transfer directory, which only its user can read, and a lock in it
that lives as long as the run. Leftovers of killed runs are directories whose lock nobody holds.
"""

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable

import torch
from safetensors.torch import save_file


logger = logging.getLogger(__name__)


# Bytes of a shard: what is held in memory before it is written. A larger tensor is a shard by itself.
SHARD_BYTES = 512 * 1024**2

PREFIX = "calclip-weights-"
LOCK_NAME = "run.lock"


class WeightFiles:
    """
    Writer of weight versions. At most one version that a server has loaded is kept.

    Args:
        directory (`str`): Transfer directory; made if it is not there. Nothing is written outside of it, and
            inside only in the run's own subdirectory.
        shard_bytes (`int`, *optional*, defaults to `SHARD_BYTES`): Bytes of a shard.

    Attributes:
        path (`str`): The run's own subdirectory, absolute, mode 0700, removed at exit.
    """

    def __init__(self, directory: str, shard_bytes: int = SHARD_BYTES):
        directory = os.path.abspath(directory)
        os.makedirs(directory, exist_ok=True)
        remove_leftovers(directory)
        self.shard_bytes = shard_bytes
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=directory)
        # Locked before it has its name, so that no other run ever sees it unlocked.
        temporary = os.path.join(self.path, f"{LOCK_NAME}.new")
        self._lock = open(temporary, "w")  # noqa: SIM115 - held for as long as the run lasts
        try:
            _lock(self._lock.fileno())
        except OSError as error:
            logger.warning("No file locks in %s (%s): what a killed run leaves there has to be removed by hand.",
                           directory, error)  # fmt: skip
        os.rename(temporary, os.path.join(self.path, LOCK_NAME))
        self._finalizer = weakref.finalize(self, _remove_own, self.path, self._lock, os.getpid())
        self._number = 0
        self._loaded: str | None = None

    def write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
        """
        Write a new version and return its directory. What no server has loaded since the last one is removed.

        Raises:
            OSError: If it cannot be written; nothing of it is left then.
        """
        writer = self.begin()
        try:
            for name, tensor in weights:
                writer.add(name, tensor)
            return writer.finish()
        except BaseException:
            writer.abort()
            raise

    def begin(self) -> "WeightWriter":
        """Writer of a new version."""
        self.keep_only(self._loaded)
        self._number += 1
        return WeightWriter(os.path.join(self.path, f"version-{self._number:06d}"), self.shard_bytes)

    def keep_only(self, version: str | None) -> None:
        """Remove every version but `version`, which a server has loaded, and half-written ones."""
        self._loaded = version
        with os.scandir(self.path) as entries:
            stale = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False) and entry.path != version]
        for path in stale:
            try:
                shutil.rmtree(path)
            except OSError as error:  # on NFS a file that the server still has open; the next time removes it
                logger.warning("Cannot remove the old weights in %s yet: %s", path, error)

    def close(self) -> None:
        """Remove the run's subdirectory."""
        self._finalizer()


class WeightWriter:
    """
    Writes one version, shard by shard, under a hidden name that it gives up when everything is on disk.

    Args:
        path (`str`): Directory that appears when the version is complete.
        shard_bytes (`int`): Bytes after which a shard is written.
    """

    def __init__(self, path: str, shard_bytes: int):
        self.path = path
        self.shard_bytes = shard_bytes
        self._partial = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.partial")
        os.mkdir(self._partial, 0o700)
        self._tensors: dict[str, torch.Tensor] = {}
        self._names: set[str] = set()
        self._bytes = 0
        self._shards = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor that nobody changes any more; it is let go once its shard is written."""
        if name in self._names:
            raise ValueError(f"The weight {name!r} was given twice.")
        self._names.add(name)
        size = tensor.numel() * tensor.element_size()
        if self._tensors and self._bytes + size > self.shard_bytes:
            self._flush()
        self._tensors[name] = tensor.to("cpu").contiguous()
        self._bytes += size

    def finish(self) -> str:
        """Make the version visible, when all of it is on disk, and return its directory."""
        self._flush()
        _sync(self._partial)
        os.rename(self._partial, self.path)
        _sync(os.path.dirname(self.path))
        return self.path

    def abort(self) -> None:
        """Remove what was written."""
        self._tensors.clear()
        shutil.rmtree(self._partial, ignore_errors=True)

    def _flush(self) -> None:
        self._shards += 1
        path = os.path.join(self._partial, f"model-{self._shards:05d}.safetensors")
        save_file(self._tensors, path, metadata={"format": "pt"})
        _sync(path)
        self._tensors, self._bytes = {}, 0


def remove_leftovers(directory: str) -> list[str]:
    """
    Remove what killed runs left in a transfer directory, and return the removed paths.

    Only directories with our prefix and a lock file in them, of this user, no links, and whose lock nobody holds. The
    lock is the kernel's: it ends with its process, whatever kills that, and holds across containers. Where the file
    system has no locks nothing is removed.
    """
    removed = []
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if not name.startswith(PREFIX):
            continue
        try:
            directory_stat = os.lstat(path)
            lock = os.open(os.path.join(path, LOCK_NAME), os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # just being made or removed, or not ours after all
        try:
            ours = stat.S_ISDIR(directory_stat.st_mode) and directory_stat.st_uid == os.getuid()
            if not ours or not stat.S_ISREG(os.fstat(lock).st_mode):
                continue
            try:
                _lock(lock)
            except OSError as error:
                if not isinstance(error, BlockingIOError):
                    logger.warning("Cannot tell whether a run still uses %s, it stays: %s", path, error)
                continue
            shutil.rmtree(path)
            removed.append(path)
            logger.info("Removed %s, left over from a killed run.", path)
        finally:
            os.close(lock)
    return removed


def _lock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_own(path: str, lock, process: int) -> None:
    # A forked child that ends is not the run's end.
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)
        lock.close()


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
