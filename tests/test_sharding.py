# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Sharded models on gloo ranks: FSDP2 by `fully_shard` itself and DeepSpeed, where it is installed, by its own
`initialize`, since Accelerate offers neither on a CPU.
"""

import json

import pytest
from launching import torchrun
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from trl_calclip.embedded import build_model, build_tokenizer


pytestmark = pytest.mark.slow

FSDP = """
import json, sys
import torch
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trl.generation.vllm_generation import VLLMGeneration
from trl_calclip.embedded import build_model
from trl_calclip.fp8.linear import bf16_pass, convert_to_fp8, fp8_linears
from trl_calclip.fp8.recipes import RECIPES

directory, recipe, precision = sys.argv[1:]
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
tokens = torch.randint(2, 20, (4, 11), generator=torch.Generator().manual_seed(3))
results = {}


def build():
    return build_model(seed=0, hidden_size=64, intermediate_size=128, num_hidden_layers=2)


def shard(model):
    policy = MixedPrecisionPolicy()
    if precision == "policy":  # what Accelerate sets for bf16
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def logits(model):
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        return model(tokens, use_cache=False).logits.float()


def named(model):
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}


plain, converted, whole = build(), build(), build()
for model in (converted, whole):
    convert_to_fp8(model, RECIPES[recipe], emulate=True)
shard(plain)
shard(converted)
results["shards"] = all(type(p.data).__name__ == "DTensor" for p in converted.parameters())
assert len(fp8_linears(converted)) == len(fp8_linears(whole)) == 14

with torch.no_grad():
    expected, in_fp8 = logits(plain), logits(converted)
    with bf16_pass(converted):
        results["bf16 pass"] = torch.equal(logits(converted), expected)
    results["fp8 again"] = torch.equal(logits(converted), in_fp8) and not torch.equal(in_fp8, expected)
    if precision == "policy":  # which casts parameters, not buffers
        for p in whole.parameters():
            p.data = p.data.bfloat16()
    results["fp8 of the whole"] = torch.equal(in_fp8, logits(whole))

# each rank a half of the batch; gradients are averaged
part = tokens[2 * rank : 2 * rank + 2]
for model, batch in ((converted, part), (whole, tokens)):
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        output = model(batch, use_cache=False).logits.float().log_softmax(-1)
    output[..., 3].mean().backward()
cosines = []
for (name, p), q in zip(converted.named_parameters(), whole.parameters(), strict=True):
    cosines.append(torch.cosine_similarity(p.grad.full_tensor().flatten(), q.grad.float().flatten(), dim=0).item())
results["gradient"] = min(cosines)

optimizer = torch.optim.AdamW(converted.parameters(), lr=1e-3)
optimizer.step()
after = {name: value.clone() for name, value in named(converted).items()}
before = dict(build().named_parameters())
results["moved"] = all(not torch.equal(after[name], before[name]) for name in after)

# the sync's weights, by TRL's own gathering
generation = VLLMGeneration.__new__(VLLMGeneration)
generation.accelerator = accelerator
synced = dict(generation._iter_fsdp2_params(converted))
results["sync"] = synced.keys() == after.keys() and all(torch.equal(synced[n].float(), after[n]) for n in after)

# saved as one state dict, as Accelerate saves it, and loaded into models that were never converted or sharded
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
state = get_model_state_dict(converted, options=options)
if rank == 0:
    fresh = build()
    torch.save(state, f"{directory}/state.pt")
    missing, unexpected = fresh.load_state_dict(torch.load(f"{directory}/state.pt"), strict=False)
    loaded = dict(fresh.named_parameters())
    results["saved"] = not missing and not unexpected and all(torch.equal(loaded[n], after[n]) for n in after)
accelerator.wait_for_everyone()
other = build()
with torch.no_grad():
    for p in other.parameters():
        p.zero_()
convert_to_fp8(other, RECIPES[recipe], emulate=True)
shard(other)
set_model_state_dict(other, torch.load(f"{directory}/state.pt"), options=StateDictOptions(full_state_dict=True))
with torch.no_grad():
    results["loaded"] = torch.equal(logits(other), logits(converted))
with open(f"{directory}/rank{rank}.json", "w") as file:
    json.dump(results, file)
"""


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [("rowwise", "autocast"), ("rowwise", "policy"), ("tensorwise", "policy"), ("blockwise", "autocast")],
)
def test_fsdp2(tmp_path, recipe, precision):
    torchrun(tmp_path, FSDP, tmp_path, recipe, precision, ranks=2)
    for rank in (0, 1):
        results = json.loads((tmp_path / f"rank{rank}.json").read_text())
        # per-tensor activation scales depend on the rows of a micro-batch: its gradient is another one
        assert results.pop("gradient") > (0.9 if recipe == "tensorwise" else 0.99)
        assert all(results.values()), results


DEEPSPEED = """
import json, sys
import deepspeed, torch
from trl_calclip.embedded import build_model
from trl_calclip.fp8.linear import bf16_pass, convert_to_fp8, fp8_linears
from trl_calclip.fp8.recipes import RECIPES
directory, stage, recipe = sys.argv[1], int(sys.argv[2]), sys.argv[3]
deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()
tokens = torch.randint(2, 20, (4, 11), generator=torch.Generator().manual_seed(3))
part = tokens[2 * rank : 2 * rank + 2]
results = {}


def build(convert):
    model = build_model(seed=0, hidden_size=64, intermediate_size=128, num_hidden_layers=2).bfloat16()
    if convert:
        convert_to_fp8(model, RECIPES[recipe], emulate=True)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage}, "zero_force_ds_cpu_optimizer": False,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        },
    )
    return engine


def logits(engine, batch):
    return engine(batch, use_cache=False).logits.float()


plain, converted = build(False), build(True)
results["stage"] = converted.zero_optimization_stage() == stage and len(fp8_linears(converted)) == 14
with torch.no_grad():
    expected, fp8 = logits(plain, tokens), logits(converted, tokens)
    with bf16_pass(converted):
        results["bf16 pass"] = torch.equal(logits(converted, tokens), expected)
    results["fp8 again"] = torch.equal(logits(converted, tokens), fp8) and not torch.equal(fp8, expected)
for _ in range(2):
    loss = logits(converted, part).log_softmax(-1)[..., 3].mean()
    converted.backward(loss)
    converted.step()
with torch.no_grad():
    results["moved"] = not torch.equal(logits(converted, tokens), fp8)
full = {}
for name, param in converted.module.named_parameters():
    with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
        full[name] = param.detach().clone()
whole = build_model(seed=0, hidden_size=64, intermediate_size=128, num_hidden_layers=2).bfloat16()
whole.load_state_dict(full, strict=False)
convert_to_fp8(whole, RECIPES[recipe], emulate=True)
with torch.no_grad():
    results["gathered"] = torch.equal(whole(tokens, use_cache=False).logits.float(), logits(converted, tokens))
with open(f"{directory}/rank{rank}.json", "w") as file:
    json.dump(results, file)
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed(tmp_path, monkeypatch, stage):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    torchrun(tmp_path, DEEPSPEED, tmp_path, stage, "rowwise", ranks=2)
    for rank in (0, 1):
        results = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(results) == 5 and all(results.values()), results


def test_deepspeed_on_a_cpu_is_refused(make_config):
    pytest.importorskip("deepspeed")
    settings = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
    with pytest.raises(ValueError, match="`deepspeed` has no effect with `use_cpu=True`"):
        make_config(deepspeed=settings)


def test_fp8_all_gather_is_refused(make_trainer):
    model = build_model(seed=0, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)
    with pytest.raises(ValueError, match="layers.0.*`enable_fsdp_float8_all_gather=True`.*pass it unconverted"):
        make_trainer(trainer={"model": model, "processing_class": build_tokenizer()})


def test_model_converted_by_torchao_is_refused(make_trainer):
    model = build_model(seed=0, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)
    with pytest.raises(ValueError, match="torchao's float8 linears already"):
        make_trainer(trainer={"model": model, "processing_class": build_tokenizer()})
