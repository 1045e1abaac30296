# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
How much memory a run needs per GPU, from the model's configuration: what grows with what.

    python -m trl_calclip.memory

prints the table of `docs/scaling.md`. Weights, gradients and optimizer are counts of bytes; activations and caches are
estimates by the rules below, and what a framework holds beside them (the CUDA context, fragmentation, NCCL's and
CUDA graphs' buffers) is not in them: leave 10 to 15 % free.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3Config

from .fp8.selection import select_linears


PARALLELISMS = ("ddp", "fsdp2", "zero2", "zero3")

# Tokens and vocabulary entries of the tile in which TRL computes log-probabilities (TRL 1.16).
LOGIT_TILE = (4096, 32768)


@dataclass(frozen=True)
class MemoryEstimate:
    """
    Bytes per GPU.

    Args:
        weights (`float`): Master weights of the trainer, or BF16 weights where DeepSpeed keeps the masters.
        gradients (`float`): Gradients.
        optimizer (`float`): AdamW's two moments, and DeepSpeed's FP32 masters.
        gathered (`float`): Weights of other ranks that a forward holds: two layers in BF16 and the head.
        training_activations (`float`): FP8 forward and backward of a micro-batch with gradient checkpointing.
        bf16_pass (`float`): BF16 pass of the same micro-batch, at another time than the training activations.
        vllm_weights (`float`): Weights of the colocated engine.
        vllm_kv_cache (`float`): Its KV cache.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    training_activations: float
    bf16_pass: float
    vllm_weights: float
    vllm_kv_cache: float

    @property
    def total(self) -> float:
        """All of it; of the two kinds of activations the larger."""
        states = self.weights + self.gradients + self.optimizer + self.gathered
        return states + max(self.training_activations, self.bf16_pass) + self.vllm_weights + self.vllm_kv_cache


def estimate_memory(
    config: PreTrainedConfig,
    *,
    num_gpus: int = 1,
    parallelism: str = "ddp",
    micro_batch_size: int = 1,
    sequence_length: int = 1024,
    fp8_rollout: bool = True,
    tensor_parallel_size: int = 1,
    kv_cache_tokens: int = 0,
) -> MemoryEstimate:
    """
    Memory per GPU of full fine-tuning with AdamW in BF16 autocast or FP8 (which keeps no second copy of the weights).

    Args:
        config ([`~transformers.PreTrainedConfig`]): Model of a decoder with dense layers.
        num_gpus (`int`, *optional*, defaults to `1`): Ranks that share the trainer's states.
        parallelism (`str`, *optional*, defaults to `"ddp"`):
            `"ddp"` and `"fsdp2"` with FP32 master weights; `"zero2"` and `"zero3"` with BF16 weights and FP32 masters
            in the optimizer, as DeepSpeed has them with `bf16`.
        micro_batch_size (`int`, *optional*, defaults to `1`): Completions per micro-batch and rank.
        sequence_length (`int`, *optional*, defaults to `1024`): Tokens of prompt and completion.
        fp8_rollout (`bool`, *optional*, defaults to `True`): Whether the engine's linears are FP8.
        tensor_parallel_size (`int`, *optional*, defaults to `1`): GPUs per engine.
        kv_cache_tokens (`int`, *optional*, defaults to `0`): Tokens that an engine caches at one time, in BF16.

    Returns:
        [`MemoryEstimate`]

    Raises:
        ValueError: If `parallelism` is unknown.
    """
    if parallelism not in PARALLELISMS:
        raise ValueError(f"`parallelism` must be one of {', '.join(PARALLELISMS)}, got {parallelism!r}.")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    num_params = sum(param.numel() for param in model.parameters())
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    num_layer_params = sum(param.numel() for param in layers[0].parameters())
    head = model.get_output_embeddings().weight.numel()
    fp8 = sum(model.get_submodule(name).weight.numel() for name in select_linears(model).fp8)

    share = 1 / num_gpus
    sharded = parallelism in ("fsdp2", "zero3")
    master = 4 if parallelism in ("ddp", "fsdp2") else 2
    weights = master * num_params * (share if sharded else 1)
    gradients = master * num_params * (1 if parallelism == "ddp" else share)
    optimizer = (8 if master == 4 else 12) * num_params * (1 if parallelism == "ddp" else share)
    # FSDP2 computes a layer while the next one arrives, and TRL gathers the head in the masters' precision.
    gathered = 2 * 2 * num_layer_params + master * head if sharded else 0.0

    tokens = micro_batch_size * sequence_length
    # A layer's widest moment: the MLP's gate, up, activation and product in BF16 beside residual stream and norm.
    stream = 4 if parallelism in ("ddp", "zero2") and master == 4 else 2
    layer = tokens * (4 * 2 * config.intermediate_size + 3 * stream * config.hidden_size)
    tile = 2 * min(tokens, LOGIT_TILE[0]) * min(config.vocab_size, LOGIT_TILE[1])
    cast = 2 * config.intermediate_size * config.hidden_size  # one weight at a time
    bf16_pass = layer + tile + cast
    # Inputs of all layers are kept; one layer is computed again, with what its backward needs and makes.
    training = len(layers) * tokens * stream * config.hidden_size + 3 * layer + tile + cast

    kv_width = 2 * config.num_key_value_heads * config.head_dim
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=gathered,
        training_activations=training,
        bf16_pass=bf16_pass,
        vllm_weights=(2 * num_params - (fp8 if fp8_rollout else 0)) / tensor_parallel_size,
        vllm_kv_cache=2 * kv_width * len(layers) * kv_cache_tokens / tensor_parallel_size,
    )


def _qwen3(hidden_size: int, intermediate_size: int, layers: int, heads: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936, hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip


def _qwen25_32b() -> Qwen2Config:
    config = Qwen2Config(
        vocab_size=152064, hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=40,
        num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    config.head_dim = 128
    return config


# Model, GPUs and settings of the run files in `configs/`.
SETTINGS: list[tuple[str, PreTrainedConfig, str, dict[str, Any]]] = [
    ("Qwen3-8B-Base", _qwen3(4096, 12288, 36, 32), "8, one node", dict(
        num_gpus=8, parallelism="fsdp2", micro_batch_size=2, sequence_length=9216, kv_cache_tokens=16 * 9216)),
    ("Qwen3-8B-Base", _qwen3(4096, 12288, 36, 32), "8, one node", dict(
        num_gpus=8, parallelism="zero3", micro_batch_size=2, sequence_length=9216, kv_cache_tokens=16 * 9216)),
    ("Qwen3-8B-Base", _qwen3(4096, 12288, 36, 32), "8, one node", dict(
        num_gpus=8, parallelism="ddp", micro_batch_size=2, sequence_length=9216, kv_cache_tokens=16 * 9216)),
    ("Qwen3-14B-Base", _qwen3(5120, 17408, 40, 40), "8, one node", dict(
        num_gpus=8, parallelism="fsdp2", micro_batch_size=1, sequence_length=22528, tensor_parallel_size=2,
        kv_cache_tokens=6 * 22528)),
    ("Qwen2.5-32B", _qwen25_32b(), "16, two nodes", dict(
        num_gpus=16, parallelism="fsdp2", micro_batch_size=1, sequence_length=9216, tensor_parallel_size=4,
        kv_cache_tokens=16 * 9216)),
]  # fmt: skip


def memory_table() -> str:
    """The settings of `configs/`, in GiB per GPU, as a markdown table."""
    lines = [
        "| model | GPUs | parallelism | engine's TP | micro-batch, tokens | weights | gradients | optimizer | "
        "gathered | training activations | BF16 pass | vLLM weights | vLLM KV cache | sum |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, config, gpus, settings in SETTINGS:
        estimate = estimate_memory(config, **settings)
        numbers = [*vars(estimate).values(), estimate.total]
        shape = f"{settings['micro_batch_size']} x {settings['sequence_length']:,}"
        row = [name, gpus, settings["parallelism"], settings.get("tensor_parallel_size", 1), shape]
        row += [f"{number / 2**30:.1f}" for number in numbers]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(memory_table())
