# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
FP8 noise of one importance ratio per completion (GSPO), against GSPO's clip range and the policy's own drift.

    python -m benchmarks.sequence_level --model smollm2 --completions 32 --tokens 24 96
    python -m benchmarks.sequence_level --model toy --completions 128 --tokens 24 --learning_rate 1e-5
    python -m benchmarks.sequence_level --train fixed calibrated --seeds 0 1

A policy takes three AdamW steps on a policy-gradient loss with random advantages of its own completions. Per
completion, the ratio is the exponential of the mean log-ratio over its tokens. Reported are the spread of the BF16
ratio, that of FP8's error, the share of completions under GSPO's lower bound `1 - 3e-4` (Zheng et al.,
arXiv 2507.18071) in BF16 and in FP8, and how many times that distance from 1 the bound must lie for FP8 to clip as
many as BF16 does.

`--train` runs the demo with sequence-level ratios and GSPO's bounds in place of tokens', at a learning rate of 2e-5:
FP8 with fixed bounds, and calibrated. Of the calibration batches after the first four it reports the shares of
completions that BF16 clips, and FP8 at the reference bounds and at the bounds in force, which earlier batches fixed.
"""

import argparse
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer
from trl import TrlParser

from benchmarks.drift import Scorer, generate
from benchmarks.header import header
from benchmarks.models import completion_logps, load_masters, prepare, prompts
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


def train(arm: str, seed: int, directory: str) -> str:
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
    shares = [f"{total[i] / total[0]:.1%}" for i in (1, 2, 3)] + [f"{total[i] / total[4]:.1%}" for i in (5, 6, 7)]
    distances = [(1 - record["lower"]) / EPSILON for record in trainer.calibration_history[TRANSIENT:]]
    span = f"{min(distances):.0f} to {max(distances):.0f}" if distances else "1"
    reward = trainer.evaluate()["eval_reward"]
    return f"| {arm} | {seed} | {total[0]}, {total[4]} | {' | '.join(shares)} | {span} | {reward:.3f} |"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="toy", help="toy, smollm2 or a directory")
    parser.add_argument("--recipes", nargs="+", default=["tensorwise", "rowwise", "blockwise"], choices=list(RECIPES))
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[24])
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument("--cache", default="runs/models")
    parser.add_argument("--train", nargs="+", choices=("fixed", "calibrated"), help="train in place of measuring")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--output_dir", default="runs/benchmarks/sequence_level")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    if args.train is not None:
        rows = [train(arm, seed, args.output_dir) for arm in args.train for seed in args.seeds]
        print(header())
        columns = ["bounds", "seed", "negative, positive", *2 * ["BF16", "FP8, reference", "FP8, in force"]]
        columns += ["distance of L", "held-out reward"]
        print(f"\n| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|")
        print("\n".join(rows))
        return
    path = prepare(args.model, args.cache)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt_ids = prompts(args.model, tokenizer, args.completions)
    print(header())
    print("\n| recipe | tokens | learning rate | std BF16 | std of FP8's error | BF16 clips | FP8 clips | distance |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for tokens in args.tokens:
        sequences, lengths = generate(load_masters(path, trained=False), prompt_ids, tokens)
        for recipe in args.recipes:
            fp8, bf16 = sequence_log_ratios(
                load_masters(path, trained=False), recipe, sequences, lengths, args.learning_rate
            )
            clipped, clipped_fp8 = ((x.exp() < 1 - EPSILON).double().mean().item() for x in (bf16, fp8))
            distance = (1 - fp8.exp().quantile(clipped).item()) / EPSILON
            print(
                f"| {recipe} | {tokens} | {args.learning_rate:g} | {bf16.std():.4f} | {(fp8 - bf16).std():.4f} | "
                f"{clipped:.1%} | {clipped_fp8:.1%} | {distance:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
