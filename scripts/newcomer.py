# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Follows the README and the drop-in guide literally, each in a clean clone of the last commit, as someone new would.

    python scripts/newcomer.py              # long: each guide installs an environment of its own and trains
    python scripts/newcomer.py --dry-run    # say what would be done

A guide's files are its Python blocks after a comment `<!-- file: NAME -->`; its commands are the lines of its `bash`
blocks. Commands of `make` and `.venv/bin` run. Others need a GPU or a model hub: they are named and not run.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path


ROOT = Path(__file__).parents[1]
GUIDES = ("README.md", "docs/drop_in.md")
_BLOCK = re.compile(
    r"(?:<!-- (?P<tag>[^>]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_RUNS_ANYWHERE = ("make ", ".venv/bin/")


@dataclass
class Steps:
    """What a guide asks a newcomer to do."""

    files: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def read_guide(text: str) -> Steps:
    """Files, commands to run and commands to leave out, in the order of the guide. Comments of commands are cut."""
    steps = Steps()
    for block in _BLOCK.finditer(text):
        if block["tag"] and block["tag"].startswith("file: "):
            steps.files[block["tag"].removeprefix("file: ")] = block["text"]
        if block["language"] != "bash":
            continue
        for line in block["text"].splitlines():
            command = re.sub(r"\s+#.*$", "", line).strip()
            if command:
                (steps.commands if command.startswith(_RUNS_ANYWHERE) else steps.left_out).append(command)
    return steps


def follow(guide: str, scratch: Path) -> None:
    """Clone the last commit into `scratch` and do there what its copy of the guide says. Raises if a command fails."""
    clone = scratch / Path(guide).stem
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    steps = read_guide((clone / guide).read_text())
    for name, text in steps.files.items():
        (clone / name).write_text(text)
    # Nothing of the environment that this was started from.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    for command in steps.commands:
        print(f"{guide}: {command}", flush=True)
        subprocess.run(command, shell=True, cwd=clone, env=environment, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("guides", nargs="*", default=GUIDES, help="files of the repository; the two by default")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    options = parser.parse_args()
    for guide in options.guides:
        steps = read_guide((ROOT / guide).read_text())
        print(f"{guide}:")
        for kind, values in (("write", steps.files), ("run", steps.commands), ("leave out", steps.left_out)):
            for value in values:
                print(f"  {kind}: {value}")
        if not steps.commands:
            print(f"{guide} has no command that could run.", file=sys.stderr)
            return 1
    if not options.dry_run:
        with tempfile.TemporaryDirectory(prefix="newcomer-") as scratch:
            for guide in options.guides:
                follow(guide, Path(scratch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
