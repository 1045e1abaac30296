# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Processes that are killed, told to end, or left by a peer; disks that are full. `docs/faults.md` has the table."""

import errno
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launching import launch
from transformers import TrainerCallback

from trl_calclip.checkpoint import STATE_NAME, checkpoint_fault, find_checkpoint, read_state
from trl_calclip.dynamic_sampling import SURPLUS_NAME


# One process runs an unbroken run, and for each point a run that dies there and its resume. It forks for each of them,
# so that the libraries are imported once.
KILLS = """
import json, os, signal, sys
from datasets import Dataset
import trl_calclip.checkpointed_trainer as module
from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer
from trl_calclip.fp8.generation import FP8VLLMGeneration

model, directory, engine, *points = sys.argv[1:]


def run(name, point, resume):
    class Trainer(CalibratedGRPOTrainer):
        def reach(self, here, step):
            if here == point and self.state.global_step == step:
                if here.startswith("sigterm"):
                    os.kill(os.getpid(), signal.SIGTERM)
                    here == "sigterm" or os.kill(os.getpid(), signal.SIGTERM)
                else:
                    os.kill(os.getpid(), signal.SIGKILL)

        def before_policy_forward(self, inputs):
            if self._micro_batch % 2:  # the second of an accumulation window
                self.reach("between micro-batches", 9)
                self.reach("sigterm", 5)
                self.reach("sigterm twice", 5)
            super().before_policy_forward(inputs)

        def score(self, inputs):
            result = super().score(inputs)
            self.reach("BF16 pass", 9)
            return result

    prompts_used = {}

    def reward(prompts, completions, **_):
        trainer.reach("rollout", 8)
        prompts_used[trainer.state.global_step] = prompts
        return [sum(c.count(d) for d in "02468") / max(len(c), 1) for c in completions]

    def write_state(*arguments, write=module.write_state):
        trainer.reach("checkpoint, before the state", 8)
        write(*arguments)
        trainer.reach("checkpoint, after the state", 8)

    def weights(self, original=FP8VLLMGeneration.bf16_weights):
        for number, item in enumerate(original(self)):
            if number == 5:
                trainer.reach("weight sync", 8)
            yield item

    module.write_state = write_state
    FP8VLLMGeneration.bf16_weights = weights
    settings = {"use_vllm": True, "vllm_max_model_length": 32} if engine == "vllm" else {}
    output_dir = os.path.join(directory, name)
    args = CalibratedGRPOConfig(
        output_dir=output_dir, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_generations=4,
        steps_per_generation=8, max_completion_length=8, learning_rate=1e-3, max_steps=12, calibration_interval=2,
        calibration_min_tokens=1, save_strategy="no" if point == "sigterm" else "steps", save_steps=4,
        logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, seed=7, gradient_checkpointing=False,
        **settings,
    )
    dataset = Dataset.from_dict({"prompt": [f"{i % 10}+{i // 10}=" for i in range(64)]})
    trainer = Trainer(model, reward, args, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    if trainer.state.global_step == 12:
        names = ("step", "loss", "grad_norm", "learning_rate", "reward", "calclip/lower", "calclip/upper")
        history = [{name: entry.get(name) for name in names} for entry in trainer.state.log_history if "loss" in entry]
        with open(os.path.join(output_dir, "result.json"), "w") as file:
            json.dump({"history": history, "prompts": prompts_used}, file)


def fork(name, point, resume=False):
    pid = os.fork()
    if pid == 0:
        log = os.open(os.path.join(directory, f"{name}{'-resumed' * resume}.log"), os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            run(name, point, resume)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


codes = {"whole": [fork("whole", None)]}
for point in points:
    codes[point] = [fork(point, point)]
    if point != "sigterm twice":
        codes[point].append(fork(point, None, resume=True))
with open(os.path.join(directory, "codes.json"), "w") as file:
    json.dump(codes, file)
"""

POINTS = ["rollout", "between micro-batches", "BF16 pass", "checkpoint, before the state"]
POINTS += ["checkpoint, after the state"]
SIGTERMS = ["sigterm", "sigterm twice"]


def run_kills(directory: Path, toy_path: str, engine: str, points: list[str]) -> Path:
    script = directory / "run.py"
    script.write_text(KILLS)
    command = [sys.executable, str(script), toy_path, str(directory), engine, *points]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return directory


@pytest.fixture(scope="module")
def killed(tmp_path_factory, toy_path):
    return run_kills(tmp_path_factory.mktemp("kills"), toy_path, "none", POINTS + SIGTERMS)


@pytest.fixture(scope="module")
def killed_with_engine(tmp_path_factory, toy_path):
    return run_kills(tmp_path_factory.mktemp("kills"), toy_path, "vllm", ["weight sync"])


def log(directory: Path, name: str) -> str:
    return (directory / f"{name}.log").read_text()


def assert_resumed_as_unbroken(directory: Path, point: str, code: int) -> None:
    codes = json.loads((directory / "codes.json").read_text())
    assert codes["whole"] == [0], log(directory, "whole")
    assert codes[point] == [code, 0], log(directory, point) + log(directory, f"{point}-resumed")
    whole, broken = (read_state(directory / name) for name in ("whole", point))
    assert whole["num_calibrations"] == 2 and whole["num_rollouts"] == 3
    for state in (whole, broken):
        for record in state["calibration_history"]:
            del record["bf16_pass_seconds"]
    assert broken == whole  # bounds, counters, schedule, history of calibrations
    results = [json.loads((directory / name / "result.json").read_text()) for name in ("whole", point)]
    assert results[0]["history"] == results[1]["history"]
    assert len(results[0]["history"]) == 12 and len({entry["loss"] for entry in results[0]["history"]}) > 6
    # the resumed process knows the prompts of its own rollouts only
    assert results[1]["prompts"] and results[1]["prompts"].items() <= results[0]["prompts"].items()
    weights = [(directory / name / "model.safetensors").read_bytes() for name in ("whole", point)]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_killed_run_goes_on_as_the_unbroken_one(killed, point):
    """`kill -9`; then bounds, schedule, data order, losses and final weights are the unbroken run's, bit for bit."""
    assert_resumed_as_unbroken(killed, point, -signal.SIGKILL)
    skipped = f"{killed / point}/checkpoint-8 (it has no trainer_state.json" in log(killed, f"{point}-resumed")
    assert skipped == point.startswith("checkpoint")


@pytest.mark.slow
@pytest.mark.vllm
def test_run_killed_in_a_weight_sync_goes_on_as_the_unbroken_one(killed_with_engine):
    assert_resumed_as_unbroken(killed_with_engine, "weight sync", -signal.SIGKILL)


@pytest.mark.slow
def test_sigterm_saves_at_the_next_boundary_and_ends(killed):
    """At step 6 of rollouts of four, without any other checkpoint; the rest is then as in the unbroken run."""
    assert "SIGTERM: taking a checkpoint at step 8" in log(killed, "sigterm")
    assert_resumed_as_unbroken(killed, "sigterm", 0)


@pytest.mark.slow
def test_second_sigterm_kills(killed):
    assert json.loads((killed / "codes.json").read_text())["sigterm twice"] == [-signal.SIGTERM]


def test_signal_handler_is_put_back(make_trainer):
    def own(signum, frame):
        raise AssertionError

    def fail(completions, **kwargs):
        assert signal.getsignal(signal.SIGTERM) not in (own, before)
        raise ZeroDivisionError

    before = signal.signal(signal.SIGTERM, own)
    try:
        make_trainer(max_steps=1).train()
        assert signal.getsignal(signal.SIGTERM) is own
        with pytest.raises(ZeroDivisionError):
            make_trainer(trainer={"reward_funcs": fail}).train()
        assert signal.getsignal(signal.SIGTERM) is own
        # without calibration it is TRL's trainer, which handles no signal
        make_trainer(max_steps=1, calibrated_clip=False).train()
    finally:
        signal.signal(signal.SIGTERM, before)


# Ranks

RANKS = """
import datetime, json, os, signal, sys, time
import torch
from datasets import Dataset
from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer

model, output_dir, fault = sys.argv[1:]
if fault == "SIGSTOP":
    # On a CPU transformers does not hand `ddp_timeout` on.
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))


class Trainer(CalibratedGRPOTrainer):
    def before_policy_forward(self, inputs):
        if os.environ["RANK"] == "1" and self.state.global_step == 5:
            with open(os.path.join(output_dir, "time"), "w") as file:
                file.write(str(time.time()))
            if fault == "none":
                return super().before_policy_forward(inputs)
            if fault == "raise":
                raise ZeroDivisionError("on one rank")
            if fault == "slow":
                time.sleep(12)
            else:
                os.kill(os.getpid(), getattr(signal, fault))
        super().before_policy_forward(inputs)


def reward(completions, **_):
    return [sum(c.count(d) for d in "02468") / max(len(c), 1) for c in completions]


args = CalibratedGRPOConfig(
    output_dir=output_dir, per_device_train_batch_size=4, num_generations=4, steps_per_generation=4,
    max_completion_length=8, learning_rate=1e-3, max_steps=12, calibration_interval=2, calibration_min_tokens=1,
    save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, seed=7, gradient_checkpointing=False,
)
dataset = Dataset.from_dict({"prompt": [f"{i % 10}+{i // 10}=" for i in range(64)]})
trainer = Trainer(model, reward, args, train_dataset=dataset)
trainer.train()
with open(os.path.join(output_dir, f"rank{os.environ['RANK']}.json"), "w") as file:
    json.dump([trainer.state.global_step, trainer.clip_range.lower, trainer.clip_range.upper], file)
"""


def ends(directory: Path) -> list[list[float]]:
    """Last step and bounds of both ranks."""
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
def test_ranks_agree_on_sigterm(toy_path, tmp_path):
    """Only one rank sees the signal; both stop at the end of the rollout, with one complete checkpoint."""
    run = launch(tmp_path, RANKS, toy_path, tmp_path, "SIGTERM", ranks=2)
    assert run.returncode == 0, run.stderr[-3000:]
    first, second = ends(tmp_path)
    assert first == second and first[0] == 8
    checkpoint = Path(find_checkpoint(True, str(tmp_path)))
    assert checkpoint.name == "checkpoint-8"
    assert {"rng_state_0.pth", "rng_state_1.pth", STATE_NAME} <= set(os.listdir(checkpoint))


@pytest.mark.slow
def test_slow_rank_is_waited_for(toy_path, tmp_path):
    results = []
    for fault in ("none", "slow"):
        directory = tmp_path / fault
        directory.mkdir()
        run = launch(directory, RANKS, toy_path, directory, fault, ranks=2)
        assert run.returncode == 0, run.stderr[-3000:]
        results += ends(directory)
    assert results[0][0] == 12 and results == [results[0]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP", "raise"])
def test_dead_rank_ends_the_run(toy_path, tmp_path, fault):
    """
    The others wait in a collective: they end within a minute of it, and the reason is said. For one that hangs they
    wait as long as the process group's timeout, here 20 s, and the launcher takes half a minute to kill it.
    """

    run = launch(tmp_path, RANKS, toy_path, tmp_path, fault, ranks=2)
    assert run.returncode != 0
    assert time.time() - float((tmp_path / "time").read_text()) < (120 if fault == "SIGSTOP" else 60)
    reason = {"SIGKILL": "Signal 9", "SIGSTOP": "Timed out waiting", "raise": "ZeroDivisionError: on one rank"}
    assert reason[fault] in run.stderr, run.stderr[-3000:]
    assert not (tmp_path / "rank0.json").exists()


# Checkpoints: which ones count


def fake_checkpoint(directory: Path, step: int, text: str | None = None) -> Path:
    path = directory / f"checkpoint-{step}"
    path.mkdir()
    if text is not None:
        (path / "trainer_state.json").write_text(text)
    return path


def test_newest_complete_checkpoint_is_found(tmp_path, caplog):
    for name in ("checkpoint-20x", "checkpoint", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-30").write_text("a file")
    complete = [fake_checkpoint(tmp_path, step, f'{{"global_step": {step}}}') for step in (4, 8, 12)]
    for wanted in (True, "true", "True", "latest"):
        assert find_checkpoint(wanted, str(tmp_path)) == str(complete[-1])
    assert not caplog.records
    truncated = fake_checkpoint(tmp_path, 16, '{"global_step": 1')
    empty = fake_checkpoint(tmp_path, 100)
    assert find_checkpoint(True, str(tmp_path)) == str(complete[-1])
    assert f"Resuming from {complete[-1]}. Skipped: {empty} (it has no trainer_state.json" in caplog.text
    assert f"{truncated} (its trainer_state.json is damaged" in caplog.text
    assert find_checkpoint(complete[0], str(tmp_path)) == str(complete[0])
    for wanted in (None, False, "false", "none"):
        assert find_checkpoint(wanted, str(tmp_path)) is None


def test_what_cannot_be_resumed_from_is_refused(make_trainer, tmp_path):
    trainer = make_trainer()
    with pytest.raises(ValueError, match="found no complete checkpoint in `output_dir=.*nor any other.*start anew"):
        trainer.train(resume_from_checkpoint=True)
    (tmp_path / "run").mkdir(exist_ok=True)
    half = fake_checkpoint(tmp_path / "run", 4)
    with pytest.raises(ValueError, match="checkpoint-4 .it has no trainer_state.json, the run ended while"):
        trainer.train(resume_from_checkpoint="latest")
    with pytest.raises(ValueError, match="checkpoint-4'` cannot be resumed from: it has no trainer_state.json"):
        trainer.train(resume_from_checkpoint=str(half))
    with pytest.raises(ValueError, match="nowhere'` cannot be resumed from: there is no such directory"):
        trainer.train(resume_from_checkpoint="nowhere")


def test_rewritten_checkpoint_is_incomplete_until_it_is_complete(make_trainer, tmp_path, monkeypatch):
    """A run that starts anew in a used directory: a mixture of old and new files must not pass for a checkpoint."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    make_trainer(**settings).train()
    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert checkpoint_fault(checkpoint) is None
    second = make_trainer(**settings)
    monkeypatch.setattr("trl_calclip.checkpointed_trainer.write_state", interrupt)
    with pytest.raises(KeyboardInterrupt):
        second.train()
    assert checkpoint_fault(checkpoint) is not None


def interrupt(*args):
    raise KeyboardInterrupt


# Disks


class Limit(TrainerCallback):
    """From step 8 on, files end at 64 KiB, with an error of the operating system's."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 8:
            resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def full_disk(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("what", ["weights", "state"])
def test_full_disk_leaves_the_old_checkpoint(make_trainer, tmp_path, monkeypatch, caplog, what):
    settings = {"max_steps": 12, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    trainer = make_trainer(trainer={"callbacks": [Limit()] if what == "weights" else []}, **settings)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with monkeypatch.context() as patch, pytest.raises(Exception, match="File too large|No space left") as caught:
            if what == "state":
                make_trainer(**{**settings, "max_steps": 4}).train()
                patch.setattr(os, "fsync", full_disk)
            trainer.train(resume_from_checkpoint=what == "state")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "checkpoint of step 8 could not be written" in " ".join(caught.value.__notes__)
    assert not (tmp_path / "run" / "checkpoint-8" / STATE_NAME).exists()
    assert not (tmp_path / "run" / "checkpoint-8" / SURPLUS_NAME).exists()

    with caplog.at_level(logging.WARNING):
        resumed = make_trainer(**settings)
        resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-8 (it has no trainer_state.json" in caplog.text
    whole = make_trainer(output_dir=str(tmp_path / "whole"), max_steps=12)
    whole.train()
    for param, expected in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(param, expected)
