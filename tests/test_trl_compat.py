# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The contract with TRL's and vLLM's private parts: what `_trl_compat.py` relies on, stated one by one.

If one of these fails after an upgrade, the code that names the attribute has to be read again before the version range
is widened.
"""

import ast
import inspect
from pathlib import Path

import pytest
import torch
import trl.generation.vllm_generation as vllm_generation_module
import trl.trainer.grpo_trainer as grpo_trainer_module
from transformers import Trainer
from trl import GRPOTrainer

import trl_calclip
from trl_calclip import _trl_compat
from trl_calclip._trl_compat import HookedGRPOTrainer, HookedVLLMGeneration, substituted_vllm_generation


VLLMGeneration = vllm_generation_module.VLLMGeneration


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_overridden_hooks_exist_with_their_arguments():
    assert parameters(GRPOTrainer._prepare_inputs) == ["self", "generation_batch"]
    assert parameters(GRPOTrainer._compute_loss) == ["self", "model", "inputs"]
    assert parameters(GRPOTrainer._generate_and_score_completions) == ["self", "inputs"]
    rewards = ["self", "inputs", "prompts", "completions", "completion_ids_list"]
    assert parameters(GRPOTrainer._calculate_rewards) == rewards
    assert parameters(Trainer._remove_unused_columns) == ["self", "dataset", "description"]
    assert parameters(GRPOTrainer.training_step) == ["self", "model", "inputs", "num_items_in_batch"]
    assert parameters(GRPOTrainer._load_optimizer_and_scheduler) == ["self", "checkpoint"]
    assert parameters(GRPOTrainer.log) == ["self", "logs", "start_time"]
    assert parameters(Trainer.train)[:2] == ["self", "resume_from_checkpoint"]
    assert parameters(GRPOTrainer._save_checkpoint) == ["self", "model", "trial"]
    assert parameters(Trainer._save_rng_state) == ["self", "output_dir"]
    assert parameters(Trainer._get_grad_norm) == ["self", "model", "grad_norm"]
    assert parameters(GRPOTrainer._generate_single_turn)[:2] == ["self", "prompt_ids"]
    assert parameters(Trainer.save_model) == ["self", "output_dir", "_internal_call"]
    assert parameters(VLLMGeneration._init_vllm) == ["self"]
    assert parameters(VLLMGeneration.sync_weights) == parameters(VLLMGeneration._iter_named_params) == ["self"]


def test_scoring_arguments():
    names = parameters(GRPOTrainer._get_per_token_logps_and_entropies)
    assert names[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
    assert {"pixel_values", "image_grid_thw", "num_images", "token_type_ids"} <= set(_trl_compat._SCORING_ARGUMENTS)
    assert not {"model", "input_ids", "batch_size", "compute_entropy"} & set(_trl_compat._SCORING_ARGUMENTS)


def test_loss_reads_the_two_epsilons_at_call_time_and_scores_once():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert "torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)" in source
    assert "coef_1 < 1 - self.epsilon_low" in source and "coef_1 > 1 + self.epsilon_high" in source
    assert source.count("self._get_per_token_logps_and_entropies(") == 1


def test_rollout_is_buffered_and_counted_as_we_assume(make_trainer):
    trainer = make_trainer(max_steps=4)
    assert trainer._buffered_inputs is None and trainer._step == 0
    trainer.train()
    assert len(trainer._buffered_inputs) == 4 and trainer._step == 4
    expected = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "old_per_token_logps"}
    assert expected <= set(trainer._buffered_inputs[0])


def test_a_round_keeps_its_metrics_to_itself_and_rewards_are_gathered(make_trainer):
    """Dynamic sampling merges the metrics of several rounds; TRL appends one value per call, and sets a total."""
    trainer = make_trainer()
    trainer.model.train()
    examples = [trainer.train_dataset[i // 4] for i in range(8)]
    batch, rewards, metrics = trainer.generate_round(examples)
    assert batch["completion_ids"].size(0) == 8 and rewards.shape == (8, 1)
    assert not trainer._metrics["train"]
    assert metrics["reward"] == pytest.approx(rewards.mean().item()) and metrics["num_tokens"] > 0
    trainer.log_in_training(metrics)
    trainer.log_in_training(metrics)
    assert trainer._metrics["train"]["reward"] == [metrics["reward"]] * 2
    assert trainer._metrics["train"]["num_tokens"] == [metrics["num_tokens"]]


def test_checkpoint_saves_the_model_before_the_trainer_state():
    source = inspect.getsource(Trainer._save_checkpoint)
    order = (
        "self.save_model(output_dir, _internal_call=True)",
        "self._save_rng_state(output_dir)",
        "TRAINER_STATE_NAME",
    )
    assert sorted(order, key=source.index) == list(order)


def test_gradients_are_judged_before_the_optimizer_step_and_checkpoints_due_after_the_callbacks():
    source = inspect.getsource(Trainer._run_epoch)
    order = (
        "self._get_grad_norm(",
        "self.optimizer.step()",
        "callback_handler.on_step_end",
        "_maybe_log_save_evaluate",
    )
    assert sorted(order, key=source.index) == list(order)


def test_completions_are_checked_before_trl_looks_at_them():
    source = inspect.getsource(GRPOTrainer._generate)
    assert source.index("self._generate_single_turn(") < source.index("ids[-1] not in eos_and_pad")


def test_generation_class_is_looked_up_by_its_global_name():
    assert "self.vllm_generation = VLLMGeneration(" in inspect.getsource(GRPOTrainer.__init__)
    assert "self.llm = LLM(" in inspect.getsource(VLLMGeneration._init_vllm)


def test_substitutions_last_no_longer_than_their_context():
    original_class, original_llm = grpo_trainer_module.VLLMGeneration, vllm_generation_module.LLM
    marker = object()
    with pytest.raises(RuntimeError, match="inside"), substituted_vllm_generation(marker):
        assert grpo_trainer_module.VLLMGeneration is marker
        raise RuntimeError("inside")
    with pytest.raises(RuntimeError, match="inside"), _trl_compat._extra_llm_arguments(dtype="bfloat16"):
        assert vllm_generation_module.LLM is not original_llm
        raise RuntimeError("inside")
    assert grpo_trainer_module.VLLMGeneration is original_class
    assert vllm_generation_module.LLM is original_llm


def test_epsilon_round_trip_is_exact_in_float32():
    """`epsilon = 1 - L` handed to TRL gives back, in the loss's float32 comparison, the very bound `L`."""
    for bound in torch.rand(1000, generator=torch.Generator().manual_seed(0)).mul(0.4).add(0.5).tolist():
        low = trl_calclip.ClipRange(bound, 1.5)
        ratio = torch.tensor([bound], dtype=torch.float32)
        assert not (ratio < 1 - low.epsilon_low).item()
        assert (torch.nextafter(ratio, torch.zeros(1)) < 1 - low.epsilon_low).item()
    for bound in torch.rand(1000, generator=torch.Generator().manual_seed(1)).mul(0.8).add(1.2).tolist():
        high = trl_calclip.ClipRange(0.8, bound)
        ratio = torch.tensor([bound], dtype=torch.float32)
        assert not (ratio > 1 + high.epsilon_high).item()
        assert (torch.nextafter(ratio, torch.full((1,), 9.0)) > 1 + high.epsilon_high).item()


def test_without_overrides_the_hooked_classes_add_nothing():
    for hook in ("begin_rollout", "end_rollout", "before_policy_forward", "after_policy_forward"):
        assert hook not in vars(GRPOTrainer)
    assert HookedVLLMGeneration.engine_arguments(None) == {}
    assert issubclass(HookedGRPOTrainer, GRPOTrainer)


PRIVATE = {
    "_step",
    "_buffered_inputs",
    "_iter_named_params",
    "_init_vllm",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
    "_prepare_inputs",
    "_last_loaded_step",
    "model_executor",
    "driver_worker",
    "model_runner",
    "_generate",
    "_generate_and_score_completions",
    "_calculate_rewards",
    "_rewards_per_func",
    "_remove_unused_columns",
    "_metrics",
    "_save_checkpoint",
    "_save_rng_state",
    "_get_grad_norm",
    "_generate_single_turn",
}


def test_private_names_stand_in_one_file_only():
    found = []
    for path in Path(trl_calclip.__file__).parent.rglob("*.py"):
        if path.name == "_trl_compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in PRIVATE:
                found.append(f"{path.name}:{node.lineno} {node.attr}")
            if isinstance(node, ast.FunctionDef) and node.name in PRIVATE:
                found.append(f"{path.name}:{node.lineno} def {node.name}")
    assert not found
