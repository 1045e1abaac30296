# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
FP8 noise of one importance ratio per completion (GSPO), against GSPO's clip range and the policy's own drift.

    python -m benchmarks sequence_level --model smollm2 --completions 32 --tokens 24 96
    python -m benchmarks sequence_level --model toy --completions 128 --tokens 24 --learning_rate 1e-5
    python -m benchmarks sequence_level --train fixed calibrated --seeds 0 1

A policy takes three AdamW steps on a policy-gradient loss with random advantages of its own completions. Per
completion, the ratio is the exponential of the mean log-ratio over its tokens. Reported are the spread of the BF16
ratio, that of FP8's error, the share of completions under GSPO's lower bound `1 - 3e-4` (Zheng et al.,
arXiv 2507.18071) in BF16 and in FP8, and how many times that distance from 1 the bound must lie for FP8 to clip as
many as BF16 does.

`--train` runs the demo with sequence-level ratios and GSPO's bounds in place of tokens', at a learning rate of 2e-5:
FP8 with fixed bounds, and calibrated. Of the calibration batches after the first four it reports the shares of
completions that BF16 clips, and FP8 at the reference bounds and at the bounds in force, which earlier batches fixed.
"""

from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer
from trl import TrlParser

from benchmarks.drift import Scorer, generate
from benchmarks.models import completion_logps, load_masters, prepare, prompts
from benchmarks.results import Results, argument_parser, report
from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer, embedded
from trl_calclip.fp8.recipes import RECIPES


EPSILON, EPSILON_HIGH = 3e-4, 4e-4
UPDATES = 3
TRANSIENT = 4
CONFIG = Path(__file__).parents[1] / "configs" / "grpo_demo.yaml"


class CountingTrainer(CalibratedGRPOTrainer):
    """Counts clipped completions per calibration batch; with `frozen` it never moves the bounds."""

    frozen = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counts: list[list[int]] = []

    def _calibrate(self, pool):
        fp8, bf16, reference = pool.fp8_ratio, pool.bf16_ratio, self.reference_clip_range
        low, high = pool.advantages < 0, pool.advantages > 0
        masks = [
            low,
            low & (bf16 < reference.lower),
            low & (fp8 < reference.lower),
            low & (fp8 < self.clip_range.lower),
        ]
        masks += [high, high & (bf16 > reference.upper), high & (fp8 > reference.upper)]
        masks += [high & (fp8 > self.clip_range.upper)]
        self.counts.append([int(mask.sum()) for mask in masks])
        if not self.frozen:
            super()._calibrate(pool)


def train(arm: str, seed: int, directory: Path) -> dict:
    """One run; its row of the table."""
    output = Path(directory, f"{arm}_{seed}")
    arguments = ["--config", str(CONFIG), "--output_dir", str(output), "--use_cpu", "true", "--disable_tqdm", "true"]
    arguments += ["--importance_sampling_level", "sequence", "--epsilon", str(EPSILON), "--epsilon_high"]
    arguments += [str(EPSILON_HIGH), "--learning_rate", "2e-5", "--calibration_min_tokens", "20", "--seed", str(seed)]
    arguments += ["--save_strategy", "no", "--num_generations_eval", "4", "--per_device_eval_batch_size", "64"]
    arguments += ["--calibration_start_at_reference", str(arm == "fixed")]
    (args,) = TrlParser(CalibratedGRPOConfig).parse_args_and_config(arguments)
    trainer = CountingTrainer(
        embedded.warm_start(Path(directory, f"warm_start_{seed}"), seed=seed),
        embedded.arithmetic_reward,
        args,
        train_dataset=embedded.arithmetic_dataset(4096, seed=seed),
        eval_dataset=embedded.arithmetic_dataset(256, split="test"),
    )
    trainer.frozen = arm == "fixed"
    trainer.train()
    total = [sum(column) for column in zip(*trainer.counts[TRANSIENT:], strict=True)]
    row = {"arm": arm, "seed": seed, "negative": total[0], "positive": total[4]}
    for name, i in {"bf16": 1, "reference": 2, "in_force": 3}.items():
        row |= {f"low_{name}": total[i] / total[0], f"high_{name}": total[i + 4] / total[4]}
    distances = [(1 - record["lower"]) / EPSILON for record in trainer.calibration_history[TRANSIENT:]]
    row["shortest"], row["longest"] = (min(distances), max(distances)) if distances else (1, 1)
    return {**row, "reward": trainer.evaluate()["eval_reward"]}


def sequence_log_ratios(model, recipe: str, sequences, lengths, learning_rate: float, rows: int = 8):
    """Mean log-ratios `(completions,)` after `UPDATES` steps: in FP8 and in BF16."""
    scorer = Scorer(model, recipe, True, sequences, lengths)
    old_fp8, old_bf16 = scorer.score()
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(scorer.fp8.parameters(), lr=learning_rate, weight_decay=0.0)
    for _ in range(UPDATES):
        chosen = torch.randperm(len(sequences), generator=generator)[:rows].tolist()
        logps = completion_logps(scorer.fp8, [sequences[i] for i in chosen], [lengths[i] for i in chosen])
        loss = -(torch.stack(logps).mean(-1) * torch.randn(len(chosen), generator=generator)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    fp8, bf16 = scorer.score()
    return (fp8 - old_fp8).mean(-1), (bf16 - old_bf16).mean(-1)


def measure(options) -> Results:
    """Noise of the ratio after `UPDATES` steps."""
    table = Results(
        f"{options.model}: one ratio per completion",
        {
            "recipe": "{recipe}",
            "tokens": "{tokens}",
            "learning rate": "{learning_rate:g}",
            "std BF16": "{std_bf16:.4f}",
            "std of FP8's error": "{std_error:.4f}",
            "BF16 clips": "{clipped_bf16:.1%}",
            "FP8 clips": "{clipped_fp8:.1%}",
            "distance": "{distance:.0f}",
        },
    )
    path = prepare(options.model, options.cache)
    prompt_ids = prompts(options.model, AutoTokenizer.from_pretrained(path), options.completions)
    for tokens in options.tokens:
        sequences, lengths = generate(load_masters(path, trained=False), prompt_ids, tokens)
        for recipe in options.recipes:
            fp8, bf16 = sequence_log_ratios(
                load_masters(path, trained=False), recipe, sequences, lengths, options.learning_rate
            )
            clipped, clipped_fp8 = ((x.exp() < 1 - EPSILON).double().mean().item() for x in (bf16, fp8))
            row = {"recipe": recipe, "tokens": tokens, "learning_rate": options.learning_rate}
            row |= {"std_bf16": bf16.std().item(), "std_error": (fp8 - bf16).std().item()}
            row |= {"clipped_bf16": clipped, "clipped_fp8": clipped_fp8}
            table.rows.append({**row, "distance": (1 - fp8.exp().quantile(clipped).item()) / EPSILON})
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser("sequence_level", __doc__)
    parser.add_argument("--model", default="toy", help="toy, smollm2 or a directory")
    parser.add_argument("--recipes", nargs="+", default=["tensorwise", "rowwise", "blockwise"], choices=list(RECIPES))
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[24])
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument("--cache", default="runs/models")
    parser.add_argument("--train", nargs="+", choices=("fixed", "calibrated"), help="train in place of measuring")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    if options.train is None:
        report(options.output, measure(options))
        return
    table = Results(
        "The demo with one ratio per completion",
        {
            "bounds": "{arm}",
            "seed": "{seed}",
            "negative, positive": "{negative}, {positive}",
            "low: BF16": "{low_bf16:.1%}",
            "FP8, reference": "{low_reference:.1%}",
            "FP8, in force": "{low_in_force:.1%}",
            "high: BF16": "{high_bf16:.1%}",
            "FP8, reference ": "{high_reference:.1%}",
            "FP8, in force ": "{high_in_force:.1%}",
            "distance of L": "{shortest:.0f} to {longest:.0f}",
            "held-out reward": "{reward:.3f}",
        },
        [train(arm, seed, options.output) for arm in options.train for seed in options.seeds],
    )
    report(options.output / "train", table)
