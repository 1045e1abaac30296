# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Two gloo ranks under torchrun: the same bounds on both, bit for bit, and a rank without tokens is fine."""

import json

import pytest
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
