# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The model card says what the run did, after what TRL says."""

import re
from pathlib import Path

from trl_calclip.model_card import HEADING, append_section


def test_card_of_a_run(make_trainer):
    trainer = make_trainer(max_steps=4, save_strategy="steps", save_steps=4, calibration_interval=1)
    trainer.train()
    trainer.save_model()
    text = (Path(trainer.args.output_dir) / "README.md").read_text()
    assert text.startswith("---") and "GRPO" in text  # TRL's own
    assert text.count(HEADING) == 1
    lower, upper = trainer.clip_range.lower, trainer.clip_range.upper
    assert f"| Bounds at the end | [{lower:.3f}, {upper:.3f}] |" in text
    assert "| FP8 recipe, training | rowwise, emulated |" in text
    assert "| Calibrations | 1, one every 1 rollout |" in text
    assert re.search(r"\| Versions \| trl-calclip \S+, torchao 0\.18", text)


def test_card_with_everything_off_is_trls(make_trainer):
    trainer = make_trainer(max_steps=1, save_strategy="steps", save_steps=1, calibrated_clip=False, fp8_recipe=None)
    trainer.train()
    trainer.save_model()
    assert HEADING not in (Path(trainer.args.output_dir) / "README.md").read_text()


def test_section_is_replaced_and_the_rest_stays(tmp_path):
    card = tmp_path / "README.md"
    card.write_text("# Mine\n\nText.\n")
    append_section(card, f"{HEADING}\n\nold\n")
    append_section(card, f"{HEADING}\n\nnew\n")
    assert card.read_text() == f"# Mine\n\nText.\n\n{HEADING}\n\nnew\n"
