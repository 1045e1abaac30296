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
from trl.generation.vllm_client import VLLMClient

import trl_calclip
from trl_calclip import CalibratedDAPOTrainer, _trl_compat
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
    assert parameters(Trainer._save_checkpoint) == ["self", "model", "trial"]
    assert parameters(VLLMGeneration._init_vllm) == ["self"]
    assert parameters(VLLMGeneration.sync_weights) == parameters(VLLMGeneration._iter_named_params) == ["self"]


def test_requests_of_the_client_pass_through_two_methods():
    assert parameters(VLLMClient._get) == parameters(VLLMClient._post) == ["self", "url", "kwargs"]
    for name in ("generate", "init_communicator", "update_named_params", "_start_weight_update"):
        source = inspect.getsource(vars(VLLMClient)[name])
        assert "self.session" not in source and ("self._post" in source or "self._start_weight_update" in source)
    assert "self.check_server(connection_timeout)" in inspect.getsource(VLLMClient.__init__)


def test_generation_by_a_server_asks_the_client_in_the_main_process_and_broadcasts():
    source = inspect.getsource(VLLMGeneration.generate)
    server = source[source.index('if self.mode == "server"') :]
    main, broadcast = server.index("self.vllm_client.generate("), server.index("broadcast_object_list(")
    assert server.index("if accelerator.is_main_process") < main < broadcast
    assert "all_logprobs[process_slice] if all_logprobs is not None else None" in server


def test_one_weight_transfer_session_quantizes_anew():
    """Read in vLLM: its NCCL engine restores and finalizes layer by layer, which is what `reload_weights` does."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
    from vllm.model_executor.model_loader.reload import layerwise

    assert "initialize_layerwise_reload(self.model)" in inspect.getsource(NCCLWeightTransferEngine.start_weight_update)
    assert "finalize_layerwise_reload(" in inspect.getsource(NCCLWeightTransferEngine.finish_weight_update)
    assert "quant_method.process_weights_after_loading(layer)" in inspect.getsource(layerwise._layerwise_process)
    source = inspect.getsource(VLLMClient.update_named_params)
    start, update = source.index("self._start_weight_update()"), source.index("/update_weights")
    assert start < update < source.index("self._finish_weight_update()")


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


def test_loss_asks_for_entropies_and_metrics_are_averaged_without_nan(make_trainer):
    assert "compute_entropy=True" in inspect.getsource(GRPOTrainer._compute_loss)
    seen = []

    class Watching(HookedGRPOTrainer):
        def after_policy_forward(self, inputs, per_token_logps):
            seen.append(self.policy_entropies.shape == per_token_logps.shape)
            self.log_in_training({"mine": float(self._step), "nothing": float("nan")})

    plain = make_trainer(max_steps=1)
    trainer = Watching(
        model=plain.model.name_or_path,
        reward_funcs=plain.reward_funcs,
        args=plain.args,
        train_dataset=plain.train_dataset,
    )
    trainer.args.max_steps = trainer.args.logging_steps = trainer.state.logging_steps = 2
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "mine" in entry]
    assert entry["mine"] == 0.5 and entry["nothing"] is None
    assert seen == [True, True] and trainer.policy_entropies is None
    assert trainer.rollout_seconds > 0


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
    "_get",
    "_post",
    "_save_checkpoint",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
    "_prepare_inputs",
    "_last_loaded_step",
    "_metrics",
    "model_executor",
    "driver_worker",
    "model_runner",
    "_generate",
    "_generate_and_score_completions",
    "_calculate_rewards",
    "_rewards_per_func",
    "_remove_unused_columns",
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


def test_names_of_the_model_card():
    assert {"_tag_names", "_name", "_paper"} <= vars(GRPOTrainer).keys()
    assert GRPOTrainer._paper.keys() == CalibratedDAPOTrainer._paper.keys()
