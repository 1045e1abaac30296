# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The table and the picture at the end of a run, from numbers that can be checked by hand."""

import math

import matplotlib.image
import pytest
from rich.console import Console

from trl_calclip import ClipRange
from trl_calclip.report import first_and_last_tenth, mean_share, plot_run, series, summary_table


REFERENCE = ClipRange(0.8, 1.24)
RECORDS = [
    {
        "step": step, "lower": 0.65, "upper": 1.7, "lower_target": 0.7, "upper_target": 1.4, "alpha_low_bf16": 0.01,
        "clip_frac_low_neg_fp8_reference": 0.05, "clip_frac_low_neg_fp8": 0.02, "overclip_low_frac_reference": 0.04,
        "overclip_low_frac": 0.01, "num_negative_tokens": tokens, "bf16_pass_seconds": 0.5,
    }
    for step, tokens in ((4, 100), (12, 300), (20, 100))
]  # fmt: skip
LOGS = [
    {"step": step, "reward": step / 100, "entropy": 0.5, "calclip/lower": 0.6, "calclip/upper": 1.8,
     "sampling/sampling_logp_difference/mean": 0.01}
    for step in range(1, 41)
] + [{"step": 40, "train_runtime": 30.0}]  # fmt: skip


def test_series_leaves_out_what_is_not_there():
    assert series([{"step": 1, "a": 2.0}, {"step": 2}, {"step": 3, "a": None}], "a") == ([1], [2.0])


def test_tenths():
    assert first_and_last_tenth(list(range(40))) == (1.5, 37.5)
    assert first_and_last_tenth([3.0]) == (3.0, 3.0)
    assert all(math.isnan(value) for value in first_and_last_tenth([]))


def test_shares_are_weighted_by_tokens():
    records = [
        {"x": 0.1, "num_negative_tokens": 100},
        {"x": 0.5, "num_negative_tokens": 300},
        {"x": None, "num_negative_tokens": 5},
    ]
    assert mean_share(records, "x") == pytest.approx(0.4)
    assert math.isnan(mean_share([], "x"))


def render(table) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(table)
    return console.export_text()


def test_summary():
    text = render(summary_table(LOGS, RECORDS, ClipRange(0.7, 1.5), REFERENCE))
    assert "0.025 → 0.385" in text
    assert "[0.600, 1.800] → [0.700, 1.500]" in text and "reference [0.800, 1.240]" in text
    assert "400" in text  # tokens of the later calibrations
    assert "4.00 % → 1.00 %" in text
    assert "0.0100 nats" in text
    assert "5.00 % of 30 s" in text


def test_summary_of_a_run_without_calibration():
    text = render(summary_table(LOGS, [], REFERENCE, REFERENCE))
    assert "0.025 → 0.385" in text and "Calibrations" not in text


def test_picture(tmp_path):
    path = tmp_path / "deep" / "run.png"
    plot_run(path, LOGS, RECORDS, REFERENCE)
    image = matplotlib.image.imread(path)
    assert image.shape[0] > 500 and image.shape[1] > 1000
    assert image[..., :3].std() > 0.05


def test_picture_of_an_empty_run(tmp_path):
    plot_run(tmp_path / "run.png", [], [], REFERENCE)
    assert (tmp_path / "run.png").stat().st_size > 10_000
