# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Bring the paper's training sets into TRL's form: a conversational `prompt` and a `solution` for `accuracy_reward`.

    python examples/prepare_maths.py deepscaler   # writes data/deepscaler/train.parquet
    python examples/prepare_maths.py dapo         # writes data/dapo/train.parquet

Written, not run: it downloads from the hub.
"""

import argparse
from pathlib import Path
from typing import Any

from datasets import load_dataset


INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

# Name on the hub, its configuration, and the columns of question and answer.
SOURCES = {
    "deepscaler": ("agentica-org/DeepScaleR-Preview-Dataset", None, "problem", "answer"),
    "dapo": ("open-r1/DAPO-Math-17k-Processed", "en", "prompt", "solution"),
}


def to_example(row: dict[str, Any], question: str, answer: str) -> dict[str, Any]:
    """One row in TRL's form."""
    content = f"{row[question].strip()}\n\n{INSTRUCTION}"
    return {"prompt": [{"role": "user", "content": content}], "solution": f"${row[answer]}$"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SOURCES)
    parser.add_argument("--output", type=Path, default=Path("data"))
    options = parser.parse_args()
    path, configuration, question, answer = SOURCES[options.name]
    data = load_dataset(path, configuration, split="train")
    data = data.map(to_example, fn_kwargs={"question": question, "answer": answer}, remove_columns=data.column_names)
    directory = options.output / options.name
    directory.mkdir(parents=True, exist_ok=True)
    data.to_parquet(directory / "train.parquet")
    print(f"{len(data):,} examples in {directory}")


if __name__ == "__main__":
    main()
