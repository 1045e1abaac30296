# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The paper's main table in miniature: BF16, BF16 training with FP8 rollout, FP8 with fixed bounds, FP8 with the lower
bound alone relaxed, FP8 calibrated, per recipe, with GRPO and DAPO's loss, over several seeds.

    python -m benchmarks miniature                                # everything, in the order of the stages; it resumes
    python -m benchmarks miniature --stages rowwise --seeds 0 1
    python -m benchmarks miniature --report                       # the tables of what is there

Everything else is equal: the same warm start, prompts, seeds, engine and updates. A toy's FP8 noise is a fraction of a
language model's, so the regime is scaled: `miniature.yaml` narrows the reference bounds, and with them the largest
steps and the start, by one factor, until FP8 clips about as many times as often as BF16 as it does in the paper. The
BF16 arms sample from the same vLLM engine as the others, loaded in BF16.

The policies are compared in BF16 on held-out prompts, whatever they were trained in. Clip shares are those of FP8
against BF16 at calibration batches, which the arms with fixed bounds take too, without moving their bounds; the first
ones, in which the bounds still travel from their start, are left out. Intervals are over seeds for rewards, and over
completions for clip shares.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import scipy.stats
from matplotlib.figure import Figure

from benchmarks.clip_counts import paired_bootstrap
from benchmarks.miniature_runs import ARMS, HELD_OUT, SAMPLES, name_of, run_one, start_reward
from benchmarks.results import Results, argument_parser, report
from trl_calclip.report import first_and_last_tenth, mean_share
from trl_calclip.report_panels import COLORS


STAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "rowwise": ("grpo", "rowwise", ("BF16", "FP8, fixed", "FP8, calibrated", "BF16, FP8 rollout")),
    "tensorwise": ("grpo", "tensorwise", ("FP8, fixed", "FP8, calibrated")),
    "blockwise": ("grpo", "blockwise", ("FP8, fixed", "FP8, calibrated")),
    "lower": ("grpo", "rowwise", ("FP8, lower bound only",)),
    "dapo": ("dapo", "rowwise", ("BF16", "FP8, fixed", "FP8, calibrated")),
}
TRANSIENT = 4  # calibrations that the bounds need at most from their start to the reference


def plan(stages: list[str], seeds: list[int]) -> list[tuple[str, str, str, int]]:
    """Runs in their order: stage by stage, and within a stage seed by seed, so that what is there compares."""
    runs = [
        (loss, recipe, arm, seed)
        for loss, recipe, arms in (STAGES[stage] for stage in stages)
        for seed in seeds
        for arm in arms
    ]
    return list(dict.fromkeys(runs))


def load(output: Path, runs: list[tuple[str, str, str, int]]) -> list[dict]:
    """Results of those runs that are finished."""
    paths = [output / name_of(*run) / "result.json" for run in runs]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def batches_of(output: Path, result: dict) -> list[tuple[dict, np.ndarray]]:
    """Records of the calibration batches after the transient, each with its `(completions, 4)` `completion_counts`."""
    path = output / name_of(*(result[name] for name in ("loss", "recipe", "arm", "seed"))) / "counts.jsonl"
    if not path.exists():
        return []
    # A resumed run repeats the rollouts since its checkpoint.
    counts = {record["rollout"]: record for record in map(json.loads, path.read_text().splitlines())}
    history = result["calibration_history"][TRANSIENT:]
    return [
        ({**counts[record["rollout"]], **record}, np.array(counts[record["rollout"]]["counts"])) for record in history
    ]


def reached(record: dict) -> bool:
    """Whether some bound inside the limits clips in FP8 what BF16 clips, to one token."""
    missed = record["clip_frac_low_neg_fp8_target"] - record["alpha_low_bf16"]
    return abs(missed) * record["num_negative_tokens"] < 1.5


def mean_interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of a mean by Student's t; NaN for a single value."""
    return scipy.stats.t.interval(0.95, len(values) - 1, np.mean(values), scipy.stats.sem(values))


def reward_table(groups: dict[tuple[str, str, str], list[dict]], starts: dict[int, float]) -> Results:
    """One row per arm: held-out reward, entropy, length, clip share."""
    table = Results(
        "The paper's table in miniature: policies compared in BF16 on held-out prompts",
        {
            "loss": "{loss}",
            "recipe": "{recipe}",
            "arm": "{arm}",
            "seeds": "{seeds}",
            "reward": "{reward:.3f}",
            "sd over seeds": "{reward_sd:.3f}",
            "gain over the warm start": "{gain:+.3f}",
            "minus BF16 [95 %]": "{delta:+.3f} [{delta_low:+.3f}, {delta_high:+.3f}]",
            "entropy": "{entropy_first:.3f} → {entropy_last:.3f}",
            "length": "{length:.1f}",
            "low clips": "{low_clip:.2%}",
            "high clips": "{high_clip:.2%}",
            "L, H at the end": "{lower:.3f}, {upper:.3f}",
        },
    )
    for (loss, recipe, arm), results in groups.items():
        rewards = {result["seed"]: float(np.mean(result["rewards"])) for result in results}
        curves = {name: [result["curves"][name][1] for result in results] for name in results[0]["curves"]}
        tenths = [first_and_last_tenth(values) for values in curves["entropy"]]
        row = {
            "loss": loss, "recipe": recipe, "arm": arm, "seeds": len(results),
            "reward": np.mean(list(rewards.values())),
            "reward_sd": np.std(list(rewards.values()), ddof=1) if len(rewards) > 1 else None,
            "gain": np.mean([reward - starts[seed] for seed, reward in rewards.items()]),
            "entropy_first": np.mean([first for first, _ in tenths]),
            "entropy_last": np.mean([last for _, last in tenths]),
            "length": np.mean([first_and_last_tenth(values)[1] for values in curves["completions/mean_length"]]),
            "low_clip": np.mean([np.mean(values) for values in curves["clip_ratio/low_mean"]]),
            "high_clip": np.mean([np.mean(values) for values in curves["clip_ratio/high_mean"]]),
            "lower": np.mean([result["clip_range"][0] for result in results]),
            "upper": np.mean([result["clip_range"][1] for result in results]),
        }  # fmt: skip
        bf16 = {result["seed"]: float(np.mean(result["rewards"])) for result in groups.get((loss, "", "BF16"), [])}
        paired = [reward - bf16[seed] for seed, reward in rewards.items() if seed in bf16]
        if arm != "BF16" and len(paired) > 1:
            row["delta"] = np.mean(paired)
            row["delta_low"], row["delta_high"] = mean_interval(paired)
        table.rows.append(
            {name: value.item() if isinstance(value, np.floating) else value for name, value in row.items()}
        )
    table.notes = [
        f"{HELD_OUT} prompts, {SAMPLES} completions each; warm start {np.mean(list(starts.values())):.3f}. "
        "Differences are paired by seed, their interval is Student's over seeds. Entropy, nats per token: first → "
        "last tenth of the rollouts; length: last tenth; clips: share of all tokens, over all updates."
    ]
    return table


def clip_table(output: Path, groups: dict[tuple[str, str, str], list[dict]]) -> Results:
    """One row per FP8 arm: what the lower bound clips, in BF16 and in FP8."""
    interval = "{{{0}:.2f}} [{{{0}_low:.2f}}, {{{0}_high:.2f}}]"
    table = Results(
        "Negative-advantage tokens under the lower bound, at held-out calibration batches",
        {
            "loss": "{loss}",
            "recipe": "{recipe}",
            "arm": "{arm}",
            "batches": "{batches} of {of_batches}",
            "tokens": "{tokens:,}",
            "BF16 clips": "{bf16_clipped:,} ({bf16:.2%})",
            "FP8, reference bounds": "{fp8_reference:.2%}",
            "of BF16's [95 %]": interval.format("multiple_reference"),
            "FP8, bounds in force": "{fp8_in_force:.2%}",
            "of BF16's, in force [95 %]": interval.format("multiple_in_force"),
            "std log r_bf16": "{bf16_std:.3f}",
            "std of FP8's noise": "{noise_std:.3f}",
            "over-clips in entropy over 0.5": "{high_entropy:.0%}",
        },
    )
    for (loss, recipe, arm), results in groups.items():
        batches = [batch for result in results for batch in batches_of(output, result)]
        inside = [counts for record, counts in batches if reached(record) or not ARMS[arm].moves]
        if not inside:
            continue
        history = [record for record, _ in batches]
        over = sum(mean_share(history, f"entropy_bin/{label}/overclip_low_part") for label in ("0.5-1", "over-1"))
        table.rows.append({
            "loss": loss, "recipe": recipe, "arm": arm, **paired_bootstrap(np.concatenate(inside)),
            "batches": len(inside), "of_batches": len(batches), "high_entropy": over,
            "bf16_std": float(np.mean([record["bf16_std"] for record in history])),
            "noise_std": float(np.mean([record["ratio_noise_std"] for record in history])),
        })  # fmt: skip
    table.notes = [
        f"The bounds in force come from earlier batches. The first {TRANSIENT} calibrations of each run are left out; "
        "so are, where bounds move, batches for which no bound inside the limits clips as often as BF16.",
        "Intervals: bootstrap over completions.",
    ]
    return table


def draw(groups: dict[tuple[str, str, str], list[dict]]) -> Figure:
    """Courses of the arms, one column per recipe; thin lines are seeds."""
    columns = list(dict.fromkeys((loss, recipe) for loss, recipe, arm in groups if arm != "BF16"))
    rows = {"reward": "reward", "entropy": "entropy, nats", "clip_ratio/low_mean": "low clips, share of tokens"}
    figure = Figure(figsize=(6 * len(columns), 8), layout="constrained")
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharey="row")
    for column, (loss, recipe) in enumerate(columns):
        for row, (metric, label) in enumerate(rows.items()):
            axis = axes[row, column]
            for color, arm in zip(COLORS, ARMS, strict=False):
                results = groups.get((loss, "" if arm == "BF16" else recipe, arm), [])
                smooth = [moving_mean(*result["curves"][metric]) for result in results]
                for steps, values in smooth:
                    axis.plot(steps, values, color=color, linewidth=0.5, alpha=0.5)
                if smooth:
                    mean = np.mean([values for _, values in smooth], axis=0)
                    axis.plot(smooth[0][0], mean, color=color, linewidth=1.8, label=arm)
            axis.grid(alpha=0.25)
            axis.set_ylabel(label if column == 0 else "")
        axes[0, column].set_title(f"{recipe}, {loss}")
        axes[-1, column].set_xlabel("step")
    axes[0, 0].legend(frameon=False, fontsize=8)
    return figure


def moving_mean(steps: list[int], values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Means over a tenth of the values, each at the middle of its window."""
    window = max(1, len(values) // 10)
    means = np.convolve(values, np.full(window, 1 / window), mode="valid")
    return np.array(steps)[window // 2 :][: len(means)], means


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser("miniature", __doc__)
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--report", action="store_true", help="run nothing, report what is there")
    parser.add_argument("--one", nargs=4, metavar=("LOSS", "RECIPE", "ARM", "SEED"), help="one run, in this process")
    options = parser.parse_args(argv)
    if options.one is not None:
        loss, recipe, arm, seed = options.one
        run_one(loss, recipe, arm, int(seed), options.output)
        return
    runs = plan(options.stages, options.seeds)
    for run in runs:
        if options.report or (options.output / name_of(*run) / "result.json").exists():
            continue
        command = [sys.executable, "-m", "benchmarks", "miniature", "--output", str(options.output), "--one"]
        subprocess.run([*command, *map(str, run)], check=True)
    results = load(options.output, runs)
    if not results:
        sys.exit(f"There is no finished run in {options.output}.")
    groups: dict[tuple[str, str, str], list[dict]] = {}
    for result in results:
        recipe = "" if result["arm"] == "BF16" else result["recipe"]
        groups.setdefault((result["loss"], recipe, result["arm"]), []).append(result)
    starts = {seed: start_reward(seed, options.output) for seed in {result["seed"] for result in results}}
    report(
        options.output,
        reward_table(groups, starts),
        clip_table(options.output, groups),
        figure=draw(groups),
    )


if __name__ == "__main__":
    main()
