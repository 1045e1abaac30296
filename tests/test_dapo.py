# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""`CalibratedDAPOTrainer`: real training on the toy, with dynamic sampling on, off, at its cap, resumed."""

import dataclasses
import gc
import json
import warnings

import conftest
import pytest
import torch
from conftest import digits_reward
from trl import GRPOConfig

from trl_calclip import CalibratedDAPOConfig, CalibratedDAPOTrainer, CalibratedGRPOConfig, CalibratedGRPOTrainer
from trl_calclip.checkpoint import STATE_NAME, read_state
from trl_calclip.dynamic_sampling import SURPLUS_NAME, load_surplus


SETTINGS = {**conftest.SETTINGS, "mask_truncated_completions": False}  # a random model rarely stops


def half_uniform_reward(prompts, completions, **kwargs):
    """0 for every completion of a prompt that begins with an odd digit: half of the groups are uniform."""
    return [reward * (int(p[0]) % 2 == 0) for p, reward in zip(prompts, digits_reward(completions), strict=True)]


def zero_reward(completions, **kwargs):
    return [0.0] * len(completions)


class Recording(CalibratedDAPOTrainer):
    """Keeps what was generated and what is trained, before rows are shuffled."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.prompts_used, self.forwards = [], [], 0

    def generate_and_score(self, inputs):
        batch = super().generate_and_score(inputs)
        if self.model.training:
            self.batches.append({name: value.clone() for name, value in batch.items()})
        return batch

    def generate_round(self, inputs):
        self.prompts_used.append([example["prompt"] for example in inputs[:: self.num_generations]])
        return super().generate_round(inputs)


@pytest.fixture
def make(toy_path, toy_dataset, tmp_path):
    made = []

    def build(reward=half_uniform_reward, cls=Recording, trainer=None, dataset=toy_dataset, **overrides):
        config = CalibratedDAPOConfig if issubclass(cls, CalibratedDAPOTrainer) else CalibratedGRPOConfig
        args = config(output_dir=str(tmp_path / "run"), **{**SETTINGS, **overrides})
        made.append(cls(toy_path, reward, args, train_dataset=dataset, **(trainer or {})))
        return made[-1]

    yield build
    for trainer in made:
        if trainer.use_vllm:
            trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
            del trainer.vllm_generation
    gc.collect()


def weights(trainer):
    return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


# Configuration


def test_defaults_are_dapos():
    args = CalibratedDAPOConfig(use_cpu=True, steps_per_generation=4, report_to="none")
    assert (args.reference_clip_range.lower, args.reference_clip_range.upper) == pytest.approx((0.8, 1.28))
    assert args.loss_type == "dapo" and args.beta == 0.0 and args.mask_truncated_completions and args.dynamic_sampling
    added = {f.name for f in dataclasses.fields(CalibratedDAPOConfig)} - {
        f.name for f in dataclasses.fields(CalibratedGRPOConfig)
    }
    assert all(name in CalibratedDAPOConfig.__doc__ for name in added) and len(added) == 6


def test_wrong_arguments_are_refused(make, toy_path, toy_dataset):
    with pytest.raises(TypeError, match="must be a `CalibratedDAPOConfig`, got GRPOConfig"):
        CalibratedDAPOTrainer(toy_path, zero_reward, GRPOConfig(use_cpu=True, report_to="none"))
    with pytest.raises(NotImplementedError, match="column images.*`dynamic_sampling=False`"):
        make(dataset=toy_dataset.add_column("images", [[]] * len(toy_dataset)))
    with pytest.raises(ValueError, match="must name one reward function.*half_uniform_reward"):
        make(dynamic_sampling_metric="accuracy")


# The four parts


def test_without_dynamic_sampling_it_is_the_grpo_trainer(make):
    dapo = {"epsilon_high": 0.28, "loss_type": "dapo", "mask_truncated_completions": True}
    first = make(cls=CalibratedGRPOTrainer, **dapo)
    first.train()
    second = make(dynamic_sampling=False, mask_truncated_completions=True)
    second.train()
    assert_same(weights(first), weights(second))
    assert first.calibration_history[0]["lower"] == second.calibration_history[0]["lower"]
    assert not any(name.startswith("dynamic_sampling") for entry in second.state.log_history for name in entry)


def test_soft_overlong_punishment_is_a_reward_with_its_weight(make):
    for weights_given, expected in ((None, [1.0, 0.5]), ([2.0], [2.0, 0.5])):
        trainer = make(overlong_buffer_length=4, overlong_penalty=0.5, reward_weights=weights_given)
        assert trainer.reward_weights.tolist() == expected
        assert trainer.args.reward_weights == weights_given  # the next trainer of the same config is like this one
    punishment = trainer.reward_funcs[1]
    # 4 tokens before the maximum of 8: nothing up to 4, then a quarter more with each token
    assert punishment(completion_ids=[[1] * n for n in (1, 4, 5, 6, 8)]) == [0.0, 0.0, -0.25, -0.5, -1.0]


def test_every_trained_group_has_spread(make):
    trainer = make(max_steps=16)
    trainer.train()
    assert len(trainer.batches) == 4 and trainer.num_cap_hits == 0 and trainer.num_calibrations == 2
    for batch in trainer.batches:
        assert batch["advantages"].view(4, 4).abs().amax(dim=1).min() > 0.1
        assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    assert min(logged(trainer, "dynamic_sampling/rounds")) >= 2
    assert logged(trainer, "dynamic_sampling/kept_groups") == [4.0] * 4
    # half of the prompts give nothing: their groups are generated, counted, and not trained
    assert max(logged(trainer, "dynamic_sampling/discarded_all_wrong")) >= 2
    assert all(
        kept > generated
        for kept, generated in zip(
            logged(trainer, "dynamic_sampling/trained_reward"), logged(trainer, "reward"), strict=True
        )
    )


def test_first_round_generates_the_batch_and_later_ones_what_is_missing(make):
    trainer = make(dynamic_sampling_surplus=0)
    trainer.train()
    order = [prompt for round_ in trainer.prompts_used for prompt in round_]
    missing = 4
    for round_ in trainer.prompts_used:
        assert len(round_) == missing
        missing -= sum(int(prompt[0]) % 2 == 0 for prompt in round_)
        missing = missing or 4
    assert len(set(order)) == len(order) == trainer._prompts.position  # no prompt twice within a pass


def test_metrics_are_over_all_generated_groups(make):
    """With a reward of 1 and 0 alternating in good groups, all of TRL's reward metrics have known values."""

    def reward(prompts, **kwargs):
        return [float(i % 2) if int(p[0]) % 2 == 0 else 0.0 for i, p in enumerate(prompts)]

    trainer = make(reward, max_steps=4)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "reward" in entry]
    prompts = [prompt for round_ in trainer.prompts_used for prompt in round_]
    good = sum(int(prompt[0]) % 2 == 0 for prompt in prompts) / len(prompts)
    assert len(trainer.prompts_used) > 1 and 0 < good < 1
    assert entry["reward"] == pytest.approx(good / 2) == entry["rewards/reward/mean"]
    assert entry["frac_reward_zero_std"] == pytest.approx(1 - good)
    values = torch.tensor([1.0] * round(2 * good * len(prompts)) + [0.0] * round((4 - 2 * good) * len(prompts)))
    assert entry["reward_std"] == pytest.approx(values.std().item()) == entry["rewards/reward/std"]
    assert entry["dynamic_sampling/trained_reward"] == 0.5
    assert entry["dynamic_sampling/trained_reward_std"] == pytest.approx(torch.tensor([0.0, 1.0] * 8).std().item())


def test_at_the_cap_uniform_groups_fill_the_batch_and_it_is_said_once(make):
    trainer = make(zero_reward, max_resample_rounds=2, max_steps=12, calibrated_clip=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(w.message) for w in caught if "resample rounds only 0 of 4" in str(w.message)]
    assert len(said) == 1
    assert trainer.num_cap_hits == 3 and logged(trainer, "dynamic_sampling/cap_hits")[-1] == 3
    assert [len(round_) for round_ in trainer.prompts_used] == [4] * 9
    assert logged(trainer, "dynamic_sampling/discarded_all_wrong") == [12.0] * 3
    assert all(batch["completion_ids"].size(0) == 16 and not batch["advantages"].any() for batch in trainer.batches)


def test_groups_are_judged_by_the_named_reward(make):
    def other(completions, **kwargs):
        return [float(len(text)) + i for i, text in enumerate(completions)]

    by_sum = make([half_uniform_reward, other], max_steps=4)
    by_sum.train()
    assert logged(by_sum, "dynamic_sampling/rounds") == [1.0]  # the other reward always differs
    by_name = make([half_uniform_reward, other], max_steps=4, dynamic_sampling_metric="half_uniform_reward")
    by_name.train()
    assert logged(by_name, "dynamic_sampling/rounds")[0] > 1
    assert logged(by_name, "dynamic_sampling/discarded_all_wrong")[0] > 0


def test_evaluation_is_untouched(make, toy_dataset):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "max_steps": 5}
    with_evaluation = make(trainer={"eval_dataset": toy_dataset.select(range(8))}, **settings)
    with_evaluation.train()
    plain = make(max_steps=5)
    plain.train()
    assert_same(weights(plain), weights(with_evaluation))
    assert with_evaluation.prompts_used == plain.prompts_used
    assert len(logged(with_evaluation, "eval_reward")) == 5
    assert not any(name.startswith("eval_dynamic") for entry in with_evaluation.state.log_history for name in entry)


def test_several_iterations_and_streaming_datasets(make, toy_dataset):
    trainer = make(num_iterations=2, max_steps=16, dataset=toy_dataset.to_iterable_dataset())
    trainer.train()
    assert len(trainer.batches) == 2 and trainer.num_rollouts == 2
    assert all(batch["advantages"].view(4, 4).abs().amax(dim=1).min() > 0.1 for batch in trainer.batches)


@pytest.mark.parametrize("cls", [CalibratedGRPOTrainer, CalibratedDAPOTrainer])
def test_sequence_level_ratios(make, cls):
    """Calibration counts what TRL's loss clips: whole completions, by the exponential of their mean log-ratio."""

    class Checking(cls):
        seen, pooled = [], []

        def after_policy_forward(self, inputs, per_token_logps):
            if self._collector is not None and self._bf16_per_token_logps is not None:
                log_ratio = per_token_logps - inputs["old_per_token_logps"]
                mask = inputs["completion_mask"]
                ratio = torch.exp((log_ratio * mask).sum(-1) / mask.sum(-1))
                counted = (mask.sum(-1) > 0) & (inputs["advantages"] != 0)
                self.seen.append(ratio[counted].double())
            super().after_policy_forward(inputs, per_token_logps)

        def _calibrate(self, pool):
            self.pooled.append(pool)
            super()._calibrate(pool)

    trainer = make(
        cls=Checking, max_steps=16, importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4,
        epsilon_high=4e-4, **({} if cls is CalibratedGRPOTrainer else {"dynamic_sampling": False}),
    )  # fmt: skip
    trainer.train()
    assert trainer.num_calibrations == 2 and len(trainer.pooled) == 2
    pooled = torch.cat([pool.fp8_ratio for pool in trainer.pooled]).sort().values
    assert torch.equal(pooled, torch.cat(trainer.seen).sort().values) and pooled.numel() <= 24
    start = trainer.args.calibration_start
    assert trainer.clip_range.lower != start[0] and 0.97 <= trainer.clip_range.lower <= 0.99985
    assert (trainer.epsilon_low, trainer.epsilon_high) == (
        trainer.clip_range.epsilon_low,
        trainer.clip_range.epsilon_high,
    )


# Resume


@pytest.mark.parametrize("calibrated", [True, False])
def test_resumed_run_equals_the_unbroken_one(make, tmp_path, calibrated):
    # 6 is in mid-rollout: the checkpoint is taken at 8.
    settings = {"max_steps": 16, "save_strategy": "steps", "save_steps": 6, "calibrated_clip": calibrated}
    whole = make(**settings)
    whole.train()
    checkpoint = tmp_path / "run" / "checkpoint-8"
    position = read_state(checkpoint)["dynamic_sampling"]["position"]
    assert position == sum(map(len, whole.prompts_used)) - sum(map(len, used_after(whole, position)))
    resumed = make(**settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same(weights(whole), weights(resumed))
    assert resumed.prompts_used == used_after(whole, position) and len(resumed.batches) == 2
    assert resumed.calibration_history[-1:] == [] or (
        resumed.calibration_history[-1]["lower"] == whole.calibration_history[-1]["lower"]
    )


def used_after(trainer, position):
    """The rounds of `trainer` after its first `position` prompts."""
    used = list(trainer.prompts_used)
    while position > 0:
        position -= len(used.pop(0))
    assert position == 0
    return used


def test_checkpoints_without_or_with_damaged_state(make, tmp_path, caplog):
    first = make(max_steps=4, save_strategy="steps", save_steps=4, calibrated_clip=False)
    first.train()
    path = tmp_path / "run" / "checkpoint-4" / STATE_NAME
    state = json.loads(path.read_text())
    for damage in (-1, 1.5, None):
        path.write_text(json.dumps({**state, "dynamic_sampling": {"position": damage, "num_cap_hits": 0}}))
        with pytest.raises(ValueError, match="state of dynamic sampling cannot be"):
            make(max_steps=8, calibrated_clip=False).train(resume_from_checkpoint=str(path.parent))
    path.unlink()
    resumed = make(max_steps=8, calibrated_clip=False)
    with caplog.at_level("WARNING"):
        resumed.train(resume_from_checkpoint=str(path.parent))
    assert "prompts start over from the dataset's first" in caplog.text
    assert resumed.prompts_used[0] == first.prompts_used[0]


def test_a_rollout_that_fails_uses_no_prompt(make):
    calls = []

    def failing_reward(completions, **kwargs):
        calls.append(len(completions))
        if len(calls) == 2:
            raise RuntimeError("the verifier is down")
        return [0.0] * len(completions)

    trainer = make(failing_reward, calibrated_clip=False)
    with pytest.raises(RuntimeError, match="verifier is down"):
        trainer.train()
    assert len(calls) == 2 and trainer._prompts.position == 0


# Surplus, with the real engine


@pytest.mark.vllm
def test_surplus_is_rescored_by_the_policy_that_trains_it_and_survives_a_resume(make, tmp_path):
    scored = []

    class Checking(Recording):
        def _rescore(self, rows, stale, count):
            before = [dict(row) for row in rows]
            super()._rescore(rows, stale, count)
            scored.append(sum(stale))
            inputs = self._join(rows)
            logps = self.score(inputs).cpu()
            for row, old, was_stale, own in zip(rows, before, stale, logps, strict=True):
                n = row["completion_ids"].numel()
                if not was_stale:
                    assert torch.equal(row["old_per_token_logps"], old["old_per_token_logps"])
                    continue
                torch.testing.assert_close(row["old_per_token_logps"], own[:n], rtol=0, atol=1e-5)
                assert not torch.allclose(row["old_per_token_logps"], old["old_per_token_logps"], atol=1e-3)
                weight = (row["old_per_token_logps"] - row["sampling_per_token_logps"]).exp().clamp(max=2.0)
                torch.testing.assert_close(row["importance_sampling_ratio"], weight)

    settings = {
        "use_vllm": True, "vllm_max_model_length": 32, "max_steps": 24, "dynamic_sampling_surplus": 4,
        "save_strategy": "steps", "save_steps": 4, "learning_rate": 3e-3,
    }  # fmt: skip
    whole = make(cls=Checking, **settings)
    whole.train()
    assert sum(scored) > 0 and whole.num_calibrations == 3
    assert all(batch["advantages"].view(4, 4).abs().amax(dim=1).min() > 0.1 for batch in whole.batches)
    kept = [n for n in range(4, 24, 4) if (tmp_path / "run" / f"checkpoint-{n}" / SURPLUS_NAME).exists()]
    assert kept, "no checkpoint had surplus: the test shows nothing"
    checkpoint = tmp_path / "run" / f"checkpoint-{kept[0]}"
    count = len(load_surplus(checkpoint))
    assert logged(whole, "dynamic_sampling/surplus")[kept[0] // 4 - 1] == count > 0
    resumed = make(cls=Checking, **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    position = read_state(checkpoint)["dynamic_sampling"]["position"]
    assert resumed.prompts_used == used_after(whole, position)
    ids = whole.batches[kept[0] // 4]["completion_ids"][: 4 * count]
    assert torch.equal(resumed.batches[0]["completion_ids"][: 4 * count, : ids.size(1)], ids)


@pytest.mark.vllm
def test_surplus_is_stale_at_once_where_no_weight_corrects_it(make):
    trainer = make(
        use_vllm=True, vllm_max_model_length=32, dynamic_sampling_surplus=4,
        vllm_importance_sampling_mode="sequence_truncate",
    )  # fmt: skip
    trainer.train()
    assert logged(trainer, "dynamic_sampling/surplus") == [0.0] * 2
    assert sum(logged(trainer, "dynamic_sampling/dropped_surplus")) > 0
