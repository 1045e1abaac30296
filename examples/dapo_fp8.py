# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
DAPO in FP8, training and rollout, with calibrated clip bounds and dynamic sampling.

Without arguments: a small model learns sums, on whatever machine this is (`configs/dapo_demo.yaml`).

    python examples/dapo_fp8.py

It takes what `grpo_fp8.py` takes, and DAPO's settings:

    accelerate launch examples/dapo_fp8.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name my/dataset \\
        --reward_funcs accuracy_reward --output_dir runs/mine --use_vllm --steps_per_generation 4 \\
        --overlong_buffer_length 64
"""

from pathlib import Path

import grpo_fp8  # first: it sets what the libraries read when they are imported

from trl_calclip import CalibratedDAPOConfig, CalibratedDAPOTrainer


DEMO_CONFIG = Path(__file__).parents[1] / "configs" / "dapo_demo.yaml"

if __name__ == "__main__":
    grpo_fp8.main(CalibratedDAPOConfig, CalibratedDAPOTrainer, DEMO_CONFIG)
