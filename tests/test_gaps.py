# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""What alignment is for, on a small model and by the benchmarks' own functions: the gap to the rollout, and drift."""

import sys
from pathlib import Path

import pytest
import torch

from trl_calclip.embedded import build_model, build_tokenizer
from trl_calclip.offline import sample_with_engine


sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import alignment, drift  # noqa: E402
from benchmarks.models import convert, load_masters  # noqa: E402


pytestmark = pytest.mark.slow

RECIPES = ["tensorwise", "rowwise", "blockwise"]  # rowwise_with_gw_hp has rowwise's forward


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A random model whose log-probabilities differ enough between tokens for FP8 to matter."""
    path = str(tmp_path_factory.mktemp("model"))
    model = build_model(seed=0, hidden_size=128, intermediate_size=256, num_hidden_layers=3)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 2:
                param.mul_(3)
    model.bfloat16().save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


@pytest.mark.vllm
@pytest.mark.parametrize("recipe", RECIPES)
def test_alignment_lowers_the_gap_to_the_rollout(checkpoint, recipe):
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 30, (96, 4), generator=generator).tolist()
    scheme = alignment.RECIPES[recipe].vllm_quantization
    rollout = sample_with_engine(checkpoint, scheme, prompts, tokens=32)
    sequences, lengths, logps = rollout.sequences, rollout.lengths, rollout.logps
    assert sum(lengths) > 1000

    def gap(model):
        return alignment.gap(model, sequences, lengths, logps)

    def masters():
        return load_masters(checkpoint, trained=True)

    aligned, _ = gap(convert(masters(), recipe, aligned=True))
    default, _ = gap(convert(masters(), recipe, aligned=False))
    bf16, _ = gap(masters())
    assert aligned < default
    if recipe != "tensorwise":  # its activations have other scales on either side
        assert aligned <= bf16


@pytest.mark.parametrize("recipe", RECIPES)
def test_small_steps_move_fp8_no_more_than_noise_does(checkpoint, recipe):
    sequences = torch.randint(2, 30, (48, 28), generator=torch.Generator().manual_seed(0)).tolist()

    def measure(aligned):
        masters = load_masters(checkpoint, trained=False)
        return drift.measure(
            masters, recipe, aligned=aligned, steps=[1, 8], sequences=sequences, lengths=[24] * 48, rows=12
        )

    ours = measure(aligned=True)
    assert all(outcome.passes for outcome in ours.values()), ours
    assert all(0.005 < outcome.bf16_std < 0.1 for outcome in ours.values())  # the steps were small, and were taken
    if recipe == "rowwise":  # powers of two: BF16 weights lie on the midpoints between FP8 numbers
        theirs = measure(aligned=False)
        assert not any(outcome.passes for outcome in theirs.values()), theirs
        assert theirs[1].std > 3 * ours[1].std
