# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
One HTML page and pictures from one or several runs, overlaid.

It reads `trainer_state.json` and `calclip_state.json`, no tracker's account. The page needs no network and no script:
pictures are inline SVG that take the page's text colour, so that one drawing serves light and dark.
"""

import html
import importlib.metadata
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .checkpoint import read_state
from .health import Alarm, HealthMonitor
from .health_settings import HealthArguments
from .report import first_and_last_tenth, mean_share, series
from .report_panels import COLORS, PANELS, Panel, label_text


STATE_FILE = "trainer_state.json"
# A colour that nothing else has; it becomes the page's text colour.
_INK = "#010203"
# The layout is settled before the ticks are: without it a wider tick label would be cut off.
_WHOLE: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 0.05}


@dataclass(frozen=True)
class Run:
    """
    What a run left behind.

    Args:
        name (`str`): What to call it.
        log_history (`list[dict]`): The trainer's log entries.
        calibrations (`list[dict]`): One record per calibration; empty for a run that did not calibrate.
        num_rollouts (`int` or `None`): Rollouts, where the run counted them.
    """

    name: str
    log_history: list[dict[str, Any]]
    calibrations: list[dict[str, Any]]
    num_rollouts: int | None

    @property
    def alarms(self) -> list[Alarm]:
        """What the alarms say to the log history, at their default thresholds."""
        monitor = HealthMonitor(HealthArguments())
        return [alarm for entry in self.log_history for alarm in monitor.update(entry, entry["step"])]


def read_run(directory: str | Path, name: str | None = None) -> Run:
    """
    Read a run from its output directory, or from its newest checkpoint where the run did not get to the end.

    Raises:
        FileNotFoundError: If neither holds a `trainer_state.json`.
        ValueError: If a file is damaged.
    """
    directory = Path(directory)
    checkpoints = sorted(directory.glob("checkpoint-*"), key=lambda path: _number_in(path.name))
    for place in [directory, *reversed(checkpoints)]:
        if (place / STATE_FILE).is_file():
            break
    else:
        raise FileNotFoundError(
            f"{directory} holds no {STATE_FILE}, nor does a checkpoint in it. Give the `output_dir` of a run that has "
            "saved a checkpoint, or called `trainer.save_state()` at its end."
        )
    try:
        history = json.loads((place / STATE_FILE).read_text())["log_history"]
        history = [entry for entry in history if "step" in entry]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place / STATE_FILE} is damaged ({error!r}).") from error
    state = read_state(str(place)) or {}
    return Run(
        name=directory.resolve().name if name is None else name,
        log_history=history,
        calibrations=state.get("calibration_history", []),
        num_rollouts=state.get("num_rollouts"),
    )


def _number_in(name: str) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1


def write_report(
    directories: Sequence[str | Path], output: str | Path, *, names: Sequence[str] | None = None
) -> list[Path]:
    """
    Write `report.html`, `report.png` with all panels, and one picture per panel.

    Args:
        directories (`Sequence[str | Path]`): Output directories of runs.
        output (`str` or `Path`): Directory to write.
        names (`Sequence[str]`, *optional*): What to call the runs.

    Returns:
        `list[Path]`: What was written, the page first.

    Raises:
        FileNotFoundError, ValueError: See `read_run`; also if there is not one name per run.
    """
    if names is not None and len(names) != len(directories):
        raise ValueError(f"{len(names)} names for {len(directories)} runs: give one for each.")
    if len(directories) > len(COLORS):
        raise ValueError(f"{len(directories)} runs: more than {len(COLORS)} cannot be told apart in one picture.")
    runs = [read_run(path, names[index] if names else None) for index, path in enumerate(directories)]
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    panels = [panel for panel in PANELS if panel.has_data(runs)]
    written = [output / "report.html", output / "report.png"]
    written[0].write_text(page(runs, panels), encoding="utf-8")
    _overview(runs, panels, written[1])
    for panel in panels:
        written.append(output / f"{panel.key}.png")
        figure = _figure(panel, runs)
        _add_legend(figure, runs)
        figure.savefig(written[-1], dpi=130, **_WHOLE)
    return written


def _figure(panel: Panel, runs: Sequence[Run]) -> Figure:
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panel.draw(figure.subplots(), runs)
    return figure


def _add_legend(figure: Figure, runs: Sequence[Run]) -> None:
    handles = [Line2D([], [], color=color, linewidth=3) for color, _ in zip(COLORS, runs, strict=False)]
    labels = [label_text(run.name) for run in runs]
    figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(runs)), frameon=False)


def _overview(runs: Sequence[Run], panels: Sequence[Panel], path: Path) -> None:
    columns = 2
    lines = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(12, 3.4 * lines + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for axis in list(axes)[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(figure.axes, panels, strict=False):
        panel.draw(axis, runs)
        axis.set_title(panel.title, fontsize=11)
    _add_legend(figure, runs)
    figure.savefig(path, dpi=90, **_WHOLE)


def svg(panel: Panel, runs: Sequence[Run]) -> str:
    """A panel as an SVG element: text in the page's colour, transparent ground, ids of its own, an alt text."""
    colored = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    ink: dict[Any, str] = {name: _INK for name in colored}
    buffer = io.StringIO()
    with matplotlib.rc_context({**ink, "svg.fonttype": "path", "svg.hashsalt": panel.key, "font.size": 12}):
        _figure(panel, runs).savefig(buffer, format="svg", transparent=True, metadata={"Date": None}, **_WHOLE)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = text.replace(_INK, "currentColor")
    text = re.sub(r'\bid="', f'id="{panel.key}-', text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{panel.key}-", text)
    alt = html.escape(panel.alt(runs), quote=True)
    # Not a pattern's replacement: a backslash in a name would be one there.
    box = re.search(r'viewBox="([^"]*)"', text)
    assert box is not None
    return f'<svg viewBox="{box[1]}" role="img" aria-label="{alt}">' + text[text.index(">") + 1 :]


def page(runs: Sequence[Run], panels: Sequence[Panel]) -> str:
    """The whole page."""
    names = [html.escape(run.name) for run in runs]
    key = "".join(
        f'<li><span class="swatch" style="background:{color}"></span>{name}</li>'
        for color, name in zip(COLORS, names, strict=False)
    )
    figures = "".join(
        f'<figure id="panel-{panel.key}"><h2>{html.escape(panel.title)}</h2>{svg(panel, runs)}'
        f"<figcaption>{html.escape(panel.caption)}</figcaption></figure>"
        for panel in panels
    )
    missing = [panel.title for panel in PANELS if panel not in panels]
    absent = f"<p>Not logged in these runs: {html.escape('; '.join(missing))}.</p>" if missing else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Report: {', '.join(names)}</title><style>{_STYLE}</style></head>\n<body><main>"
        f'<h1>FP8 reinforcement learning</h1><ul class="key">{key}</ul>'
        f'<div class="scroll"><table>{_table(runs, names)}</table></div>{_alarms(runs, names)}'
        f'<div class="panels">{figures}</div>{absent}'
        f"<footer>trl-calclip {importlib.metadata.version('trl-calclip')}</footer></main></body></html>\n"
    )


def _table(runs: Sequence[Run], names: Sequence[str]) -> str:
    head = "<tr><td></td>" + "".join(f'<th scope="col">{name}</th>' for name in names) + "</tr>"
    columns = [summary(run) for run in runs]
    rows = "".join(
        f'<tr><th scope="row">{html.escape(label)}</th>'
        + "".join(f"<td>{html.escape(column[label])}</td>" for column in columns)
        + "</tr>"
        for label in columns[0]
    )
    return f"<thead>{head}</thead><tbody>{rows}</tbody>"


def summary(run: Run) -> dict[str, str]:
    """A run in a few numbers, as text; "-" where it has none."""

    def ends(name: str, digits: int = 3) -> str:
        first, last = first_and_last_tenth(series(run.log_history, name)[1])
        return "-" if math.isnan(first) else f"{first:.{digits}f} → {last:.{digits}f}"

    def mean(name: str, form: str) -> str:
        values = series(run.log_history, name)[1]
        return form.format(sum(values) / len(values)) if values else "-"

    def over(name: str) -> str:
        value = mean_share(done, name)
        return "-" if math.isnan(value) else f"{value:.2%}"

    done = [record for record in run.calibrations if record.get("alpha_low_bf16") is not None]
    steps = [entry["step"] for entry in run.log_history]
    runtime = series(run.log_history, "train_runtime")[1]
    return {
        "Optimizer steps": str(max(steps, default=0)),
        "Mean reward, first → last tenth": ends("reward"),
        "Entropy, nats per token": ends("entropy"),
        "Lower bound": ends("calclip/lower"),
        "Upper bound": ends("calclip/upper"),
        "Negative tokens clipped in BF16, reference bounds": over("alpha_low_bf16"),
        "Negative tokens clipped in FP8, reference bounds": over("clip_frac_low_neg_fp8_reference"),
        "Negative tokens clipped in FP8, bounds in force": over("clip_frac_low_neg_fp8"),
        "Mismatch KL (k3), nats per token": mean("rollout_corr/k3_kl", "{:.5f}"),
        "token_mult_prob_error": mean("token_mult_prob_error", "{:.4f}"),
        "Training time": f"{sum(runtime):.0f} s" if runtime else "-",
        "Alarms": str(len(run.alarms)),
    }


def _alarms(runs: Sequence[Run], names: Sequence[str]) -> str:
    items = "".join(
        f"<details><summary>{name}: {html.escape(alarm.name)} at step {alarm.step}</summary>"
        f"<p>{html.escape(alarm.message).replace(chr(10), '<br>')}</p></details>"
        for run, name in zip(runs, names, strict=True)
        for alarm in run.alarms
    )
    return f"<section><h2>Alarms, at default thresholds</h2>{items or '<p>None.</p>'}</section>"


_STYLE = """
:root{--ground:#fff;--ink:#1d2127;--soft:#5b6470;--line:#d8dce2;--card:#f7f8fa}
@media(prefers-color-scheme:dark){:root{--ground:#14171b;--ink:#e6e9ed;--soft:#a3acb8;--line:#343a43;--card:#1b1f25}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:76rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.05rem;margin:.2rem 0 .4rem}
.key{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.4rem 1.4rem;overflow-wrap:anywhere}
.swatch{display:inline-block;width:1.6rem;height:.35rem;border-radius:.2rem;margin-right:.5rem;vertical-align:middle}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.92rem;margin:.5rem 0 1rem}
th,td{padding:.3rem .8rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th[scope=row]{text-align:left;font-weight:normal;color:var(--soft);white-space:normal;min-width:11rem}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:1rem}
figure{margin:0;padding:.8rem;background:var(--card);border:1px solid var(--line);border-radius:.5rem}
svg{display:block;width:100%;height:auto}
figcaption,footer{color:var(--soft);font-size:.88rem}
footer{margin:1.5rem 0}
details{margin:.3rem 0}
"""
