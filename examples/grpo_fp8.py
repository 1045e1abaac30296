# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
GRPO in FP8, training and rollout, with calibrated clip bounds.

Without arguments: a small model learns sums, on whatever machine this is (`configs/grpo_demo.yaml`).

    python examples/grpo_fp8.py

Anything else, on GPUs:

    accelerate launch examples/grpo_fp8.py --config configs/grpo_fp8_rowwise.yaml
    accelerate launch examples/grpo_fp8.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name my/dataset \\
        --reward_funcs accuracy_reward --output_dir runs/mine --use_vllm --steps_per_generation 4

After an interruption the same command with `--resume_from_checkpoint latest` goes on from the newest complete
checkpoint.
"""

import importlib
import logging
import os
import sys
import warnings
from pathlib import Path


# Before the libraries are imported: they speak of missing GPU kernels and coming deprecations while they load.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# On a CPU that others use too, waiting threads must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", category=DeprecationWarning)
for name in ("torchao", "torch.utils._pytree", "vllm.triton_utils.importing"):
    logging.getLogger(name).setLevel(logging.ERROR)

import torch  # noqa: E402
import transformers  # noqa: E402
import trl.rewards  # noqa: E402
from datasets import load_dataset  # noqa: E402
from rich.console import Console  # noqa: E402
from transformers.trainer_callback import ProgressCallback  # noqa: E402
from trl import ModelConfig, TrlParser, get_peft_config  # noqa: E402
from trl.scripts.grpo import GRPOScriptArguments  # noqa: E402

from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer, embedded  # noqa: E402
from trl_calclip.report import plot_run, summary_table  # noqa: E402


DEMO_CONFIG = Path(__file__).parents[1] / "configs" / "grpo_demo.yaml"


class Progress(ProgressCallback):
    """Trainer's progress bar with the figures that matter beside it, in place of a line per log entry."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is None:
            return
        names = {"reward": "reward", "entropy": "entropy", "calclip/lower": "L", "calclip/upper": "H"}
        self.shown = {
            **getattr(self, "shown", {}),
            **{label: f"{logs[name]:.3f}" for name, label in names.items() if logs.get(name) is not None},
        }
        self.training_bar.set_postfix(self.shown, refresh=False)


def load_reward(name: str):
    """A reward of `trl.rewards` by its name, or any function by its dotted import path."""
    if "." in name:
        module, name = name.rsplit(".", 1)
        sys.path.insert(0, os.getcwd())
        return getattr(importlib.import_module(module), name)
    if name in trl.rewards.__all__:
        return getattr(trl.rewards, name)
    raise ValueError(
        f"Unknown reward function {name!r}. Use one of {', '.join(trl.rewards.__all__)}, or a dotted import path such "
        "as 'my_rewards.exact_match'."
    )


def load_task(script_args: GRPOScriptArguments, training_args: CalibratedGRPOConfig, model_args: ModelConfig) -> dict:
    """Model, rewards and data for the trainer: those named on the command line, or the embedded ones."""
    if model_args.model_name_or_path is None and script_args.dataset_name is None:
        if training_args.should_save:
            print("The embedded model is warm-started on imperfect demonstrations: about a minute, once.", flush=True)
        with training_args.main_process_first(desc="warm start"):
            model = embedded.warm_start(os.path.join(training_args.output_dir, "warm_start"), seed=training_args.seed)
        evaluation = embedded.arithmetic_dataset(64, split="test") if training_args.eval_strategy != "no" else None
        return {
            "model": model,
            "reward_funcs": embedded.arithmetic_reward,
            "train_dataset": embedded.arithmetic_dataset(4096, seed=training_args.seed, split="train"),
            "eval_dataset": evaluation,
        }
    if model_args.model_name_or_path is None or script_args.dataset_name is None or not script_args.reward_funcs:
        raise ValueError(
            "Give `--model_name_or_path`, `--dataset_name` and `--reward_funcs` together, or none of the three for "
            "the embedded model and task."
        )
    model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    training_args.model_init_kwargs = {**model_init_kwargs, **(training_args.model_init_kwargs or {})}
    data = load_dataset(
        script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
    )
    return {
        "model": model_args.model_name_or_path,
        "reward_funcs": [load_reward(name) for name in script_args.reward_funcs],
        "train_dataset": data[script_args.dataset_train_split],
        "eval_dataset": data[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        "peft_config": get_peft_config(model_args),
    }


def main(config=CalibratedGRPOConfig, trainer_class=CalibratedGRPOTrainer, demo_config: Path = DEMO_CONFIG) -> None:
    arguments = sys.argv[1:]
    if not any(argument.startswith("--config") or argument == "--output_dir" for argument in arguments):
        arguments = ["--config", str(demo_config), *arguments]
    if not torch.cuda.is_available() and "--use_cpu" not in arguments:
        arguments += ["--use_cpu", "true"]
    transformers.utils.logging.disable_progress_bar()
    parser = TrlParser((GRPOScriptArguments, config, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config(arguments)
    console = Console()

    if training_args.should_save:
        console.print(f"Output: {training_args.output_dir}")
    trainer = trainer_class(args=training_args, **load_task(script_args, training_args, model_args))
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Progress())
    resume = training_args.resume_from_checkpoint
    # The command line passes text, and the trainer reads it only while it keeps a state of its own.
    trainer.train(resume_from_checkpoint=True if resume in ("true", "True", "latest") else resume)
    trainer.save_model()
    trainer.save_state()

    if trainer.is_world_process_zero():
        picture = os.path.join(training_args.output_dir, "run.png")
        history, reference = trainer.state.log_history, trainer.reference_clip_range
        plot_run(picture, history, trainer.calibration_history, reference)
        console.print(summary_table(history, trainer.calibration_history, trainer.clip_range, reference))
        console.print(f"Model and calibration state: {training_args.output_dir}\nPicture: {picture}")


if __name__ == "__main__":
    main()
