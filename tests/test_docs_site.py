# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The documentation's site builds without a warning, and the API reference shows docstrings, not their dialect."""

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
pytest.importorskip("mkdocs", reason="the site needs `make docs` first")
pytest.importorskip("griffe", reason="the site needs `make docs` first")
sys.path.insert(0, str(ROOT / "scripts"))

from trl_docstrings import convert_links, convert_sections  # noqa: E402


def test_sections():
    text = """Does it.

Args:
    > Parameters that control the noise

    size (`int`, *optional*, defaults to `20`):
        How many.
        In tokens.
    a, b (`list[float]` or `None`): Two.

Returns:
    [`~datasets.Dataset`]: Rows.

Raises:
    `ValueError`: never.

Source: nobody."""
    assert (
        convert_sections(text)
        == """Does it.

Args:
    size (int): **The noise.**
        How many.
        In tokens. Defaults to `20`.
    a (list[float] | None): As the next one.
    b (list[float] | None): Two.

Returns:
    datasets.Dataset: Rows.

Raises:
    ValueError: never.

Source: nobody."""
    )
    assert "Defaults to" not in convert_sections(text, show_defaults=False)


def test_links():
    ours = {"ClipRange": "trl_calclip.ClipRange"}
    assert convert_links("a [`ClipRange`]", ours) == "a [`ClipRange`][trl_calclip.ClipRange]"
    hub = "https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig"
    assert convert_links("[`~trl.GRPOConfig`]", ours) == f"[`GRPOConfig`]({hub})"
    assert convert_links("[`TokenPool`] [`x`](y)", ours) == "`TokenPool` [`x`](y)"


@pytest.mark.slow
def test_site_builds_strictly(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    page = (tmp_path / "api.html").read_text()
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    for dialect in ("*optional*", "[`", "Args:", "Parameters that control"):
        assert dialect not in text, dialect
    assert "Whether to calibrate the clip bounds. Defaults to True." in re.sub(r"\s+", " ", text)
    assert 'id="trl_calclip.CalibratedDAPOTrainer"' in page
