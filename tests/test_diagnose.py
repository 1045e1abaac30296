# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The diagnosis: numbers that must come out, and verdicts on numbers that were made."""

import dataclasses
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from trl_calclip import ClipRange
from trl_calclip.diagnose import Settings, _layers, diagnose, judge, rows
from trl_calclip.fp8.linear import convert_to_fp8
from trl_calclip.fp8.recipes import RECIPES
from trl_calclip.offline import completion_logps, sample_with_model


PROMPTS = [[4 + index % 10, 13] for index in range(12)]
SMALL = Settings(tokens=8, use_engine=False)


def test_without_moving_there_is_no_ratio_and_no_verdict_against(toy_path):
    found = diagnose(toy_path, "rowwise", PROMPTS, dataclasses.replace(SMALL, learning_rate=0.0))
    assert found.bf16_ratio_std == 0.0 and found.errors["ratio_noise_std"] == 0.0
    assert found.errors["prob_error_fp8"] > 0
    assert found.clip["overclip_low_frac_reference"] == 0.0
    assert found.verdict == "fits"
    # FP8 clips as BF16 does: the lower bound stays where it is.
    assert found.calibrated.lower == pytest.approx(0.8, abs=1e-6)


def test_numbers_of_a_diagnosis(toy_path):
    stages = []
    settings = dataclasses.replace(SMALL, learning_rate=1e-3, per_layer=True)
    found = diagnose(toy_path, "rowwise", PROMPTS, settings, stages.append)
    assert stages[:4] == ["load", "rollout", "old policy", "BF16 noise floor"]
    assert 0 < found.num_negative_tokens < found.num_tokens <= 9 * 8  # a quarter of the completions is on-policy
    assert found.bf16_ratio_std > 10 * found.bf16_floor_std
    assert found.errors["ratio_noise_std"] > 0 and math.isnan(found.gap) and found.mismatch == {}
    assert set(found.layers) == {"model.layers.0", "model.layers.1"}
    assert all(0 < value < 2 for value in found.layers.values())
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["gap"] is None
    assert dict(rows(found))["verdict"] == found.verdict


@pytest.mark.vllm
def test_engine_and_trainer_agree(toy_path):
    found = diagnose(toy_path, "rowwise", PROMPTS, dataclasses.replace(SMALL, use_engine=True))
    assert 0 <= found.gap < 0.02
    assert found.mismatch["rollout_corr/rollout_is_eff_sample_size"] > 0.99


def test_too_few_completions_are_refused(toy_path):
    with pytest.raises(ValueError, match="3 completions in 4 updates"):
        diagnose(toy_path, "rowwise", PROMPTS[:3], SMALL)


@pytest.fixture(scope="module")
def healthy(toy_path):
    return diagnose(toy_path, "rowwise", PROMPTS, SMALL)


def changed(found, *, clip=None, **changes):
    return dataclasses.replace(found, clip={**found.clip, **(clip or {})}, **changes)


def test_verdicts(healthy):
    assert judge(healthy, SMALL)[0] == "fits"
    over = {"overclip_low_frac_reference": 0.09, "overclip_high_frac_reference": 0.07}
    verdict, reason = judge(changed(healthy, clip=over, calibrated=ClipRange(0.7, 1.5)), SMALL)
    assert verdict == "calibrate" and "9.0% of the negative" in reason and "[0.700, 1.500]" in reason
    assert "near the edge" not in reason
    verdict, reason = judge(changed(healthy, clip=over, calibrated=ClipRange(0.52, 1.5)), SMALL)
    assert verdict == "calibrate" and "near the edge of the search range, 0.5" in reason
    verdict, reason = judge(changed(healthy, clip=over, calibrated=ClipRange(0.505, 1.5)), SMALL)
    assert verdict == "avoid" and "ends at its limit of 0.5" in reason
    mismatch = {"rollout_corr/k3_kl": 0.2, "rollout_corr/rollout_is_eff_sample_size": 0.9}
    assert judge(changed(healthy, mismatch=mismatch), SMALL)[0] == "avoid"
    errors = {**healthy.errors, "nonfinite_frac": 0.01}
    assert judge(changed(healthy, errors=errors), SMALL)[0] == "avoid"
    assert judge(changed(healthy, num_negative_tokens=0), SMALL)[0] == "avoid"


def test_layers_are_found_by_their_number(toy_path):
    model = AutoModelForCausalLM.from_pretrained(toy_path)
    names = convert_to_fp8(model, RECIPES["rowwise"], emulate=True)
    groups = _layers(model)
    assert list(groups) == ["model.layers.0", "model.layers.1"]
    assert sum(map(len, groups.values())) == len(names)


def test_sampling_without_an_engine(toy_path):
    model = AutoModelForCausalLM.from_pretrained(toy_path).eval()
    state = torch.get_rng_state()
    rollout = sample_with_model(model, [[4, 13], [5, 14, 6]] * 8, 12, rows=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(1 <= length <= 12 for length in rollout.lengths)
    eos = model.generation_config.eos_token_id
    for sequence, length in zip(rollout.sequences, rollout.lengths, strict=True):
        completion = sequence[-length:]
        assert eos not in completion[:-1] and (length == 12 or completion[-1] == eos)
    assert len({tuple(sequence) for sequence in rollout.sequences}) > 12
    scores = completion_logps(model, rollout.sequences, rollout.lengths)
    assert [len(score) for score in scores] == rollout.lengths and all((score < 0).all() for score in scores)
