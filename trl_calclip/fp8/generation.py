# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The vLLM FP8 engine: build it, push weights into it, and check that it took them.

Subclasses of TRL's `VLLMGeneration`; what differs is the engine's quantization, the reload that re-quantizes on every
sync, and the self-check. Generation itself is TRL's. Here are the self-check, which every engine gets, and the
colocated engine; the server is in `server.py`.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.elastic.utils.distributed import get_free_port

from .._trl_compat import (
    HookedVLLMGeneration,
    engine_model,
    engine_parameter_names,
    engine_weight_names,
    reload_engine_weights,
)
from .alignment import EXACT, GPU_TOLERANCE, AlignmentReport, alignment_report
from .recipes import Recipe
from .selection import expert_modules, refuse_moe, select_linears


logger = logging.getLogger(__name__)


# Length of the self-check's fixed probe, in tokens. Its mean gap is compared with the limit, so a few dozen are
# enough.
PROBE_LENGTH = 64


class CheckedVLLMGeneration(HookedVLLMGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] whose engine is checked against the trainer.

    A subclass says how weights reach the engine and how it scores tokens.

    Args:
        recipe (`Recipe` or `None`): FP8 recipe of the engine, `None` for a BF16 engine.
        ignore (`Sequence[str]`): `fnmatch` patterns on names of linears that stay in BF16.
        allow_moe (`bool`): Whether a mixture of experts is only warned of.
        allow_mismatch (`bool`): Whether trainer and engine may have different FP8 recipes.
        check_interval (`int`): Syncs between two self-checks; the first sync is always checked. 0 checks the first
            only.
        check_limit (`float`): Largest mean absolute log-probability gap between engine and trainer, nats per token.
        **kwargs: What `VLLMGeneration` takes.
    """

    def __init__(
        self,
        *args,
        recipe: Recipe | None,
        check_interval: int,
        check_limit: float,
        ignore: Sequence[str] = (),
        allow_moe: bool = False,
        allow_mismatch: bool = False,
        **kwargs,
    ):
        self.recipe = recipe
        self.ignore = ignore
        self.allow_moe = allow_moe
        self.allow_mismatch = allow_mismatch
        self.check_interval = check_interval
        self.check_limit = check_limit
        self.num_syncs = 0
        self.check_due = True
        self.probe_gap: float | None = None
        super().__init__(*args, **kwargs)

    def push_weights(self) -> None:
        """Bring the trainer's weights, rounded to BF16, into the engine, which quantizes them anew. Collective."""
        raise NotImplementedError

    def score_with_engine(self, probe: list[int]) -> torch.Tensor:
        """Log-probabilities of `probe[1:]` at temperature 1, `(..., len(probe) - 1)`, nats, on every rank."""
        raise NotImplementedError

    def check(self) -> None:
        """What is checked after a sync. Raises `RuntimeError`, on every rank, if the engine is not the trainer's."""
        self.check_sync()

    def sync_weights(self) -> None:
        """
        Push the trainer's weights into the engine, and check it if that is due.

        Raises:
            RuntimeError: Before anything is loaded, if the weights' names are not those that the engine needs; after
                it, if a self-check is due and the engine does not hold the trainer's weights, or computes otherwise.
        """
        self.push_weights()
        self.check_due |= bool(self.check_interval) and self.num_syncs % self.check_interval == 0
        self.num_syncs += 1
        if self.check_due:
            self.check()
            self.check_due = False

    def refuse_broken_experts(self) -> None:
        """Raise for a mixture of experts on a CPU engine."""
        if expert_modules(self.model):
            raise NotImplementedError(
                "vLLM 0.31 on a CPU computes with broken experts once a mixture of experts was reloaded, in BF16 "
                "too. Use `use_vllm=False`, a GPU, or a dense model."
            )

    @property
    def _sharded(self) -> bool:
        return self._dist.is_fsdp or self._dist.is_zero3

    def bf16_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as the engine gets them, one by one: BF16, adapters merged, copies that stay valid."""
        # Copies: vLLM holds a layer's tensors until its last one arrives, and adapters are unmerged in place
        # afterwards.
        for name, param in self.named_weights():
            yield name, param.detach().to(torch.bfloat16, copy=True)

    def check_sync(self) -> float:
        """
        Score a fixed probe with the engine and with the trainer, and compare.

        No random generator is moved: the probe is teacher-forced, its one sampled token is greedy and thrown away.

        Returns:
            `float`: Mean absolute gap of the log-probabilities at temperature 1, nats per token, the largest over
            ranks.

        Raises:
            RuntimeError: If the gap is above `check_limit` or not finite, on every rank alike.
        """
        probe = self._probe()
        devices = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            engine = self.score_with_engine(probe)
            trainer = self._score_with_trainer(probe)
        gap = (engine - trainer).abs().mean(-1).amax().to(self.accelerator.device)
        gap = torch.nan_to_num(gap, nan=float("inf"))
        self.probe_gap = self.accelerator.gather(gap.reshape(1)).max().item()
        if not self.probe_gap <= self.check_limit:
            raise RuntimeError(
                f"The vLLM engine does not compute with the trainer's weights: after weight sync {self.num_syncs} the "
                f"log-probabilities of a fixed probe of {len(probe)} tokens differ by {self.probe_gap:.3g} nats on "
                f"average, above `fp8_sync_check_limit={self.check_limit}`. FP8 noise alone stays far below. Rollouts "
                "would come from another policy than the one trained. Look at the sync first: vLLM's version, a model "
                "class whose reload path is broken (vllm#48284), weights changed outside the trainer."
            )
        return self.probe_gap

    def _probe(self) -> list[int]:
        """Token ids of the probe: the same pseudo-random ones for every sync, rank and run."""
        vocab_size = self.model.get_input_embeddings().num_embeddings
        generator = torch.Generator().manual_seed(0)
        limit = PROBE_LENGTH if self.max_model_length is None else min(PROBE_LENGTH, self.max_model_length - 1)
        return torch.randint(vocab_size, (limit,), generator=generator).tolist()

    @torch.no_grad()
    def _score_with_trainer(self, probe: list[int]) -> torch.Tensor:
        input_ids = torch.tensor([probe], device=self.accelerator.device)
        with self.accelerator.autocast():
            logits = self.model(input_ids=input_ids, use_cache=False).logits
        logps = logits[0, :-1].float().log_softmax(-1)
        return logps.gather(-1, input_ids[0, 1:, None])[:, 0].cpu()


class FP8VLLMGeneration(CheckedVLLMGeneration):
    """
    The colocated engine, with FP8 weights, checked bit for bit where these can be read.

    Args: see [`CheckedVLLMGeneration`].
    """

    def __init__(self, *args, **kwargs):
        self.alignment: AlignmentReport | None = None
        num_threads = torch.get_num_threads()
        super().__init__(*args, **kwargs)
        torch.set_num_threads(num_threads)  # the engine lowers it for the whole process

    def engine_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {"quantization": None, "dtype": "bfloat16"}
        if self.recipe is not None:
            # Only here: the module imports vLLM.
            from .vllm_reference import engine_arguments

            refuse_moe(self.model, allow=self.allow_moe)
            left = select_linears(self.model, self.ignore).bf16
            arguments.update(engine_arguments(self.recipe.vllm_quantization, left))
        if self.accelerator.device.type == "cpu":
            self.refuse_broken_experts()
            # Compilation costs 20 s at start and gains nothing here; without the two variables vLLM sizes its cache
            # from a NUMA reading and pins threads that the trainer needs.
            arguments["enforce_eager"] = True
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # TRL looks for a free port at 29500 first: of two runs that start together on a machine, one would end.
        if os.environ.get("MASTER_PORT", "").strip().lower() in {"", "0", "auto"}:
            os.environ["MASTER_PORT"] = str(get_free_port())
        return arguments

    def push_weights(self) -> None:
        # Naming sharded weights gathers them: once is enough, names do not change.
        if self.num_syncs == 0 or not self._sharded:
            self._check_names()
        reload_engine_weights(self.llm, self.bf16_weights())
        # Cached prefixes were computed with the weights before.
        self.llm.reset_prefix_cache()

    def score_with_engine(self, probe: list[int]) -> torch.Tensor:
        return score_with_engine(self.llm, probe)

    def check(self) -> None:
        self.check_sync()
        self.check_alignment()

    def _check_names(self) -> None:
        # vLLM fills a fused layer that lacks a part with whatever is in memory, and is dead after an unknown name.
        engine_names = [engine_name for _, engine_name in engine_weight_names(self.llm, self.weight_names())]
        # The engine has its own names for experts: of these only the self-check can tell.
        engine_names = [name for name in engine_names if ".experts." not in name]
        given = set(engine_names)
        needed = {name for name in engine_parameter_names(self.llm) if ".experts." not in name}
        missing = sorted(needed - given)
        unknown = sorted(given - needed - {"lm_head.weight"})  # a tied head is the embedding under another name
        twice = (
            sorted({name for name in given if engine_names.count(name) > 1}) if len(given) < len(engine_names) else []
        )
        if missing or unknown or twice:
            faults = (("missing", missing), ("unknown to the engine", unknown), ("given twice", twice))
            listed = "; ".join(f"{fault}: {', '.join(names[:6])}" for fault, names in faults if names)
            raise RuntimeError(
                f"The trainer's weights do not fit the vLLM engine ({listed}). Nothing was loaded: vLLM would compute "
                "with memory that was never written, or stop half-way. The model of the trainer must be the one that "
                "the engine was started from."
            )

    def check_alignment(self) -> AlignmentReport | None:
        """
        Compare the numbers that trainer and engine hold, bit for bit on a CPU, within `GPU_TOLERANCE` on a GPU.

        Returns:
            [`AlignmentReport`] or `None`: `None` where weights are sharded, in the trainer or in the engine, and
            cannot be compared.

        Raises:
            RuntimeError: If a layer differs, with the layers' names.
        """
        if self.tensor_parallel_size > 1 or self._sharded:
            return None
        report = alignment_report(self.accelerator.unwrap_model(self.model), self.llm)
        if self.alignment is None and self.accelerator.is_main_process:
            fp8 = [layer.name for layer in report.layers if layer.engine_fp8]
            logger.info("%s", report)
            logger.info("FP8 layers of the engine: %s", ", ".join(fp8))
        self.alignment = report
        on_cpu = self.accelerator.device.type == "cpu"
        if not (self.allow_mismatch and report.trainer_recipe != report.engine_recipe):
            report.raise_on_difference(EXACT if on_cpu else GPU_TOLERANCE)
        return report


def score_with_engine(llm, token_ids: list[int]) -> torch.Tensor:
    """
    Log-probabilities of `token_ids[1:]` under an in-process engine, at temperature 1.

    Returns:
        `torch.Tensor`: `(len(token_ids) - 1,)`, float32, CPU, nats.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    output = llm.generate([{"prompt_token_ids": token_ids}], sampling_params=params, use_tqdm=False)[0]
    return torch.tensor(
        [logprobs[token].logprob for logprobs, token in zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)]
    )


def engine_fp8_parameters(llm) -> dict[str, torch.Tensor]:
    """The float8 weights that an in-process engine holds, by vLLM's parameter names."""
    return {
        name: param
        for name, param in engine_model(llm).named_parameters()
        if param.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    }
