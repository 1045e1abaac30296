# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The embedded model, tokenizer, task and warm start."""

import json
import random
import re
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_calclip import embedded
from trl_calclip.embedded import (
    ALPHABET,
    SPLITS,
    arithmetic_dataset,
    arithmetic_reward,
    build_model,
    build_tokenizer,
    warm_start,
    worked_solution,
)


def test_tokenizer_round_trip_is_exact(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    rng = random.Random(0)
    texts = [ALPHABET, " 1  + 2\n\n=3 , 4 .", *("".join(rng.choices(ALPHABET, k=40)) for _ in range(50))]
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        for text in texts:
            token_ids = each(text)["input_ids"]
            assert len(token_ids) == len(text)
            assert each.decode(token_ids) == text
        assert (each.pad_token_id, each.eos_token_id) == (0, 1)
        assert each("1+2=3<eos>")["input_ids"][-1] == each.eos_token_id
        assert each(["1", "12"], padding=True)["input_ids"][0][0] == each.pad_token_id


def test_tokenizer_refuses_a_character_it_does_not_know():
    with pytest.raises(Exception, match="UNK"):
        build_tokenizer()("3 + é")


def test_model_has_the_dimensions_that_fp8_asks_for():
    model = build_model()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert 0.9e6 < model.num_parameters() < 1.2e6
    assert len(model.model.layers) == 4 and len(linears) == 4 * 7 + 1
    for name, linear in linears.items():
        multiple = 16 if name == "lm_head" else 128
        assert linear.in_features % 128 == 0 and linear.out_features % multiple == 0, name
    assert model.config.vocab_size >= len(build_tokenizer())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.attention_dropout == 0.0


def test_model_depends_on_its_seed_and_leaves_the_global_one_alone():
    state = torch.get_rng_state()
    first, again, other = build_model(1), build_model(1), build_model(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.model.layers[0].mlp.up_proj.weight, other.model.layers[0].mlp.up_proj.weight)


def test_model_refuses_a_width_that_heads_do_not_divide():
    with pytest.raises(ValueError, match="hidden_size must be a multiple of 32.* 100"):
        build_model(hidden_size=100)


def test_items_score_one_with_their_own_answer_and_their_worked_solution():
    data = arithmetic_dataset(300, seed=3)
    assert len(data) == 300
    solutions = [worked_solution(prompt) for prompt in data["prompt"]]
    assert arithmetic_reward(data["answer"][:], entry=data["entry"][:]) == [1.0] * 300
    assert arithmetic_reward(solutions, entry=data["entry"][:], prompts=data["prompt"][:]) == [1.0] * 300
    assert all(8 <= len(solution) <= 40 for solution in solutions)
    assert max(map(len, data["prompt"])) == 8
    assert set("".join([*data["prompt"], *solutions])) <= set(ALPHABET)


def test_wrong_and_empty_completions():
    entry = json.dumps({"answer": "11", "question": "", "metadata": {}})
    completions = ["", "=", "4+8=12", "4+7=", "nonsense", "4+7=11", "4+7= 11 ", "11=12", "4+7=110"]
    assert arithmetic_reward(completions, entry=[entry] * 9) == [0, 0, 0, 0, 0, 1, 1, 0, pytest.approx(2 / 3)]
    with pytest.raises(ValueError):
        arithmetic_reward(["11"], entry=[entry] * 2)


def test_splits_and_seeds_are_disjoint():
    prompts = {
        (split, seed): arithmetic_dataset(2000, seed=seed, split=split)["prompt"][:]
        for split in SPLITS
        for seed in (0, 1)
    }
    assert prompts["train", 0] == arithmetic_dataset(2000, seed=0)["prompt"][:]
    for split in SPLITS:
        mine = {prompt for seed in (0, 1) for prompt in prompts[split, seed]}
        others = {prompt for other, seed in prompts if other != split for prompt in prompts[other, seed]}
        assert len(mine) > 2000 and not mine & others
        # Seeds 0 and 1 are other items, not reasoning-gym's copy shifted by one.
        assert prompts[split, 0][1:100] != prompts[split, 1][:99]


def test_dataset_refuses_what_it_does_not_have():
    with pytest.raises(ValueError, match="split.*'validation'"):
        arithmetic_dataset(4, split="validation")
    with pytest.raises(ValueError, match="size.*0"):
        arithmetic_dataset(0)


def test_imperfect_demonstrations_stop_and_slip_as_often_as_asked():
    rng, prompt = random.Random(0), "2+5-9-0="
    perfect = worked_solution(prompt)
    assert perfect == "2+5=7,7-9=-2,-2-0=-2"
    stopped = [worked_solution(prompt, rng, stop_share=0.4) for _ in range(2000)]
    assert all(perfect.startswith(solution) and solution.count("=") >= 1 for solution in stopped)
    assert 0.36 < sum(solution != perfect for solution in stopped) / 2000 < 0.44
    slipped = [worked_solution(prompt, rng, slip_share=0.1) for _ in range(2000)]
    assert 0.69 < sum(solution == perfect for solution in slipped) / 2000 < 0.77  # 0.9 ** 3 = 0.729
    for argument in ({"slip_share": 0.1}, {"separators": ",;"}):
        with pytest.raises(ValueError, match="need an rng"):
            worked_solution(prompt, **argument)
    spaced = [worked_solution(prompt, rng, separators=",;") for _ in range(2000)]
    assert {solution.replace(";", ",") for solution in spaced} == {perfect}
    assert 0.47 < sum(solution.count(";") for solution in spaced) / 4000 < 0.53


def test_longer_sums():
    expressions = [prompt.rstrip("=") for prompt in arithmetic_dataset(200, terms=(5, 8))["prompt"]]
    counts = {len(re.findall(r"\d", expression)) for expression in expressions}
    assert counts == {5, 6, 7, 8}
    for wrong in ((2, 4), (5, 4)):
        with pytest.raises(ValueError, match="terms must be"):
            arithmetic_dataset(1, terms=wrong)


def test_missing_reasoning_gym_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for call in (lambda: arithmetic_dataset(1), lambda: arithmetic_reward(["1"], entry=["{}"])):
        with pytest.raises(ImportError, match=r'pip install "trl-calclip\[demo\]"'):
            call()


def test_warm_start_is_reused_for_the_same_settings_and_replaced_for_others(tmp_path):
    path, state = tmp_path / "deep" / "model", torch.get_rng_state()
    assert warm_start(path, steps=2, batch_size=4) == str(path)
    assert torch.equal(torch.get_rng_state(), state)
    written = (path / "model.safetensors").stat().st_mtime_ns
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(path)("1+2=")["input_ids"] == build_tokenizer()("1+2=")["input_ids"]
    assert not torch.equal(model.lm_head.weight, build_model().lm_head.weight)

    warm_start(path, steps=2, batch_size=4)
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    warm_start(path, steps=3, batch_size=4)
    assert json.loads((path / "warm_start.json").read_text())["steps"] == 3
    assert (path / "model.safetensors").stat().st_mtime_ns != written
    assert [child.name for child in path.parent.iterdir()] == ["model"]


def test_warm_start_learns(tmp_path):
    data = arithmetic_dataset(32, seed=5, split="test")
    tokenizer = build_tokenizer()
    texts = [prompt + worked_solution(prompt) for prompt in data["prompt"]]
    inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    trained = AutoModelForCausalLM.from_pretrained(warm_start(tmp_path / "model", steps=40, batch_size=8))
    with torch.no_grad():
        before, after = (model(**inputs, labels=labels).loss.item() for model in (build_model().eval(), trained))
    assert after < before - 1.0


@pytest.mark.parametrize("stage", ["_train", "build_tokenizer"])
def test_interrupted_warm_start_leaves_nothing(tmp_path, monkeypatch, stage):
    class Interrupted(Exception):
        pass

    if stage == "_train":  # before anything is written

        def interrupt(*args):
            raise Interrupted

        monkeypatch.setattr(embedded, stage, interrupt)
    else:  # after the weights are written, before the tokenizer is

        class Tokenizer:
            def __getattr__(self, name):
                return getattr(tokenizer, name)

            def __call__(self, *args, **kwargs):
                return tokenizer(*args, **kwargs)

            def __len__(self):
                return len(tokenizer)

            def save_pretrained(self, path):
                assert (path / "model.safetensors").is_file()
                raise Interrupted

        tokenizer = build_tokenizer()
        monkeypatch.setattr(embedded, stage, Tokenizer)
    with pytest.raises(Interrupted):
        warm_start(tmp_path / "model", steps=1, batch_size=2)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    warm_start(tmp_path / "model", steps=1, batch_size=2)
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_warm_start_leaves_a_directory_that_is_not_its_own_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not a warm start"):
        warm_start(tmp_path, steps=1, batch_size=2)
    assert [child.name for child in tmp_path.iterdir()] == ["thesis.txt"]
