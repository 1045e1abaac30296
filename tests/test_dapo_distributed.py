# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Dynamic sampling on two gloo ranks, each with its own vLLM engine, one of which only ever makes uniform groups."""

import json

import pytest
from launching import torchrun


pytestmark = [pytest.mark.slow, pytest.mark.vllm]

SCRIPT = """
import json, os, sys
from datasets import Dataset
from trl_calclip import CalibratedDAPOConfig, CalibratedDAPOTrainer

model, output_dir = sys.argv[1:]
rank = int(os.environ["RANK"])


class Recording(CalibratedDAPOTrainer):
    record = {"drawn": [], "kept": [], "bounds": [], "moved": 0, "spread": [], "items": [], "mask": [], "surplus": 0}

    def _generate_groups(self, count):
        first = self._prompts.position
        result = super()._generate_groups(count)
        self.record["drawn"].append([first, self._prompts.position])
        return result

    def _assemble(self, groups):
        self.record["kept"].append([group.rewards for group in groups])
        self.record["spread"].append(all(not group.uniform for group in groups))
        self.record["surplus"] += sum(group.stale for group in groups)
        here = sum(owner == rank for group in groups for owner in group.ranks)
        batch = super()._assemble(groups)
        self.record["moved"] += max(0, batch["completion_ids"].size(0) - here)
        self.record["items"].append(batch["num_items_in_batch"].item())
        self.record["mask"].append(batch["completion_mask"].sum().item())
        return batch

    def end_rollout(self):
        super().end_rollout()
        self.record["bounds"].append([self.epsilon_low, self.epsilon_high])


def reward(completions, **_):
    if rank == 1:
        return [0.0] * len(completions)
    return [sum(c.count(d) for d in "02468") / max(len(c), 1) for c in completions]


args = CalibratedDAPOConfig(
    output_dir=output_dir, per_device_train_batch_size=4, num_generations=4, steps_per_generation=2,
    max_completion_length=8, learning_rate=1e-3, max_steps=50, calibration_interval=2, calibration_min_tokens=1,
    mask_truncated_completions=False, dynamic_sampling_surplus=4, use_vllm=True, vllm_max_model_length=32,
    save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, seed=7, gradient_checkpointing=False,
)
dataset = Dataset.from_dict({"prompt": [f"{i % 10}+{i // 10}=" for i in range(64)]})
trainer = Recording(model, reward, args, train_dataset=dataset)
trainer.train()
trainer.record["position"] = trainer._prompts.position
trainer.record["caps"] = trainer.num_cap_hits
trainer.record["weights"] = sum(p.double().sum().item() for p in trainer.model.parameters())
with open(f"{output_dir}/rank{rank}.json", "w") as file:
    json.dump(trainer.record, file)
"""


def test_two_ranks_agree_on_every_round(toy_path, tmp_path):
    torchrun(tmp_path, SCRIPT, toy_path, tmp_path, ranks=2)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert len(first["kept"]) == 25 and len(first["bounds"]) == 25
    for name in ("drawn", "kept", "bounds", "spread", "position", "caps", "items", "weights", "surplus"):
        assert first[name] == second[name], name
    assert all(first["spread"]) and first["caps"] == 0 and first["surplus"] > 0
    assert len(set(map(tuple, first["bounds"]))) > 1
    # Rank 1 trains completions that rank 0 generated, and no prompt is drawn twice or left out.
    assert first["moved"] == 0 and second["moved"] > 0
    assert [end for _, end in first["drawn"][:-1]] == [start for start, _ in first["drawn"][1:]]
    assert first["items"] == [a + b for a, b in zip(first["mask"], second["mask"], strict=True)]
