# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The real vLLM engine in FP8: what it holds, that syncs reach it, that the self-check sees when they do not."""

import gc
import socket
from contextlib import suppress

import pytest
import torch

from trl_calclip._trl_compat import engine_model, reload_engine_weights
from trl_calclip.fp8.generation import PROBE_LENGTH, engine_fp8_parameters, score_with_engine
from trl_calclip.fp8.linear import bf16_pass
from trl_calclip.fp8.quantizers import quantize_per_channel


pytestmark = pytest.mark.vllm

VLLM = {"use_vllm": True, "vllm_max_model_length": 80, "fp8_sync_check_interval": 1}


def release(trainer):
    """Let go of an engine's memory: the cache alone is a gibibyte."""
    trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
    del trainer.vllm_generation
    gc.collect()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, toy_path, toy_dataset):
    """A calibrated FP8 run of twelve steps with a real FP8 engine."""
    from conftest import digits_reward

    from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer

    args = CalibratedGRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("run")), per_device_train_batch_size=4, num_generations=4,
        steps_per_generation=4, max_completion_length=8, learning_rate=1e-3, max_steps=12, calibration_interval=2,
        calibration_min_tokens=1, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, seed=7, **VLLM,
    )  # fmt: skip
    trainer = CalibratedGRPOTrainer(toy_path, digits_reward, args, train_dataset=toy_dataset)
    trainer.train()
    # The last optimizer step came after the last sync.
    trainer.vllm_generation.sync_weights()
    yield trainer
    release(trainer)


def test_trained_and_calibrated_with_the_engine(trained):
    assert trained.num_calibrations == 2 and trained.num_rollouts == 3
    history = trained.state.log_history
    gaps = [entry["sampling/sampling_logp_difference/mean"] for entry in history if "reward" in entry]
    assert len(gaps) == 3 and all(0 < gap < 0.05 for gap in gaps)
    assert all(0 < entry["sampling/importance_sampling_ratio/max"] <= 2.0 for entry in history if "reward" in entry)


def test_engine_holds_float8_weights_everywhere_but_in_head_and_embedding(trained):
    llm = trained.vllm_generation.llm
    names = set(engine_fp8_parameters(llm))
    assert names == {
        f"model.layers.{layer}.{module}.weight"
        for layer in range(2)
        for module in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    parameters = dict(engine_model(llm).named_parameters())
    assert parameters["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_engine_holds_the_trainers_weights_bit_for_bit(trained):
    stored = engine_fp8_parameters(trained.vllm_generation.llm)
    parameters = dict(engine_model(trained.vllm_generation.llm).named_parameters())
    weights = {name: param.detach().bfloat16() for name, param in trained.model.named_parameters()}
    fused = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
    for name, payload in stored.items():
        prefix, module = name.removesuffix(".weight").split(".", 3)[:3], name.removesuffix(".weight").split(".", 3)[3]
        parts = [f"{module.split('.')[0]}.{part}" for part in fused.get(module, [module.split(".")[1]])]
        weight = torch.cat([weights[".".join([*prefix, part, "weight"])] for part in parts])
        expected, scale = quantize_per_channel(weight)
        assert torch.equal(payload.t().float(), expected.float()), name
        assert torch.equal(parameters[f"{name}_scale"], scale), name


def test_engine_and_trainer_agree_and_fp8_is_why(trained):
    generation = trained.vllm_generation
    gap = generation.check_sync()
    assert 0 < gap < 0.03
    # The engine is nearer to the trainer's FP8 than to its BF16.
    with bf16_pass(trained.model):
        bf16_gap = generation.check_sync()
    assert bf16_gap > 1.2 * gap


def test_self_check_moves_no_generator(trained):
    before = torch.get_rng_state()
    trained.vllm_generation.check_sync()
    assert torch.equal(before, torch.get_rng_state())


def test_reload_of_unchanged_weights_changes_nothing(trained):
    generation = trained.vllm_generation
    probe = list(range(2, 30))
    before = score_with_engine(generation.llm, probe)
    generation.sync_weights()
    assert torch.equal(score_with_engine(generation.llm, probe), before)


def test_sync_follows_the_trainer_there_and_back(trained):
    generation = trained.vllm_generation
    probe = list(range(2, 30))
    before = score_with_engine(generation.llm, probe)
    saved = {name: param.detach().clone() for name, param in trained.model.named_parameters()}
    with torch.no_grad():
        # The embedding is tied to the head, of which the engine keeps a copy of its own.
        for param in trained.model.parameters():
            param.mul_(1 + 0.2 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
    generation.sync_weights()  # checks itself
    assert (score_with_engine(generation.llm, probe) - before).abs().mean() > 0.05
    with torch.no_grad():
        for name, param in trained.model.named_parameters():
            param.copy_(saved[name])
    generation.sync_weights()
    assert torch.equal(score_with_engine(generation.llm, probe), before)


@pytest.mark.parametrize("fault", ["skipped", "another model's", "one layer missing", "head left behind", "nan"])
def test_corrupted_sync_raises(trained, fault):
    generation = trained.vllm_generation
    saved = {name: param.detach().clone() for name, param in trained.model.named_parameters()}
    limit, generation.check_limit = (
        generation.check_limit,
        0.05,
    )  # a random model's log-probabilities are close together
    weights = {name: param.detach().bfloat16() for name, param in generation.named_weights()}
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for param in trained.model.parameters():
            param.mul_(1 + 0.5 * torch.randn(param.shape, generator=generator))
    moved = {name: param.detach().bfloat16() for name, param in generation.named_weights()}
    if fault == "another model's":
        weights = {name: torch.randn(value.shape, generator=generator).bfloat16() for name, value in moved.items()}
    elif fault == "one layer missing":
        weights = {name: weights[name] if ".layers.1." in name else value for name, value in moved.items()}
    elif fault == "head left behind":
        weights = {**moved, "lm_head.weight": weights["lm_head.weight"]}
    elif fault == "nan":
        weights = {**moved, "model.norm.weight": torch.full_like(moved["model.norm.weight"], torch.nan)}
    try:
        reload_engine_weights(generation.llm, iter(weights.items()))
        generation.llm.reset_prefix_cache()
        with pytest.raises(RuntimeError, match=f"does not compute with the trainer's weights.*{PROBE_LENGTH} tokens"):
            generation.check_sync()
    finally:
        with torch.no_grad():
            for name, param in trained.model.named_parameters():
                param.copy_(saved[name])
        generation.check_limit = limit
        generation.sync_weights()


def test_bf16_training_with_fp8_rollout_while_another_run_takes_trls_port(make_trainer, monkeypatch):
    threads = torch.get_num_threads()
    # Another run found TRL's port free as well, and was faster.
    monkeypatch.setattr("trl.trainer.utils._is_port_free", lambda port, host="127.0.0.1": True)
    with socket.socket() as other_run:
        other_run.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # then somebody listens there indeed
            other_run.bind(("", 29500))
            other_run.listen()
        trainer = make_trainer(**VLLM, fp8_recipe=None, fp8_rollout="rowwise", calibrated_clip=False, max_steps=4)
    assert torch.get_num_threads() == threads
    trainer.train()
    assert trainer.fp8_modules == []
    assert len(engine_fp8_parameters(trainer.vllm_generation.llm)) == 8
    release(trainer)


def test_self_check_and_evaluation_do_not_change_a_run(make_trainer, toy_dataset):
    """With fixed bounds, a run that checks every sync and evaluates every step equals one that does neither."""
    fixed = {**VLLM, "max_steps": 8, "calibration_min_tokens": 10**6}
    runs = {
        "on": make_trainer(
            trainer={"eval_dataset": toy_dataset.select(range(8))},
            **{**fixed, "calibration_interval": 1, "eval_strategy": "steps", "eval_steps": 1},
        ),
    }
    results = {}
    for name in ("on", "off"):
        trainer = runs.get(name) or make_trainer(
            **{**fixed, "calibration_interval": 10**6, "fp8_sync_check_interval": 0}
        )
        trainer.train()
        results[name] = {key: param.detach().clone() for key, param in trainer.model.named_parameters()}
        release(trainer)
    for name, weight in results["off"].items():
        assert torch.equal(results["on"][name], weight), name


def test_resumed_run_with_an_engine_equals_the_unbroken_one(make_trainer, tmp_path):
    """The engine of a resumed run starts from the base model on disk: its first rollout must see the checkpoint."""
    settings = {**VLLM, "max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    weights = {}
    for name, checkpoint in (("whole", None), ("resumed", str(tmp_path / "run" / "checkpoint-4"))):
        trainer = make_trainer(**settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        weights[name] = {key: param.detach().clone() for key, param in trainer.model.named_parameters()}
        release(trainer)
    for key, weight in weights["whole"].items():
        assert torch.equal(weights["resumed"][key], weight), key
