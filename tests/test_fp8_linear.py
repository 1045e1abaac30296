# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Float8 linears: their numbers, the BF16 pass inside them, and the shapes that a GPU would refuse."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from trl_calclip.embedded import build_model
from trl_calclip.fp8.linear import SwitchableFloat8Linear, bf16_pass, convert_to_fp8, fp8_linears
from trl_calclip.fp8.recipes import RECIPES, get_recipe, resolve_emulate


ROWWISE = RECIPES["rowwise"]


@pytest.fixture
def model():
    return build_model(seed=1, hidden_size=64, intermediate_size=128, num_hidden_layers=2)


@pytest.fixture
def tokens():
    return torch.randint(2, 20, (3, 11), generator=torch.Generator().manual_seed(0))


def log_probs(model, tokens):
    with torch.autocast("cpu", torch.bfloat16):
        return model(tokens).logits.float().log_softmax(-1)


def quantize_rows(x: torch.Tensor) -> torch.Tensor:
    """Row-wise e4m3 round trip with exact scales, in float64 up to the cast."""
    scale = 448 / x.double().abs().amax(-1, keepdim=True)
    return (x.double() * scale).float().to(torch.float8_e4m3fn).double() / scale


def test_forward_is_the_product_of_quantized_rows():
    torch.manual_seed(0)
    linear = nn.Linear(48, 32, bias=True)
    holder = nn.Sequential(linear)
    holder.get_output_embeddings = lambda: None
    reference = copy.deepcopy(linear)
    convert_to_fp8(holder, ROWWISE, emulate=True)
    x = torch.randn(5, 48)
    expected = (
        quantize_rows(x.bfloat16()) @ quantize_rows(reference.weight.detach().bfloat16()).T + reference.bias.double()
    )
    got = holder(x).double()
    assert (got - expected).abs().max() < 0.02  # BF16 output
    assert (got - reference(x).double()).abs().max() > 0.005  # and it is not the unquantized product


def test_master_weights_are_rounded_to_bf16_first(model, tokens):
    convert_to_fp8(model, ROWWISE, emulate=True)
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for linear in fp8_linears(rounded):
            assert not torch.equal(linear.weight, linear.weight.bfloat16().float())
            linear.weight.copy_(linear.weight.bfloat16().float())
    assert torch.equal(log_probs(model, tokens), log_probs(rounded, tokens))


def test_weight_gradient_goes_straight_through(model, tokens):
    plain = copy.deepcopy(model)
    convert_to_fp8(model, ROWWISE, emulate=True)
    for candidate in (model, plain):
        log_probs(candidate, tokens)[..., 3].mean().backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert param.grad.dtype == torch.float32
        cosine = torch.cosine_similarity(param.grad.flatten(), other.grad.flatten(), dim=0)
        assert cosine > 0.95, name


def test_bf16_pass_is_the_unconverted_model_bit_for_bit(model, tokens):
    plain = copy.deepcopy(model)
    names = convert_to_fp8(model, ROWWISE, emulate=True)
    assert len(names) == len(fp8_linears(model)) == 14
    assert not isinstance(model.lm_head, SwitchableFloat8Linear)
    fp8 = log_probs(model, tokens)
    with bf16_pass(model):
        inside = log_probs(model, tokens)
    assert torch.equal(inside, log_probs(plain, tokens))
    assert (fp8 - inside).abs().mean() > 1e-4
    assert torch.equal(log_probs(model, tokens), fp8)


def test_bf16_pass_touches_nothing_and_survives_an_exception(model, tokens):
    convert_to_fp8(model, ROWWISE, emulate=True)
    log_probs(model, tokens).mean().backward()
    model.train()
    rng = torch.get_rng_state()
    grads = [param.grad.clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match="inside"), bf16_pass(model), torch.no_grad():
        log_probs(model, tokens)
        raise RuntimeError("inside")
    assert model.training
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), grads, strict=True))
    assert all(linear.fp8_enabled for linear in fp8_linears(model))


def test_nested_bf16_passes_close_in_order(model):
    convert_to_fp8(model, ROWWISE, emulate=True)
    with bf16_pass(model):
        with bf16_pass(model):
            pass
        assert not any(linear.fp8_enabled for linear in fp8_linears(model))
    assert all(linear.fp8_enabled for linear in fp8_linears(model))


def test_bf16_pass_before_a_checkpointed_fp8_forward(model, tokens):
    plain = copy.deepcopy(model)
    for candidate in (model, plain):
        convert_to_fp8(candidate, ROWWISE, emulate=True)
        candidate.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.no_grad(), bf16_pass(model):
        log_probs(model, tokens)
    for candidate in (model, plain):
        log_probs(candidate, tokens)[..., 3].mean().backward()
    for (name, param), other in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(param.grad, other[1].grad), name


def test_same_parameters_and_state_dict_after_conversion(model):
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    convert_to_fp8(model, ROWWISE, emulate=True)
    assert list(model.state_dict()) == keys
    assert all(param is before[name] for name, param in model.named_parameters())


def test_adapters_and_tiny_linears_stay(model):
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    model.base_model.model.model.layers[0].mlp.gate = nn.Linear(64, 8)
    names = convert_to_fp8(model, ROWWISE, emulate=True)
    assert len(names) == 14
    assert not any("lora" in name or name.endswith("mlp.gate") for name in names)
    assert sum("base_layer" in name for name in names) == 4


def test_nothing_to_convert_is_refused():
    holder = nn.Sequential(nn.Linear(16, 4))
    holder.get_output_embeddings = lambda: None
    with pytest.raises(ValueError, match="no `nn.Linear`"):
        convert_to_fp8(holder, ROWWISE, emulate=True)


def test_dimensions_that_the_gemm_refuses_are_named():
    holder = nn.Sequential(nn.Linear(40, 32))
    holder.get_output_embeddings = lambda: None
    with pytest.raises(ValueError, match=r"multiples of 16.*0 \(40 -> 32\)"):
        convert_to_fp8(holder, ROWWISE, emulate=False)
    convert_to_fp8(holder, ROWWISE, emulate=True)


class GpuShapes(TorchDispatchMode):
    """Refuses every float8 GEMM that a GPU would refuse: contracted and trailing dimensions off multiples of 16."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, Float8TrainingTensor) for kind in types):
            return NotImplemented  # let torchao unwrap it; its plain operations come back here
        if func is torch.ops.aten._scaled_mm.default:
            (_, inner), (inner_b, columns) = args[0].shape, args[1].shape
            self.seen += 1
            assert inner == inner_b and inner % 16 == 0 and columns % 16 == 0, (args[0].shape, args[1].shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("length", [1, 7, 11, 16])
def test_gemm_shapes_are_a_gpus_for_any_number_of_tokens(model, length):
    convert_to_fp8(model, ROWWISE, emulate=False)
    tokens = torch.full((3, length), 5)
    with GpuShapes() as shapes:
        log_probs(model, tokens).mean().backward()
    assert shapes.seen == 3 * 14


def test_gemm_and_emulation_agree(model, tokens):
    emulated = copy.deepcopy(model)
    convert_to_fp8(emulated, ROWWISE, emulate=True)
    convert_to_fp8(model, ROWWISE, emulate=False)
    assert (log_probs(model, tokens) - log_probs(emulated, tokens)).abs().mean() < 5e-3


def test_output_has_the_dtype_of_a_linear(model):
    convert_to_fp8(model, ROWWISE, emulate=True)
    linear = fp8_linears(model)[0]
    assert linear(torch.randn(2, 64)).dtype == torch.float32
    assert linear(torch.randn(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(2, 64)).dtype == torch.bfloat16


def test_non_finite_input_stays_visible(model):
    convert_to_fp8(model, ROWWISE, emulate=True)
    x = torch.ones(2, 64)
    x[0, 0] = float("nan")
    output = fp8_linears(model)[0](x)
    assert output[0].isnan().all() and output[1].isfinite().all()


def test_recipe_scales_are_exact():
    for emulate in (True, False):
        config = ROWWISE.torchao_config(emulate=emulate)
        assert not config.round_scales_to_power_of_2
        assert config.emulate is emulate
    assert ROWWISE.torchao_config(emulate=False).pad_inner_dim


def test_unknown_recipe():
    with pytest.raises(ValueError, match="Unknown FP8 recipe 'rowwize'"):
        get_recipe("rowwize")


@pytest.mark.parametrize(
    ("device", "capability", "emulate", "expected"),
    [
        ("cpu", None, None, True),
        ("cpu", None, False, False),
        ("cuda", (9, 0), None, False),
        ("cuda", (10, 0), None, False),
        ("cuda", (9, 0), True, True),
        ("cuda", (8, 0), True, True),
    ],
)
def test_resolve_emulate(device, capability, emulate, expected):
    assert resolve_emulate(ROWWISE, device, capability, emulate) is expected


@pytest.mark.parametrize(
    ("device", "capability", "emulate", "message"),
    [
        ("cuda", (8, 0), None, "compute capability 9.0 or higher.*this one has 8.0.*fp8_emulate=True"),
        ("cuda", (8, 0), False, "compute capability 9.0"),
        ("mps", None, None, "'mps' device"),
    ],
)
def test_resolve_emulate_refuses(device, capability, emulate, message):
    with pytest.raises(ValueError, match=message):
        resolve_emulate(ROWWISE, device, capability, emulate)


def test_gradients_are_torchaos():
    torch.manual_seed(0)
    for emulate in (True, False):
        config = ROWWISE.torchao_config(emulate=emulate)
        linear = SwitchableFloat8Linear.from_float(nn.Linear(64, 48, bias=False), config, ROWWISE)
        x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn(2, 16, 48, dtype=torch.bfloat16)
        weight = linear.weight.detach().bfloat16().requires_grad_()
        theirs = matmul_with_hp_or_float8_args.apply(x, weight.t(), linear.linear_mm_config, config)
        expected = torch.autograd.grad(theirs, [x, weight], gradient)
        got = torch.autograd.grad(linear(x), [x, linear.weight], gradient)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1].float())
