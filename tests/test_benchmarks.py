# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The benchmarks: their entry point, what they save, the statistics behind their claims on counts whose answer is known.
"""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import digits_reward
from matplotlib.figure import Figure


ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import kernels, miniature, miniature_runs, solver, sync  # noqa: E402
from benchmarks.__main__ import BENCHMARKS, main  # noqa: E402
from benchmarks.clip_counts import paired_bootstrap  # noqa: E402
from benchmarks.measuring import Clock, Turns, fresh, median_interval, rotated, total_ratio  # noqa: E402
from benchmarks.overhead import ARMS, arms, summaries  # noqa: E402
from benchmarks.results import Results, report  # noqa: E402
from trl_calclip import embedded  # noqa: E402


# Entry point


def modules() -> set[str]:
    """Modules of `benchmarks/` that can be run."""
    return {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\ndef main(argv" in path.read_text()}


def test_every_benchmark_is_listed(capsys):
    runnable = modules() - {"__main__"}
    assert runnable == set(BENCHMARKS)
    main([])
    listed = capsys.readouterr().out
    assert all(name in listed for name in BENCHMARKS)


@pytest.mark.parametrize("name", sorted(modules() - {"__main__"}))
def test_every_benchmark_says_how_it_is_run(name, capsys):
    with pytest.raises(SystemExit) as leaving:
        main([name, "--help"])
    assert leaving.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: python -m benchmarks {name} ")
    assert f"\n    python -m benchmarks {name}" in told  # its docstring has a command


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("solvr", "There is no benchmark 'solvr'. Did you mean 'solver'?"),
        ("zzz", f"There is no benchmark 'zzz'. There are: {', '.join(BENCHMARKS)}."),
    ],
)
def test_an_unknown_name_gets_a_sentence(name, sentence):
    with pytest.raises(SystemExit) as leaving:
        main([name])
    assert leaving.value.code == sentence


def test_what_is_reported_is_saved_unrounded(tmp_path, capsys):
    columns = {"tokens [count]": "{tokens:,}", "time": "{seconds:.1f} ± {error:.1f}", "none": "[{nothing:.2f}]"}
    rows = [{"tokens": 1000, "seconds": 0.123456, "error": 1 / 3}, {"tokens": 2000, "seconds": None}]
    report(tmp_path / "new", Results("A table", columns, rows, ["A [note]."]), figure=Figure())
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("1,000", "0.1 ± 0.3", "A [note].", "tokens [count]", "torch 2"))
    assert "[]" not in shown
    saved = json.loads((tmp_path / "new" / "results.json").read_text())
    assert saved["tables"] == [{"title": "A table", "rows": rows, "notes": ["A [note]."]}]
    assert {"hardware", "threads", "versions", "commit", "date", "command"} <= set(saved)
    assert saved["versions"]["trl"].startswith("1.16")
    assert (tmp_path / "new" / "results.png").read_bytes().startswith(b"\x89PNG")


# How it is measured


def test_time_counts_for_the_innermost_part():
    now = [0.0]

    def work(seconds):
        now[0] += seconds

    clock = Clock(lambda: now[0])
    with clock.part("outer"):
        work(1)
        with clock.part("inner"):
            work(2)
            clock.timed("innermost", work)(4)
            work(8)
        work(16)
    work(32)
    assert clock.seconds == {"outer": 17, "inner": 10, "innermost": 4}


def test_threads_take_turns_and_none_waits_for_one_that_failed():
    turns, seen = Turns([0, 1, 1, 0, 2, 1]), []

    def run(who, times):
        for _ in range(times):
            turns.wait(who)
            if who == 2:
                turns.give_up()
                raise ValueError("broken")
            seen.append(who)
            turns.hand_over()

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(run, who, times) for who, times in ((0, 2), (1, 3), (2, 1))]
        running[0].result()
        with pytest.raises(RuntimeError, match="Another thread failed"):
            running[1].result()
        with pytest.raises(ValueError, match="broken"):
            running[2].result()
    assert seen == [0, 1, 1, 0]


def test_every_repeat_runs_every_arm_in_another_order():
    orders = [rotated(["a", "b", "c"], repeat) for repeat in range(6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len({tuple(order) for order in orders}) == 6


@pytest.mark.slow
def test_peak_memory_of_a_fresh_process():
    """A million float32 and as many int64 come out of a sort: 11.4 MiB, besides what it works with."""
    assert 11 <= fresh(solver.peak_mebibytes, "sort", 10**6) < 40


def test_the_medians_interval_covers_it_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    intervals = [median_interval(rng.normal(size=15), draws=500) for _ in range(100)]
    assert 85 <= sum(low <= 0 <= high for low, high in intervals) < 100


def test_the_ratio_of_totals_and_its_interval():
    ratio, low, high = total_ratio([2.0, 2.0, 2.0, 14.0], [2.0, 2.0, 2.0, 4.0])  # one long one among equal ones
    assert ratio == 2.0
    assert low == pytest.approx(1.0, abs=0.01) and 2.5 < high < 3.5
    assert total_ratio([3.0, 6.0], [2.0, 4.0]) == (1.5, 1.5, 1.5)


# Solver


@pytest.mark.parametrize("seed", range(5))
def test_the_grid_search_agrees_with_the_exact_solve_to_within_its_step(seed):
    data = solver.tokens(20_000, seed)
    exact, grid = solver.solve(data).target, solver.grid_search(data)
    assert grid.lower == pytest.approx(exact.lower, abs=1e-3)  # one gap between neighbouring ratios
    assert grid.upper == pytest.approx(exact.upper, abs=solver.GRID_STEP)
    assert exact.lower < 0.78 and exact.upper > 1.3  # well inside the limits: there was something to find


def test_the_grid_search_of_few_tokens_by_hand():
    """Negative ratios 0.6 to 0.9, of which BF16 clips a half; positive masses 1.2 and 1.5, of which BF16 keeps one."""
    fp8, bf16 = [0.6, 0.7, 0.8, 0.9, 1.25, 1.55], [0.7, 0.7, 0.9, 0.9, 1.2, 1.5]
    advantages, ones = [-1.0] * 4 + [1.0] * 2, [1.0] * 6
    data = [solver.torch.tensor(column) for column in (fp8, bf16, advantages, ones, ones)]
    # lower: the median, 0.75. In force 0.65: kept are 0.7 + 0.8 + 0.9 = 2.4; rho = 1.2 / 1.8; target 1.6; 1.25 < 1.6.
    found = solver.grid_search(data)
    assert (found.lower, found.upper) == (pytest.approx(0.75), pytest.approx(1.26))


# Sync and overhead


def test_growth_of_a_straight_line():
    rows = [{"recipe": "rowwise", "parameters": n * 10**6, "sync_min": 0.01 + 0.002 * n} for n in (1, 10, 100)]
    assert sync.growth("rowwise", rows).startswith("rowwise: 10.0 ms + 2.00 ms per million parameters")


def test_ratios_are_those_of_rollouts_of_the_same_round():
    def run(*seconds):
        return {"step": sum(seconds), "memory": 1.0, "rollouts": [(value, 2 * value) for value in seconds]}

    results = {"TRL": [run(10.0, 20.0), run(40.0)], "everything off": [run(11.0, 22.0), run(44.0)]}
    trl, off = summaries(results)
    assert "trl_step" not in trl and off["rollouts"] == 3 and off["step"] == 38.5
    for name in ("trl_step", "trl_wall", "trl_step_median"):
        assert off[name] == pytest.approx(1.1) and off[f"{name}_95"] == pytest.approx((1.1, 1.1), abs=1e-6)
    assert arms(vllm=False)[0] == "TRL" and "TRL" in ARMS


# Kernels


def test_kernels_need_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "cuda_capability", lambda: None)
    with pytest.raises(SystemExit, match=r"tensorwise needs a GPU .* 8\.9 or higher, and this machine has no GPU"):
        main(["kernels"])
    monkeypatch.setattr(kernels, "cuda_capability", lambda: (8, 9))
    with pytest.raises(SystemExit, match=r"rowwise needs .* 9\.0 or higher, and this machine has one with 8\.9"):
        main(["kernels"])


@pytest.mark.slow
def test_kernels_run_emulated_and_claim_nothing(tmp_path, capsys):
    main(["kernels", "--emulate", "--recipes", "tensorwise", "blockwise", "--output", str(tmp_path)])
    (table,) = json.loads((tmp_path / "results.json").read_text())["tables"]
    assert table["title"].startswith("EMULATED, times mean nothing")
    assert "EMULATED" in capsys.readouterr().out
    arms = [(row["mode"], row["recipe"]) for row in table["rows"]]
    assert arms == [(mode, recipe) for mode in ("compiled", "eager") for recipe in ("BF16", "tensorwise", "blockwise")]
    for row in table["rows"]:
        assert "fault" not in row and row["step_ms"] > 0 and row["bf16_pass_ms"] > 0
        if row["recipe"] != "BF16":
            assert row["excluded"] > row["interval"] > row["calibration"] > 0  # passes only ever cost
    kernels.draw(table["rows"]).savefig(tmp_path / "speeds.png")  # drawn with times that mean something only
    assert not (tmp_path / "results.png").exists()


def test_a_kernel_that_fails_is_a_row_with_its_fault(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(kernels, "convert_to_fp8", fail)
    main(["kernels", "--emulate", "--modes", "eager", "--recipes", "rowwise", "--output", str(tmp_path)])
    (table,) = json.loads((tmp_path / "results.json").read_text())["tables"]
    faults = {row["recipe"]: row.get("fault") for row in table["rows"]}
    assert faults == {"rowwise": "RuntimeError: no such kernel", "BF16": None}


# The demo's bootstrap


def test_shares_and_gain_by_hand():
    # tokens, clipped in BF16, in FP8 at the reference, in FP8 calibrated
    counts = np.array([[10, 1, 3, 1], [30, 1, 5, 3]])
    result = paired_bootstrap(counts, draws=1000)
    assert result["completions"] == 2 and result["tokens"] == 40
    assert (result["bf16"], result["fp8_reference"], result["fp8_in_force"]) == (2 / 40, 8 / 40, 4 / 40)
    assert result["gain"] == pytest.approx((8 - 2) / 40 - (4 - 2) / 40)
    assert (result["multiple_reference"], result["multiple_in_force"]) == (4, 2)
    assert result["difference_reference"] == pytest.approx(6 / 40) and result["bf16_clipped"] == 2


def test_no_multiple_of_nothing():
    result = paired_bootstrap(np.array([[10, 0, 3, 1], [30, 0, 5, 3]]), draws=1000)
    assert result["multiple_reference"] is None and result["multiple_in_force_low"] is None
    assert result["difference_in_force"] == 4 / 40 and result["difference_in_force_low"] > 0


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        tokens = rng.integers(5, 30, size=150)
        shares = rng.beta(1, 20, size=150)  # tokens of a completion share their fate
        columns = [tokens, rng.binomial(tokens, 0.02), rng.binomial(tokens, shares), rng.binomial(tokens, 0.02)]
        result = paired_bootstrap(np.stack(columns, axis=1), draws=1000)
        # |1/21 - 0.02| - |0.02 - 0.02|; the second term is small and never negative
        covered += result["gain_low"] <= 1 / 21 - 0.02 <= result["gain_high"] + 0.005
    assert covered >= 85


def test_no_gain_without_a_difference():
    rng = np.random.default_rng(1)
    tokens = rng.integers(5, 30, size=200)
    bf16, fp8 = rng.binomial(tokens, 0.02), rng.binomial(tokens, 0.05)
    result = paired_bootstrap(np.stack([tokens, bf16, fp8, fp8], axis=1), draws=500)
    assert result["gain"] == result["gain_low"] == result["gain_high"] == 0


# The miniature


def test_miniature_runs_what_compares_first():
    runs = miniature.plan(["rowwise", "tensorwise"], [0, 1])
    assert [run[2:] for run in runs[:4]] == [
        ("BF16", 0), ("FP8, fixed", 0), ("FP8, calibrated", 0), ("BF16, FP8 rollout", 0)
    ]  # fmt: skip
    assert len(runs) == len({miniature.name_of(*run) for run in runs}) == 12
    # BF16 throughout has no recipe: one run serves all
    assert miniature.name_of("grpo", "rowwise", "BF16", 1) == miniature.name_of("grpo", "blockwise", "BF16", 1)


@pytest.mark.parametrize(("missed_tokens", "inside"), [(0, True), (1, True), (-1, True), (2, False), (40, False)])
def test_target_is_reached_to_one_token(missed_tokens, inside):
    record = {"alpha_low_bf16": 0.01, "num_negative_tokens": 1000}
    assert miniature.reached({**record, "clip_frac_low_neg_fp8_target": 0.01 + missed_tokens / 1000}) is inside


def digits(completions, entry, **columns) -> list[float]:
    return digits_reward(completions)


def miniature_result(arm: str, seed: int, reward: float) -> dict:
    curves = {name: [[1, 2], [0.2, 0.1]] for name in ("entropy", "completions/mean_length")}
    curves |= {f"clip_ratio/{side}_mean": [[1, 2], [0.01, 0.03]] for side in ("low", "high")}
    return {"loss": "grpo", "recipe": "rowwise", "arm": arm, "seed": seed, "rewards": [reward, reward + 0.2],
            "curves": curves, "clip_range": [0.9, 1.1]}  # fmt: skip


def test_miniature_pairs_differences_by_seed():
    bf16_runs = [miniature_result("BF16", seed, 0.1 * seed) for seed in (0, 1, 2)]
    fp8_runs = [miniature_result("FP8, fixed", seed, reward) for seed, reward in ((1, 0.15), (0, 0.01))]
    groups = {("grpo", "", "BF16"): bf16_runs, ("grpo", "rowwise", "FP8, fixed"): fp8_runs}
    bf16, fp8 = miniature.reward_table(groups, {0: 0.05, 1: 0.05, 2: 0.05}).rows
    assert bf16["reward"] == pytest.approx(0.2) and bf16["reward_sd"] == pytest.approx(0.1) and "delta" not in bf16
    assert fp8["delta"] == pytest.approx(0.03) and fp8["gain"] == pytest.approx(0.13)
    # differences 0.05 and 0.01: standard error 0.02, Student's quantile with one degree of freedom 12.706
    assert fp8["delta_high"] - fp8["delta"] == pytest.approx(0.02 * 12.706, rel=1e-4)
    assert fp8["low_clip"] == pytest.approx(0.02) and fp8["entropy_last"] == pytest.approx(0.1)


@pytest.fixture
def small_miniature(toy_path, tmp_path, monkeypatch):
    """The miniature with three rollouts of a random model."""
    text = miniature_runs.CONFIG.read_text()
    for old, new in {"max_steps: 600": "max_steps: 12", "max_completion_length: 96": "max_completion_length: 12",
                     "calibration_interval: 5": "calibration_interval: 1", "per_device_train_batch_size: 32":
                     "per_device_train_batch_size: 8", "calibration_min_tokens: 300": "calibration_min_tokens: 5",
                     "learning_rate: 2.0e-5": "learning_rate: 1.0e-3"}.items():  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    config = tmp_path / "small.yaml"
    config.write_text(text)
    monkeypatch.setattr(miniature_runs, "CONFIG", config)
    monkeypatch.setattr(miniature_runs, "HELD_OUT", 4)
    monkeypatch.setattr(miniature_runs, "warm_start", lambda seed, output: toy_path)
    monkeypatch.setattr(embedded, "arithmetic_reward", digits)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_stopped_run_of_the_miniature_has_no_result_and_goes_on(small_miniature, tmp_path, monkeypatch):
    def stopping(completions, entry, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return digits(completions, entry)

    path = tmp_path / miniature.name_of("grpo", "rowwise", "FP8, fixed", 0) / "result.json"
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "arithmetic_reward", stopping)
        with pytest.raises(SystemExit, match="Stopped at step 4 of 12"):
            miniature_runs.run_one("grpo", "rowwise", "FP8, fixed", 0, tmp_path)
    assert not path.exists()
    miniature_runs.run_one("grpo", "rowwise", "FP8, fixed", 0, tmp_path)
    assert json.loads(path.read_text())["curves"]["reward"][0] == [1, 5, 9]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("arm", ["BF16", "FP8, lower bound only", "FP8, calibrated"])
def test_miniature_measures_and_moves_what_the_arm_says(arm, small_miniature, tmp_path):
    miniature_runs.run_one("grpo", "rowwise", arm, 0, tmp_path)
    result = json.loads((tmp_path / miniature.name_of("grpo", "rowwise", arm, 0) / "result.json").read_text())
    assert len(result["rewards"]) == 4 and len(result["curves"]["reward"][1]) == 3
    batches = miniature.batches_of(
        tmp_path, {**result, "calibration_history": [{}] * 4 + result["calibration_history"]}
    )
    if arm == "BF16":
        assert not batches and result["clip_range"] == pytest.approx([0.95, 1.06])
        return
    assert [record["rollout"] for record, _ in batches] == [0, 1, 2]
    assert all(0 < counts[:, 0].sum() >= counts[:, 3].sum() for _, counts in batches)
    lower, upper = result["clip_range"]
    if arm == "FP8, lower bound only":
        assert (lower, upper) == pytest.approx((0.9, 1.06))
    else:
        assert lower != pytest.approx(0.9) and upper != pytest.approx(1.2)
