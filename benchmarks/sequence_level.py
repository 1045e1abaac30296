# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
FP8 noise of one importance ratio per completion (GSPO), against GSPO's clip range and the policy's own drift.

    python -m benchmarks.sequence_level --model smollm2 --completions 32 --tokens 24 96
    python -m benchmarks.sequence_level --model toy --completions 128 --tokens 24 --learning_rate 1e-5

A policy takes three AdamW steps on a policy-gradient loss with random advantages of its own completions. Per
completion, the ratio is the exponential of the mean log-ratio over its tokens. Reported are the spread of the BF16
ratio, that of FP8's error, the share of completions under GSPO's lower bound `1 - 3e-4` (Zheng et al.,
arXiv 2507.18071) in BF16 and in FP8, and how many times that distance from 1 the bound must lie for FP8 to clip as
many as BF16 does.
"""

import argparse

import torch
import transformers
from transformers import AutoTokenizer

from benchmarks.drift import Scorer, generate
from benchmarks.header import header
from benchmarks.models import completion_logps, load_masters, prepare, prompts
from trl_calclip.fp8.recipes import RECIPES


EPSILON = 3e-4
UPDATES = 3


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
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
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
