# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The only file that names private attributes of TRL and vLLM, each with the version it was written for.

Everything else calls the functions and overrides the hooks that stand here. `tests/test_trl_compat.py` states what
each of them relies on, so that an upgrade breaks a test before it breaks a run. Written for TRL 1.16 and vLLM 0.31.
"""

import collections
import functools
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import trl.generation.vllm_generation as vllm_generation_module
import trl.trainer.grpo_trainer as grpo_trainer_module
from accelerate.utils import is_peft_model
from datasets import IterableDataset
from transformers import TrainerControl
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.models.utils import disable_gradient_checkpointing


class RolloutServerError(RuntimeError):
    """The vLLM server stayed away for too long, came back unfit, or refused what it was asked."""


class HookedGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with hooks at the moments that calibration needs. Without an override of them it is TRL's
    trainer.

    A rollout is one generation batch, used for `steps_per_generation * num_iterations` micro-batches. Evaluation calls
    no hook: it neither counts as a rollout nor replaces the buffered one.
    """

    control: TrainerControl
    _scoring_policy = False
    # Entropies that the loss computed beside `per_token_logps`, `(B, T)`, nats; there in `after_policy_forward`.
    policy_entropies: torch.Tensor | None = None
    # Seconds that the last rollout took: weight sync, generation, rewards and scoring.
    rollout_seconds: float = 0.0

    def begin_rollout(self, micro_batches: list[dict[str, Any]]) -> None:
        """Called when a rollout was generated and split into the loss's `micro_batches`, before its first update."""

    def end_rollout(self) -> None:
        """Called after the backward pass of a rollout's last micro-batch, before the optimizer step."""

    def before_policy_forward(self, inputs: dict[str, Any]) -> None:
        """Called in training before the loss scores `inputs` with the current policy; no graph is held yet."""

    def after_policy_forward(self, inputs: dict[str, Any], per_token_logps: torch.Tensor) -> None:
        """Called in training after the loss was computed. `per_token_logps`: `(B, T)`, with the loss's graph."""

    def rollout_failed(self, error: RolloutServerError) -> None:
        """
        Called on every rank when a rollout for training failed, before its first update. Whatever this raises takes
        the place of `error`.
        """

    def save_checkpoint(self) -> str:
        """Save a checkpoint of the present step, whatever `save_strategy` is, and return its path. Collective."""
        self._save_checkpoint(self.model, trial=None)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        return f"{self.args.output_dir}/checkpoint-{self.state.global_step}"

    @property
    def had_a_rollout(self) -> bool:
        """Whether a rollout was generated since the trainer was built: without one nothing was trained either."""
        return self._buffered_inputs is not None

    def before_optimizer_step(self, grad_norm: torch.Tensor | float | None) -> None:
        """Called after clipping, with the norm before it; the same number on every rank."""

    def check_completions(
        self, prompt_ids: list[list[int]], completion_ids: list[list[int]], logprobs: list[list[float | None]] | None
    ) -> None:
        """
        Called with what the engine, or the model itself, generated, one completion per prompt; `None` stands for NaN.
        """

    def check_rewards(self, rewards_per_func: torch.Tensor) -> None:
        """Called with all ranks' rewards, `(completions, reward functions)`."""

    def write_checkpoint(self, model, trial) -> None:
        """Called for each checkpoint."""
        super()._save_checkpoint(model, trial)

    def load_checkpoint(self, checkpoint: str) -> None:
        """Called in a resume, on every rank, when the optimizer and the scheduler are loaded from `checkpoint`."""

    @property
    def micro_batches_per_rollout(self) -> int:
        """How many micro-batches use one rollout."""
        return self.args.steps_per_generation * self.num_iterations

    @torch.no_grad()
    def score(self, inputs: dict[str, Any]) -> torch.Tensor:
        """
        Log-probabilities of the completion tokens of a micro-batch under the current weights.

        The rows and padding are the loss's, so that both forwards have the same shapes. Under DDP the unwrapped module
        is called; under FSDP and DeepSpeed `self.model` is what TRL itself scores the old policy with.

        Returns:
            `torch.Tensor`: `(B, T)`, nats; 0 where the attention mask is 0.
        """
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        extra = {name: inputs[name] for name in _SCORING_ARGUMENTS if name in inputs}
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            per_token_logps, _, _ = super()._get_per_token_logps_and_entropies(
                self.model, input_ids, attention_mask, inputs["completion_ids"].size(1), **extra
            )
        return per_token_logps

    def generate_and_score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """
        Called for each rollout and each batch of an evaluation: generates completions for `inputs`, one example per
        completion, and returns this rank's padded tensors.
        """
        return super()._generate_and_score_completions(inputs)

    def generate_round(self, inputs: list[dict[str, Any]]) -> tuple[dict[str, Any], torch.Tensor, dict[str, float]]:
        """
        Generate and score a part of a rollout.

        Returns:
            `tuple[dict[str, Any], torch.Tensor, dict[str, float]]`: What `generate_and_score` returns; the rewards of
            all ranks' completions, `(ranks * len(inputs), reward functions)`; and TRL's metrics of the round, which
            are not logged.
        """
        logged, self._metrics["train"] = self._metrics["train"], collections.defaultdict(list)
        try:
            batch = super()._generate_and_score_completions(inputs)
        finally:
            metrics, self._metrics["train"] = self._metrics["train"], logged
        return batch, self._rewards_per_func, {name: values[-1] for name, values in metrics.items()}

    def log_in_training(self, metrics: dict[str, float]) -> None:
        """Let TRL log `metrics` with its own: it averages them over the logging window and leaves out NaN."""
        for name, value in metrics.items():
            if name == "num_tokens":  # a total, which TRL sets anew each time
                self._metrics["train"][name] = [value]
            else:
                self._metrics["train"][name].append(value)

    def training_dataset(self):
        """The training dataset with the columns that the reward functions are given."""
        if isinstance(self.train_dataset, IterableDataset):
            return self.train_dataset
        return self._remove_unused_columns(self.train_dataset, description="Training")

    def training_step(self, model, inputs, num_items_in_batch):
        output = super().training_step(model, inputs, num_items_in_batch)
        if self._step % self.micro_batches_per_rollout == 0:
            self.end_rollout()
        return output

    def _prepare_inputs(self, generation_batch):
        buffered = self._buffered_inputs
        start = time.perf_counter()
        try:
            inputs = super()._prepare_inputs(generation_batch)
        except RolloutServerError as error:
            if self.model.training:
                self.rollout_failed(error)
            raise
        if self._buffered_inputs is not buffered:
            self.rollout_seconds = time.perf_counter() - start
            self.begin_rollout(self._buffered_inputs)
        return inputs

    def _generate_and_score_completions(self, inputs):
        return self.generate_and_score(inputs)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.check_completions(prompt_ids, completion_ids, logprobs)
        return completion_ids, logprobs

    def _calculate_rewards(self, *args, **kwargs):
        try:
            self._rewards_per_func = super()._calculate_rewards(*args, **kwargs)
        except Exception as error:
            error.add_note(
                f"This came from a reward function ({', '.join(self.reward_func_names)}). It must return a list with "
                "one number for each completion, or None for a completion that it cannot judge."
            )
            raise
        self.check_rewards(self._rewards_per_func)
        return self._rewards_per_func

    def _get_grad_norm(self, *args, **kwargs):
        grad_norm = super()._get_grad_norm(*args, **kwargs)
        self.before_optimizer_step(grad_norm)
        return grad_norm

    def _save_checkpoint(self, model, trial):
        self.write_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.load_checkpoint(checkpoint)

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        # The main process writes `trainer_state.json` next: with it, all ranks' files are there.
        self.accelerator.wait_for_everyone()

    def _compute_loss(self, model, inputs):
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        self.before_policy_forward(inputs)
        self._scoring_policy = True
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._scoring_policy = False
        self.after_policy_forward(inputs, self._policy_per_token_logps)
        self._policy_per_token_logps = self.policy_entropies = None
        return loss

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        # Also called for the old policy, the KL anchor and evaluation: those are not the current policy's.
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._scoring_policy:
            self._policy_per_token_logps, self.policy_entropies = result[0], result[1]
        return result


# What a micro-batch holds for the forward beside tokens and masks: images and token types.
_SCORING_ARGUMENTS = [
    name
    for name in inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    if name
    not in (
        *("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"),
        *("compute_entropy", "compute_aux_loss"),
    )
]


@contextmanager
def substituted_vllm_generation(cls: Callable[..., VLLMGeneration]) -> Iterator[None]:
    """
    Let `GRPOTrainer.__init__` build `cls` in place of its `VLLMGeneration`, while the context lasts.

    TRL 1.16 looks the class up by its module-global name and offers no argument for it; trl#6816 would.
    """
    original = grpo_trainer_module.VLLMGeneration
    grpo_trainer_module.VLLMGeneration = cls
    try:
        yield
    finally:
        grpo_trainer_module.VLLMGeneration = original


class HookedVLLMGeneration(VLLMGeneration):
    """[`~trl.generation.vllm_generation.VLLMGeneration`] with a say in how its engine is built."""

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments for `vllm.LLM` over TRL's own."""
        return {}

    def weight_names(self) -> list[str]:
        """
        Names that `named_weights` yields, without merging or copying anything; sharded models are gathered for it.
        """
        return [name for name, _ in self.named_weights(merge=False)]

    def named_weights(self, *, merge: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """
        The trainer's weights one by one, gathered and, unless `merge` is off, with adapters merged, under vLLM's
        names.

        A tied output head is named too: vLLM on a CPU packs its own copy of it at load, and a reload that names only
        the embedding would leave that copy as it was. A tensor is valid until the next one is asked for.
        """
        tied = self.model.config.get_text_config().tie_word_embeddings
        for name, param in (
            self._iter_adapted_params(merge) if is_peft_model(self.model) else self._iter_named_params()
        ):
            yield name, param
            if tied and name.endswith("embed_tokens.weight"):
                yield "lm_head.weight", param

    def _iter_adapted_params(self, merge: bool) -> Iterator[tuple[str, torch.Tensor]]:
        # TRL merges all adapters at once and subtracts them again afterwards, which leaves rounding errors in the
        # frozen base, more with each sync. Here one layer at a time is merged and put back as it was.
        model = self.model
        if self._dist.is_fsdp:
            raise NotImplementedError(
                "Adapters under FSDP cannot be merged for a checked vLLM engine without changing the frozen base "
                "weights. Train adapters under DDP or DeepSpeed, or train all weights."
            )
        with self._dist.gather_params(list(model.parameters())):
            for name, param in model.named_parameters():
                if model.prefix in name or "original_module" in name:
                    continue
                fixed = name.removeprefix("base_model.model.").replace(".base_layer", "")
                fixed = self._fix_param_name_to_vllm(fixed, extra_prefixes=["modules_to_save.default."])
                with merged_adapters(model, name) if merge else nullcontext():
                    yield fixed, param.data

    def connect(self) -> None:
        """Connect to the server of `mode="server"`, as TRL does."""
        super()._init_vllm()

    def _init_vllm(self) -> None:
        if self.mode == "server":
            self.connect()
            return
        with _extra_llm_arguments(**self.engine_arguments()):
            super()._init_vllm()


class HookedVLLMClient(VLLMClient):
    """[`~trl.generation.vllm_client.VLLMClient`] with a say in how its requests are sent."""

    def request(self, method: str, url: str, **kwargs: Any) -> dict[str, Any]:
        """Send one request and return its answer, what TRL does for `method` unless overridden."""
        return super()._get(url, **kwargs) if method == "GET" else super()._post(url, **kwargs)

    def _get(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self.request("GET", url, **kwargs)

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self.request("POST", url, **kwargs)


@contextmanager
def _extra_llm_arguments(**arguments: Any) -> Iterator[None]:
    """Let `VLLMGeneration` pass `arguments` to `vllm.LLM` over its own, while the context lasts (TRL 1.16)."""
    original = vllm_generation_module.LLM

    @functools.wraps(original)
    def build(**kwargs: Any):
        return original(**{**kwargs, **arguments})

    vllm_generation_module.LLM = build
    try:
        yield
    finally:
        vllm_generation_module.LLM = original


def engine_model(llm) -> torch.nn.Module:
    """The model of an in-process vLLM engine (vLLM 0.31)."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.get_model()


def engine_quantization(llm) -> str | None:
    """Quantization scheme of an in-process engine as the user named it, `None` for BF16 (vLLM 0.31)."""
    return llm.llm_engine.vllm_config.model_config.quantization


def engine_parameter_names(llm) -> list[str]:
    """
    Names of what a checkpoint must bring for an in-process engine, parts of fused layers one by one (vLLM 0.31).

    Scales are left out: quantizing makes them.
    """
    model = engine_model(llm)
    names = []
    for name, _ in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        if leaf.endswith("_scale") or leaf.endswith("_scale_inv"):
            continue
        for part in model.packed_modules_mapping.get(module, [module]):
            names.append(".".join(filter(None, [parent, part, leaf])))
    return names


def engine_weight_names(llm, names: Iterable[str]) -> list[tuple[str, str]]:
    """
    Checkpoint names with the engine's names for them, parts of fused layers under their own (vLLM 0.31).

    Names that vLLM skips while it loads are left out.
    """
    names = list(names)
    mapper = engine_model(llm).hf_to_vllm_mapper
    if mapper is None:
        return [(name, name) for name in names]
    mapper = mapper.get_rename_mapper()
    return [(name, mapped) for name in names for mapped in mapper.apply_list([name])]


@contextmanager
def merged_adapters(model: torch.nn.Module, name: str) -> Iterator[None]:
    """
    Merge the active adapters of the layer that parameter `name` belongs to, while the context lasts.

    Afterwards the layer's weights are what they were, bit for bit: subtracting an adapter would leave rounding errors.
    Parameters outside a PEFT base layer are left alone.
    """
    path, base, _ = name.rpartition(".base_layer.")
    if not base:
        yield
        return
    layer = model.get_submodule(path)
    saved = {param: param.detach().clone() for param in layer.get_base_layer().parameters()}
    layer.merge()
    try:
        yield
    finally:
        layer.unmerge()
        for param, value in saved.items():
            param.data.copy_(value)


def reload_engine_weights(llm, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """
    Load checkpoint-format weights into an in-process engine and quantize them anew, in place (vLLM 0.31).

    Loading into quantized modules by `load_weights` meets shape asserts; only the reload path restores the loadable
    layout first. Tensors must stay valid until their layer is complete.
    """
    llm.llm_engine.model_executor.driver_worker.model_runner.reload_weights(weights_iterator=weights)
