# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Sampling and scoring without a trainer: what the diagnosis and the benchmarks measure on."""

import gc
import importlib.util
import os
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Rollout:
    """
    Sampled completions.

    Args:
        sequences (`list[list[int]]`): Token ids of prompt and completion.
        lengths (`list[int]`): Length of each completion.
        logps (`list[torch.Tensor]` or `None`):
            Log-probabilities of the completions' tokens under the engine, nats; `None` where no engine sampled them.
    """

    sequences: list[list[int]]
    lengths: list[int]
    logps: list[torch.Tensor] | None


def vllm_is_there() -> bool:
    """Whether the module `vllm` can be imported."""
    return importlib.util.find_spec("vllm") is not None


def prepare_engine_environment() -> None:
    """
    Environment variables of a quiet in-process engine, where the user has set none. vLLM reads them at import.

    On a CPU it would otherwise size its cache from a NUMA reading and pin threads.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def sample_with_engine(path: str, scheme: str, prompt_ids: list[list[int]], tokens: int, seed: int = 1) -> Rollout:
    """
    Completions of an FP8 engine, which is built for it and shut down again.

    Args:
        path (`str`): Model directory or name.
        scheme (`str`): vLLM's quantization, as in [`Recipe`]`.vllm_quantization`.
        prompt_ids (`list[list[int]]`): Prompts.
        tokens (`int`): Longest completion.
        seed (`int`, *optional*, defaults to `1`): Seed of the sampling, at temperature 1.
    """
    prepare_engine_environment()
    from vllm import LLM, SamplingParams

    from .fp8.vllm_reference import engine_arguments

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what a model before it held: the engine takes most of the memory
    threads = torch.get_num_threads()
    llm = LLM(
        model=path, dtype="bfloat16", enforce_eager=True, max_model_len=max(map(len, prompt_ids)) + tokens + 1,
        max_num_seqs=16, seed=0, logprobs_mode="processed_logprobs", disable_log_stats=True,
        **engine_arguments(scheme, []),
    )  # fmt: skip
    params = SamplingParams(temperature=1.0, max_tokens=tokens, logprobs=0, seed=seed)
    # The same prompt twice would give the same completion twice under one seed.
    each = [params.clone() for _ in prompt_ids]
    for index, own in enumerate(each):
        own.seed = seed + index
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompt_ids], each, use_tqdm=False)
    completions = [list(output.outputs[0].token_ids) for output in outputs]
    logps = [
        torch.tensor([entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, ids, strict=True)])
        for output, ids in zip(outputs, completions, strict=True)
    ]
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    torch.set_num_threads(threads)
    sequences = [prompt + ids for prompt, ids in zip(prompt_ids, completions, strict=True)]
    return Rollout(sequences, [len(ids) for ids in completions], logps)


@torch.no_grad()
def sample_with_model(
    model: PreTrainedModel, prompt_ids: list[list[int]], tokens: int, seed: int = 1, rows: int = 8
) -> Rollout:
    """Completions of the model itself, at temperature 1, `rows` prompts at a time."""
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    sequences, lengths = [], []
    with torch.random.fork_rng(), torch.autocast(model.device.type, torch.bfloat16):
        torch.manual_seed(seed)
        for start in range(0, len(prompt_ids), rows):
            part = prompt_ids[start : start + rows]
            width = max(map(len, part))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in part], device=model.device)
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in part])
            output = model.generate(
                input_ids=ids, attention_mask=mask.to(model.device), do_sample=True, temperature=1.0, top_k=0,
                top_p=1.0, max_new_tokens=tokens, pad_token_id=0,
            )  # fmt: skip
            for prompt, row in zip(part, output[:, width:].tolist(), strict=True):
                end = next((index + 1 for index, token in enumerate(row) if token in ends), len(row))
                sequences.append(prompt + row[:end])
                lengths.append(end)
    return Rollout(sequences, lengths, None)


def score_completions(
    model: PreTrainedModel, sequences: list[list[int]], lengths: list[int], rows: int = 8
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """
    Score the last `lengths[i]` tokens of each sequence, under BF16 autocast; with gradients where they are on.

    Sequences run in micro-batches of `rows`, padded on the right, where a causal model does not look.

    Returns:
        `tuple[list[torch.Tensor], list[torch.Tensor]]`: Per sequence log-probabilities and entropies (without
        gradient), nats, on the model's device.
    """
    logps, entropies = [], []
    for start in range(0, len(sequences), rows):
        part = sequences[start : start + rows]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(sequence) for sequence in part], batch_first=True)
        ids = ids.to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16):
            logits = model(ids, use_cache=False).logits
        log_softmax = logits[:, :-1].float().log_softmax(-1)
        scored = log_softmax.gather(-1, ids[:, 1:, None])[..., 0]
        entropy = -(log_softmax.detach().exp() * log_softmax.detach()).sum(-1)
        for row, own, sequence, length in zip(scored, entropy, part, lengths[start : start + rows], strict=True):
            columns = slice(len(sequence) - 1 - length, len(sequence) - 1)
            logps.append(row[columns])
            entropies.append(own[columns])
    return logps, entropies


def completion_logps(
    model: PreTrainedModel, sequences: list[list[int]], lengths: list[int], rows: int = 8
) -> list[torch.Tensor]:
    """Log-probabilities alone, see `score_completions`."""
    return score_completions(model, sequences, lengths, rows)[0]
