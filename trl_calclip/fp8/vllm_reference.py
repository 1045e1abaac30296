# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
vLLM quantization methods for a CPU: per-tensor and per-block FP8 in plain torch, where vLLM has no W8A8 kernel.

On a CPU vLLM runs `fp8_per_channel` as it is. Its `fp8_per_tensor` cannot load there, and its `fp8_per_block` needs
AMX and then leaves the activations in BF16, which is another computation. The two methods here store real float8
weights and quantize activations, with the numbers of `quantizers` and `blockwise`, which the trainer uses too. Layouts
and parameter names are those of vLLM's own methods, weight reload included. They are correct, not fast, and for one
rank per engine.

The per-tensor method quantizes activations per token: so does vLLM's `fp8_per_tensor` on every GPU with FP8 kernels,
in spite of its name.

Importing this module imports vLLM.
"""

import os
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from .blockwise import BLOCK, dequantize_blocks, dequantize_groups, quantize_blocks, quantize_groups
from .quantizers import FP8_DTYPE, float32_matmul, quantize_per_tensor, quantize_per_token, scaled_matmul


class _ReferenceLinearMethod(OnlineLinearBase):
    """What both methods share: quantize once per load or reload, compute on rows."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if get_tensor_model_parallel_world_size() > 1:
            raise NotImplementedError(
                "calclip's reference FP8 methods run on one rank per engine: a shard of a weight has other scales "
                "than the whole. Use tensor_parallel_size=1 on a CPU."
            )
        super().create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # vLLM calls this when the layer's last tensor has arrived and once more when the whole model is loaded.
        if layer.weight.dtype != FP8_DTYPE:
            self.quantize(layer, layer.weight.data)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        output = self.multiply(layer, x.reshape(-1, x.shape[-1]), bias)
        return output.to(x.dtype).reshape(*x.shape[:-1], output.shape[-1])

    def quantize(self, layer: torch.nn.Module, weight: torch.Tensor) -> None:
        """Replace the layer's BF16 `weight` of shape `(N, K)` by FP8 payload and scale."""
        raise NotImplementedError

    def multiply(self, layer: torch.nn.Module, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Output `(M, N)` for BF16 rows `(M, K)`, in BF16 or yet to be rounded."""
        raise NotImplementedError


class PerTensorLinearMethod(_ReferenceLinearMethod):
    """
    One scale per weight, one per token. A fused weight (q/k/v, gate/up) has one scale in all, as on a GPU.

    The layer holds `weight`, the payload as a `(K, N)` view, and `weight_scale` of shape `(1,)`.
    """

    def quantize(self, layer: torch.nn.Module, weight: torch.Tensor) -> None:
        payload, scale = quantize_per_tensor(weight)
        replace_parameter(layer, "weight", payload.t())
        replace_parameter(layer, "weight_scale", scale)

    def multiply(self, layer: torch.nn.Module, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return scaled_matmul(*quantize_per_token(rows), layer.weight.t(), layer.weight_scale, bias)


class PerBlockLinearMethod(_ReferenceLinearMethod):
    """
    One scale per 128x128 block of the weight, one per 128 features of a token.

    The layer holds `weight`, the payload of shape `(N, K)`, and `weight_scale_inv`: the name is vLLM's, the payload is
    multiplied with it. Each part of a fused weight has blocks of its own, as the trainer's separate linears have, so
    the scale has `sum(ceil(n / 128))` rows for parts of `n` outputs. Where 128 divides every `n` these are vLLM's
    blocks.
    """

    def quantize(self, layer: torch.nn.Module, weight: torch.Tensor) -> None:
        payloads, scales = zip(*map(quantize_blocks, weight.split(layer.logical_widths)), strict=True)
        replace_parameter(layer, "weight", torch.cat(payloads))
        replace_parameter(layer, "weight_scale_inv", torch.cat(scales))

    def multiply(self, layer: torch.nn.Module, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        widths = layer.logical_widths
        scales = layer.weight_scale_inv.split([-(-width // BLOCK) for width in widths])
        parts = map(dequantize_blocks, layer.weight.split(widths), scales)
        output = float32_matmul(dequantize_groups(*quantize_groups(rows)), torch.cat(list(parts)).t()).to(rows.dtype)
        # After rounding to BF16, as vLLM adds it to its block kernels' output, and the trainer to torchao's.
        return output if bias is None else output + bias


class _ReferenceConfig(QuantizationConfig):
    """Every linear of the model by one method; heads, embeddings and ignored layers stay as they are."""

    name: str
    method: type[_ReferenceLinearMethod]

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "_ReferenceConfig":
        raise ValueError(
            f"{cls.name!r} quantizes BF16 checkpoints while they load, and this checkpoint is quantized already: "
            f"{config}. Start from the BF16 model."
        )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None
        # vLLM hands the user's `quantization_config` over in this attribute, see `engine_arguments`.
        online = self.online_quantization_config
        ignore = [] if online is None else online.ignored_layers
        if should_ignore_layer(prefix, ignore=ignore, fused_mapping=self.packed_modules_mapping, use_fnmatch=True):
            return UnquantizedLinearMethod()
        return self.method()


class PerTensorConfig(_ReferenceConfig):
    name = "calclip_fp8_per_tensor"
    method = PerTensorLinearMethod


class PerBlockConfig(_ReferenceConfig):
    name = "calclip_fp8_per_block"
    method = PerBlockLinearMethod


# Read by vLLM when it first multiplies.
E8M0_VARIABLE = "VLLM_USE_DEEP_GEMM_E8M0"

# vLLM's scheme to the config that stands in for it on a CPU.
REFERENCE_CONFIGS = {"fp8_per_tensor": PerTensorConfig, "fp8_per_block": PerBlockConfig}


def register() -> None:
    """
    Make the reference methods known to vLLM in this process, if it runs on a CPU.

    Idempotent. It is also the `vllm.general_plugins` entry point, by which `vllm serve` and its workers call it.
    """
    if not current_platform.is_cpu():
        return
    for config in REFERENCE_CONFIGS.values():
        if config.name not in QUANTIZATION_METHODS:
            register_quantization_config(config.name)(config)


def engine_arguments(scheme: str, ignore: list[str]) -> dict[str, Any]:
    """
    Arguments of `vllm.LLM` for one of vLLM's online FP8 schemes, on this process's platform.

    Args:
        scheme (`str`): `"fp8_per_channel"`, `"fp8_per_tensor"` or `"fp8_per_block"`.
        ignore (`list[str]`): Layers that stay in BF16, by exact name or `fnmatch` pattern. Parts of a fused layer are
            to be named together.

    Returns:
        `dict[str, Any]`: `quantization` and, where something is ignored, `quantization_config`. On a CPU the methods
        of this module stand in for vLLM's, and are registered. For blocks, DeepGEMM's powers of two are switched off.

    Raises:
        ValueError: If the environment asks for scales that are powers of two.
    """
    if scheme == "fp8_per_block":
        # By default DeepGEMM, where it is installed, rounds scales up to powers of two and quantizes the weights once
        # more.
        if os.environ.setdefault(E8M0_VARIABLE, "0") != "0":
            raise ValueError(
                f"{E8M0_VARIABLE}={os.environ[E8M0_VARIABLE]} makes vLLM round block scales to powers of two; the "
                "trainer's are exact, so that both sides would compute with other numbers. Unset the variable, or set "
                "it to 0."
            )
    stand_in = current_platform.is_cpu() and scheme in REFERENCE_CONFIGS
    if stand_in:
        register()
    arguments: dict[str, Any] = {"quantization": REFERENCE_CONFIGS[scheme].name if stand_in else scheme}
    if ignore:
        arguments["quantization_config"] = {"ignore": list(ignore)}
        if stand_in:
            # Without targets vLLM would take the patterns for a scheme of its own beside ours, and refuse them.
            arguments["quantization_config"]["targets"] = {}
    return arguments
