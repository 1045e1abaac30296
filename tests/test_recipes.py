# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The table of recipes, each recipe's product against its definition, and which linears become FP8."""

import copy
import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from transformers import MixtralConfig, MixtralForCausalLM

from trl_calclip.embedded import build_model
from trl_calclip.fp8.linear import SwitchableFloat8Linear, bf16_pass, convert_to_fp8, fp8_linears
from trl_calclip.fp8.quantizers import quantize_input_per_tensor, quantize_per_tensor
from trl_calclip.fp8.recipes import RECIPES, recipe_of_scheme, resolve_emulate
from trl_calclip.fp8.selection import refuse_moe, select_linears


NAMES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"]
TORCHAO = NAMES[:3]


@pytest.fixture
def model():
    return build_model(seed=1, hidden_size=64, intermediate_size=128, num_hidden_layers=2)


def log_probs(model, tokens):
    with torch.autocast("cpu", torch.bfloat16):
        return model(tokens).logits.float().log_softmax(-1)


def build_linear(name: str, emulate: bool = True, bias: bool = False) -> SwitchableFloat8Linear:
    torch.manual_seed(0)
    recipe = RECIPES[name]
    return SwitchableFloat8Linear.from_float(
        nn.Linear(64, 48, bias=bias), recipe.torchao_config(emulate=emulate), recipe
    )


def moe_model() -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return MixtralForCausalLM(config)


# The table


def test_table():
    assert list(RECIPES) == NAMES
    schemes = {name: recipe.vllm_quantization for name, recipe in RECIPES.items()}
    assert schemes == {
        "tensorwise": "fp8_per_tensor",
        "rowwise": "fp8_per_channel",
        "rowwise_with_gw_hp": "fp8_per_channel",
        "blockwise": "fp8_per_block",
    }
    assert {name: recipe.min_capability for name, recipe in RECIPES.items()} == {
        "tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0), "blockwise": (9, 0),
    }  # fmt: skip
    assert [recipe.dim_multiple for recipe in RECIPES.values()] == [16, 16, 16, 128]
    for recipe in RECIPES.values():
        assert recipe_of_scheme(recipe.vllm_cpu_quantization).matches(recipe)
        assert recipe_of_scheme(recipe.vllm_quantization).matches(recipe)
    with pytest.raises(ValueError, match="'mxfp4'"):
        recipe_of_scheme("mxfp4")


@pytest.mark.parametrize("name", TORCHAO)
def test_torchaos_configuration_with_exact_scales(name):
    ours, theirs = RECIPES[name].torchao_config(emulate=True), Float8LinearConfig.from_recipe_name(name)
    assert not ours.round_scales_to_power_of_2
    assert ours == dataclasses.replace(theirs, emulate=True, round_scales_to_power_of_2=False)


@pytest.mark.parametrize("name", NAMES)
def test_gpus(name):
    recipe = RECIPES[name]
    assert resolve_emulate(recipe, "cuda", (9, 0), None) is False
    assert resolve_emulate(recipe, "cuda", (8, 0), True) is True
    with pytest.raises(ValueError, match=rf"{name!r}` needs a GPU with compute capability"):
        resolve_emulate(recipe, "cuda", (8, 8), None)
    if name == "tensorwise":
        assert resolve_emulate(recipe, "cuda", (8, 9), None) is False
    else:
        with pytest.raises(ValueError, match="9.0 or higher"):
            resolve_emulate(recipe, "cuda", (8, 9), None)


def test_blockwise_has_no_kernel_on_a_cpu():
    with pytest.raises(ValueError, match="CUDA GPUs only"):
        resolve_emulate(RECIPES["blockwise"], "cpu", None, False)
    assert resolve_emulate(RECIPES["tensorwise"], "cpu", None, False) is False


# The products


@pytest.mark.parametrize("name", NAMES)
def test_product_is_that_of_the_quantized_operands(name):
    linear = build_linear(name, bias=True)
    x = torch.randn(7, 64).bfloat16()
    payload, scale = linear.recipe.quantize_weight(linear.weight.detach().bfloat16(), None)
    if name == "blockwise":
        scale = scale.repeat_interleave(128, 0)[:48].repeat_interleave(128, 1)[:, :64]
    weight = payload.double() * scale.double()
    rows = x.double()
    amax = rows.abs().max() if name == "tensorwise" else rows.abs().amax(-1, keepdim=True)
    step = (rows * (448 / amax)).float().to(torch.float8_e4m3fn).double() * (amax / 448)
    expected = step @ weight.t() + linear.bias.detach().double()
    output = linear(x).double()
    assert (output - expected).abs().max() < 0.02  # BF16 output, and a payload may go the other way at a midpoint
    plain = x.double() @ linear.weight.detach().double().t() + linear.bias.detach().double()
    assert (output - expected).abs().mean() < 0.25 * (output - plain).abs().mean()


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("name", TORCHAO)
def test_gradients_are_torchaos(name, emulate):
    linear = build_linear(name, emulate)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(2, 16, 48, dtype=torch.bfloat16)
    weight = linear.weight.detach().bfloat16().requires_grad_()
    theirs = matmul_with_hp_or_float8_args.apply(x, weight.t(), linear.linear_mm_config, linear.config)
    expected = torch.autograd.grad(theirs, [x, weight], gradient)
    got = torch.autograd.grad(linear(x), [x, linear.weight], gradient)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1].float())


@pytest.mark.parametrize("name", TORCHAO)
def test_gemm_and_emulation_agree(name):
    emulated, gemm = build_linear(name, True), build_linear(name, False)
    x = torch.randn(16, 64).bfloat16()
    outputs = emulated(x), gemm(x)
    assert (outputs[0] - outputs[1]).abs().max() <= 2**-7 * outputs[0].abs().max()
    assert (outputs[0] == outputs[1]).float().mean() > 0.8


def test_activations_per_tensor_are_torchaos():
    config = RECIPES["tensorwise"].torchao_config(emulate=True)
    linear = build_linear("tensorwise")
    for seed in range(3):
        x = torch.randn(64, 192, generator=torch.Generator().manual_seed(seed)).bfloat16() * 10.0**-seed
        payload, scale = quantize_input_per_tensor(x)
        theirs = hp_tensor_to_float8_dynamic(x, config.cast_config_input.target_dtype, linear.linear_mm_config)
        assert torch.equal(payload.view(torch.uint8), theirs._data.view(torch.uint8))
        assert torch.allclose(scale, theirs._scale.reciprocal(), rtol=2**-22, atol=0)


@pytest.mark.parametrize("adapters", [False, True])
def test_tensorwise_shares_scales_as_the_engine_fuses(model, adapters):
    if adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    convert_to_fp8(model, RECIPES["tensorwise"], emulate=True)
    layer = [module for module in model.modules() if type(module).__name__ == "Qwen3DecoderLayer"][1]
    q, k = layer.self_attn.q_proj, layer.self_attn.k_proj
    q = q.base_layer if adapters else q
    with torch.no_grad():
        k.weight[3, 5] = 2.0
    assert q.weight_amax().item() == k.weight_amax().item() == 2.0
    assert layer.self_attn.o_proj.weight_amax() is None
    assert layer.mlp.up_proj.weight_amax() == layer.mlp.gate_proj.weight_amax()
    scale = quantize_per_tensor(q.weight.detach().bfloat16(), q.weight_amax())[1]
    assert scale.item() == torch.tensor(2.0 / 448).item()
    # A copy of the model shares among its own linears.
    copied = copy.deepcopy(model)
    twin = fp8_linears(copied)[0]
    assert twin.scale_group[0] is twin and len(twin.scale_group) == 3


@pytest.mark.parametrize("name", NAMES)
def test_master_weights_are_rounded_first_and_the_bf16_pass_is_exact(model, name):
    tokens = torch.randint(2, 20, (3, 11), generator=torch.Generator().manual_seed(0))
    plain = copy.deepcopy(model)
    assert len(convert_to_fp8(model, RECIPES[name], emulate=True)) == 14
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for linear in fp8_linears(rounded):
            linear.weight.copy_(linear.weight.bfloat16().float())
    with torch.no_grad():
        fp8 = log_probs(model, tokens)
    assert torch.equal(fp8, log_probs(rounded, tokens))
    with bf16_pass(model):
        assert torch.equal(log_probs(model, tokens), log_probs(plain, tokens))
    assert (fp8 - log_probs(plain, tokens)).abs().mean() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_gradient_follows_the_plain_models(model, name):
    tokens = torch.randint(2, 20, (3, 11), generator=torch.Generator().manual_seed(0))
    plain = copy.deepcopy(model)
    convert_to_fp8(model, RECIPES[name], emulate=True)
    for candidate in (model, plain):
        log_probs(candidate, tokens)[..., 3].mean().backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.cosine_similarity(param.grad.flatten(), other.grad.flatten(), dim=0) > 0.93, name


@pytest.mark.parametrize("name", NAMES)
def test_kernel_limits_are_named(name):
    multiple = RECIPES[name].dim_multiple
    holder = nn.Sequential(
        nn.Linear(multiple, 3 * multiple, bias=False), nn.Linear(multiple + 8, multiple, bias=False)
    )
    holder.get_output_embeddings = lambda: None
    with pytest.raises(
        ValueError, match=rf"multiples of {multiple}.*: 1 \({multiple + 8} -> {multiple}\).*fp8_ignore"
    ):
        convert_to_fp8(holder, RECIPES[name], emulate=False)
    assert convert_to_fp8(holder, RECIPES[name], emulate=False, ignore=["1"]) == ["0"]


def test_blockwise_kernel_takes_no_bias():
    holder = nn.Sequential(nn.Linear(128, 128))
    holder.get_output_embeddings = lambda: None
    with pytest.raises(ValueError, match="without a bias only; these have one: 0"):
        convert_to_fp8(holder, RECIPES["blockwise"], emulate=False)
    assert convert_to_fp8(copy.deepcopy(holder), RECIPES["blockwise"], emulate=True) == ["0"]
    assert convert_to_fp8(holder, RECIPES["rowwise"], emulate=False) == ["0"]


# Which linears


def test_ignored_linears_stay_in_bf16(model):
    ignore = ["model.layers.0.self_attn.[qkv]_proj", "*.layers.1.mlp.down_proj"]
    selection = select_linears(model, ignore)
    left = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"] + ["model.layers.1.mlp.down_proj"]
    assert selection.bf16 == left
    assert len(selection.fp8) == 10 and not set(selection.fp8) & set(left)
    assert convert_to_fp8(model, RECIPES["rowwise"], emulate=True, ignore=ignore) == selection.fp8
    assert type(model.model.layers[1].mlp.down_proj) is nn.Linear
    assert select_linears(model, ignore) == selection  # converted already


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        (
            ["*.layers.7.*"],
            r"'\*\.layers\.7\.\*' in `fp8_ignore` matches no linear.*'model.layers.0.self_attn.q_proj'",
        ),
        (["*.o_proj", "lm_head"], "'lm_head' in `fp8_ignore` matches no linear"),
        (["*.embed_tokens"], "matches no linear"),
        (["layers.0.mlp.down_proj"], "matches no linear"),
        (["*.layers.1.self_attn.q_proj"], r"q_proj in BF16 and converts .*k_proj, .*v_proj.*all of them, or none"),
        (["*.gate_proj"], "gate_proj in BF16 and converts .*up_proj"),
        (["*"], "leaves every linear in BF16"),
    ],
)
def test_patterns_that_are_refused(model, ignore, message):
    with pytest.raises(ValueError, match=message):
        select_linears(model, ignore)


def test_heads_adapters_and_saved_copies_are_not_converted(model):
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "o_proj"]))
    names = convert_to_fp8(wrapped, RECIPES["rowwise"], emulate=True)
    assert len(names) == 14
    assert sum(name.endswith("o_proj.modules_to_save.default") for name in names) == 2
    assert sum(name.endswith("q_proj.base_layer") for name in names) == 2
    assert not any("lora_" in name or "lm_head" in name or "original_module" in name for name in names)


def test_small_part_of_a_fused_linear_keeps_all_in_bf16(model):
    model.model.layers[0].self_attn.k_proj = nn.Linear(64, 8, bias=False)
    selection = select_linears(model)
    assert sorted(selection.bf16) == [f"model.layers.0.self_attn.{part}_proj" for part in "kqv"]


def test_mixture_of_experts_is_refused_or_warned_of():
    model = moe_model()
    with pytest.raises(NotImplementedError, match=r"MixtralForCausalLM is a mixture of experts .*fp8_allow_moe=True"):
        refuse_moe(model, allow=False)
    with pytest.warns(UserWarning, match="mixture of experts.*routers and experts stay in BF16"):
        refuse_moe(model, allow=True)
    refuse_moe(build_model(), allow=False)
    routers = [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]
    names = convert_to_fp8(model, RECIPES["rowwise"], emulate=True)
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"} and len(names) == 8
    assert routers and not any(isinstance(router, Float8Linear) for router in routers)
    left = sorted(name.rpartition(".")[2] for name in select_linears(model).bf16)
    assert left == ["experts", "experts", "gate", "gate"]
