# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
The parts of dynamic sampling that know no trainer: a stream of prompts that can be resumed, and completions as rows.

A row is one completion without its padding, a dictionary of CPU tensors: rows of rounds that were padded differently
can be put into one batch, sent to another rank, and written into a checkpoint.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


Row = dict[str, torch.Tensor]

SURPLUS_NAME = "dynamic_sampling.safetensors"
_PROMPT_KEYS = ("prompt_ids", "prompt_mask")


class PromptStream:
    """
    Examples of a dataset one after the other, pass after pass, the same on every rank, from any position on.

    Args:
        dataset (`Dataset` or `IterableDataset`): Examples.
        shuffle (`bool`): Whether each pass has its own order; of an iterable dataset, by `datasets`' shuffle buffer.
        seed (`int`): Seed of the order. Pass `n` of it is ordered by `seed + n`.

    Attributes:
        position (`int`): Examples taken so far. Set it to resume; of an iterable dataset they are then read again.
    """

    def __init__(self, dataset: Dataset | IterableDataset, *, shuffle: bool, seed: int):
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.position = 0
        self._pass = -1
        self._order: list[int] = []
        self._iterator: Iterator[dict[str, Any]] | None = None
        self._iterator_position = 0

    def take(self, count: int) -> list[dict[str, Any]]:
        """The next `count` examples. Raises `ValueError` if the dataset is empty."""
        next_example = self._next_streamed if isinstance(self.dataset, IterableDataset) else self._next_indexed
        return [next_example() for _ in range(count)]

    def _next_indexed(self) -> dict[str, Any]:
        number, index = divmod(self.position, len(self.dataset))
        if self.shuffle and self._pass != number:
            generator = torch.Generator().manual_seed(self.seed + number)
            self._pass, self._order = number, torch.randperm(len(self.dataset), generator=generator).tolist()
        self.position += 1
        return self.dataset[self._order[index] if self.shuffle else index]

    def _next_streamed(self) -> dict[str, Any]:
        if self._iterator is None or self._iterator_position != self.position:
            self._iterator, self._iterator_position = self._passes(), 0
            while self._iterator_position < self.position:
                next(self._iterator)
                self._iterator_position += 1
        example = next(self._iterator)
        self.position += 1
        self._iterator_position += 1
        return example

    def _passes(self) -> Iterator[dict[str, Any]]:
        number = 0
        while True:
            dataset = self.dataset.shuffle(seed=self.seed + number) if self.shuffle else self.dataset
            empty = True
            for example in dataset:
                empty = False
                yield example
            if empty:
                raise ValueError("The training dataset has no examples.")
            number += 1


@dataclass
class Group:
    """
    The completions of one prompt. All ranks hold the same groups; the rows lie where they were generated.

    Args:
        rewards (`list[float]`): Weighted sum of each completion's rewards, NaN where none was given.
        judged (`list[float]`): The values by which the group is judged, NaN where there is none.
        ranks (`list[int]`): Rank that holds each row.
        rows (`dict[int, Row]`): This rank's rows, by their number in the group.
        stale (`bool`): Whether the group was generated for an earlier rollout batch.
    """

    rewards: list[float]
    judged: list[float]
    ranks: list[int]
    rows: dict[int, Row] = field(default_factory=dict)
    stale: bool = False

    @property
    def uniform(self) -> bool:
        """Whether all judged values are equal, NaN left out. A group without any is uniform."""
        return len({value for value in self.judged if value == value}) < 2

    @property
    def correct(self) -> bool:
        """Whether a uniform group's value is above 0."""
        return any(value > 0 for value in self.judged)


def training_ranks(owners: list[int], world_size: int) -> list[int]:
    """
    Rank that trains each row: the one that holds it while it has room, otherwise the first one with room.

    Args:
        owners (`list[int]`): Rank that holds each row; a multiple of `world_size` of them.
        world_size (`int`): Number of ranks, each of which trains equally many rows.

    Returns:
        `list[int]`: One rank per row, the same on every rank. As few rows move as can be.
    """
    room = [len(owners) // world_size] * world_size
    ranks: list[int | None] = []
    for owner in owners:
        stays = room[owner] > 0
        room[owner] -= stays
        ranks.append(owner if stays else None)
    free = iter([rank for rank in range(world_size) for _ in range(room[rank])])
    return [next(free) if rank is None else rank for rank in ranks]


def split_rows(batch: dict[str, Any]) -> list[Row]:
    """
    Rows of a batch of TRL's, without padding. A completion that is masked as a whole keeps one masked token.

    Args:
        batch (`dict[str, Any]`): Tensors of shape `(B,)`, `(B, 1)`, `(B, P)` for `P` prompt tokens or `(B, T)`.

    Raises:
        NotImplementedError: If the batch holds anything else, such as images.
    """
    tensors = {name: value for name, value in batch.items() if name != "num_items_in_batch"}
    num_rows, num_tokens = batch["completion_ids"].shape
    lengths = batch["completion_mask"].sum(dim=1).clamp(min=1).tolist()
    keep = batch["prompt_mask"].bool().cpu()
    rows: list[Row] = [{} for _ in range(num_rows)]
    for name, value in tensors.items():
        width = keep.size(1) if name in _PROMPT_KEYS else num_tokens
        if not isinstance(value, torch.Tensor) or value.shape not in ((num_rows,), (num_rows, 1), (num_rows, width)):
            raise NotImplementedError(
                f"Dynamic sampling cannot take `{name}` apart into completions. Set `dynamic_sampling=False` for "
                "models that read images."
            )
        value = value.cpu()
        for i, row in enumerate(rows):
            if name in _PROMPT_KEYS:
                row[name] = value[i][keep[i]]
            else:
                row[name] = value[i] if value.dim() == 1 or value.size(1) == 1 < num_tokens else value[i, : lengths[i]]
    return rows


def join_rows(
    rows: list[Row], *, pad_token_id: int, pad_to_multiple_of: int | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """Batch from rows, padded as TRL pads: prompts on the left, completions on the right."""
    batch = {}
    fills = {
        "prompt_ids": pad_token_id,
        "completion_ids": pad_token_id,
        "tool_mask": 1,
        "importance_sampling_ratio": 1,
    }
    for name in rows[0]:
        values = [row[name] for row in rows]
        # One value per completion, as a number or, for sequence-level weights, as a row of one.
        if values[0].dim() == 0 or name == "importance_sampling_ratio" and all(v.numel() == 1 for v in values):
            batch[name] = torch.stack(values).to(device)
            continue
        length = max(value.numel() for value in values)
        if pad_to_multiple_of is not None:
            length += -length % pad_to_multiple_of
        padded = values[0].new_full((len(values), length), fills.get(name, 0))
        for target, value in zip(padded, values, strict=True):
            if name in _PROMPT_KEYS:
                target[length - value.numel() :] = value
            else:
                target[: value.numel()] = value
        batch[name] = padded.to(device)
    return batch


def save_surplus(directory: str, groups: list[Group]) -> None:
    """Write complete groups to `directory`, by rename. Without groups no file is left."""
    path = Path(directory) / SURPLUS_NAME
    if not groups:
        path.unlink(missing_ok=True)
        return
    tensors: dict[str, torch.Tensor] = {}
    described = []
    for g, group in enumerate(groups):
        described.append({"rewards": group.rewards, "judged": group.judged, "ranks": group.ranks})
        for i, row in group.rows.items():
            tensors |= {f"{g}.{i}.{name}": value.clone().contiguous() for name, value in row.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"groups": json.dumps(described)})
    os.replace(temporary, path)


def load_surplus(directory: str) -> list[Group]:
    """
    Groups that `save_surplus` wrote to `directory`; none without the file.

    Raises:
        ValueError: If the file is damaged.
    """
    path = Path(directory) / SURPLUS_NAME
    if not path.exists():
        return []
    try:
        with safe_open(path, framework="pt") as file:
            groups = [Group(**described, stale=True) for described in json.loads(file.metadata()["groups"])]
            for key in file.keys():
                g, i, name = key.split(".")
                groups[int(g)].rows.setdefault(int(i), {})[name] = file.get_tensor(key)
    except (SafetensorError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"{path} is damaged ({error}). Resume from another checkpoint, or delete the file: its groups are then "
            "not trained."
        ) from error
    return groups
