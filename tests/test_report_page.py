# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The report: self-contained, with every run's numbers in it, and harmless whatever the runs are called."""

import json
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import matplotlib.image
import pytest

from trl_calclip.checkpoint import write_state
from trl_calclip.report_page import read_run, summary, write_report
from trl_calclip.report_panels import MAX_POINTS, PANELS, label_text, thin, time_split


HOSTILE = '</title><script>alert(1)</script><img src=x onerror=alert(2)> $\\frac{ "quoted" --> &amp; __'


def write_run(directory, *, calibrated=True, alarm=False, steps=40):
    directory.mkdir(parents=True)
    logs = [
        {"step": step, "reward": step / 100, "entropy": 0.5, "clip_ratio/low_mean": 0.001, "loss": 0.0,
         "rollout_corr/k3_kl": 0.5 if alarm and step == 30 else 0.001, "time/rollout_seconds": 0.5}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    if calibrated:
        for entry in logs:
            entry.update({"calclip/lower": 0.7, "calclip/upper": 1.5})
        record = {
            "step": 4, "rollout": 0, "lower": 0.7, "upper": 1.5, "lower_target": 0.7, "upper_target": 1.4,
            "alpha_low_bf16": 0.01, "clip_frac_low_neg_fp8": 0.02, "clip_frac_low_neg_fp8_reference": 0.05,
            "overclip_low_frac": 0.015, "overclip_high_frac": 0.0, "num_negative_tokens": 100,
            "bf16_pass_seconds": 2.0, "entropy_bin/over-1/completions": 0.25,
        }  # fmt: skip
        state = {"clip_range": [0.7, 1.5], "num_rollouts": 10, "num_calibrations": 1, "num_skipped_calibrations": 0}
        write_state(str(directory), {**state, "calibration_history": [record], "schedule": {}, "world": {}})
    logs.append({"step": steps, "train_runtime": 30.0})
    (directory / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
    return directory


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of style."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self._in_style = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._in_style = tag == "style"

    def handle_data(self, data):
        if not self._in_style:
            self.text.append(data)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    runs = [write_run(root / "bf16", calibrated=False), write_run(root / "fp8", alarm=True)]
    return root, write_report(runs, root / "out", names=["plain", HOSTILE])


def test_page_needs_nothing_from_outside(report):
    page = Page(report[1][0].read_text())
    names = [tag for tag, _ in page.tags]
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(names)
    for _, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "http" not in report[1][0].read_text().replace("http://www.w3.org/1999/xlink", "")


def test_hostile_name_is_shown_as_it_is(report):
    page = Page(report[1][0].read_text())
    assert HOSTILE in "".join(page.text)
    labels = [attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"]
    assert all(HOSTILE in label for label in labels)


def test_every_picture_has_an_alt_text_with_numbers(report):
    page = Page(report[1][0].read_text())
    pictures = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(pictures) == len(PANELS) == len([path for path in report[1] if path.suffix == ".png"]) - 1
    assert all(picture["role"] == "img" for picture in pictures)
    assert pictures[0]["aria-label"].startswith(
        "Mean reward, from the first to the last tenth of the run. plain: 0.02"
    )
    (bounds,) = [p["aria-label"] for p in pictures if p["aria-label"].startswith("Clip bounds")]
    assert "plain, upper: no data" in bounds and "upper: 1.5 to 1.5" in bounds


def test_pictures_are_sound_svg_with_ids_of_their_own(report):
    text = report[1][0].read_text()
    seen = set()
    for part in text.split("<svg ")[1:]:
        svg = "<svg " + part[: part.index("</svg>")] + "</svg>"
        svg = svg.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1)
        tree = ElementTree.fromstring(svg)
        ids = {node.get("id") for node in tree.iter() if node.get("id")}
        assert ids and not ids & seen
        seen |= ids
        assert "currentColor" in svg


def test_colours_follow_the_reader(report):
    text = report[1][0].read_text()
    assert "prefers-color-scheme:dark" in text and 'content="light dark"' in text and "width=device-width" in text


def test_alarms_are_in_the_page(report):
    text = "".join(Page(report[1][0].read_text()).text)
    assert "mismatch_kl at step 30" in text and "1. sync:" in text


def test_pictures_are_drawn(report):
    for path in report[1][1:]:
        assert matplotlib.image.imread(path)[..., :3].std() > 0.02


def test_summary_by_hand(report):
    run = read_run(report[0] / "fp8")
    numbers = summary(run)
    assert run.name == "fp8"
    assert numbers["Mean reward, first → last tenth"] == "0.025 → 0.385"
    assert numbers["Negative tokens clipped in FP8, reference bounds"] == "5.00%"
    assert numbers["Alarms"] == "1"
    assert time_split(run) == {"rollouts": 5.0, "updates and the rest": 23.0, "BF16 passes": 2.0}
    assert summary(read_run(report[0] / "bf16"))["Lower bound"] == "-"


def test_newest_checkpoint_stands_in_for_an_unfinished_run(tmp_path):
    write_run(tmp_path / "run" / "checkpoint-9", steps=9)
    write_run(tmp_path / "run" / "checkpoint-10", steps=10)
    assert summary(read_run(tmp_path / "run"))["Optimizer steps"] == "10"


def test_wrong_directories_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no trainer_state.json"):
        read_run(tmp_path)
    (tmp_path / "trainer_state.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        read_run(tmp_path)
    write_run(tmp_path / "run")
    with pytest.raises(ValueError, match="2 names for 1 runs"):
        write_report([tmp_path / "run"], tmp_path / "out", names=["a", "b"])


def test_empty_run_gives_a_page(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trainer_state.json").write_text('{"log_history": []}')
    written = write_report([tmp_path / "run"], tmp_path / "out")
    assert [path.name for path in written] == ["report.html", "report.png"]
    assert "Not logged in these runs" in written[0].read_text()


def test_long_histories_are_thinned():
    steps, values = thin(list(range(10_000)), [1.0] * 10_000)
    assert len(steps) == len(values) <= MAX_POINTS and set(values) == {1.0}
    assert steps[0] == 6.0  # mean of 0 to 12


def test_labels_hold_no_markup():
    assert label_text("$\\frac") == "??frac" and label_text("__x--y") == "x-y" and label_text("__") == "run"
