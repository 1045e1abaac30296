# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""Pooling over ranks: the same tokens give the same bounds bit for bit however they are split, and a fair sample."""

import json

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import torchrun

from trl_calclip import ClipRange
from trl_calclip.calibration import (
    NUM_COLUMNS,
    TokenCollector,
    TokenPool,
    calibrate,
    draw_micro_batches,
    sample_rows,
    token_keys,
)


def make_rows(count: int, seed: int = 0) -> torch.Tensor:
    """Tokens of completions of sixteen: a small drift under a larger noise, advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(count, generator=generator) for _ in range(4)]
    number = torch.arange(count)
    columns = [
        (0.1 * draw[0] + 0.15 * draw[1]).exp(),
        (0.1 * draw[0]).exp(),
        draw[2],
        (0.1 * draw[3]).exp().clamp(max=2.0),
        torch.rand(count, generator=generator),
        number // 16,
        number % 16,
        torch.rand(count, generator=generator),
        0.1 * draw[1],
    ]
    return torch.stack([column.float() for column in columns], dim=1)


def solve(pool: TokenPool):
    result, shares = calibrate(
        pool, reference=ClipRange(0.8, 1.24), current=ClipRange(0.6, 1.8), use_sampling_probs=True, min_tokens=1
    )
    return result, shares


def pool_alone(parts: list[torch.Tensor], max_tokens: int, seed=(0,)) -> TokenPool:
    """What `pool` makes of the parts of several ranks, without a process for each."""
    collector = TokenCollector(max_tokens=max_tokens, seed=seed)
    collector._rows = [sample_rows(part, max_tokens, seed) for part in parts]
    return collector.pool(Accelerator(cpu=True))


ROWS = make_rows(400)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.lists(st.integers(0, 3), min_size=400, max_size=400),
    order=st.randoms(use_true_random=False),
    max_tokens=st.sampled_from([10_000, 400, 399, 150, 40]),
)
def test_any_split_over_ranks_gives_the_same_bounds(ranks, order, max_tokens):
    shuffled = list(range(400))
    order.shuffle(shuffled)
    parts = [ROWS[[i for i in shuffled if ranks[i] == rank]] for rank in range(4)]
    whole, split = pool_alone([ROWS], max_tokens), pool_alone(parts, max_tokens)
    assert torch.equal(torch.stack(list(vars(whole).values())), torch.stack(list(vars(split).values())))
    assert len(split.fp8_ratio) == min(400, max_tokens)
    assert repr(solve(whole)) == repr(solve(split))


def test_bounds_do_not_depend_on_the_number_of_threads():
    pool = TokenPool.from_rows(make_rows(300_000))
    before = torch.get_num_threads()
    answers = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        result, shares = solve(pool)
        # The diagnostics beside it are means, and may differ in their last digits.
        answers.add(repr((result, shares["clip_frac_low_neg_fp8_target"])))
    torch.set_num_threads(before)
    assert len(answers) == 1


def test_keys_are_unique_and_depend_on_the_seed():
    numbers = torch.arange(100_000)
    keys = token_keys(numbers, (7, 3))
    assert len(set(keys.tolist())) == len(numbers)
    assert (token_keys(numbers, (7, 3)) == keys).all()
    assert (token_keys(numbers, (7, 4)) != keys).all() and (token_keys(numbers, (8, 3)) != keys).all()


def test_each_token_stays_with_the_same_chance():
    """2000 draws of 60 of 240 tokens: every token is drawn 500 times but for the noise, every pair 124 times."""
    rows = make_rows(240)
    drawn = torch.zeros(2000, 240)
    for draw in range(2000):
        sample = sample_rows(rows, 60, (0, draw))
        drawn[draw, (sample[:, 5] * 16 + sample[:, 6]).long()] = 1
    assert (drawn.sum(1) == 60).all()
    # standard deviation of a binomial count: sqrt(2000 * 1/4 * 3/4) = 19.4; the largest of 240 within 4.5 of them
    assert (drawn.sum(0) - 500).abs().max() < 88
    pairs = drawn.T @ drawn
    pairs = pairs[torch.triu(torch.ones(240, 240), 1).bool()]
    expected = 2000 * 60 * 59 / (240 * 239)
    assert (pairs - expected).abs().max() < 5.5 * expected**0.5
    assert pairs.std() == pytest.approx((expected * (1 - expected / 2000)) ** 0.5, rel=0.05)


def test_sampled_share_is_unbiased():
    rows = make_rows(20_000)
    truth = solve(TokenPool.from_rows(rows))[0].alpha_low_bf16
    samples = torch.tensor(
        [solve(TokenPool.from_rows(sample_rows(rows, 2000, (seed,))))[0].alpha_low_bf16 for seed in range(200)]
    )
    assert samples.std() > 0.003
    assert samples.mean().item() == pytest.approx(truth, abs=4 * samples.std().item() / 200**0.5)


def test_collector_is_bounded():
    collector = TokenCollector(max_tokens=50)
    logps = torch.zeros(4, 20)
    for _ in range(30):
        collector.add(
            per_token_logps=logps,
            old_per_token_logps=logps,
            bf16_per_token_logps=logps,
            bf16_old_per_token_logps=logps,
            advantages=torch.ones(4),
            mask=torch.ones(4, 20),
            importance_sampling_ratio=None,
            sampling_per_token_logps=None,
        )
        assert sum(map(len, collector._rows)) <= 100
    pool = collector.pool(Accelerator(cpu=True))
    assert len(pool.completions) == 50
    assert pool.completions.max() > 100  # late tokens too
    numbers = pool.completions * 2**24 + pool.positions
    assert (numbers.diff() > 0).all()


SCRIPT = """
import json, sys
import torch
from accelerate import Accelerator
from torch.distributed.tensor.debug import CommDebugMode
from trl_calclip import ClipRange
from trl_calclip.calibration import TokenCollector, calibrate

directory = sys.argv[1]
accelerator = Accelerator(cpu=True)
rank, ranks = accelerator.process_index, accelerator.num_processes
answers = {}
for name, case in torch.load(f"{directory}/cases.pt").items():
    collector = TokenCollector(
        rank, ranks, max_tokens=case["max_tokens"], max_tokens_per_rank=case["per_rank"], seed=(1, 2)
    )
    collector._rows = [case["rows"][case["ranks"][ranks] == rank]]
    with CommDebugMode() as mode:
        pool = collector.pool(accelerator)
    result, shares = calibrate(
        pool, reference=ClipRange(0.8, 1.24), current=ClipRange(0.6, 1.8), use_sampling_probs=True, min_tokens=1
    )
    collectives = {str(op): count for op, count in mode.get_comm_counts().items()}
    answers[name] = {"answer": repr((result, shares)), "collectives": collectives}
with open(f"{directory}/{ranks}-{rank}.json", "w") as file:
    json.dump(answers, file)
"""


@pytest.mark.slow
def test_recorded_calibration_batch_on_one_two_and_four_ranks(make_trainer, tmp_path):
    """Tokens of a real calibration batch, split at random, all on the last rank, or with ranks left out."""
    trainer = make_trainer(max_steps=4, learning_rate=3e-3, per_device_train_batch_size=16)
    pools = []
    original = trainer._calibrate
    trainer._calibrate = lambda pool: (pools.append(pool), original(pool))
    trainer.train()
    (pool,) = pools
    recorded = torch.stack(list(vars(pool).values()), dim=1).float()
    assert len(recorded) > 200 and recorded.shape[1] == NUM_COLUMNS
    made = make_rows(30_000)

    generator = torch.Generator().manual_seed(0)
    cases = {}
    for name, rows, max_tokens, per_rank in (
        ("recorded", recorded, 1_000_000, len(recorded)),
        ("recorded, sampled", recorded, len(recorded) // 3, None),
        ("made", made, 1_000_000, len(made)),
        ("made, sampled", made, 10_000, 30_000),
        ("no negative tokens", made[made[:, 2] > 0], 1_000_000, len(made)),
        ("no tokens", made[:0], 1_000, None),
    ):
        for split in ("at random", "last rank", "one empty"):
            assigned = {}
            for ranks in (1, 2, 4):
                if split == "at random":
                    assigned[ranks] = torch.randint(ranks, (len(rows),), generator=generator)
                elif split == "last rank":
                    assigned[ranks] = torch.full((len(rows),), ranks - 1)
                else:
                    assigned[ranks] = torch.randint(max(ranks - 1, 1), (len(rows),), generator=generator)
            cases[f"{name}, {split}"] = {
                "rows": rows, "max_tokens": max_tokens, "per_rank": per_rank, "ranks": assigned,
            }  # fmt: skip
    torch.save(cases, tmp_path / "cases.pt")
    answers = {}
    for ranks in (1, 2, 4):
        torchrun(tmp_path, SCRIPT, tmp_path, ranks=ranks)
        for rank in range(ranks):
            answers[ranks, rank] = json.loads((tmp_path / f"{ranks}-{rank}.json").read_text())
    for name in cases:
        seen = {answer[name]["answer"] for answer in answers.values()}
        assert len(seen) == 1, name
        skipped = "skipped_reason=None" not in seen.pop()
        assert skipped == name.startswith("no "), name
        for (ranks, _), answer in answers.items():
            # one all-gather where there are several ranks, and nothing else
            assert sum(answer[name]["collectives"].values()) == (ranks > 1), answer[name]
            assert all("allgather" in op for op in answer[name]["collectives"])
    assert len({answer["recorded, at random"]["answer"] for answer in answers.values()}) == 1


def test_draw_of_micro_batches():
    assert draw_micro_batches(1.0, 1, 4, (0, 0)) == {1, 2, 3}
    assert len(draw_micro_batches(0.01, 2, 8, (0, 0))) == 1
    assert draw_micro_batches(0.5, 2, 8, (0, 5)) == draw_micro_batches(0.5, 2, 8, (0, 5))
    counts = torch.zeros(8)
    for rollout in range(2000):
        drawn = draw_micro_batches(0.5, 2, 8, (0, rollout))
        assert len(drawn) == 3
        counts[list(drawn)] += 1
    assert counts[:2].tolist() == [0, 0]
    assert (counts[2:] - 1000).abs().max() < 4.5 * (2000 / 4) ** 0.5
