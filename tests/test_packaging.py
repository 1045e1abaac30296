# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""What `python -m build` makes: its contents, and that the wheel works where the sources are not."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow

SMOKE = """
import json, sys
import trl_calclip, trl_calclip.fp8.recipes
from trl_calclip import CalibratedDAPOTrainer, CalibratedGRPOConfig, ClipRange
config = CalibratedGRPOConfig(output_dir="unused", use_cpu=True, steps_per_generation=4)
print(json.dumps({"file": trl_calclip.__file__, "start": config.calibration_start, "names": trl_calclip.__all__}))
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> Path:
    """Directory with a wheel that was built from the source distribution, and with that distribution."""
    sources = tmp_path_factory.mktemp("sources") / "repository"
    # A copy, so that nothing is left in the repository; only what is there for everybody.
    ignored = shutil.ignore_patterns(".*", "build", "dist", "runs", "site", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, sources, ignore=ignored)
    output = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(sources)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return output


def test_contents(distributions):
    (wheel,) = distributions.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "trl_calclip").rglob("*.py")}
    assert package <= set(names) and "trl_calclip/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {"trl_calclip", wheel.name.split("-py3")[0] + ".dist-info"}
    metadata = next(name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text and "Requires-Python: >=3.11" in text
    assert any(name.endswith("licenses/LICENSE") for name in names)
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    assert "vllm.general_plugins" in zipfile.ZipFile(wheel).read(entry_points).decode()

    (source,) = distributions.glob("*.tar.gz")
    members = {name.partition("/")[2] for name in tarfile.open(source).getnames()}
    assert package | {"LICENSE", "README.md", "pyproject.toml", "trl_calclip/py.typed"} <= members


def test_wheel_installs_and_imports(distributions, tmp_path):
    (wheel,) = distributions.glob("*.whl")
    target = tmp_path / "target"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*install, str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    result = subprocess.run(
        [sys.executable, "-c", SMOKE], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.strip().splitlines()[-1])
    doctor = [sys.executable, "-m", "trl_calclip.cli", "doctor", "--json"]
    told = subprocess.run(doctor, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert told.returncode == 0 and "rowwise" in told.stdout, told.stderr[-3000:]
    assert found["file"].startswith(str(target)) and found["start"] == [0.6, 1.8]
    assert "CalibratedGRPOTrainer" in found["names"]
