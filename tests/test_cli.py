# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The command as a user runs it."""

import json
import subprocess
import sys

import pytest

from trl_calclip.cli import RECIPE_NAMES, build_parser, main
from trl_calclip.doctor import examine
from trl_calclip.fp8.recipes import RECIPES


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "trl_calclip.cli", *arguments], capture_output=True, text=True)


def test_recipes_of_the_parser_are_the_tables():
    # The parser answers `--help` without importing torch.
    assert RECIPE_NAMES == tuple(RECIPES)
    result = run("diagnose", "--help")
    assert result.returncode == 0 and "--per-layer" in result.stdout


def test_wrong_arguments_are_refused():
    for arguments in ([], ["diagnose", "--recipe", "rowwize"], ["report"], ["docter"]):
        with pytest.raises(SystemExit) as exit:
            build_parser().parse_args(arguments)
        assert exit.value.code == 2


def test_users_errors_are_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("trl-calclip report: ") and "trainer_state.json" in error and error.count("\n") == 1


def test_doctor_names_versions_and_recipes(capsys):
    found = examine()
    versions = {row["name"]: row for row in found["versions"]}
    assert versions["trl"]["verdict"] == "ok" and versions["trl"]["supported"] == ">=1.16,<1.17"
    recipes = {row["name"]: row for row in found["recipes"]}
    assert set(recipes) == set(RECIPES)
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "blockwise" in printed and "torchao" in printed


def test_doctor_on_a_cpu_says_what_is_emulated(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipes = {row["name"]: row for row in examine()["recipes"]}
    assert all(row["trainer"] == "emulated" for row in recipes.values())
    assert "no float8 GEMM on a CPU" in recipes["rowwise"]["why"]


def test_doctor_on_a_gpu_without_the_kernel_says_why(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Some GPU")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    found = examine()
    assert "compute capability 8.0" in found["device"]
    recipes = {row["name"]: row for row in found["recipes"]}
    assert recipes["rowwise"]["trainer"] == "no" and "9.0 or higher" in recipes["rowwise"]["why"]
    assert recipes["tensorwise"]["rollout"] == "no" or "not installed" in recipes["tensorwise"]["why"]


@pytest.mark.vllm
def test_round_trip_through_the_engine():
    result = run("doctor", "--round-trip", "--json")
    assert result.returncode == 0, result.stderr[-2000:]
    trip = json.loads(result.stdout)["round_trip"]  # nothing else is on stdout
    assert trip["tokens"] > 50 and trip["gap"] < 0.05


def test_diagnose_end_to_end(toy_path, tmp_path, capsys):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}+1="}) + "\n" for i in range(3)))
    arguments = ["diagnose", toy_path, "--no-engine", "--dataset", str(data), "--completions", "8", "--tokens", "8"]
    arguments += ["--prompt-column", "question", "--recipe", "rowwise", "blockwise", "--output", str(tmp_path)]
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "diagnosis.json").read_text())
    assert [entry["recipe"] for entry in printed["recipes"]] == ["rowwise", "blockwise"]
    assert all(entry["verdict"] and entry["reason"] for entry in printed["recipes"])
    assert main(arguments) == 0
    assert "over-clipped low, high" in capsys.readouterr().out


def test_diagnose_refuses_a_missing_column(toy_path, tmp_path, capsys):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"question": "1+1="}\n')
    assert main(["diagnose", toy_path, "--dataset", str(data), "--output", str(tmp_path)]) == 1
    assert "no column 'prompt', only question" in capsys.readouterr().err
