# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The command `trl-calclip`: `doctor`, `diagnose` and `report`. `python -m trl_calclip.cli` is the same.

    trl-calclip doctor --round-trip
    trl-calclip diagnose HuggingFaceTB/SmolLM2-135M-Instruct --recipe rowwise blockwise
    trl-calclip report runs/bf16 runs/fp8 --output report
"""

import argparse
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


RECIPE_NAMES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")

# For a model that is not told what to say. Any text will do: it is numerics that is measured.
PROMPTS = [
    "The capital of France is",
    "Here is a short story about a robot who learned to paint.",
    "To sort a list of numbers in Python, you can",
    "Three reasons to drink more water:",
    "Q: What is 17 + 25? A:",
    "The history of the steam engine begins",
    "Dear Sir or Madam, I am writing to",
    "Once upon a time in a village by the sea",
]


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog="trl-calclip", description="Look at FP8 reinforcement learning.")
    commands = parser.add_subparsers(dest="command", required=True)
    new: dict[str, Any] = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}

    doctor = commands.add_parser("doctor", help="versions, hardware, and which recipes run here", **new)
    doctor.add_argument("--round-trip", action="store_true", help="send a tiny model through an FP8 engine")
    doctor.add_argument("--recipe", default="rowwise", choices=RECIPE_NAMES, help="recipe of the round trip")
    doctor.add_argument("--json", action="store_true", help="print JSON")

    diagnose = commands.add_parser("diagnose", help="would this model over-clip in FP8? no training run needed", **new)
    diagnose.add_argument("model", nargs="?", help="directory or name of a causal LM; the demo's without it")
    diagnose.add_argument("--recipe", nargs="+", default=["rowwise"], choices=RECIPE_NAMES, help="recipes to compare")
    diagnose.add_argument("--dataset", help="name of a data set, or a .json, .jsonl, .csv or .parquet file")
    diagnose.add_argument("--dataset-config", help="configuration of the data set")
    diagnose.add_argument("--dataset-split", default="train", help="its split")
    diagnose.add_argument("--prompt-column", default="prompt", help="column with texts or conversations")
    diagnose.add_argument("--completions", type=int, default=32, help="one per prompt")
    diagnose.add_argument("--tokens", type=int, default=48, help="longest completion")
    diagnose.add_argument("--updates", type=int, default=4, help="optimizer steps that use the rollout")
    diagnose.add_argument("--learning-rate", type=float, default=1e-6, help="of AdamW")
    diagnose.add_argument("--epsilon", type=float, default=0.2, help="reference bound below 1, as a distance")
    diagnose.add_argument("--epsilon-high", type=float, default=0.24, help="reference bound above 1, as a distance")
    diagnose.add_argument("--no-engine", action="store_true", help="let the model itself sample, without vLLM")
    diagnose.add_argument("--emulate", action="store_true", help="emulate float8 GEMMs on a GPU without them")
    diagnose.add_argument("--per-layer", action="store_true", help="leave layers in BF16 one at a time")
    diagnose.add_argument("--seed", type=int, default=0, help="of sampling and advantages")
    diagnose.add_argument("--output", type=Path, default=Path("runs/diagnose"), help="where the result is saved")
    diagnose.add_argument("--json", action="store_true", help="print JSON")

    report = commands.add_parser("report", help="one HTML page and pictures from one or several runs", **new)
    report.add_argument("runs", nargs="+", type=Path, help="output directories of runs, or checkpoints")
    report.add_argument("--names", nargs="+", help="what to call the runs; their directories' names without it")
    report.add_argument("--output", type=Path, default=Path("report"), help="directory to write")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status. Errors of the user are one line on stderr."""
    options = build_parser().parse_args(arguments)
    # What the libraries say of missing GPU kernels and coming deprecations while they load is no news here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for name in ("torchao", "torch.utils._pytree", "vllm.triton_utils.importing"):
        logging.getLogger(name).setLevel(logging.ERROR)
    command = {"doctor": run_doctor, "diagnose": run_diagnose, "report": run_report}[options.command]
    try:
        return command(options)
    except (ValueError, ImportError, OSError, NotImplementedError) as error:
        print(f"trl-calclip {options.command}: {error}", file=sys.stderr)
        return 1


def print_json(value) -> None:
    print(json.dumps(value, indent=1, allow_nan=False))


def run_doctor(options) -> int:
    from .doctor import examine, round_trip

    found = examine()
    if options.round_trip:
        found["round_trip"] = round_trip(options.recipe)
    if options.json:
        print_json(found)
        return 0
    console = Console()
    table = Table(title="Versions", title_justify="left")
    for column in ("package", "installed", "supported", ""):
        table.add_column(column)
    for row in found["versions"]:
        table.add_row(row["name"], row["installed"] or "-", row["supported"] or "", row["verdict"])
    console.print(table)
    console.print(f"Device: {found['device']}")
    table = Table(title="FP8 recipes", title_justify="left")
    for column in ("recipe", "trainer", "rollout", "why"):
        table.add_column(column)
    for row in found["recipes"]:
        table.add_row(row["name"], row["trainer"], row["rollout"], row["why"])
    console.print(table)
    if options.round_trip:
        console.print(
            "Round trip, {recipe}: {tokens} tokens in {seconds:.1f} s, mean gap engine to trainer {gap:.4f} "
            "nats.".format(**found["round_trip"])
        )
    return 0


def run_diagnose(options) -> int:
    from .offline import prepare_engine_environment, vllm_is_there

    prepare_engine_environment()
    import transformers
    from transformers import AutoTokenizer

    from .clip_range import ClipRange
    from .diagnose import Settings, diagnose, rows
    from .doctor import describe

    transformers.utils.logging.disable_progress_bar()
    console = Console(stderr=options.json)
    path = options.model or _embedded_model(options.output, console)
    prompt_ids = _prompts(options, path, AutoTokenizer.from_pretrained(path))
    settings = Settings(
        tokens=options.tokens,
        updates=options.updates,
        learning_rate=options.learning_rate,
        reference=ClipRange(1 - options.epsilon, 1 + options.epsilon_high),
        use_engine=vllm_is_there() and not options.no_engine,
        emulate=True if options.emulate else None,
        per_layer=options.per_layer,
        seed=options.seed,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for recipe in options.recipe:
            task = progress.add_task(recipe, total=None)

            def advance(what: str, task=task, recipe=recipe) -> None:
                progress.update(task, advance=1, description=f"{recipe}: {what}")

            found.append(diagnose(path, recipe, prompt_ids, settings, advance))
            done = progress.tasks[task].completed
            progress.update(task, total=done, description=f"{recipe}: {found[-1].verdict}")
    result = {
        "model": options.model or "embedded",
        "measured_on": describe(),
        "settings": {
            name: value for name, value in vars(options).items() if name not in ("output", "json", "command")
        },
        "recipes": [diagnosis.to_json() for diagnosis in found],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "diagnosis.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if options.json:
        print_json(result)
        return 0
    table = Table(title=f"Diagnosis of {options.model or 'the embedded model'}", title_justify="left")
    table.add_column("")
    for diagnosis in found:
        table.add_column(diagnosis.recipe, justify="right")
    for cells in zip(*(rows(diagnosis) for diagnosis in found), strict=True):
        table.add_row(cells[0][0], *(value for _, value in cells))
    console.print(table)
    for diagnosis in found:
        console.print(f"{diagnosis.recipe}: {diagnosis.verdict}. {diagnosis.reason}", markup=False)
    console.print(f"{result['measured_on']}\nSaved: {options.output / 'diagnosis.json'}", markup=False)
    return 0


def _embedded_model(output: Path, console: Console) -> str:
    from . import embedded

    console.print("The embedded model is warm-started: about a minute, once.")
    return embedded.warm_start(output / "warm_start")


def _prompts(options, path: str, tokenizer) -> list[list[int]]:
    """Token ids of `options.completions` prompts, from the data set or built in, repeated if they are too few."""
    from . import embedded

    if options.dataset is not None:
        prompts = _load_dataset(options)[options.prompt_column]
    elif (Path(path) / embedded.SETTINGS_FILE).exists():
        prompts = embedded.arithmetic_dataset(options.completions, seed=5, split="test")["prompt"]
    else:
        prompts = PROMPTS
    prompts = [prompts[index % len(prompts)] for index in range(options.completions)]
    return [
        tokenizer(prompt)["input_ids"]
        if isinstance(prompt, str)
        else list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])
        for prompt in prompts
    ]


def _load_dataset(options):
    from datasets import load_dataset

    suffix = Path(options.dataset).suffix.lstrip(".")
    kinds = {"json": "json", "jsonl": "json", "csv": "csv", "parquet": "parquet"}
    if suffix in kinds:
        data = load_dataset(kinds[suffix], data_files=options.dataset, split="train")
    else:
        data = load_dataset(options.dataset, options.dataset_config, split=options.dataset_split)
    if options.prompt_column not in data.column_names:
        raise ValueError(
            f"The data set has no column {options.prompt_column!r}, only {', '.join(data.column_names)}. Name one "
            "with `--prompt-column`."
        )
    if not len(data):
        raise ValueError(f"The data set {options.dataset} has no rows.")
    return data


def run_report(options) -> int:
    from .report_page import write_report

    written = write_report(options.runs, options.output, names=options.names)
    Console().print("\n".join(str(path) for path in written), markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
