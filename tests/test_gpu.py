# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Every recipe on a GPU with FP8 kernels: kernels against emulation, training steps, BF16 passes, speed against BF16.

    python -m pytest -m gpu tests/test_gpu.py -s

vLLM is not needed. Speeds are printed; the test fails only where FP8 is so slow that it cannot be the kernel.
"""

import copy

import pytest
import torch
from conftest import digits_reward
from torch import nn

from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer
from trl_calclip.embedded import build_model, build_tokenizer
from trl_calclip.fp8.blockwise import blockwise_linear
from trl_calclip.fp8.linear import SwitchableFloat8Linear, bf16_pass, convert_to_fp8, fp8_linears
from trl_calclip.fp8.quantizers import quantize_per_channel, quantize_per_tensor, quantize_per_token
from trl_calclip.fp8.recipes import RECIPES, cuda_capability, resolve_emulate


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(params=list(RECIPES))
def recipe(request):
    recipe = RECIPES[request.param]
    if cuda_capability() < recipe.min_capability:
        pytest.skip(f"{recipe.name} needs compute capability {recipe.min_capability}")
    return recipe


def build_linear(recipe, in_features: int, out_features: int, *, emulate: bool) -> SwitchableFloat8Linear:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(in_features, out_features, bias=False)
    with torch.no_grad():
        linear.weight.copy_(0.02 * torch.randn(linear.weight.shape, generator=generator))
    config = recipe.torchao_config(emulate=emulate)
    return SwitchableFloat8Linear.from_float(linear.cuda(), config, recipe)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def log_probs(model, tokens):
    with torch.autocast("cuda", torch.bfloat16):
        return model(tokens, use_cache=False).logits.float().log_softmax(-1)


# Kernels


@pytest.mark.parametrize("tokens", [1, 77, 384])  # never only multiples of 16: completions have any length
def test_kernels_compute_what_the_emulation_computes(recipe, tokens):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 512, generator=generator).bfloat16().cuda()
    gradient = torch.randn(tokens, 384, generator=generator).bfloat16().cuda()
    results = {}
    for emulate in (True, False):
        linear = build_linear(recipe, 512, 384, emulate=emulate)
        input = x.clone().requires_grad_()
        output = linear(input)
        output.backward(gradient)
        results[emulate] = output.detach(), input.grad, linear.weight.grad
    for name, kernel, emulated in zip(("output", "input", "weight"), results[False], results[True], strict=True):
        assert kernel.isfinite().all(), name
        # BF16 rounding, the tensor cores' accumulation, and payloads next to a midpoint that go the other way.
        assert relative_error(kernel, emulated) < 1e-2, name
    plain = x @ build_linear(recipe, 512, 384, emulate=True).weight.detach().bfloat16().t()
    assert relative_error(results[False][0], plain) > 2e-2  # FP8 itself


def test_scales_and_payloads_are_a_cpus():
    """True division on either device: no reciprocal of 448, no flush of small numbers."""
    generator = torch.Generator().manual_seed(2)
    values = (torch.randn(512, 1024, generator=generator) * torch.logspace(-6, 2, 512)[:, None]).bfloat16()
    for quantize in (quantize_per_channel, quantize_per_tensor):
        payload, scale = quantize(values)
        gpu_payload, gpu_scale = quantize(values.cuda())
        assert torch.equal(gpu_scale.cpu(), scale)
        assert torch.equal(gpu_payload.cpu().view(torch.uint8), payload.view(torch.uint8))
    payload, scale = quantize_per_token(
        values.cuda()
    )  # the GPU's rule divides: the scale is the same, a step may differ
    assert torch.equal(scale.cpu(), quantize_per_token(values)[1])
    assert torch.equal(payload.cpu().view(torch.uint8), quantize_per_channel(values)[0].view(torch.uint8))


def test_emulation_is_the_same_on_both_devices(recipe):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    linear = build_linear(recipe, 256, 128, emulate=True)
    gpu = linear(x.cuda())
    cpu = linear.cpu()(x)
    assert relative_error(gpu.cpu(), cpu) < 1e-2


def test_blockwise_kernels_refuse_other_dimensions():
    if cuda_capability() < RECIPES["blockwise"].min_capability:
        pytest.skip("no blockwise kernels here")
    x, weight = torch.randn(8, 200).bfloat16().cuda(), torch.randn(128, 200).bfloat16().cuda()
    with pytest.raises(ValueError, match="multiples of 128"):
        blockwise_linear(x, weight, emulate=False)
    assert blockwise_linear(x, weight, emulate=True).shape == (8, 128)


def test_gpu_uses_kernels_by_default(recipe):
    assert resolve_emulate(recipe, "cuda", cuda_capability(), None) is False


# The model


def test_bf16_pass_is_the_unconverted_model_bit_for_bit(recipe):
    model = build_model(seed=1).cuda()
    tokens = torch.randint(2, 20, (3, 37), generator=torch.Generator().manual_seed(4)).cuda()
    plain = copy.deepcopy(model)
    convert_to_fp8(model, recipe, emulate=False)
    with torch.no_grad():
        expected, fp8 = log_probs(plain, tokens), log_probs(model, tokens)
        with bf16_pass(model):
            assert torch.equal(log_probs(model, tokens), expected)
        assert torch.equal(log_probs(model, tokens), fp8)
    assert (fp8 - expected).abs().mean() > 1e-4


def test_bf16_pass_holds_no_second_copy(recipe):
    model = build_model(seed=1, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8).cuda()
    size = sum(2 * param.numel() for param in model.parameters())
    convert_to_fp8(model, recipe, emulate=False)
    tokens = torch.full((1, 16), 5, device="cuda")
    with torch.no_grad(), bf16_pass(model):
        log_probs(model, tokens)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        log_probs(model, tokens)
    assert torch.cuda.max_memory_allocated() - before < 0.4 * size


def test_gradients_follow_the_plain_models(recipe):
    model = build_model(seed=1).cuda()
    tokens = torch.randint(2, 20, (3, 37), generator=torch.Generator().manual_seed(4)).cuda()
    plain = copy.deepcopy(model)
    assert len(convert_to_fp8(model, recipe, emulate=False)) == len(fp8_linears(model)) == 28
    for candidate in (model, plain):
        log_probs(candidate, tokens)[..., 3].mean().backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.cosine_similarity(param.grad.flatten(), other.grad.flatten(), dim=0) > 0.9, name


def test_trains_and_calibrates(recipe, tmp_path, toy_dataset):
    path = str(tmp_path / "model")
    build_model(seed=0).save_pretrained(path)  # 128 divides its dimensions
    build_tokenizer().save_pretrained(path)
    args = CalibratedGRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, steps_per_generation=4,
        max_completion_length=8, learning_rate=1e-3, max_steps=8, calibration_interval=1, calibration_min_tokens=1,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, seed=7, fp8_recipe=recipe.name,
    )  # fmt: skip
    trainer = CalibratedGRPOTrainer(path, digits_reward, args, train_dataset=toy_dataset)
    assert len(trainer.fp8_modules) == 28
    assert not any(linear.config.emulate for linear in fp8_linears(trainer.model))
    before = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.num_calibrations == 2
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 8 and all(torch.tensor(losses).isfinite())
    parameters = dict(trainer.model.named_parameters())
    assert all(not torch.equal(parameters[name], value) for name, value in before.items() if "proj" in name)


# Speed


def _milliseconds(run, repeats: int = 20) -> float:
    for _ in range(5):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def test_speed_against_bf16(recipe, record_property):
    """Forward and backward of one linear of an 8B model's MLP, 8192 tokens, without compilation."""
    linear = build_linear(recipe, 4096, 12288, emulate=False).bfloat16()
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(8192, 12288, device="cuda", dtype=torch.bfloat16)

    def step():
        linear(x).backward(gradient)
        x.grad = linear.weight.grad = None

    fp8 = _milliseconds(step)
    linear.fp8_enabled = False
    bf16 = _milliseconds(step)
    record_property("fp8_ms", fp8)
    record_property("bf16_ms", bf16)
    print(f"\n{recipe.name}: FP8 {fp8:.2f} ms, BF16 {bf16:.2f} ms, {bf16 / fp8:.2f} times as fast")
    assert fp8 < 3 * bf16  # a float32 product, as in emulation, takes longer
