# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""The task and the model that the demo runs on when it is given neither: sums with working-out, for a small Qwen3.

Everything here is made on the spot and needs no download. The task is reasoning-gym's `chain_sum`: its items, their
answers and their scoring are reasoning-gym's, only the prompt is shortened to the bare expression, because the model
reads characters:

    prompt       2+5-9-9=
    completion   2+5=7,7-9=-2,-2-9=-11

The warm start teaches from imperfect demonstrations: some stop before the end, some have a slip. The model picks up
the arithmetic together with the bad habits, so that reinforcement learning has something to improve that a few minutes
on a CPU can show.

Three splits never share an expression, whatever their seeds and sizes (see `arithmetic_dataset`).
"""

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Literal
from zlib import crc32

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


TASK = "chain_sum"
ALPHABET = "0123456789+-*/=,.;:()[]<>^%? \n"
SPLITS = ("warm_start", "train", "test")
TERMS = (3, 4)
SETTINGS_FILE = "warm_start.json"
# Of the demonstrations, the share that stops early; of their steps, the share with a wrong result.
STOP_SHARE = 0.4
SLIP_SHARE = 0.1


def _reasoning_gym():
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "The embedded task comes from reasoning-gym, which is not installed. "
            'Install it with: pip install "trl-calclip[demo]"'
        ) from error
    return reasoning_gym


def build_tokenizer() -> PreTrainedTokenizerFast:
    """
    Character tokenizer: one token per character of `ALPHABET`, besides `<pad>` and `<eos>`. Encoding adds no special
    tokens, so that decoding gives back the text exactly; batches are padded on the left.

    Returns:
        [`~transformers.PreTrainedTokenizerFast`]: Encoding a character outside `ALPHABET` raises, nothing is dropped.
    """
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left", model_max_length=256
    )


def build_model(
    seed: int = 0, *, hidden_size: int = 128, intermediate_size: int = 512, num_hidden_layers: int = 4
) -> Qwen3ForCausalLM:
    """
    Randomly initialized Qwen3 in FP32 for `build_tokenizer`'s vocabulary, without dropout. With the default sizes it
    has 1.05 M parameters, and both dimensions of every linear layer but the head are multiples of 128, which is what
    blockwise FP8 asks for.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Seed of the initialization. The global random state is left as it was.
        hidden_size (`int`, *optional*, defaults to `128`):
            Width of the model, a multiple of 32: heads are 32 wide, each with its own keys and values.
        intermediate_size (`int`, *optional*, defaults to `512`):
            Width of the MLP.
        num_hidden_layers (`int`, *optional*, defaults to `4`):
            Number of layers.

    Raises:
        ValueError: If `hidden_size` is not a multiple of 32.
    """
    if hidden_size % 32:
        raise ValueError(f"hidden_size must be a multiple of 32, the width of a head, but is {hidden_size}.")
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # Transformers' 0.02 is meant for wider models; at width 128 it makes the warm start slower.
        initializer_range=0.06,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def arithmetic_dataset(
    size: int,
    seed: int = 0,
    split: Literal["warm_start", "train", "test"] = "train",
    *,
    terms: tuple[int, int] = TERMS,
) -> Dataset:
    """
    Sums and differences of numbers of one digit, three or four of them unless asked for more.

    reasoning-gym seeds item `i` of a data set with `seed + i`, so that neighbouring seeds give shifted copies of the
    same items. Here the seeds are a thousand million apart, and an expression belongs to the one split that its CRC-32
    modulo 3 says: splits have no expression in common, even where two seeds draw the same one.

    Args:
        size (`int`):
            Number of items.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the items.
        split (`str`, *optional*, defaults to `"train"`):
            `"warm_start"` for `warm_start`, `"train"` for reinforcement learning, `"test"` for evaluation.
        terms (`tuple[int, int]`, *optional*, defaults to `(3, 4)`):
            Fewest and most numbers of an expression. Each takes about six tokens of a worked solution.

    Returns:
        [`~datasets.Dataset`]: Columns `prompt` (`str`), `answer` (`str`) and `entry` (`str`, the item of reasoning-gym
        as JSON, which is what its verifier asks for).

    Raises:
        ValueError: If `size` is not positive, `split` is none of the three, or `terms` is no range from 3 up.
        ImportError: If reasoning-gym is not installed.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, but is {size}.")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, but is {split!r}.")
    if not 3 <= terms[0] <= terms[1]:
        raise ValueError(f"terms must be the fewest and the most numbers of an expression, 3 or more, but is {terms}.")
    items = _reasoning_gym().create_dataset(
        TASK, min_terms=terms[0], max_terms=terms[1], min_digits=1, max_digits=1, seed=seed * 10**9, size=10**9
    )
    rows = []
    for item in items:
        expression = item["metadata"]["expression"]
        if SPLITS[crc32(expression.encode()) % 3] == split:
            prompt = expression.replace(" ", "") + "="
            rows.append({"prompt": prompt, "answer": item["answer"], "entry": json.dumps(item)})
            if len(rows) == size:
                return Dataset.from_list(rows)


def arithmetic_reward(completions: list[str], entry: list[str], **columns) -> list[float]:
    """
    Reward of `arithmetic_dataset`: reasoning-gym's own score of what follows the last `=` of a completion (of the
    whole completion where there is none).

    Args:
        completions (`list[str]`):
            `B` completions, without special tokens.
        entry (`list[str]`):
            Column `entry` of the data set, one per completion.
        **columns:
            What else the trainer hands to a reward function; not used.

    Returns:
        `list[float]`: `B` rewards in [0, 1]: 1 for the right number, a share where the right digits are part of a
        longer answer, 0 for anything else and for an empty completion.

    Raises:
        ImportError: If reasoning-gym is not installed.
    """
    score = _reasoning_gym().get_score_answer_fn(TASK)
    return [
        float(score(answer=completion.rsplit("=", 1)[-1].strip(), entry=json.loads(item)))
        for completion, item in zip(completions, entry, strict=True)
    ]


def worked_solution(
    prompt: str,
    rng: random.Random | None = None,
    stop_share: float = 0.0,
    slip_share: float = 0.0,
    separators: str = ",",
) -> str:
    """
    Completion that solves a prompt of `arithmetic_dataset` step by step, e.g. `"1-2=-1,-1+9=8"` for `"1-2+9="`.

    Args:
        prompt (`str`):
            Sum of at least three digits, ending in `=`.
        rng (`random.Random`, *optional*):
            Where stops and slips come from; needed when one of the shares is above 0.
        stop_share (`float`, *optional*, defaults to `0.0`):
            Probability that the solution ends after a step drawn uniformly from all but the last.
        slip_share (`float`, *optional*, defaults to `0.0`):
            Probability, for each step, that its result is one too large or too small; later steps go on from there.
        separators (`str`, *optional*, defaults to `","`):
            Characters to draw from between two steps: wording that does not matter. More than one needs an `rng`.

    Raises:
        ValueError: If a share is above 0 and there is no `rng`.
    """
    if rng is None:
        if stop_share or slip_share or len(separators) > 1:
            raise ValueError(
                f"stop_share={stop_share}, slip_share={slip_share} and separators={separators!r} need an rng: give "
                "one, or leave them as they are by default."
            )
        rng = random.Random()  # nothing is drawn from it
    total, steps = int(prompt[0]), []
    for sign, digit in zip(prompt[1:-1:2], prompt[2::2], strict=True):
        result = total + int(sign + digit)
        if slip_share and rng.random() < slip_share:
            result += rng.choice((-1, 1))
        steps.append(f"{total}{sign}{digit}={result}")
        total = result
    if stop_share and rng.random() < stop_share:
        steps = steps[: rng.randrange(1, len(steps))]
    if len(separators) == 1:
        return separators.join(steps)
    return steps[0] + "".join(rng.choice(separators) + step for step in steps[1:])


def _train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    steps: int,
    batch_size: int,
    lr: float,
    terms: tuple[int, int],
    separators: str,
) -> None:
    """Supervised training on imperfect solutions; the loss covers the solution and the end token, each item is new."""
    rng = random.Random(seed)
    prompts = arithmetic_dataset(steps * batch_size, seed, "warm_start", terms=terms)["prompt"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 30, max(0.1, 1 - step / steps))
    )
    model.train()
    for step in range(steps):
        batch = prompts[step * batch_size : (step + 1) * batch_size]
        texts = [
            prompt + worked_solution(prompt, rng, STOP_SHARE, SLIP_SHARE, separators) + tokenizer.eos_token
            for prompt in batch
        ]
        inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        lengths = torch.tensor([len(prompt) for prompt in batch])
        learn = (torch.arange(inputs["input_ids"].size(1)) >= lengths[:, None]) & inputs["attention_mask"].bool()
        labels = inputs["input_ids"].masked_fill(~learn, -100)
        logits = model(**inputs).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def warm_start(
    path: str | os.PathLike,
    seed: int = 0,
    *,
    steps: int = 800,
    batch_size: int = 16,
    learning_rate: float = 3e-3,
    terms: tuple[int, int] = TERMS,
    separators: str = ",",
    **model_arguments: int,
) -> str:
    """
    Trains `build_model` on imperfect demonstrations, so that it solves a part of the task, and saves it with its
    tokenizer.

    The directory appears at `path` only when it is complete: it is written beside it under another name and renamed.
    A directory that an earlier call with the same settings left there is used as it is, and one with other settings
    is replaced. The global random state is left as it was in either case.

    Args:
        path (`str` or `os.PathLike`):
            Directory of the model.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the initialization and of the data, which come from the `"warm_start"` split.
        steps (`int`, *optional*, defaults to `800`):
            Number of optimizer steps.
        batch_size (`int`, *optional*, defaults to `16`):
            Demonstrations per step.
        learning_rate (`float`, *optional*, defaults to `3e-3`):
            Peak of a linear schedule with 30 steps of warm-up.
        terms (`tuple[int, int]`, *optional*, defaults to `(3, 4)`):
            Fewest and most numbers of an expression, as in `arithmetic_dataset`.
        separators (`str`, *optional*, defaults to `","`):
            What stands between two steps, as in `worked_solution`.
        **model_arguments:
            Sizes for `build_model`.

    Returns:
        `str`: `path`, which `from_pretrained` takes.

    Raises:
        FileExistsError: If `path` holds something else than a warm start; it is not touched.
        ImportError: If reasoning-gym is not installed.
    """
    path = Path(path)
    settings = {
        "task": TASK,
        "seed": seed,
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "stop_share": STOP_SHARE,
        "slip_share": SLIP_SHARE,
        "terms": list(terms),
        "separators": separators,
        **model_arguments,
    }
    if path.exists():
        if not (path / SETTINGS_FILE).is_file():
            raise FileExistsError(
                f"{path} exists and holds no {SETTINGS_FILE}, so it is not a warm start and is left alone. "
                "Give another path or remove it."
            )
        if json.loads((path / SETTINGS_FILE).read_text()) == settings:
            return str(path)
    tokenizer, model = build_tokenizer(), build_model(seed, **model_arguments)
    _train(model, tokenizer, seed, steps, batch_size, learning_rate, terms, separators)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
        new = Path(scratch) / "new"
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        (new / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
        if path.exists():
            path.rename(Path(scratch) / "old")
        new.rename(path)
    return str(path)
