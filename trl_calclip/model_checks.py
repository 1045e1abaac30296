# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Models that FP8 or the calibration cannot take, refused with the reason."""

import torch
from torch import nn
from torchao.float8.float8_linear import Float8Linear
from transformers import ProcessorMixin

from .fp8.linear import fp8_linears


def refuse_unsuited(model: nn.Module) -> None:
    """
    Refuse models of a kind that is not trained in FP8 here, before TRL fails on them at the first rollout.

    Tied embeddings are fine.

    Raises:
        ValueError: If the model is no causal language model, or has FP16 weights.
        NotImplementedError: If it has a vision or audio tower.
    """
    config = model.config.to_dict()
    if config.get("is_encoder_decoder") or not model.can_generate() or model.get_output_embeddings() is None:
        raise ValueError(
            f"`model` must be a causal language model, and {type(model).__name__} is none: it cannot continue a "
            "prompt. Use a checkpoint whose `config.json` names a `...ForCausalLM` in `architectures`."
        )
    towers = [name for name in ("vision_config", "audio_config") if config.get(name)]
    if towers:
        raise NotImplementedError(
            f"`model` is a {type(model).__name__} with a {towers[0].removesuffix('_config')} tower, whose linears "
            "trainer and engine would not quantize alike. Use a text model, or `fp8_recipe=None` with "
            "`fp8_rollout='off'`."
        )
    if any(param.dtype == torch.float16 for param in model.parameters()):
        raise ValueError(
            "`model` has FP16 weights: their exponents are too short for updates and for the rounding to BF16 that "
            "FP8 starts from. Load it in FP32 or BF16, e.g. `model_init_kwargs={'dtype': 'float32'}`."
        )


def refuse_tokenizer(processing_class) -> None:
    """
    Refuse a tokenizer without an end token: TRL looks for it in every completion.

    Args:
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`]): Tokenizer.

    Raises:
        ValueError: If it has none.
    """
    tokenizer = processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer (`processing_class`) has no EOS token: completions could not end, and TRL could not mask "
            "what follows. Set one that the model knows, `tokenizer.eos_token = '...'`, and pass the tokenizer."
        )


def refuse_quantized(model: nn.Module) -> None:
    """
    Refuse a checkpoint that was loaded quantized.

    Raises:
        ValueError: If the model's configuration names a quantization.
    """
    quantization = model.config.to_dict().get("quantization_config")
    if quantization is not None:
        raise ValueError(
            f"The model was loaded quantized ({quantization}). FP8 training keeps master weights in high precision "
            "and quantizes them itself: load the BF16 checkpoint, or set `fp8_recipe=None`."
        )


def refuse_converted(model: nn.Module) -> None:
    """
    Refuse a model whose linears an earlier trainer has converted, or torchao with settings of its own.

    Raises:
        ValueError: If the model holds float8 linears.
    """
    gathered = [
        name
        for name, module in model.named_modules()
        if isinstance(module, Float8Linear) and module.config.enable_fsdp_float8_all_gather
    ]
    if gathered:
        raise ValueError(
            f"The model's linears ({gathered[0]} is the first) were converted by torchao with "
            "`enable_fsdp_float8_all_gather=True`: FSDP2 then gathers the weights in FP8, and no rank ever holds the "
            "BF16 weights that the BF16 pass of a calibration needs. Load the model anew and pass it unconverted: "
            "`fp8_recipe` converts it, with weights gathered in BF16."
        )
    ours = set(fp8_linears(model))
    if any(isinstance(module, Float8Linear) and module not in ours for module in model.modules()):
        raise ValueError(
            "The model's linears are torchao's float8 linears already, which have no BF16 pass and other scales than "
            "the rollout engine. Load the model anew and pass it unconverted: `fp8_recipe` converts it."
        )
    if ours:
        raise ValueError(
            "The model's linears are float8 linears already: an earlier trainer in this process converted it in "
            "place. Load the model anew, or pass its name."
        )


def refuse_dropout(model: nn.Module) -> None:
    """
    Refuse a model in which dropout, or another random noise, is active in training mode.

    It draws other numbers in the old and the current policy's forward: the importance ratio is then noisy without any
    FP8, and calibration would mistake one noise for the other. `disable_dropout=True` empties dropout modules; it does
    not reach rates that a module keeps as a number, as attention layers do for a functional call, and neither layer
    drop nor a router's jitter.

    Raises:
        ValueError: If any such rate is above 0, with the modules that have it.
    """
    active = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            if module.p > 0:
                active.append(f"{name} (p={module.p})")
            continue
        for attribute, value in vars(module).items():
            if any(word in attribute for word in ("drop", "jitter")) and isinstance(value, float) and value > 0:
                active.append(f"{name}.{attribute} ({value})")
    if active:
        shown = ", ".join(active[:4]) + (f" and {len(active) - 4} more" if len(active) > 4 else "")
        raise ValueError(
            f"`calibrated_clip=True` needs a model without dropout, this one has {shown}. Dropout makes the "
            "importance ratio noisy without FP8. Set `disable_dropout=True` (it empties dropout modules, LoRA's "
            "included), `lora_dropout=0` in the PEFT config, and all other rates to 0 in the model's config, e.g. "
            "`model_init_kwargs={'attention_dropout': 0.0}`."
        )
