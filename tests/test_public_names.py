# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The package's public names, imported lazily, and the plugin that vLLM loads in processes of its own."""

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

import trl_calclip


def run(code: str, **environment: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout.strip().splitlines()[-1]


def test_names_are_sorted_listed_and_there():
    assert trl_calclip.__all__ == sorted(trl_calclip.__all__) == sorted(trl_calclip._MODULES)
    assert set(trl_calclip.__all__) <= set(dir(trl_calclip))
    for name in trl_calclip.__all__:
        assert getattr(trl_calclip, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'CalibratedGrpoTrainer'"):
        _ = trl_calclip.CalibratedGrpoTrainer


def test_pure_maths_imports_no_trl():
    code = "import sys, trl_calclip; trl_calclip.ClipRange(0.8, 1.2); "
    code += "print([name for name in ('trl', 'torchao') if name in sys.modules])"
    assert run(code) == "[]"


@pytest.mark.vllm
def test_plugin_is_an_entry_point_that_needs_no_trl():
    (plugin,) = [
        entry for entry in importlib.metadata.entry_points(group="vllm.general_plugins") if entry.name == "trl_calclip"
    ]
    assert plugin.value == "trl_calclip.fp8.vllm_reference:register"
    code = (
        "import sys\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS as known\n"
        "print(sorted(n for n in known if 'calclip' in n), [m for m in ('trl', 'peft') if m in sys.modules])"
    )
    assert run(code) == "['calclip_fp8_per_block', 'calclip_fp8_per_tensor'] []"


@pytest.mark.vllm
@pytest.mark.slow
def test_server_process_knows_the_scheme(toy_path, tmp_path):
    """A server that nobody told about this package rolls out with its stand-in for a scheme that has no CPU kernel."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", toy_path, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "64"]
    command += ["--quantization", "calclip_fp8_per_block"]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    url = f"http://127.0.0.1:{port}"
    log = tmp_path / "server.log"
    with open(log, "w") as file:
        server = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 300
            while True:
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(1)
            with urllib.request.urlopen(f"{url}/server_info?config_format=json", timeout=60) as answer:
                information = json.load(answer)
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps({"model": toy_path, "prompt": [5, 6, 7], "max_tokens": 4, "logprobs": 1}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                choice = json.load(answer)["choices"][0]
        finally:
            server.terminate()
            server.wait(60)
    assert "calclip_fp8_per_block" in json.dumps(information)
    assert len(choice["logprobs"]["token_logprobs"]) >= 1
