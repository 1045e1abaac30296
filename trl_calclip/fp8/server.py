# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Rollouts from a vLLM server: checked at the start, given the weights by NCCL or through files, survived when it dies.

A server that was restarted has its base weights and says nothing about it. So each push leaves a mark in it, vLLM's
weight version, which a fresh process does not have: it is compared before each rollout, and after it, when rollouts
that were sampled from other weights are thrown away.

Only the main process talks to the server. What happens there, answers and errors, is broadcast, so that every rank
goes on, tries again or raises alike.
"""

import logging
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list

from .._trl_compat import RolloutServerError
from .generation import CheckedVLLMGeneration
from .selection import refuse_moe, select_linears
from .server_checks import check_server
from .server_client import UNTOUCHED, ServerClient, ServerLost
from .weight_files import WeightFiles


logger = logging.getLogger(__name__)

T = TypeVar("T")

# What an error becomes on the ranks that only hear of it: the first of these that it is.
_BROADCAST_ERRORS = (ServerLost, RolloutServerError, ValueError, NotImplementedError, RuntimeError)


class ServerVLLMGeneration(CheckedVLLMGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] with a vLLM server that is checked and may be restarted.

    Args:
        transfer (`str`): How weights get there: `"nccl"`, `"filesystem"`, or `"auto"` for NCCL from a GPU.
        transfer_dir (`str`): Directory for the weights' files, which the server sees under the same path.
        **kwargs: What [`CheckedVLLMGeneration`] takes. `server_timeout` bounds the wait at the start and each time
            that the server is lost.
    """

    def __init__(self, *args, transfer: str, transfer_dir: str, **kwargs):
        self.transfer = transfer
        self.transfer_dir = transfer_dir
        self._run = uuid.uuid4().hex
        self._greeted = False
        self._pending = ""  # marks of the push under way and of the last complete one, in the main process
        self._complete: str | None = None
        self._files: WeightFiles | None = None
        self._metadata: list[tuple[str, str, list[int]]] | None = None
        super().__init__(*args, **kwargs)

    # Start

    def connect(self) -> None:
        if self.transfer == "auto":
            self.transfer = "nccl" if self.accelerator.device.type == "cuda" else "filesystem"
        self._selection = None
        if self.recipe is not None:
            refuse_moe(self.model, allow=self.allow_moe)
            self._selection = select_linears(self.model, self.ignore)
        self._replicas, self.max_model_length, on_cpu = self._on_main(self._open)
        if on_cpu:
            self.refuse_broken_experts()

    def _open(self) -> tuple[int, int, bool]:
        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        self.vllm_client = ServerClient(url, self.group_port, self.server_timeout)
        config = self._check_server()
        if self.transfer == "filesystem":
            self._files = WeightFiles(self.transfer_dir)
        return (
            config["parallel_config"]["data_parallel_size"],
            config["model_config"]["max_model_len"],
            config["device_config"]["device"] == "cpu",
        )

    def _check_server(self) -> dict[str, Any]:
        information = self.vllm_client.server_info()
        check_server(
            information,
            self.vllm_client.base_url,
            recipe=self.recipe,
            selection=self._selection,
            min_length=self.max_model_length or self.max_completion_length + 1,
            transfer=self.transfer,
        )
        return information["vllm_config"]

    # Weights

    def sync_weights(self) -> None:
        self._persist(super().sync_weights)

    def push_weights(self) -> None:
        """
        Push the weights once, on every rank, and mark the server with their version.

        Raises:
            ServerLost: If the server went away meanwhile.
            RolloutServerError: If it refuses the weights, or serves another run.
        """
        if self._on_main(self._greet):
            self.check_due = True
        if self.transfer == "nccl":
            self._push_by_nccl()
        else:
            self._push_by_files()
        self._on_main(self._finish_push)

    def _greet(self) -> bool:
        """Look who answers before weights are gathered for it. Whether the server was restarted."""
        restarted = self._greeted and self._read_mark() == UNTOUCHED
        if restarted:
            logger.warning(
                "The vLLM server at %s was restarted; its weights are pushed again.", self.vllm_client.base_url
            )
            try:
                self._check_server()
            except ValueError as error:
                raise RolloutServerError(str(error)) from error
            self.vllm_client.close_communicator()
        if self.transfer == "nccl" and self.vllm_client.communicator is None:
            self.vllm_client.init_communicator(device=self.accelerator.device)
        self._greeted = True
        self._pending = f"{self._run}-{self.num_syncs}-pending"
        self.vllm_client.set_weight_version(self._pending)
        return restarted

    def _read_mark(self) -> str:
        mark = self.vllm_client.weight_version()
        if mark != UNTOUCHED and not mark.startswith(self._run):
            raise RolloutServerError(
                f"Another run pushed its weights into the vLLM server at {self.vllm_client.base_url} (weight version "
                f"{mark!r}, expected {self._complete!r}). A server serves one trainer: give each its own."
            )
        return mark

    def _holds_weights(self) -> bool:
        return self._read_mark() == self._complete

    def _finish_push(self) -> None:
        # Cached prefixes were computed with the weights before.
        self.vllm_client.reset_prefix_cache()
        if self._read_mark() != self._pending:
            raise ServerLost(f"The vLLM server at {self.vllm_client.base_url} was restarted during a weight push.")
        self._complete = f"{self._run}-{self.num_syncs}"
        self.vllm_client.set_weight_version(self._complete)

    def _push_by_files(self) -> None:
        if not self.accelerator.is_main_process:
            for _ in self.named_weights():  # gathered by all ranks together
                pass
            self._on_main(None)
            return
        weights = self.bf16_weights()

        def write() -> None:
            assert self._files is not None
            try:
                path = self._files.write(weights)
            except OSError as error:
                raise RolloutServerError(
                    f"The trainer's weights could not be written below {self._files.path}: {error}. The server keeps "
                    "the weights before. Look at the disk, or set another `fp8_weight_transfer_dir`."
                ) from error
            self.vllm_client.reload_weights(path)
            self._files.keep_only(path)

        self._on_main(write, last=weights)

    def _push_by_nccl(self) -> None:
        # One session of vLLM's weight transfer brings all weights: it restores each layer's loadable form, and
        # quantizes it when the layer is complete. Written for vLLM 0.31 and not run: it needs two GPUs.
        if self._metadata is None:
            weights = self.named_weights(merge=False)
            self._metadata = [(name, "bfloat16", list(weight.shape)) for name, weight in weights]
        if not self.accelerator.is_main_process:
            for _ in self.named_weights():
                pass
            self._on_main(None)
            return
        weights = self.bf16_weights()
        self._on_main(lambda: self.vllm_client.update_named_params(self._metadata, weights), last=weights)

    def score_with_engine(self, probe: list[int]) -> torch.Tensor:
        """Scores of every data-parallel replica, `(replicas, len(probe) - 1)`."""
        scores = self._on_main(lambda: [self.vllm_client.score(probe, replica) for replica in range(self._replicas)])
        return torch.tensor(scores)

    # Rollouts

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        return self._persist(lambda: self._generate_once(prompts, images, num_generations, profiler))

    def _generate_once(self, prompts, images, num_generations, profiler) -> tuple:
        if not self._on_main(self._holds_weights):
            super().sync_weights()
        if self.accelerator.is_main_process:
            with self.vllm_client.deferred_failure():
                output = super().generate(prompts, images, num_generations, profiler)
        else:
            output = super().generate(prompts, images, num_generations, profiler)
        self._on_main(self._confirm_rollout)
        return output

    def _confirm_rollout(self) -> None:
        if self.vllm_client.failure is not None:
            raise self.vllm_client.failure
        if not self._holds_weights():
            raise ServerLost("The vLLM server was restarted during a rollout, which is thrown away.")

    # Failures

    def _persist(self, action: Callable[[], T]) -> T:
        """
        Call `action` on every rank until the server lets it finish, for `server_timeout` seconds after it was first
        lost.

        Raises:
            RolloutServerError: On every rank, if it cannot be finished by then.
        """
        lost_at = None
        while True:
            try:
                return action()
            except ServerLost as error:
                lost_at = lost_at or time.monotonic()
                self._on_main(self._wait_for_server, lost_at, str(error))

    def _wait_for_server(self, lost_at: float, reason: str) -> None:
        remaining = self.server_timeout - (time.monotonic() - lost_at)
        logger.warning("%s Waiting up to %.0f s for it.", reason, max(remaining, 0.0))
        if remaining <= 0:
            raise RolloutServerError(
                f"The vLLM server at {self.vllm_client.base_url} was lost again and again for "
                f"{self.server_timeout:.0f} s (`vllm_server_timeout`): {reason}"
            )
        self.vllm_client.check_server(remaining)

    def _on_main(self, function: Callable[..., T] | None, *args: Any, last=None) -> T:
        """
        Call `function` in the main process and return its result, or raise its error, on every rank.

        Args:
            function (`Callable` or `None`): Not called by the other ranks.
            *args: Its arguments.
            last (`Iterator`, *optional*): Used up in the main process whatever happens, because the other ranks take
                part in each of its steps.
        """
        outcome: list[Any] = [None, None, None]
        cause = None
        if self.accelerator.is_main_process:
            try:
                assert function is not None
                outcome[0] = function(*args)
            except Exception as error:
                cause = error
                kind = next((kind for kind in _BROADCAST_ERRORS if isinstance(error, kind)), RolloutServerError)
                known = isinstance(error, _BROADCAST_ERRORS)
                outcome[1:] = [kind, str(error) if known else f"{type(error).__name__}: {error}"]
            if last is not None:
                for _ in last:
                    pass
        broadcast_object_list(outcome, from_process=0)
        result, kind, message = outcome
        if kind is not None:
            raise kind(message) from cause
        return result
