# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The client of a vLLM server: TRL's, with requests that are sent once and failures that say whether trying again helps.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection

from .._trl_compat import HookedVLLMClient, RolloutServerError


# What `weight_version` of a server says to which nothing was pushed yet (vLLM 0.31).
UNTOUCHED = "default"


# A machine that vanishes says nothing: after two minutes of silence the connection is dead.
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
]


class ServerLost(RuntimeError):
    """The vLLM server does not answer, or does not hold the weights that were pushed: worth another try."""


class _OnceAdapter(HTTPAdapter):
    """Sends a request once, over connections that notice a vanished machine."""

    def __init__(self):
        super().__init__(max_retries=0, pool_maxsize=64)

    def init_poolmanager(self, *args, **kwargs):
        options = HTTPConnection.default_socket_options + KEEP_ALIVE
        super().init_poolmanager(*args, socket_options=options, **kwargs)


class ServerClient(HookedVLLMClient):
    """
    [`~trl.generation.vllm_client.VLLMClient`] that tells a server that is gone from one that refuses.

    TRL's client repeats a failed request for about a minute by itself, also into a server that was restarted meanwhile
    and holds other weights, and waits without end for one that answers but is not healthy. Here each request is sent
    once, and waiting is bounded and the caller's.

    Raises:
        ServerLost: By every request that gets no answer, or a server error while the server is not healthy.
        RolloutServerError: By every request that is refused by a healthy server.
    """

    # Seconds to wait for a connection, and for the answer to a question. Work may take as long as it takes.
    connect_timeout = 10.0
    answer_timeout = 60.0

    def __init__(self, base_url: str, group_port: int, connection_timeout: float):
        self._deferring = False
        self.failure: Exception | None = None
        super().__init__(base_url=base_url, group_port=group_port, connection_timeout=connection_timeout)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, _OnceAdapter())

    def is_healthy(self) -> bool:
        """Whether the server answers and its engine lives."""
        try:
            return requests.get(f"{self.base_url}/health", timeout=self.connect_timeout).status_code == 200
        except requests.RequestException:
            return False

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 0.5) -> None:
        """
        Wait until the server is healthy, asking less and less often.

        Args:
            total_timeout (`float`, *optional*, defaults to `0.0`): Seconds to wait in all.
            retry_interval (`float`, *optional*, defaults to `0.5`): Seconds before the second question. Doubled each
                time, up to 8.

        Raises:
            RolloutServerError: If it is not healthy by then.
        """
        deadline = time.monotonic() + total_timeout
        while not self.is_healthy():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise RolloutServerError(
                    f"The vLLM server at {self.base_url} was not up within {total_timeout:.0f} s "
                    "(`vllm_server_timeout`). Start it, see docs/server.md, or raise the timeout."
                )
            time.sleep(min(retry_interval, remaining))
            retry_interval = min(2 * retry_interval, 8.0)

    def server_info(self) -> dict[str, Any]:
        """
        What the server says of itself: `vllm_config`, `vllm_env` and its vLLM's `version`.

        Raises:
            ValueError: If it runs without its development endpoints.
        """
        information = self.get(
            "/server_info?config_format=json",
            missing="has no development endpoints, through which weights are pushed and its configuration is read. "
            "Restart it with `VLLM_SERVER_DEV_MODE=1` in its environment, reachable by the trainer alone.",
        )
        return {**information, "version": self.get("/version")["version"]}

    def reload_weights(self, path: str) -> None:
        """
        Have all workers load, and quantize, the checkpoint in `path`.

        Raises:
            RolloutServerError: If they cannot; until the next reload they compute with nothing sensible.
        """
        call = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        try:
            self.post("/collective_rpc", json=call)
        except RolloutServerError as error:
            raise RolloutServerError(
                f"The vLLM server could not load the trainer's weights from {path}. It must see this directory under "
                "the same path, run as the same user, and serve a model of the trainer's architecture; its log says "
                f"which it is. {error}"
            ) from error

    def reset_prefix_cache(self) -> None:
        """
        Drop what was computed with the weights before.

        Raises:
            RolloutServerError: If other requests are being served, whose blocks cannot be dropped.
        """
        for pause in (0.1, 0.5, 2.0, 0.0):
            if self.post("/reset_prefix_cache")["success"]:
                return
            time.sleep(pause)
        raise RolloutServerError(
            f"The vLLM server at {self.base_url} cannot drop its prefix cache: it serves other requests meanwhile. "
            "They would be answered, and cached, with a mixture of old and new weights. Keep it for one trainer."
        )

    def weight_version(self) -> str:
        """The mark that was last set, `"default"` in a server that was just started."""
        return self.get("/weight_info")["weight_version"]

    def set_weight_version(self, version: str) -> None:
        """Set a mark that the server keeps for as long as it runs."""
        self.post("/update_weight_version", json={"new_version": version})

    def score(self, token_ids: list[int], replica: int) -> list[float]:
        """Log-probabilities of `token_ids[1:]` at temperature 1 under one data-parallel replica, nats."""
        choice = self.post(
            "/v1/completions",
            # Greedy: the one token that has to be sampled moves no generator.
            json={
                "model": self.model, "prompt": [token_ids], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0,
            },
            headers={"X-data-parallel-rank": str(replica)},
        )["choices"][0]  # fmt: skip
        scores = zip(choice["prompt_logprobs"][1:], token_ids[1:], strict=True)
        return [logprobs[str(token)]["logprob"] for logprobs, token in scores]

    @contextmanager
    def deferred_failure(self) -> Iterator[None]:
        """
        Let generation fail without raising while the context lasts; the exception is in `failure` then.

        In TRL's `generate` the other ranks wait for the main process's completions: it must come to hand them over,
        empty if need be.
        """
        self.failure, self._deferring = None, True
        try:
            yield
        finally:
            self._deferring = False

    def generate(self, prompts, *args, **kwargs):
        nothing = {"prompt_ids": [], "completion_ids": [], "logprobs": None, "logprob_token_ids": None}
        return self._deferred(super().generate, nothing, prompts, *args, **kwargs)

    def image_features(self, images, *args, **kwargs):
        return self._deferred(super().image_features, [None] * len(images), images, *args, **kwargs)

    def _deferred(self, function, nothing, *args, **kwargs):
        if not self._deferring:
            return function(*args, **kwargs)
        if self.failure is None:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self.failure = error
        return nothing

    def get(self, path: str, **kwargs) -> dict[str, Any]:
        """Answer of `GET path`."""
        return self.request("GET", f"{self.base_url}{path}", **kwargs)

    def post(self, path: str, **kwargs) -> dict[str, Any]:
        """Answer of `POST path`."""
        return self.request("POST", f"{self.base_url}{path}", **kwargs)

    def request(self, method: str, url: str, missing: str | None = None, **kwargs) -> dict[str, Any]:
        timeout = (self.connect_timeout, self.answer_timeout if method == "GET" else None)
        try:
            response = self.session.request(method, url, timeout=timeout, **kwargs)
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            raise ServerLost(f"The vLLM server at {self.base_url} does not answer: {error}") from error
        if response.status_code == 200:
            return response.json() if response.content else {}
        if response.status_code == 404 and missing is not None:
            raise ValueError(f"The vLLM server at {self.base_url} {missing}")
        answer = f"{method} {url} got {response.status_code}: {response.text[:1000]}"
        if response.status_code >= 500 and not self.is_healthy():
            raise ServerLost(f"The vLLM server at {self.base_url} fails: {answer}")
        raise RolloutServerError(f"The vLLM server refused a request: {answer}")
