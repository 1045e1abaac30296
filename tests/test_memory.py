# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Peak memory of converting, of BF16 passes and of weight syncs: never a second full copy of the model."""

import gc
import weakref

import pytest
import torch
from conftest import digits_reward
from peft import LoraConfig
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer
from trl_calclip.embedded import build_model, build_tokenizer
from trl_calclip.fp8.linear import bf16_pass, convert_to_fp8
from trl_calclip.fp8.recipes import RECIPES


LAYERS = 12


class PeakMemory(TorchDispatchMode):
    """Largest number of bytes at one time in storages that were made inside the context, on this thread."""

    def __enter__(self):
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if _is_plain(tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if _is_plain(tensor) and tensor.untyped_storage()._cdata not in known:
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def _is_plain(value) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu"


def size(model) -> int:
    """Bytes of the weights in BF16, as a sync hands them over."""
    return sum(2 * param.numel() for param in model.parameters())


@pytest.fixture(scope="module")
def large():
    return build_model(seed=0, hidden_size=256, intermediate_size=768, num_hidden_layers=LAYERS)


def test_the_meter_counts_what_is_alive():
    a = torch.zeros(1000)
    with PeakMemory() as memory:
        for _ in range(5):
            b = a + 1
        c = b.view(10, 100) * 2
        kept = [b, c]
        a.add_(1)
    assert memory.peak == 8000 and weakref.ref(kept[0])() is b


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_converting_copies_no_weights(recipe):
    model = build_model(seed=0, hidden_size=128, intermediate_size=256, num_hidden_layers=3)
    with PeakMemory() as memory:
        convert_to_fp8(model, RECIPES[recipe], emulate=True)
    assert memory.peak == 0


def test_bf16_pass_holds_a_layer_at_a_time(large):
    tokens = torch.full((1, 4), 5)
    peaks = {}
    model = build_model(seed=0, hidden_size=256, intermediate_size=768, num_hidden_layers=LAYERS)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), PeakMemory() as memory:
        model(tokens, use_cache=False)
    peaks["plain"] = memory.peak  # autocast keeps a copy of everything: the meter sees it
    convert_to_fp8(model, RECIPES["rowwise"], emulate=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), bf16_pass(model), PeakMemory() as memory:
        model(tokens, use_cache=False)
    peaks["pass"] = memory.peak
    assert peaks["plain"] > 0.9 * size(model)
    assert peaks["pass"] < 0.1 * size(model)


@pytest.mark.vllm
@pytest.mark.parametrize(("recipe", "adapters"), [("blockwise", False), ("rowwise", True)])
def test_sync_holds_a_few_layers_at_a_time(tmp_path, large, toy_dataset, recipe, adapters):
    path = str(tmp_path / "model")
    large.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    args = CalibratedGRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, steps_per_generation=4,
        max_completion_length=8, report_to="none", use_cpu=True, use_vllm=True, vllm_max_model_length=80,
        fp8_recipe=recipe, fp8_sync_check_interval=0,
    )  # fmt: skip
    peft_config = LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear") if adapters else None
    trainer = CalibratedGRPOTrainer(path, digits_reward, args, train_dataset=toy_dataset, peft_config=peft_config)
    generation = trainer.vllm_generation
    generation.sync_weights()  # with its checks
    with PeakMemory() as sync:
        generation.sync_weights()
    with PeakMemory() as alignment:
        generation.check_alignment()
    generation.llm.llm_engine.engine_core.shutdown()
    del trainer.vllm_generation, generation
    gc.collect()
    assert 0 < sync.peak < 0.3 * size(large)
    assert 0 < alignment.peak < 0.3 * size(large)
