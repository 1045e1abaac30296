# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Weight sync into the rollout engine, per recipe, as models grow, against building the engine anew.

    python -m benchmarks sync

Random Qwen3 models of 1 M to 138 M parameters. Per repeat, size and recipe a fresh process builds a trainer with an
engine, syncs, saves the weights in BF16 and builds a second engine from them, and syncs again. `BF16` is this
package's sync of a BF16 engine. TRL's own `sync_weights` is tried on that engine too; where it fails, the table says
how.
"""

import os


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import vllm  # noqa: E402
from datasets import Dataset  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from rich.progress import track  # noqa: E402
from transformers.utils import logging  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402

from benchmarks.measuring import fresh, rotated  # noqa: E402
from benchmarks.results import Results, argument_parser, report  # noqa: E402
from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer  # noqa: E402
from trl_calclip.embedded import build_model, build_tokenizer  # noqa: E402
from trl_calclip.report_panels import COLORS  # noqa: E402


# Width and layers; the MLP is four times as wide.
SIZES = {"1M": (128, 4), "6M": (256, 6), "19M": (384, 8), "50M": (512, 12), "138M": (640, 21)}
RECIPES = ("BF16", "tensorwise", "rowwise", "blockwise")


def seconds(function: Callable[[], Any], times: int = 1) -> list[float]:
    """Seconds of each of several calls."""
    result = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        result.append(time.perf_counter() - start)
    return result


def measure(size: str, recipe: str, syncs: int, directory: str) -> dict[str, Any]:
    """Seconds of syncs, of the self-check, and of a second engine. Use a fresh process: engines leave traces."""
    logging.disable_progress_bar()
    path, width_and_layers = Path(directory) / size, SIZES[size]
    if not path.exists():
        width, layers = width_and_layers
        build_model(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers).save_pretrained(path)
        build_tokenizer().save_pretrained(path)
    bf16 = recipe == "BF16"
    args = CalibratedGRPOConfig(
        output_dir=str(Path(directory) / "trainer"), per_device_train_batch_size=2, num_generations=2,
        steps_per_generation=2, use_vllm=True, vllm_max_model_length=128, report_to="none", fp8_sync_check_limit=1e9,
        fp8_recipe="rowwise" if bf16 else recipe, fp8_rollout="off" if bf16 else "auto",
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    asked: list[dict] = []
    build = vllm.LLM.__init__

    def recorded(self, *args, **kwargs):
        asked.append(kwargs)
        build(self, *args, **kwargs)

    with mock.patch.object(vllm.LLM, "__init__", recorded):
        trainer = CalibratedGRPOTrainer(
            str(path), lambda completions, **_: [0.0] * len(completions), args,
            train_dataset=Dataset.from_dict({"prompt": ["1+2="] * 8}),
        )  # fmt: skip
    generation = trainer.vllm_generation
    generation.sync_weights()  # the first one also compares names and checks itself
    result: dict[str, Any] = {"parameters": trainer.model.num_parameters()}
    times = seconds(generation.push_weights, syncs)
    result["check"] = seconds(generation.check)
    with tempfile.TemporaryDirectory() as saved:

        def anew() -> None:
            trainer.model.save_pretrained(
                saved, state_dict={n: p.bfloat16() for n, p in trainer.model.state_dict().items()}
            )
            trainer.processing_class.save_pretrained(saved)
            vllm.LLM(**{**asked[0], "model": saved})

        result["anew"] = seconds(anew)
    result["sync"] = times + seconds(generation.push_weights, syncs)
    if bf16:
        try:
            result["trl"] = seconds(lambda: VLLMGeneration.sync_weights(generation), syncs)
        except Exception as error:
            result["trl_fails"] = f"{type(error).__name__}: {error}"
    return result


def summary(size: str, recipe: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table from a size's and a recipe's repeats."""
    row: dict[str, Any] = {"size": size, "recipe": recipe, "parameters": runs[0]["parameters"], "repeats": len(runs)}
    for part in ("sync", "check", "anew", "trl"):
        values = [value for run in runs for value in run.get(part, [])]
        if values:
            row |= {part: statistics.median(values), f"{part}_min": min(values), f"{part}_max": max(values)}
    row["trl_fails"] = runs[0].get("trl_fails")
    row["factor"] = row["anew_min"] / row["sync_min"]
    return {**row, "sync_ms": 1000 * row["sync"], "min_ms": 1000 * row["sync_min"], "max_ms": 1000 * row["sync_max"]}


def growth(recipe: str, rows: list[dict[str, Any]]) -> str:
    """How the sync grows: a line through the fastest, which other work delays least, weighted by their inverse."""
    parameters, times = ([row[name] for row in rows if row["recipe"] == recipe] for name in ("parameters", "sync_min"))
    if len(times) < 2:
        return f"{recipe}: one size only."
    slope, start = np.polyfit(np.array(parameters) / 1e6, times, 1, w=1 / np.array(times))
    exponent = np.polyfit(np.log(parameters), np.log(times), 1)[0]
    return (
        f"{recipe}: {1000 * start:.1f} ms + {1000 * slope:.2f} ms per million parameters (as a power: {exponent:.2f})."
    )


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Seconds against parameters."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for recipe, color in zip(RECIPES, COLORS, strict=False):
        own = [row for row in rows if row["recipe"] == recipe]
        for part, style in (("sync_min", "o-"), ("anew_min", "s--")):
            label = recipe if part == "sync_min" else None
            axis.loglog(
                [row["parameters"] for row in own], [row[part] for row in own], style, color=color, label=label
            )
    ink = axis.xaxis.label.get_color()
    axis.plot([], [], "s--", color=ink, label="engine anew")
    axis.set_xlabel("parameters")
    axis.set_title("Weight sync, seconds, the fastest")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize="small")
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser("sync", __doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--syncs", type=int, default=3, help="syncs before and after the second engine")
    options = parser.parse_args(argv)
    arms = [(size, recipe) for size in options.sizes for recipe in options.recipes]
    runs: dict[tuple[str, str], list] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as directory:
        for repeat in track(range(options.repeats)):
            for arm in rotated(arms, repeat):
                runs[arm].append(fresh(measure, *arm, options.syncs, directory))
    table = Results(
        "Weight sync into an engine",
        {
            "parameters": "{parameters:,}",
            "recipe": "{recipe}",
            "sync, ms: median [range]": "{sync_ms:.1f} [{min_ms:.1f}, {max_ms:.1f}]",
            "self-check, s": "{check:.2f}",
            "engine anew, s: median [range]": "{anew:.2f} [{anew_min:.2f}, {anew_max:.2f}]",
            "fastest anew / fastest sync": "{factor:.0f}",
            "TRL's sync_weights, s": "{trl:.3f}{trl_fails}",
        },
        [summary(*arm, results) for arm, results in runs.items()],
    )
    fails = {row["trl_fails"] for row in table.rows if row["trl_fails"]}
    for row in table.rows:
        row["trl_fails"] = row["trl_fails"] and "fails"
    table.notes += [f"TRL's own sync fails here: {fault}" for fault in fails]
    table.notes += [growth(recipe, table.rows) for recipe in options.recipes]
    report(options.output, table, figure=draw(table.rows))
