# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
`CalibratedDAPOTrainer`: [`CalibratedGRPOTrainer`] with what TRL lacks of DAPO, dynamic sampling.

Clip-higher, the token-level loss, overlong filtering and the soft overlong punishment are TRL's: the config sets them.
What is kept of a rollout is decided on the gathered rewards, so that all ranks do the same number of rounds.
"""

import collections
import logging
import math
import textwrap
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.utils import nanstd

from .calibrated_dapo_config import CalibratedDAPOConfig
from .calibrated_grpo_trainer import CalibratedGRPOTrainer
from .callbacks import RolloutBoundaryCallback
from .dynamic_sampling import (
    Group,
    PromptStream,
    Row,
    join_rows,
    load_surplus,
    save_surplus,
    split_rows,
    training_ranks,
)


logger = logging.getLogger(__name__)


@dataclass
class Round:
    """What one round of generation gave: groups, all ranks' rewards `(completions, functions)`, TRL's metrics."""

    groups: list[Group]
    rewards_per_func: torch.Tensor
    metrics: dict[str, float]


class CalibratedDAPOTrainer(CalibratedGRPOTrainer):
    """
    Trainer for DAPO in FP8, training and rollout, with calibrated clip bounds.

    Takes what [`CalibratedGRPOTrainer`] takes, with a [`CalibratedDAPOConfig`] as `args`. With
    `dynamic_sampling=False` it is that trainer.

    With dynamic sampling the trainer draws its prompts itself, in an order that depends on the seed alone. The length
    of the training is still what TRL makes of the dataset's size, so that an epoch can be more than one pass.

    Attributes:
        num_cap_hits (`int`): Rollout batches that uniform groups had to fill, over all resumes.
    """

    _tag_names = ["trl", "dapo", "trl-calclip", "fp8"]
    _name = "DAPO"
    _paper = {
        "title": "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
        "id": "2503.14476",
        "citation": textwrap.dedent("""\
            @article{yu2025dapo,
                title  = {{DAPO: An Open-Source LLM Reinforcement Learning System at Scale}},
                author = {Qiying Yu and others},
                year   = 2025,
                eprint = {arXiv:2503.14476},
            }"""),
    }

    def __init__(self, model, reward_funcs=None, args: CalibratedDAPOConfig | None = None, *others, **kwargs):
        if args is None:
            args = CalibratedDAPOConfig()
        if not isinstance(args, CalibratedDAPOConfig):
            raise TypeError(
                f"`args` must be a `CalibratedDAPOConfig`, got {type(args).__name__}. It takes every argument of "
                "`CalibratedGRPOConfig`: change the class name and keep the rest."
            )
        with overlong_punishment(args, reward_funcs, kwargs) as reward_funcs:
            super().__init__(model, reward_funcs, args, *others, **kwargs)

        self.num_cap_hits = 0
        self._surplus: list[Group] = []
        if not args.dynamic_sampling:
            return
        images = {"image", "images"} & set(self.train_dataset.column_names or [])
        if images:
            raise NotImplementedError(
                f"The dataset has images (column {', '.join(images)}), which dynamic sampling cannot take apart into "
                "completions. Set `dynamic_sampling=False`."
            )
        self._prompts = PromptStream(self.training_dataset(), shuffle=self.shuffle_dataset, seed=args.seed)
        self._judging_column = self._find_judging_column()
        if not args.calibrated_clip:
            self.add_callback(RolloutBoundaryCallback(max(1, args.updates_per_rollout)))

    def _find_judging_column(self) -> int | None:
        name, names = self.args.dynamic_sampling_metric, self.reward_func_names
        if name is None:
            return None
        if names.count(name) != 1:
            raise ValueError(
                f"`dynamic_sampling_metric={name!r}` must name one reward function of this run. They are "
                f"{', '.join(names)}; `None` judges by their weighted sum."
            )
        return names.index(name)

    # Dynamic sampling

    def generate_and_score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not (self.args.dynamic_sampling and self.model.training):
            return super().generate_and_score(inputs)
        num_groups = len(inputs) * self.accelerator.num_processes // self.num_generations
        position = self._prompts.position
        try:
            kept, rounds, extra_seconds = self._generate_rounds(num_groups)
        except Exception:
            # A rollout that failed has used no prompt: a checkpoint of this state begins with the same ones.
            self._prompts.position = position
            raise
        generated = [group for round_ in rounds for group in round_.groups]
        uniform = [group for group in generated if group.uniform]
        batch = (kept + uniform)[:num_groups]
        self._surplus = self._carry_over(kept[num_groups:])
        if len(kept) < num_groups:
            self._count_cap_hit(len(kept), num_groups)
        self._log_sampling(batch, rounds)
        self.log_in_training(
            {
                "dynamic_sampling/rounds": len(rounds),
                "dynamic_sampling/kept_groups": min(len(kept), num_groups),
                "dynamic_sampling/discarded_all_correct": sum(group.correct for group in uniform),
                "dynamic_sampling/discarded_all_wrong": sum(not group.correct for group in uniform),
                "dynamic_sampling/surplus": len(self._surplus),
                "dynamic_sampling/dropped_surplus": max(0, len(kept) - num_groups) - len(self._surplus),
                "dynamic_sampling/extra_generation_seconds": extra_seconds,
            }
        )
        return self._assemble(batch)

    def _generate_rounds(self, num_groups: int) -> tuple[list[Group], list[Round], float]:
        """Good groups, surplus of the last rollout first; the rounds; and seconds of those after the first."""
        kept = self._surplus
        rounds: list[Round] = []
        extra_seconds = 0.0
        while len(kept) < num_groups and len(rounds) <= self.args.max_resample_rounds:
            start = time.perf_counter()
            surplus = self.args.dynamic_sampling_surplus if rounds else 0
            latest = self._generate_groups(num_groups - len(kept) + surplus)
            extra_seconds += time.perf_counter() - start if rounds else 0.0
            rounds.append(latest)
            kept = kept + [group for group in latest.groups if not group.uniform]
        return kept, rounds, extra_seconds

    def _generate_groups(self, count: int) -> Round:
        """Generate and score `count` groups of fresh prompts, or the few more with which ranks have equal shares."""
        world_size, size = self.accelerator.num_processes, self.num_generations
        count += -count % (world_size // math.gcd(world_size, size))
        examples = [example for example in self._prompts.take(count) for _ in range(size)]
        share = len(examples) // world_size
        start = self.accelerator.process_index * share
        batch, rewards_per_func, metrics = self.generate_round(
            [dict(example) for example in examples[start : start + share]]
        )
        rows = dict(enumerate(split_rows(batch), start))
        rewards_per_func = rewards_per_func.cpu()
        rewards = weighted_sum(rewards_per_func, self.reward_weights)
        judged = rewards if self._judging_column is None else rewards_per_func[:, self._judging_column].tolist()
        groups = []
        for first in range(0, len(examples), size):
            group = slice(first, first + size)
            numbers = range(first, first + size)
            groups.append(
                Group(
                    rewards=rewards[group],
                    judged=judged[group],
                    ranks=[number // share for number in numbers],
                    rows={i: rows[number] for i, number in enumerate(numbers) if number in rows},
                )
            )
        return Round(groups, rewards_per_func, metrics)

    def _carry_over(self, groups: list[Group]) -> list[Group]:
        """
        Those of the good groups that the batch had no place for which the next batch begins with.

        By then the policy has moved on by one rollout batch. Truncated importance weights per token correct that;
        without them the groups are stale at once. A group that is left over for the second time is stale in any case.
        """
        args = self.args
        corrected = args.use_vllm and args.vllm_importance_sampling_correction
        if not groups or not corrected or args.vllm_importance_sampling_mode != "token_truncate":
            return []
        fresh = [group for group in groups if not group.stale]
        rows = gather_object([(g, i, row) for g, group in enumerate(fresh) for i, row in group.rows.items()])
        for g, i, row in rows:
            fresh[g].rows[i] = row
        for group in fresh:
            group.stale = True
        return fresh

    def _assemble(self, groups: list[Group]) -> dict[str, Any]:
        """This rank's share of the groups' completions as one padded batch."""
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        slots = [(group, i) for group in groups for i in range(self.num_generations)]
        # After a resume there may be fewer ranks than the surplus was generated on.
        owners = [group.ranks[i] % world_size for group, i in slots]
        targets = training_ranks(owners, world_size)
        if owners != targets:
            # A surplus group's rows are on every rank already.
            leaving = [
                (number, group.rows[i])
                for number, (group, i) in enumerate(slots)
                if owners[number] == rank != targets[number] and not group.stale
            ]
            for number, row in gather_object(leaving):
                group, i = slots[number]
                group.rows[i] = row
        mine = [slots[number] for number, target in enumerate(targets) if target == rank]
        rows = [group.rows[i] for group, i in mine]
        num_stale = collections.Counter(
            target for (group, _), target in zip(slots, targets, strict=True) if group.stale
        )
        if num_stale:
            # Ranks score equally many rows, or those with fewer would keep the others of a sharded model waiting.
            self._rescore(rows, [group.stale for group, _ in mine], max(num_stale.values()))
        batch = self._join(rows)
        mask = batch["completion_mask"]
        mask = mask if "tool_mask" not in batch else mask * batch["tool_mask"]
        batch["num_items_in_batch"] = self.accelerator.gather(mask.sum()).sum()
        return batch

    def _rescore(self, rows: list[Row], stale: list[bool], count: int) -> None:
        """
        Give stale rows the log-probabilities of the policy that is about to be trained, and the weight that follows.

        Args:
            rows (`list[Row]`): This rank's rows; stale ones are replaced.
            stale (`list[bool]`): Which of them are.
            count (`int`): Rows to score, at least as many as are stale. Others make up for the rest.
        """
        numbers = sorted(range(len(rows)), key=lambda i: not stale[i])[:count]
        size = self.args.per_device_train_batch_size
        for chunk in (numbers[i : i + size] for i in range(0, len(numbers), size)):
            inputs = self._join([rows[i] for i in chunk])
            for i, logps in zip(chunk, self.score(inputs).cpu(), strict=True):
                if not stale[i]:
                    continue
                old = logps[: rows[i]["completion_ids"].numel()]
                log_weight = (old - rows[i]["sampling_per_token_logps"]) * rows[i]["completion_mask"]
                if "tool_mask" in rows[i]:
                    log_weight = log_weight * rows[i]["tool_mask"]
                weight = (
                    log_weight.nan_to_num(nan=0.0)
                    .exp()
                    .clamp(
                        min=self.args.vllm_importance_sampling_clip_min,
                        max=self.args.vllm_importance_sampling_clip_max,
                    )
                )
                rows[i] = {**rows[i], "old_per_token_logps": old, "importance_sampling_ratio": weight}

    def _join(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        return join_rows(
            rows,
            pad_token_id=self.processing_class.pad_token_id,
            pad_to_multiple_of=self.pad_to_multiple_of,
            device=self.accelerator.device,
        )

    # Logging and checkpoints

    def _count_cap_hit(self, kept: int, wanted: int) -> None:
        self.num_cap_hits += 1
        if self.num_cap_hits > 1 or not self.accelerator.is_main_process:
            return
        warnings.warn(
            f"After {self.args.max_resample_rounds} resample rounds only {kept} of {wanted} groups have rewards that "
            "differ; the batch is filled with uniform groups, which carry no gradient. This is said once, "
            "`dynamic_sampling/cap_hits` counts. If it goes on, the task is too hard or too easy for the model, or "
            "the reward is broken: see `dynamic_sampling/discarded_all_wrong` and `_all_correct`.",
            stacklevel=2,
        )

    def _log_sampling(self, batch: list[Group], rounds: list[Round]) -> None:
        """TRL's metrics over all generated groups, as if one round had generated them; and the trained rewards."""
        merged = {name: merge_rounds(name, rounds) for round_ in rounds for name in round_.metrics}
        if rounds:
            # A spread over all is not the mean of the rounds' spreads.
            rewards_per_func = torch.cat([round_.rewards_per_func for round_ in rounds])
            for column, name in zip(rewards_per_func.T, self.reward_func_names, strict=True):
                merged[f"rewards/{name}/std"] = nanstd(column).item()
            merged["reward_std"] = nanstd(
                torch.tensor([group.rewards for round_ in rounds for group in round_.groups])
            ).item()
        trained = torch.tensor([group.rewards for group in batch])
        merged["dynamic_sampling/trained_reward"] = trained.nanmean().item()
        merged["dynamic_sampling/trained_reward_std"] = nanstd(trained).item()
        self.log_in_training(merged)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.args.dynamic_sampling and self.model.training and "train_runtime" not in logs:
            logs["dynamic_sampling/cap_hits"] = self.num_cap_hits
        super().log(logs, start_time)

    @property
    def keeps_state(self) -> bool:
        return super().keeps_state or self.args.dynamic_sampling

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.args.dynamic_sampling and self.args.should_save:
            save_surplus(output_dir or self.args.output_dir, self._surplus)

    def load_checkpoint(self, checkpoint: str) -> None:
        super().load_checkpoint(checkpoint)
        if self.args.dynamic_sampling:
            self._surplus = load_surplus(checkpoint)

    def _state(self) -> dict[str, Any]:
        if not self.args.dynamic_sampling:
            return super()._state()
        state = {"position": self._prompts.position, "num_cap_hits": self.num_cap_hits}
        return {**super()._state(), "dynamic_sampling": state}

    def _restore(self, state: dict[str, Any] | None) -> None:
        super()._restore(state)
        if not self.args.dynamic_sampling:
            return
        if state is None or "dynamic_sampling" not in state:
            logger.warning(
                "The checkpoint was not written by a run with dynamic sampling: prompts start over from the dataset's "
                "first."
            )
            return
        saved = state["dynamic_sampling"]
        if not isinstance(saved, dict) or any(
            type(saved.get(name)) is not int or saved[name] < 0 for name in ("position", "num_cap_hits")
        ):
            raise ValueError(
                f"The checkpoint's state of dynamic sampling cannot be: {saved!r}. Resume from another checkpoint."
            )
        self._prompts.position, self.num_cap_hits = saved["position"], saved["num_cap_hits"]


@contextmanager
def overlong_punishment(args: CalibratedDAPOConfig, reward_funcs, trainer_arguments: dict[str, Any]):
    """
    Append TRL's soft overlong punishment to the reward functions, if the config asks for it.

    Weights are lists as long as the functions' and are read while the trainer is built, so `args` holds the longer
    one as long as the context lasts.
    """
    if args.overlong_buffer_length is None:
        yield reward_funcs
        return
    reward_funcs = [] if reward_funcs is None else reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    weights = args.reward_weights
    if isinstance(trainer_arguments.get("reward_processing_classes"), list):
        trainer_arguments["reward_processing_classes"] = [*trainer_arguments["reward_processing_classes"], None]
    args.reward_weights = [*(weights or [1.0] * len(reward_funcs)), args.overlong_penalty]
    try:
        yield [
            *reward_funcs,
            get_soft_overlong_punishment(args.max_completion_length, args.overlong_buffer_length),
        ]
    finally:
        args.reward_weights = weights


def weighted_sum(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> list[float]:
    """Weighted sum over the reward functions of `(N, functions)`, without NaN as in TRL; NaN where all are NaN."""
    rewards = (rewards_per_func * weights).nansum(dim=1)
    return torch.where(rewards_per_func.isnan().all(dim=1), torch.nan, rewards).tolist()


def merge_rounds(name: str, rounds: list[Round]) -> float:
    """One value for a metric of several rounds: an extreme, a total, or the mean weighted by the rounds' groups."""
    values = [(len(round_.groups), round_.metrics[name]) for round_ in rounds if name in round_.metrics]
    last = name.rpartition("/")[2]
    if last.startswith("min"):
        return min(value for _, value in values)
    if last.startswith("max") or name == "num_tokens":
        return max(value for _, value in values)
    finite = [(count, value) for count, value in values if not math.isnan(value)]
    if not finite:
        return math.nan
    return sum(count * value for count, value in finite) / sum(count for count, _ in finite)
