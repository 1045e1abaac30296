# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Every recipe with a real vLLM engine: both sides hold the same numbers, or an error names the layers that differ."""

import gc
import logging

import pytest
import torch
from conftest import digits_reward
from peft import LoraConfig
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer, alignment_report
from trl_calclip._trl_compat import reload_engine_weights
from trl_calclip.embedded import build_tokenizer
from trl_calclip.fp8.generation import engine_fp8_parameters, score_with_engine
from trl_calclip.fp8.linear import bf16_pass, fp8_linears


pytestmark = pytest.mark.vllm

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"]
SETTINGS = {
    "per_device_train_batch_size": 4, "num_generations": 4, "steps_per_generation": 4, "max_completion_length": 8,
    "learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_steps": 8, "calibration_interval": 1,
    "calibration_min_tokens": 1, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    "use_cpu": True, "seed": 7, "use_vllm": True, "vllm_max_model_length": 80, "fp8_sync_check_interval": 1,
}  # fmt: skip


def release(trainer):
    """Let go of an engine's memory: the cache alone is a gibibyte."""
    if trainer.use_vllm:
        trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
        del trainer.vllm_generation
    gc.collect()


def build(model, toy_dataset, directory, trainer=None, **overrides) -> CalibratedGRPOTrainer:
    args = CalibratedGRPOConfig(output_dir=str(directory), **{**SETTINGS, **overrides})
    return CalibratedGRPOTrainer(model, digits_reward, args, train_dataset=toy_dataset, **(trainer or {}))


@pytest.fixture
def make(toy_path, toy_dataset, tmp_path):
    """Function from overrides of `SETTINGS` to a trainer, whose engine is let go of afterwards."""
    made = []

    def make(model=toy_path, **overrides) -> CalibratedGRPOTrainer:
        made.append(build(model, toy_dataset, tmp_path, **overrides))
        return made[-1]

    yield make
    for trainer in made:
        release(trainer)


def move_weights(model, size: float) -> None:
    """A step of the size that AdamW takes at this learning rate."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param += size * torch.randn(param.shape, generator=generator).sign()


@pytest.fixture(scope="module", params=RECIPES)
def trained(request, tmp_path_factory, toy_path, toy_dataset):
    trainer = build(toy_path, toy_dataset, tmp_path_factory.mktemp("run"), fp8_recipe=request.param)
    trainer.train()
    trainer.vllm_generation.sync_weights()  # the last optimizer step came after the last sync
    yield trainer
    release(trainer)


def test_trains_and_calibrates(trained):
    assert trained.num_calibrations == 2
    gaps = [
        entry["sampling/sampling_logp_difference/mean"] for entry in trained.state.log_history if "reward" in entry
    ]
    assert all(0 < gap < 0.05 for gap in gaps)
    assert len(engine_fp8_parameters(trained.vllm_generation.llm)) == 8
    assert len(fp8_linears(trained.model)) == 14


def test_both_sides_hold_the_same_numbers(trained):
    report = alignment_report(trained.model, trained.vllm_generation.llm)
    expected = trained.args.fp8_recipe.removesuffix("_with_gw_hp")  # one rule for both
    assert report.trainer_recipe == trained.args.fp8_recipe and report.engine_recipe == expected
    names = {name for name in trained.fp8_modules}
    assert {layer.name for layer in report.layers if layer.engine_fp8} == names
    assert {layer.name for layer in report.layers if layer.trainer_fp8} == names
    assert all(layer.readable and layer.payload_share == layer.scale == 0 for layer in report.layers)
    # Norms and the embedding, too.
    assert {"model.embed_tokens", "model.norm", "model.layers.1.mlp.down_proj"} < {
        layer.name for layer in report.layers
    }
    assert "14 FP8 weights in the engine, 14 of them in the trainer" in str(report)
    report.raise_on_difference()


def test_stale_weights_of_a_tiny_step_are_seen(trained):
    """An update of 1e-6 moves few BF16 weights and no log-probability that a probe could tell from noise."""
    model, generation = trained.model, trained.vllm_generation
    saved = {name: param.detach().clone() for name, param in model.named_parameters()}
    move_weights(model, 1e-6)
    moved = {
        name for name, param in model.named_parameters() if not torch.equal(param.bfloat16(), saved[name].bfloat16())
    }
    try:
        generation.check_sync()  # does not see it
        with pytest.raises(RuntimeError, match=r"do not hold the same weights: model\..*of its numbers"):
            generation.check_alignment()
        differing = {layer.name for layer in alignment_report(model, generation.llm).different()}
        assert differing and {f"{name}.weight" for name in differing} <= moved
        generation.sync_weights()
        assert not alignment_report(model, generation.llm).different()
    finally:
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(saved[name])
        generation.sync_weights()


def test_one_flipped_payload_is_named(trained):
    weight = engine_fp8_parameters(trained.vllm_generation.llm)["model.layers.1.mlp.gate_up_proj.weight"]
    bits = weight.view(torch.uint8)
    index = (3, 130) if bits.shape[1] > bits.shape[0] else (130, 3)  # in the second half of the fused rows: up_proj
    bits[index] ^= 1
    try:
        (layer,) = alignment_report(trained.model, trained.vllm_generation.llm).different()
        assert layer.name == "model.layers.1.mlp.up_proj" and layer.payload_steps == 1
        with pytest.raises(RuntimeError, match="model.layers.1.mlp.up_proj.*by up to 1 FP8 steps"):
            trained.vllm_generation.check_alignment()
    finally:
        bits[index] ^= 1
    trained.vllm_generation.check_alignment()


def test_layer_that_is_fp8_on_one_side_is_named(trained):
    model = trained.model
    linear = model.model.layers[0].self_attn.o_proj
    plain = torch.nn.Linear(64, 64, bias=False)
    plain.weight = linear.weight
    model.model.layers[0].self_attn.o_proj = plain
    try:
        with pytest.raises(RuntimeError, match="model.layers.0.self_attn.o_proj is FP8 in the engine only"):
            trained.vllm_generation.check_alignment()
    finally:
        model.model.layers[0].self_attn.o_proj = linear


@pytest.mark.parametrize("fault", ["missing", "unknown", "twice"])
def test_wrong_names_raise_before_anything_is_loaded(trained, monkeypatch, fault):
    generation = trained.vllm_generation
    probe = list(range(2, 30))
    before = score_with_engine(generation.llm, probe)
    complete = generation.named_weights

    def faulty(**arguments):
        for name, param in complete(**arguments):
            if fault == "missing" and name.endswith("1.self_attn.k_proj.weight"):
                continue
            yield name.replace("up_proj", "upp_proj") if fault == "unknown" else name, param
            if fault == "twice" and name.endswith("norm.weight"):
                yield name, param

    monkeypatch.setattr(generation, "named_weights", faulty)
    monkeypatch.setattr(generation, "num_syncs", 0)  # names are checked at the first sync
    named = {"missing": "missing: model.layers.1.self_attn.k_proj", "unknown": "upp_proj", "twice": "given twice"}
    with pytest.raises(RuntimeError, match=f"do not fit the vLLM engine.*{named[fault]}.*Nothing was loaded"):
        generation.sync_weights()
    monkeypatch.undo()
    assert torch.equal(score_with_engine(generation.llm, probe), before)
    generation.sync_weights()


@pytest.mark.parametrize("name", RECIPES)
def test_adapters_are_merged_for_the_rollout_and_taken_out_bit_for_bit(make, name):
    adapters = LoraConfig(r=4, lora_alpha=64, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    trainer = make(trainer={"peft_config": adapters}, fp8_recipe=name, learning_rate=2e-2)
    base = {key: param.detach().clone() for key, param in trainer.model.named_parameters() if not param.requires_grad}
    assert len(base) > 14 and not any("lora_" in key for key in base)
    trainer.train()
    assert trainer.num_calibrations == 2
    parameters = dict(trainer.model.named_parameters())
    for key, value in base.items():
        assert torch.equal(parameters[key], value), key
    assert all(parameters[key].abs().max() > 1e-3 for key in parameters if "lora_B" in key)

    generation = trainer.vllm_generation
    probe = list(range(2, 30))
    stale = score_with_engine(generation.llm, probe)
    generation.sync_weights()  # compares the merged weights with the engine's
    assert (score_with_engine(generation.llm, probe) - stale).abs().mean() > 1e-3
    for key, value in base.items():
        assert torch.equal(parameters[key], value), key
    report = alignment_report(trainer.model, generation.llm)
    assert not report.different() and sum(layer.trainer_fp8 for layer in report.layers) == 14

    # The BF16 pass runs the adapters, too.
    tokens = torch.randint(2, 20, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), bf16_pass(trainer.model):
        with_adapters = trainer.model(tokens).logits
        with trainer.model.disable_adapter():
            without = trainer.model(tokens).logits
    assert (with_adapters - without).abs().max() > 0.02


def test_adapter_that_rounding_removes_shows_as_mismatch(make):
    """Base weights that are FP8 numbers swallow an adapter of less than half a step: only the trainer moves."""
    adapters = LoraConfig(r=1, lora_alpha=1, lora_dropout=0.0, target_modules=["v_proj"])
    trainer = make(trainer={"peft_config": adapters})
    generation, parameters = trainer.vllm_generation, dict(trainer.model.named_parameters())
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = grid[grid.abs() >= 32]  # steps of at least 2 downwards
    unit = 2.0**-12
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in parameters.items():
            if name.endswith("v_proj.base_layer.weight"):
                param.copy_(grid[torch.randint(len(grid), param.shape, generator=generator)] * unit)
                param[:, 0] = 448 * unit
    generation.sync_weights()
    probe = generation._probe()
    engine, ours, gap = (
        score_with_engine(generation.llm, probe),
        generation._score_with_trainer(probe),
        generation.probe_gap,
    )
    with torch.no_grad():
        for name, param in parameters.items():
            if "lora_A" in name:
                param.fill_(1.0)
            elif "lora_B" in name:
                param.fill_(0.9 * unit)
    generation.sync_weights()  # both sides hold the merged weights, and yet
    assert torch.equal(score_with_engine(generation.llm, probe), engine)
    moved = generation._score_with_trainer(probe)
    assert (moved - ours).abs().mean() > 1e-4
    assert generation.probe_gap == pytest.approx((moved - engine).abs().mean().item()) != gap


def test_ignored_layers_are_bf16_on_both_sides_and_reported(make, caplog):
    ignore = ["*.layers.0.mlp.*", "*.layers.1.self_attn.[qkv]_proj"]
    with caplog.at_level(logging.INFO, logger="trl_calclip"):
        trainer = make(fp8_recipe="blockwise", fp8_ignore=ignore, max_steps=4)
        trainer.train()
    names = set(engine_fp8_parameters(trainer.vllm_generation.llm))
    assert names == {
        f"model.layers.{module}.weight"
        for module in [
            "0.self_attn.qkv_proj",
            "0.self_attn.o_proj",
            "1.self_attn.o_proj",
            "1.mlp.gate_up_proj",
            "1.mlp.down_proj",
        ]
    }
    report = trainer.vllm_generation.alignment
    assert not report.one_sided and not report.different()
    assert {layer.name for layer in report.layers if layer.trainer_fp8} == set(trainer.fp8_modules)
    lines = [record.getMessage() for record in caplog.records]
    assert (
        sum(line.startswith("FP8 alignment: trainer blockwise, engine blockwise; 8 FP8 weights") for line in lines)
        == 1
    )
    assert any("FP8 layers of the engine: model.layers.0.self_attn.q_proj" in line for line in lines)


def test_mixture_of_experts_that_is_allowed(make, tmp_path):
    """Attention is FP8, routers and experts are BF16. A vLLM engine on a CPU does not survive a reload of experts."""
    tokenizer = build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    path = str(tmp_path / "moe")
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    with pytest.raises(NotImplementedError, match="fp8_allow_moe=True"):
        make(model=path)
    for rollout in ("auto", "off"):
        with pytest.raises(NotImplementedError, match="on a CPU computes with broken experts"):
            make(model=path, fp8_rollout=rollout, fp8_allow_moe=True)
    with pytest.warns(UserWarning, match="routers and experts stay in BF16"):
        trainer = make(
            model=path,
            fp8_recipe="blockwise",
            fp8_allow_moe=True,
            use_vllm=False,
            vllm_max_model_length=None,
            max_steps=4,
        )
    trainer.train()
    assert len(trainer.fp8_modules) == 8 and trainer.num_calibrations == 1


@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
def test_bf16_training_with_fp8_rollout(make, name):
    trainer = make(fp8_recipe=None, fp8_rollout=name, calibrated_clip=False, max_steps=4)
    trainer.train()
    report = trainer.vllm_generation.alignment
    assert report.trainer_recipe is None and report.engine_recipe == name
    assert sum(layer.engine_fp8 for layer in report.layers) == 14 and not report.different()


def test_mismatch_that_is_allowed_trains_and_is_reported(make):
    with pytest.warns(UserWarning, match="quantize by different rules"):
        trainer = make(fp8_recipe="rowwise", fp8_rollout="blockwise", fp8_allow_mismatch=True, max_steps=4,
        )  # fmt: skip
    trainer.train()
    report = trainer.vllm_generation.alignment
    assert (report.trainer_recipe, report.engine_recipe) == ("rowwise", "blockwise")


def test_bf16_engine_is_compared_too(make):
    trainer = make(fp8_rollout="off", max_steps=4)
    trainer.train()
    generation = trainer.vllm_generation
    generation.sync_weights()
    assert generation.alignment.engine_recipe is None and not generation.alignment.one_sided
    weights = {name: param.detach().bfloat16() for name, param in generation.named_weights()}
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.01
    reload_engine_weights(generation.llm, iter(weights.items()))
    with pytest.raises(RuntimeError, match="model.norm"):
        generation.check_alignment()
