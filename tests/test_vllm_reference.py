# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Real vLLM engines on a CPU for each FP8 scheme: what they store and compute, and what a weight reload does."""

import gc
import os

import pytest
import torch
from torch import nn

from trl_calclip.embedded import build_model, build_tokenizer
from trl_calclip.fp8.blockwise import blockwise_linear, quantize_blocks
from trl_calclip.fp8.quantizers import (
    quantize_per_channel,
    quantize_per_tensor,
    quantize_per_token,
    scaled_matmul,
    shared_weight_amax,
)


# vLLM reads these when it is imported, or when an engine starts.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the reference methods stand in for vLLM's on a CPU only"),
]

SCHEMES = ["fp8_per_channel", "fp8_per_tensor", "fp8_per_block"]
LAYERS = 2
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
PROMPT = list(range(2, 26))

# Stays in BF16 in every engine here: the pattern, and the one layer that it matches.
IGNORE, IGNORED = "*.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj"


def bits(payload: torch.Tensor) -> torch.Tensor:
    return payload.contiguous().view(torch.uint8)


@pytest.fixture(scope="module")
def hf_model():
    """BF16 Qwen3 whose 192-wide projections end in the middle of a 128-block, with weights large enough to matter."""
    model = build_model(seed=0, hidden_size=192, intermediate_size=320, num_hidden_layers=LAYERS)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 2:
                param.mul_(4)
    return model.to(torch.bfloat16).eval()


@pytest.fixture(scope="module")
def other_weights(hf_model):
    """Weights of the same model, all moved by a tenth of their size."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: value + 0.1 * value.std() * torch.randn(value.shape, generator=generator).to(value.dtype)
        for name, value in hf_model.state_dict().items()
    }


@pytest.fixture(scope="module", params=SCHEMES)
def engine(request, hf_model, tmp_path_factory):
    from vllm import LLM

    from trl_calclip.fp8.vllm_reference import engine_arguments

    path = str(tmp_path_factory.mktemp("model"))
    hf_model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    threads = torch.get_num_threads()
    llm = LLM(
        model=path,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        logprobs_mode="processed_logprobs",
        seed=0,
        disable_log_stats=True,
        **engine_arguments(request.param, [IGNORE]),
    )
    llm.scheme = request.param
    yield llm
    torch.set_num_threads(threads)
    del llm
    gc.collect()


def engine_model(llm) -> nn.Module:
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def reload(llm, state_dict) -> None:
    llm.llm_engine.model_executor.driver_worker.model_runner.reload_weights(weights_iterator=iter(state_dict.items()))
    llm.reset_prefix_cache()


def score(llm) -> torch.Tensor:
    """Log-probabilities of the prompt's tokens but the first."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    output = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
    pairs = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    return torch.tensor([logprobs[token].logprob for logprobs, token in pairs])


def greedy(llm) -> list[int]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return list(llm.generate([{"prompt_token_ids": PROMPT[:5]}], params, use_tqdm=False)[0].outputs[0].token_ids)


def quantize_parts(scheme: str, parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What an engine stores for the linears `parts` that it fuses, by the trainer's quantizers."""
    if scheme == "fp8_per_tensor":
        amax = torch.stack([part.abs().amax() for part in parts]).amax()
        payloads = [quantize_per_tensor(part, amax)[0] for part in parts]
        return torch.cat(payloads), quantize_per_tensor(parts[0], amax)[1]
    quantize = {"fp8_per_channel": quantize_per_channel, "fp8_per_block": quantize_blocks}[scheme]
    payloads, scales = zip(*map(quantize, parts), strict=True)
    return torch.cat(payloads), torch.cat(scales)


def assert_engine_stores(llm, state_dict) -> None:
    found = 0
    for name, module in engine_model(llm).named_modules():
        parent, _, leaf = name.rpartition(".")
        if not leaf.endswith("_proj") or name == IGNORED:
            continue
        found += 1
        parts = [state_dict[f"{parent}.{part}.weight"] for part in PACKED.get(leaf, [leaf])]
        expected_payload, expected_scale = quantize_parts(llm.scheme, parts)
        assert module.weight.dtype == torch.float8_e4m3fn
        payload = module.weight if llm.scheme == "fp8_per_block" else module.weight.t()
        scale = module.weight_scale_inv if llm.scheme == "fp8_per_block" else module.weight_scale
        assert torch.equal(bits(payload), bits(expected_payload)), name
        assert torch.equal(scale, expected_scale), name
    assert found == 4 * LAYERS - 1


def fp8_linear(scheme: str, rows: torch.Tensor, linear: nn.Linear, amax: torch.Tensor) -> torch.Tensor:
    """Output of a linear layer without bias, as the trainer computes it on a CPU: BF16 for blocks, else float32."""
    if scheme == "fp8_per_block":
        return blockwise_linear(rows, linear.weight, emulate=True)
    if scheme == "fp8_per_tensor":
        return scaled_matmul(*quantize_per_token(rows), *quantize_per_tensor(linear.weight, amax))
    return scaled_matmul(*quantize_per_token(rows), *quantize_per_channel(linear.weight))


class TestEngine:
    def test_stores_the_quantizers_bits(self, engine, hf_model):
        assert_engine_stores(engine, hf_model.state_dict())

    def test_only_projections_are_float8(self, engine):
        float8 = {name for name, param in engine_model(engine).named_parameters() if param.dtype.itemsize == 1}
        expected = {
            f"model.layers.{layer}.{leaf}.weight"
            for layer in range(LAYERS)
            for leaf in ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
        }
        assert float8 == expected - {f"{IGNORED}.weight"}

    def test_reload_takes_other_weights_and_returns(self, engine, hf_model, other_weights):
        before, storage = score(engine), engine_model(engine).model.layers[1].mlp.down_proj.weight.data_ptr()
        reload(engine, other_weights)
        moved = score(engine)
        assert (moved - before).abs().mean() > 0.05
        assert_engine_stores(engine, other_weights)
        reload(engine, hf_model.state_dict())
        assert torch.equal(score(engine), before)
        assert_engine_stores(engine, hf_model.state_dict())
        assert engine_model(engine).model.layers[1].mlp.down_proj.weight.data_ptr() == storage

    def test_reload_of_the_same_weights_changes_nothing(self, engine, hf_model):
        text, logps = greedy(engine), score(engine)
        reload(engine, hf_model.state_dict())
        assert greedy(engine) == text
        assert torch.equal(score(engine), logps)

    @torch.no_grad()
    def test_computes_what_the_trainer_computes(self, engine, hf_model):
        """The same rows through the engine's linears and the trainer's arithmetic give the same BF16 numbers."""
        layer, hf_layer = engine_model(engine).model.layers[1], hf_model.model.layers[1]
        generator = torch.Generator().manual_seed(2)
        for fused, parts in [
            (layer.self_attn.qkv_proj, [hf_layer.self_attn.get_submodule(part) for part in PACKED["qkv_proj"]]),
            (layer.mlp.gate_up_proj, [hf_layer.mlp.get_submodule(part) for part in PACKED["gate_up_proj"]]),
            (layer.mlp.down_proj, [hf_layer.mlp.down_proj]),
        ]:
            rows = torch.randn(60, parts[0].in_features, generator=generator).bfloat16()
            rows[0], rows[1] = 0, rows[1] * 1e-4
            bias = torch.randn(sum(part.out_features for part in parts), generator=generator).bfloat16()
            for with_bias in [None, bias]:
                actual = fused.quant_method.apply(fused, rows, with_bias)
                expected = [fp8_linear(engine.scheme, rows, part, shared_weight_amax(parts)) for part in parts]
                expected = torch.cat(expected, dim=-1) if with_bias is None else torch.cat(expected, dim=-1) + bias
                assert torch.equal(actual, expected.to(torch.bfloat16))


def test_per_token_quantizer_is_vllms():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    input = torch.randn(2000, 192, generator=torch.Generator().manual_seed(2)).bfloat16()
    input[:500] *= 1e-4  # under vLLM's floor for scales
    input[0] = 0
    with set_current_vllm_config(VllmConfig()):
        expected_payload, expected_scale = QuantFP8(False, GroupShape.PER_TOKEN).forward_native(input)
    payload, scale = quantize_per_token(input)
    assert torch.equal(bits(payload), bits(expected_payload))
    assert torch.equal(scale, expected_scale)


def test_blocks_differ_from_vllms_by_single_steps_only():
    """vLLM's own per-block quantizer rounds its scales otherwise. On a GPU this is the tolerance between the sides."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(3)).bfloat16()
    payload, scale = quantize_blocks(weight)
    vllm_payload, vllm_scale = per_block_cast_to_fp8(weight, [128, 128], False)
    torch.testing.assert_close(scale, vllm_scale, rtol=2**-22, atol=0)
    # Neighbouring FP8 numbers of one sign are neighbouring integers.
    steps = (bits(payload).int() - bits(vllm_payload).int()).abs()
    assert steps.max() <= 1
    assert 0 < (steps > 0).float().mean() < 1e-3


def test_registering_twice_registers_once():
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    from trl_calclip.fp8.vllm_reference import PerBlockConfig, register

    register()
    register()
    assert QUANTIZATION_METHODS.count("calclip_fp8_per_block") == 1
    assert get_quantization_config("calclip_fp8_per_block") is PerBlockConfig


def test_engine_arguments():
    from trl_calclip.fp8.vllm_reference import engine_arguments

    assert engine_arguments("fp8_per_channel", []) == {"quantization": "fp8_per_channel"}
    assert engine_arguments("fp8_per_tensor", []) == {"quantization": "calclip_fp8_per_tensor"}
    assert engine_arguments("fp8_per_block", ["*.down_proj"]) == {
        "quantization": "calclip_fp8_per_block",
        "quantization_config": {"ignore": ["*.down_proj"], "targets": {}},
    }
