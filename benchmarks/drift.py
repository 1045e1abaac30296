# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Does FP8 amplify small optimizer steps beyond noise?

    python -m benchmarks drift --model smollm2 --steps 1 200 --recipes rowwise

FP32 masters take AdamW steps at a learning rate of 1e-6 on a policy-gradient loss with random advantages of its own
completions. They are drawn anew for each step: with the same ones again and again the policy would leave its old self
by a nat within 200 steps, where no clip would let it go, and FP8's error is another one there.

Per token, `d = log r_fp8 - log r_bf16`, the two importance ratios of the same two sets of weights. As a control every
weight moves from the start by the same distance with a random sign, three draws. Two conditions: the standard
deviation of `d` is at most 1.25 times the control's, and its mean is not below `-var(d)` by more than two standard
errors (pure noise of variance v has a mean of about `-v / 2`). FP8 rounding that follows the gradient fails either.
Errors and intervals are clustered by completion.
"""

import copy
import dataclasses

import torch
import transformers
from rich.progress import track
from transformers import AutoTokenizer

from benchmarks.models import completion_logps, convert, load_masters, prepare, prompts
from benchmarks.results import Results, argument_parser, report
from trl_calclip.fp8.linear import SwitchableFloat8Linear, bf16_pass
from trl_calclip.fp8.recipes import RECIPES


MAX_SPREAD = 1.25


@dataclasses.dataclass(frozen=True)
class Drift:
    """
    Outcome of one recipe after a number of steps.

    Args:
        mean (`float`): Mean of `d`, nats.
        mean_error (`float`): Its standard error.
        std (`float`): Its standard deviation over tokens.
        control_std (`float`): That of the control, over its three draws.
        std_ratio_interval (`tuple[float, float]`): 95 % interval of `std / control_std`.
        bf16_std (`float`): Standard deviation of `log r_bf16`.
    """

    mean: float
    mean_error: float
    std: float
    control_std: float
    std_ratio_interval: tuple[float, float]
    bf16_std: float

    @property
    def passes(self) -> bool:
        """Whether both conditions hold."""
        not_below = self.mean + 2 * self.mean_error >= -(self.std**2)
        return self.std <= MAX_SPREAD * self.control_std and not_below


@torch.no_grad()
def generate(model, prompt_ids: list[list[int]], tokens: int, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Sampled completions, one per prompt, all of `tokens` tokens."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for ids in prompt_ids:
        sequence, cache = list(ids), None
        step = torch.tensor([sequence])
        for _ in range(tokens):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(step, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            token = torch.multinomial(output.logits[0, -1].float().softmax(-1), 1, generator=generator)
            sequence.append(token.item())
            step = token[None]
        sequences.append(sequence)
    return sequences, [tokens] * len(sequences)


class Scorer:
    """Log-probabilities in FP8 and in BF16, each with the model that computes it; weights are loaded into both."""

    def __init__(self, model, recipe: str, aligned: bool, sequences, lengths):
        self.plain = model
        self.fp8 = convert(copy.deepcopy(model), recipe, aligned=aligned)
        self.switch = any(isinstance(module, SwitchableFloat8Linear) for module in self.fp8.modules())
        self.sequences, self.lengths = sequences, lengths

    @torch.no_grad()
    def score(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(completions, tokens)` each: FP8, then BF16, with the weights that `fp8` has now."""
        fp8 = torch.stack(completion_logps(self.fp8, self.sequences, self.lengths))
        if self.switch:
            with bf16_pass(self.fp8):
                return fp8, torch.stack(completion_logps(self.fp8, self.sequences, self.lengths))
        for own, other in zip(self.plain.parameters(), self.fp8.parameters(), strict=True):
            own.data = other.data
        return fp8, torch.stack(completion_logps(self.plain, self.sequences, self.lengths))


def measure(
    model, recipe: str, *, aligned: bool, steps: list[int], sequences, lengths, rows: int = 4
) -> dict[int, Drift]:
    """
    Take `max(steps)` optimizer steps and measure after each number in `steps`.

    Args:
        model ([`~transformers.PreTrainedModel`]): FP32 masters. Its weights are used up.
        recipe (`str`): FP8 recipe.
        aligned (`bool`): This package's rules, or the libraries' defaults.
        steps (`list[int]`): When to measure.
        sequences, lengths (`list`): Completions to train and to measure on, of equal length.
        rows (`int`): Completions per step.
    """
    scorer = Scorer(model, recipe, aligned, sequences, lengths)
    start = {name: param.detach().clone() for name, param in scorer.fp8.named_parameters()}
    old_fp8, old_bf16 = scorer.score()
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(scorer.fp8.parameters(), lr=1e-6, weight_decay=0.0)
    results, indices = {}, torch.arange(len(sequences)).split(rows)
    for step in range(1, max(steps) + 1):
        chosen = indices[step % len(indices)]
        logps = completion_logps(scorer.fp8, [sequences[i] for i in chosen], [lengths[i] for i in chosen])
        advantages = torch.randn(len(chosen), generator=generator)
        loss = -(torch.stack(logps).mean(-1) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step not in steps:
            continue
        fp8, bf16 = scorer.score()
        after = {name: param.detach().clone() for name, param in scorer.fp8.named_parameters()}
        d, control = (fp8 - old_fp8) - (bf16 - old_bf16), []
        for draw in range(3):
            noise = torch.Generator().manual_seed(100 + draw)
            with torch.no_grad():
                for name, param in scorer.fp8.named_parameters():
                    sign = torch.randint(2, param.shape, generator=noise).mul_(2).sub_(1)
                    param.copy_(start[name] + sign * (after[name] - start[name]).abs())
            noisy_fp8, noisy_bf16 = scorer.score()
            control.append((noisy_fp8 - old_fp8) - (noisy_bf16 - old_bf16))
        with torch.no_grad():
            for name, param in scorer.fp8.named_parameters():
                param.copy_(after[name])
        control = torch.stack(control)
        ratios = []
        for _ in range(1000):
            rows_drawn = torch.randint(len(sequences), (len(sequences),), generator=generator)
            ratios.append((d[rows_drawn].std() / control[:, rows_drawn].std()).item())
        low, high = torch.tensor(ratios).quantile(torch.tensor([0.025, 0.975])).tolist()
        results[step] = Drift(
            mean=d.mean().item(),
            mean_error=((d - d.mean()).sum(dim=1).square().sum().sqrt() / d.numel()).item(),
            std=d.std().item(),
            control_std=control.std().item(),
            std_ratio_interval=(low, high),
            bf16_std=(bf16 - old_bf16).std().item(),
        )
    return results


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser("drift", __doc__)
    parser.add_argument("--model", default="toy", help="toy, smollm2 or a directory")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--rules", nargs="+", choices=("aligned", "default"), default=["aligned", "default"])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 200])
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--cache", default="runs/models")
    options = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    path = prepare(options.model, options.cache)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt_ids = prompts(options.model, tokenizer, options.completions)
    sequences, lengths = generate(load_masters(path, trained=False), prompt_ids, options.tokens)
    table = Results(
        f"{options.model}: FP8's error of the log-ratio after optimizer steps, nats",
        {
            "recipe": "{recipe}",
            "rules": "{rules}",
            "steps": "{steps}",
            "std of log r_bf16": "{bf16_std:.4f}",
            "mean of d": "{mean:.4f} ± {mean_error:.4f}",
            "-var(d)": "{minus_variance:.4f}",
            "std of d": "{std:.4f}",
            "control": "{control_std:.4f}",
            "ratio, 95 %": "{ratio:.2f} ({low:.2f} to {high:.2f})",
            "passes": "{passes}",
        },
    )
    for recipe, rules in track([(recipe, rules) for recipe in options.recipes for rules in options.rules]):
        outcomes = measure(
            load_masters(path, trained=False),
            recipe,
            aligned=rules == "aligned",
            steps=options.steps,
            sequences=sequences,
            lengths=lengths,
        )
        for steps, drift in outcomes.items():
            row = {"recipe": recipe, "rules": rules, "steps": steps, **dataclasses.asdict(drift)}
            row["low"], row["high"] = row.pop("std_ratio_interval")
            row |= {"minus_variance": -(drift.std**2), "ratio": drift.std / drift.control_std}
            table.rows.append({**row, "passes": "yes" if drift.passes else "no"})
    report(options.output, table)
