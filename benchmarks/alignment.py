# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
How far trainer and rollout engine are apart, per recipe, with and without alignment.

    python -m benchmarks alignment --model smollm2 --completions 16 --tokens 48

A vLLM engine in FP8 samples completions. The mean absolute gap of their log-probabilities is measured against the same
model in BF16, with this package's rules, and with the libraries' defaults (powers of two, master weights not rounded,
a scale per linear). Standard errors are over completions.
"""

import math

import torch
import transformers
from rich.progress import track
from transformers import AutoTokenizer

from benchmarks.models import convert, load_masters, prepare, prompts
from benchmarks.results import Results, argument_parser, report
from trl_calclip.fp8.recipes import RECIPES
from trl_calclip.offline import completion_logps, sample_with_engine


@torch.no_grad()
def gap(model, sequences, lengths, engine_logps) -> tuple[float, float]:
    """Mean absolute gap per token, nats, and its standard error over completions."""
    ours = completion_logps(model, sequences, lengths)
    gaps = [(a - b).abs() for a, b in zip(ours, engine_logps, strict=True)]
    mean = torch.cat(gaps).mean().item()
    # Ratio estimator: completions differ in length.
    residuals = torch.stack([(values - mean).sum() for values in gaps])
    return mean, math.sqrt((residuals**2).sum().item()) / sum(lengths)


def measure(name: str, path: str, recipes: list[str], completions: int, tokens: int) -> dict[str, dict]:
    """By recipe: the gap in `bf16`, `aligned` and `default`, each with its standard error, and the tokens."""
    prompt_ids = prompts(name, AutoTokenizer.from_pretrained(path), completions)
    results, sampled = {}, {}
    for recipe in recipes:
        scheme = RECIPES[recipe].vllm_quantization
        if scheme not in sampled:
            sampled[scheme] = sample_with_engine(path, scheme, prompt_ids, tokens)
        rollout = sampled[scheme]
        sequences, lengths, logps = rollout.sequences, rollout.lengths, rollout.logps
        results[recipe] = {
            "bf16": gap(load_masters(path, trained=True), sequences, lengths, logps),
            "aligned": gap(convert(load_masters(path, trained=True), recipe, aligned=True), sequences, lengths, logps),
            "default": gap(
                convert(load_masters(path, trained=True), recipe, aligned=False), sequences, lengths, logps
            ),
            "tokens": sum(lengths),
        }
    return results


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser("alignment", __doc__)
    parser.add_argument("--model", default="toy", help="toy, smollm2 or a directory")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--cache", default="runs/models")
    options = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    path = prepare(options.model, options.cache)
    labels = {"bf16": "BF16 trainer", "aligned": "aligned", "default": "libraries' defaults"}
    columns = {label: f"{{{key}:.4f}} ± {{{key}_error:.4f}}" for key, label in labels.items()}
    table = Results(
        f"{options.model}: mean absolute gap to the engine, nats per token",
        {"recipe": "{recipe}", "tokens": "{tokens}", **columns},
    )
    for recipe in track(options.recipes):
        values = measure(options.model, path, [recipe], options.completions, options.tokens)[recipe]
        row = {"recipe": recipe, "tokens": values["tokens"]}
        for key in labels:
            row[key], row[f"{key}_error"] = values[key]
        table.rows.append(row)
    report(options.output, table)
