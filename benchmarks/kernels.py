# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
FP8 against BF16 on a GPU: a training step of decoder layers, per recipe and layer shape, eager and compiled.

    python -m benchmarks kernels
    python -m benchmarks kernels --emulate    its paths on any machine, at a tiny size; its times mean nothing

A step is forward and backward of a few Qwen3 layers without head or optimizer, FP32 masters under BF16 autocast, on
16,384 tokens in rows of 2,048. Timed by CUDA events in interleaved repeats, ratios within a repeat. The paper gives
times without the BF16 passes of calibration; beside that stands what is left with them, for four updates per rollout:
at a calibration, which adds three passes of the old policy and three of the current one, and at every twentieth
rollout. Attention and norms are BF16 in every arm, and the head is left out: a whole model gains less.

What has not begun when `--minutes` are over is left out, and the table says so.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from matplotlib.figure import Figure
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.measuring import median_interval, rotated
from benchmarks.results import Results, argument_parser, report
from trl_calclip.fp8.linear import bf16_pass, convert_to_fp8
from trl_calclip.fp8.recipes import RECIPES, cuda_capability
from trl_calclip.report_panels import COLORS


# Of Qwen3 models: hidden, MLP, query heads, key heads, width of a head; and how many layers are timed.
SHAPES = {
    "8B": (4096, 12288, 32, 8, 128, 4),
    "1.7B": (2048, 6144, 16, 8, 128, 8),
    "0.6B": (1024, 3072, 16, 8, 128, 8),
}
TINY = {"tiny": (128, 256, 4, 2, 32, 2)}
PAPER = {"tensorwise": "1.4 to 1.5", "rowwise": "1.2 to 1.3", "blockwise": "1.1 to 1.2"}
UPDATES, INTERVAL = 4, 20
PASSES = 2 * (UPDATES - 1)  # BF16 passes of a calibration: old and current policy, without the first update


def build(shape: tuple[int, ...], recipe: str, device: str, emulate: bool) -> Qwen3ForCausalLM:
    """Layers of a shape with a head of next to nothing, in FP8 or, for `"BF16"`, as they are."""
    hidden, mlp, heads, key_heads, head_dim, layers = shape
    config = Qwen3Config(
        vocab_size=128, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=head_dim, dtype=torch.float32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    if recipe != "BF16":
        convert_to_fp8(model, RECIPES[recipe], emulate=emulate)
    return model


def milliseconds(function: Callable[[], Any], device: str) -> float:
    """Time of one call, on the GPU's own clock where there is one."""
    if device == "cpu":
        start = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - start)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


class Arm:
    """A model and what is timed of it."""

    def __init__(self, shape: tuple[int, ...], recipe: str, compiled: bool, ids: torch.Tensor, emulate: bool):
        self.device, self.ids = ids.device.type, ids
        self.model = build(shape, recipe, self.device, emulate)
        if compiled:  # layer by layer, as they are alike: compiled once for all
            for layer in self.model.model.layers:
                layer.compile(backend="aot_eager" if emulate else "inductor")
        self.times: dict[str, list[float]] = {"step": [], "bf16_pass": []}

    def step(self) -> None:
        """Forward and backward."""
        self.model.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(self.ids, use_cache=False).logits
        logits.float().log_softmax(-1)[..., 3].mean().backward()

    @torch.no_grad()
    def bf16_pass(self) -> None:
        """What calibration adds, once for each policy and micro-batch."""
        with bf16_pass(self.model), torch.autocast(self.device, torch.bfloat16):
            self.model(self.ids, use_cache=False)

    def repeat(self) -> None:
        """Time each once."""
        for name, times in self.times.items():
            times.append(milliseconds(self.step if name == "step" else self.bf16_pass, self.device))


def measure(shape_name: str, shape, recipes: list[str], compiled: bool, options) -> list[dict[str, Any]]:
    """Rows of one shape, eager or compiled; an arm that fails becomes a row with the fault."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, length = [], min(options.length, options.tokens)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(128, (options.tokens // length, length), generator=generator).to(device)
    arms: dict[str, Arm] = {}
    named = {"shape": shape_name, "mode": "compiled" if compiled else "eager"}
    for recipe in ["BF16", *recipes]:
        try:
            arm = Arm(shape, recipe, compiled, ids, options.emulate)
            for _ in range(options.warm_up):
                arm.repeat()
        except Exception as error:  # a compiler's or a kernel's fault is a result
            rows.append({**named, "recipe": recipe, "fault": f"{type(error).__name__}: {str(error)[:200]}"})
            continue
        arm.times = {name: [] for name in arm.times}
        arms[recipe] = arm
    for repeat in range(options.repeats):
        for recipe in rotated(list(arms), repeat):
            arms[recipe].repeat()
    if "BF16" not in arms:
        return rows
    base = arms["BF16"].times["step"]
    for recipe, arm in arms.items():
        row: dict[str, Any] = {**named, "recipe": recipe, "paper": PAPER.get(recipe)}
        row |= {f"{name}_ms": statistics.median(times) for name, times in arm.times.items()}
        if recipe != "BF16":
            pairs = list(zip(base, arm.times["step"], arm.times["bf16_pass"], strict=True))
            for name, share in (("excluded", 0), ("interval", 1 / INTERVAL), ("calibration", 1)):
                ratios = [UPDATES * bf16 / (UPDATES * fp8 + share * PASSES * extra) for bf16, fp8, extra in pairs]
                row |= {name: statistics.median(ratios), f"{name}_min": min(ratios), f"{name}_max": max(ratios)}
                row[f"{name}_interval"] = median_interval(ratios)
        rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Speed over BF16, without and with the BF16 passes."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    bars = [row for row in rows if "excluded" in row]
    labels = [f"{row['shape']} {row['mode']}\n{row['recipe']}" for row in bars]
    for offset, (name, label) in enumerate(
        (("excluded", "without BF16 passes"), ("interval", "interval 20"), ("calibration", "calibration batch"))
    ):
        positions = [index + 0.27 * (offset - 1) for index in range(len(bars))]
        axis.bar(positions, [row[name] for row in bars], width=0.25, color=COLORS[offset], label=label)
    axis.axhline(1.0, color=axis.xaxis.label.get_color(), linewidth=1)
    axis.set_xticks(range(len(bars)), labels, fontsize="x-small", rotation=90)
    axis.set_title("Training step: times as fast as BF16")
    axis.legend(frameon=False, fontsize="small")
    return figure


def refuse_without_kernels(recipes: list[str]) -> None:
    """Leave with a sentence unless this machine's GPU has the recipes' float8 kernels."""
    capability = cuda_capability()
    for recipe in recipes:
        needed = RECIPES[recipe].min_capability
        if capability is None or capability < needed:
            have = "no GPU" if capability is None else f"one with {'.'.join(map(str, capability))}"
            sys.exit(
                f"`kernels` times float8 kernels: {recipe} needs a GPU with compute capability "
                f"{'.'.join(map(str, needed))} or higher, and this machine has {have}. Choose others by `--recipes`, "
                "or run its paths by `--emulate`, which measures nothing."
            )


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser("kernels", __doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--recipes", nargs="+", default=list(PAPER), choices=list(RECIPES))
    parser.add_argument("--modes", nargs="+", default=["compiled", "eager"], choices=["compiled", "eager"])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--warm_up", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=5.5, help="begin nothing after so many")
    parser.add_argument("--emulate", action="store_true", help="tiny layers, emulated: measures nothing")
    options = parser.parse_args(argv)
    shapes = {name: SHAPES[name] for name in options.shapes}
    if options.emulate:
        shapes, options.tokens, options.length, options.repeats, options.warm_up = TINY, 64, 32, 2, 2
    else:
        refuse_without_kernels(options.recipes)
    emulated = "EMULATED, times mean nothing: " if options.emulate else ""
    speeds = {
        f"{title}: median [range]": f"{{{name}:.2f}} [{{{name}_min:.2f}}, {{{name}_max:.2f}}]"
        for name, title in (("excluded", "without passes"), ("interval", "interval 20"), ("calibration", "at one"))
    }
    table = Results(
        f"{emulated}training step of {options.tokens:,} tokens, times as fast as BF16",
        {
            "shape": "{shape}",
            "mode": "{mode}",
            "recipe": "{recipe}",
            "step, ms": "{step_ms:.2f}{fault}",
            "BF16 pass, ms": "{bf16_pass_ms:.2f}",
            **speeds,
            "paper": "{paper}",
        },
    )
    begun = time.monotonic()
    for name, shape in shapes.items():
        for mode in options.modes:
            if time.monotonic() - begun > 60 * options.minutes:
                table.notes.append(f"{name}, {mode}: not begun after {options.minutes:g} minutes.")
                continue
            torch.compiler.reset()
            # Every arm is a version of the same layer, two each for the step and two for the BF16 pass.
            with torch._dynamo.config.patch(recompile_limit=64):
                table.rows += measure(name, shape, options.recipes, mode == "compiled", options)
    table.notes.append(
        f"{options.repeats} interleaved repeats. Paper: Chen et al., arXiv 2609.22870, passes excluded."
    )
    report(options.output, table, figure=None if options.emulate else draw(table.rows))
