# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The parts of dynamic sampling on their own: order of prompts, rows, which rank trains what."""

import collections
import math

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import pad

from trl_calclip.calibrated_dapo_trainer import Round, merge_rounds, weighted_sum
from trl_calclip.dynamic_sampling import (
    SURPLUS_NAME,
    Group,
    PromptStream,
    join_rows,
    load_surplus,
    save_surplus,
    split_rows,
    training_ranks,
)


def stream(streaming=False, shuffle=True, seed=3, size=10):
    dataset = Dataset.from_dict({"prompt": list(range(size))})
    if streaming:
        dataset = dataset.to_iterable_dataset(num_shards=2)
    return PromptStream(dataset, shuffle=shuffle, seed=seed)


def prompts(examples):
    return [example["prompt"] for example in examples]


@pytest.mark.parametrize("streaming", [False, True])
def test_each_pass_has_every_prompt_once_in_an_order_of_its_own(streaming):
    taken = prompts(stream(streaming).take(30))
    passes = [taken[:10], taken[10:20], taken[20:]]
    assert all(sorted(order) == list(range(10)) for order in passes)
    assert len(set(map(tuple, passes))) == 3
    assert taken == prompts(stream(streaming).take(30)) != prompts(stream(streaming, seed=4).take(30))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_any_position_can_be_resumed(streaming, shuffle):
    whole = prompts(stream(streaming, shuffle).take(33))
    if not shuffle:
        assert whole == [*range(10)] * 3 + [0, 1, 2]
    for position in (0, 1, 10, 17, 29):
        resumed = stream(streaming, shuffle)
        resumed.take(2)
        resumed.position = position
        assert prompts(resumed.take(1)) + prompts(resumed.take(3)) == whole[position : position + 4]
        assert resumed.position == position + 4


def test_an_empty_stream_is_an_error_and_not_an_endless_loop():
    empty = Dataset.from_dict({"prompt": ["x"]}).to_iterable_dataset().filter(lambda example: False)
    with pytest.raises(ValueError, match="no examples"):
        PromptStream(empty, shuffle=False, seed=0).take(1)


@given(st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False))
def test_ranks_train_equally_many_rows_and_few_move(world_size, share, random):
    owners = [random.randrange(world_size) for _ in range(world_size * share)]
    ranks = training_ranks(owners, world_size)
    assert collections.Counter(ranks) == dict.fromkeys(range(world_size), share)
    surplus = sum(max(0, count - share) for count in collections.Counter(owners).values())
    assert sum(owner != rank for owner, rank in zip(owners, ranks, strict=True)) == surplus


def test_hand_made_assignment():
    assert training_ranks([0, 0, 0, 1], 2) == [0, 0, 1, 1]
    assert training_ranks([1, 1, 1, 1], 2) == [1, 1, 0, 0]
    assert training_ranks([1, 0, 1, 0], 2) == [1, 0, 1, 0]


def padded_batch(prompt_lengths, lengths, generator, pad_to_multiple_of=None, weights="token"):
    """A batch as TRL makes it; completions of length 0 are truncated ones, masked as a whole."""

    def draw(sizes, side, fill):
        values = [torch.rand(size, generator=generator) for size in sizes]
        return pad(values, padding_value=fill, padding_side=side, pad_to_multiple_of=pad_to_multiple_of)

    sizes = [length or 3 for length in lengths]
    batch = {
        "prompt_ids": draw(prompt_lengths, "left", 9).mul(100).long(),
        "prompt_mask": pad(
            [torch.ones(n, dtype=torch.long) for n in prompt_lengths],
            padding_value=0, padding_side="left", pad_to_multiple_of=pad_to_multiple_of,
        ),
        "completion_ids": draw(sizes, "right", 0.09).mul(100).long(),
        "completion_mask": pad(
            [torch.full((n,), int(length > 0)) for n, length in zip(sizes, lengths, strict=True)],
            padding_value=0, padding_side="right", pad_to_multiple_of=pad_to_multiple_of,
        ),
        "advantages": torch.randn(len(lengths), generator=generator),
        "old_per_token_logps": draw(sizes, "right", 0),
        "sampling_per_token_logps": draw(sizes, "right", 0),
        "num_items_in_batch": torch.tensor(7),
    }  # fmt: skip
    ratio = draw(sizes, "right", 1)
    batch["importance_sampling_ratio"] = ratio if weights == "token" else ratio[:, :1]
    return batch


@pytest.mark.parametrize("weights", ["token", "sequence"])
@pytest.mark.parametrize("multiple", [None, 8])
def test_rows_of_two_rounds_make_one_batch(weights, multiple):
    generator = torch.Generator().manual_seed(0)
    first = padded_batch([2, 5], [4, 1], generator, weights=weights)
    second = padded_batch([3], [6], generator, weights=weights)
    joined = join_rows(
        split_rows(first) + split_rows(second), pad_token_id=9, pad_to_multiple_of=multiple, device=torch.device("cpu")
    )
    assert "num_items_in_batch" not in joined
    prompt, length = (5, 6) if multiple is None else (8, 8)
    assert joined["prompt_ids"].shape == (3, prompt) and joined["completion_ids"].shape == (3, length)
    assert joined["prompt_mask"].sum(1).tolist() == [2, 5, 3] and joined["completion_mask"].sum(1).tolist() == [
        4,
        1,
        6,
    ]
    assert torch.equal(joined["advantages"], torch.cat([first["advantages"], second["advantages"]]))
    for i, (source, row) in enumerate([(first, 0), (first, 1), (second, 0)]):
        tokens = joined["completion_mask"][i].bool()
        for name in ("completion_ids", "old_per_token_logps", "sampling_per_token_logps"):
            expected = source[name][row][source["completion_mask"][row].bool()]
            assert torch.equal(joined[name][i][tokens], expected)
        prompt_tokens = joined["prompt_mask"][i].bool()
        assert torch.equal(
            joined["prompt_ids"][i][prompt_tokens], source["prompt_ids"][row][source["prompt_mask"][row].bool()]
        )
        assert prompt_tokens[-1] and (joined["prompt_ids"][i][~prompt_tokens] == 9).all()
        assert (joined["completion_ids"][i][~tokens] == 9).all()
    expected_shape = (3, length) if weights == "token" else (3, 1)
    assert joined["importance_sampling_ratio"].shape == expected_shape
    if weights == "token":
        assert (joined["importance_sampling_ratio"][~joined["completion_mask"].bool()] == 1).all()


def test_a_masked_completion_keeps_one_masked_token():
    row = split_rows(padded_batch([2, 2], [0, 4], torch.Generator().manual_seed(0)))[0]
    assert row["completion_mask"].tolist() == [0] and row["completion_ids"].numel() == 1


def test_images_are_refused():
    batch = padded_batch([2], [2], torch.Generator().manual_seed(0))
    with pytest.raises(NotImplementedError, match="`pixel_values`.*`dynamic_sampling=False`"):
        split_rows({**batch, "pixel_values": torch.zeros(1, 3, 4, 4)})
    with pytest.raises(NotImplementedError, match="`num_images`"):
        split_rows({**batch, "num_images": [1]})


def group(judged, **kwargs):
    return Group(rewards=judged, judged=judged, ranks=[0] * len(judged), **kwargs)


def test_what_is_uniform():
    nan = math.nan
    assert group([0.5, 0.5]).uniform and group([0.5, 0.5]).correct
    assert group([0.0, 0.0]).uniform and not group([0.0, 0.0]).correct
    assert group([1.0, nan, 1.0]).uniform and group([nan, nan]).uniform and not group([nan, nan]).correct
    assert not group([0.0, 1.0]).uniform and not group([0.0, nan, 1e-6]).uniform


def test_surplus_survives_a_checkpoint(tmp_path):
    batch = padded_batch([2, 3], [4, 0], torch.Generator().manual_seed(0))
    batch["sampling_per_token_logps"][0, 1] = math.nan
    rows = dict(enumerate(split_rows(batch)))
    save_surplus(tmp_path / "new", [group([0.0, math.nan], rows=rows)])
    (loaded,) = load_surplus(tmp_path / "new")
    assert loaded.stale and loaded.ranks == [0, 0] and loaded.rewards[0] == 0.0 and math.isnan(loaded.rewards[1])
    for i, row in rows.items():
        assert loaded.rows[i].keys() == row.keys()
        for name, value in row.items():
            assert loaded.rows[i][name].dtype == value.dtype
            torch.testing.assert_close(loaded.rows[i][name], value, rtol=0, atol=0, equal_nan=True)
    path = tmp_path / "new" / SURPLUS_NAME
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match="is damaged"):
        load_surplus(tmp_path / "new")
    save_surplus(tmp_path / "new", [])
    assert load_surplus(tmp_path / "new") == [] and not path.exists()


def test_weighted_sum_leaves_nan_out():
    nan = math.nan
    rewards = torch.tensor([[1.0, 2.0], [1.0, nan], [nan, nan]])
    total = weighted_sum(rewards, torch.tensor([1.0, 0.5]))
    assert total[:2] == [2.0, 1.0] and math.isnan(total[2])


def test_rounds_are_merged_as_if_they_were_one():
    def of(count, metrics):
        return Round([group([0.0])] * count, torch.zeros(0), metrics)

    rounds = [
        of(
            3,
            {"reward": 1.0, "completions/min_length": 4.0, "completions/max_length": 9.0, "num_tokens": 10, "x": 1.0},
        ),
        of(1, {"reward": 5.0, "completions/min_length": 2.0, "completions/max_length": 6.0, "num_tokens": 30}),
    ]
    assert merge_rounds("reward", rounds) == 2.0
    assert merge_rounds("completions/min_length", rounds) == 2.0
    assert merge_rounds("completions/max_length", rounds) == 9.0
    assert merge_rounds("num_tokens", rounds) == 30
    assert merge_rounds("x", rounds) == 1.0
    assert math.isnan(merge_rounds("y", [of(1, {"y": math.nan})]))
