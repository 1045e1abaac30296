# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Gloo ranks under torchrun: the same bounds on all of them bit for bit, and the same loss and gradient for the same
batch.
"""

import json

import pytest
import torch
from launching import torchrun


pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from datasets import Dataset
from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer

model, output_dir, case = sys.argv[1:]


class Recording(CalibratedGRPOTrainer):
    seen, mine = [], []

    def end_rollout(self):
        if self._collector is not None:
            if case == "empty rank" and self.accelerator.process_index == 1:
                self._collector._rows.clear()
            self.mine.append(sum(len(rows) for rows in self._collector._rows))
        super().end_rollout()
        self.seen.append([self.epsilon_low, self.epsilon_high])

    def _calibrate(self, pool):
        self.pooled = getattr(self, "pooled", []) + [len(pool.fp8_ratio)]
        super()._calibrate(pool)


def reward(completions, **_):
    return [sum(c.count(d) for d in "02468") / max(len(c), 1) for c in completions]


args = CalibratedGRPOConfig(
    output_dir=output_dir, per_device_train_batch_size=4, num_generations=4, steps_per_generation=4,
    max_completion_length=8, learning_rate=1e-3, max_steps=12, calibration_interval=1, calibration_min_tokens=1,
    save_strategy="steps", save_steps=8, report_to="none", use_cpu=True, disable_tqdm=True, seed=7,
)
dataset = Dataset.from_dict({"prompt": [f"{i % 10}+{i // 10}=" for i in range(64)]})
trainer = Recording(model, reward, args, train_dataset=dataset)
trainer.train()
rank = trainer.accelerator.process_index
result = {"seen": trainer.seen, "mine": trainer.mine, "pooled": trainer.pooled, "count": trainer.num_calibrations}
with open(f"{output_dir}/rank{rank}.json", "w") as file:
    json.dump(result, file)
"""


@pytest.mark.parametrize("case", ["full", "empty rank"])
def test_two_ranks_hold_the_same_bounds(toy_path, tmp_path, case):
    torchrun(tmp_path, SCRIPT, toy_path, tmp_path, case, ranks=2)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["count"] == second["count"] == 3
    assert first["seen"] == second["seen"] and len(set(map(tuple, first["seen"]))) > 1
    assert first["pooled"] == second["pooled"] == [a + b for a, b in zip(first["mine"], second["mine"], strict=True)]
    assert all(second["mine"]) if case == "full" else not any(second["mine"])
    assert (tmp_path / "checkpoint-8" / "calclip_state.json").exists()


BASELINE = """
import os, sys
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer

model, output_dir = sys.argv[1:]
batch = torch.load(f"{output_dir}/batch.pt")


class Recorded(CalibratedGRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        rows = len(batch["completion_ids"]) // ranks
        part = slice(rank * rows, (rank + 1) * rows)
        return {name: value[part] if value.dim() else value for name, value in batch.items()}


class KeepGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}


ranks = int(os.environ["WORLD_SIZE"])
dataset = Dataset.from_dict({"prompt": [f"{i % 10}+{i // 10}=" for i in range(64)]})
for loss_type in ("grpo", "dapo"):
    args = CalibratedGRPOConfig(
        output_dir=output_dir, per_device_train_batch_size=len(batch["completion_ids"]) // ranks, num_generations=4,
        max_completion_length=8, max_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        logging_steps=1, max_grad_norm=0.0, bf16=False, gradient_checkpointing=False, loss_type=loss_type,
        fp8_recipe=None, calibrated_clip=False, epsilon=0.2, epsilon_high=0.24,
    )
    keep = KeepGradients()
    trainer = Recorded(model, lambda completions, **_: [0.0] * len(completions), args, train_dataset=dataset,
                       callbacks=[keep])
    trainer.train()
    if trainer.accelerator.is_main_process:
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        torch.save((loss, keep.gradients), f"{output_dir}/{loss_type}-{ranks}.pt")
"""


def test_bf16_baseline_has_one_loss_and_gradient_on_one_two_and_four_ranks(make_trainer, toy_path, tmp_path):
    recorder = make_trainer(
        per_device_train_batch_size=16, steps_per_generation=2, max_steps=1, bf16=False, fp8_recipe=None,
        calibrated_clip=False,
    )  # fmt: skip
    recorder.train()
    (batch,) = recorder._buffered_inputs[:1]
    batch = {name: value for name, value in batch.items() if value is not None}
    noise = torch.randn(batch["old_per_token_logps"].shape, generator=torch.Generator().manual_seed(0))
    batch["old_per_token_logps"] = batch["old_per_token_logps"] + 0.2 * noise  # ratios that are clipped and kept
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    assert batch["advantages"].unique().numel() > 4
    torch.save(batch, tmp_path / "batch.pt")
    for ranks in (1, 2, 4):
        torchrun(tmp_path, BASELINE, toy_path, tmp_path, ranks=ranks)
    for loss_type in ("grpo", "dapo"):
        loss, gradients = torch.load(tmp_path / f"{loss_type}-1.pt")
        assert loss != 0 and max(gradient.abs().max() for gradient in gradients.values()) > 1e-3
        for ranks in (2, 4):
            other_loss, others = torch.load(tmp_path / f"{loss_type}-{ranks}.pt")
            assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
            for name, gradient in gradients.items():
                torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


ENGINES = """
import json, sys
from datasets import Dataset
from transformers import TrainerCallback
from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer

model, output_dir = sys.argv[1:]


class EveryStep(TrainerCallback):
    seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append([trainer.epsilon_low, trainer.epsilon_high, trainer.num_calibrations])


def reward(completions, **_):
    return [sum(c.count(d) for d in "02468") / max(len(c), 1) for c in completions]


args = CalibratedGRPOConfig(
    output_dir=output_dir, per_device_train_batch_size=4, num_generations=4, steps_per_generation=4,
    max_completion_length=8, learning_rate=1e-3, max_steps=50, calibration_interval=2, calibration_min_tokens=1,
    save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, seed=7, gradient_checkpointing=False,
    use_vllm=True, vllm_mode="colocate", vllm_max_model_length=80, calibration_schedule="adaptive",
)
dataset = Dataset.from_dict({"prompt": [f"{i % 10}+{i // 10}=" for i in range(64)]})
trainer = CalibratedGRPOTrainer(model, reward, args, train_dataset=dataset, callbacks=[EveryStep()])
trainer.train()
result = {
    "seen": EveryStep.seen,
    "rollouts": [record["rollout"] for record in trainer.calibration_history],
    "pooled": [record["num_pooled_tokens"] for record in trainer.calibration_history],
    "equal": sum(layer.payload_share == 0 for layer in trainer.vllm_generation.alignment.layers),
}
with open(f"{output_dir}/rank{trainer.accelerator.process_index}.json", "w") as file:
    json.dump(result, file)
"""


@pytest.mark.vllm
def test_two_ranks_with_engines_hold_the_same_bounds_in_every_step(toy_path, tmp_path):
    """Fifty steps in FP8 on both sides, an engine on each rank; the adaptive schedule decides alike on both."""
    torchrun(tmp_path, ENGINES, toy_path, tmp_path, ranks=2)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert len(first["seen"]) == 50 and len({tuple(bounds[:2]) for bounds in first["seen"]}) > 3
    assert first["seen"][-1][2] == len(first["rollouts"]) >= 3
    assert min(first["pooled"]) > 50 and first["equal"] > 0
