# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Where the limit of the self-check comes from: its gap after a sound weight sync, and after syncs with a fault put in.

    python -m benchmarks sync_faults --model smollm2
"""

import os


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402

from benchmarks.models import prepare  # noqa: E402
from benchmarks.results import Results, argument_parser, report  # noqa: E402
from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer  # noqa: E402
from trl_calclip._trl_compat import reload_engine_weights  # noqa: E402


def faults(weights: dict[str, torch.Tensor], layers: int) -> dict[str, dict[str, torch.Tensor]]:
    """Sets of weights that a broken sync could leave in the engine, by what is wrong with them."""
    generator = torch.Generator().manual_seed(0)
    middle, before = f".layers.{layers // 2}.", f".layers.{layers // 2 - 1}."
    projection = "model.layers.0.self_attn.q_proj.weight"

    def noise(share: float) -> dict[str, torch.Tensor]:
        return {
            name: (w.float() * (1 + share * torch.randn(w.shape, generator=generator))).bfloat16()
            if w.dim() == 2
            else w
            for name, w in weights.items()
        }

    return {
        "none": weights,
        "every matrix 2 % off": noise(0.02),
        "one layer of zeros": {
            name: torch.zeros_like(w) if middle in name and w.dim() == 2 else w for name, w in weights.items()
        },
        "one layer from its neighbour": {
            name: weights[name.replace(middle, before)] if middle in name else w for name, w in weights.items()
        },
        "one q_proj with its rows shuffled": {
            **weights,
            projection: weights[projection][torch.randperm(len(weights[projection]), generator=generator)],
        },
        "every matrix 10 % off": noise(0.1),
        "random weights": {
            name: (torch.randn(w.shape, generator=generator) * w.float().std()).bfloat16() if w.dim() == 2 else w
            for name, w in weights.items()
        },
    }


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser("sync_faults", __doc__)
    parser.add_argument("--model", default="smollm2", help="`toy`, `smollm2` or a directory")
    parser.add_argument("--recipe", default="rowwise")
    parser.add_argument("--cache", default="runs/benchmarks/models")
    options = parser.parse_args(argv)
    args = CalibratedGRPOConfig(
        output_dir=str(options.output / "trainer"), per_device_train_batch_size=2, num_generations=2,
        steps_per_generation=2, use_vllm=True, vllm_max_model_length=128, fp8_recipe=options.recipe,
        fp8_sync_check_limit=1e9, report_to="none", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = CalibratedGRPOTrainer(
        prepare(options.model, options.cache),
        lambda completions, **_: [0.0] * len(completions),
        args,
        train_dataset=Dataset.from_dict({"prompt": ["1+2="] * 8}),
    )
    generation = trainer.vllm_generation
    weights = {name: param.detach().bfloat16().clone() for name, param in generation.named_weights()}
    table = Results(
        f"{options.model}, {options.recipe}: gap of the self-check's probe after a sync with a fault",
        {"fault": "{fault}", "nats per token": "{gap:.3f}"},
    )
    for name, wrong in faults(weights, trainer.model.config.num_hidden_layers).items():
        reload_engine_weights(generation.llm, iter(wrong.items()))
        generation.llm.reset_prefix_cache()
        table.rows.append({"fault": name, "gap": generation.check_sync()})
    report(options.output, table)
