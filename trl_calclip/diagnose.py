# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Would this model over-clip in this recipe? Measured without a training run.

One rollout, then a few optimizer steps of a policy gradient with random advantages on a copy, in micro-batches as the
trainer takes them. The tokens of the steps after the first are pooled and solved by the trainer's own code. Random
advantages say what the numerics do; what rewards do they cannot say.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator

import torch
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from .calibration import TokenCollector, TokenPool
from .clip_range import ClipRange, calibrate_clip_range
from .fp8.linear import bf16_pass, convert_to_fp8, fp8_linears
from .fp8.recipes import cuda_capability, get_recipe, resolve_emulate
from .metrics import ENTROPY_BINS, clip_metrics, entropy_metrics, error_metrics, mismatch_metrics, mismatch_sums
from .offline import Rollout, sample_with_engine, sample_with_model, score_completions


# Bands of the verdict; the first is this package's, the other two are verl's.
SMALL_OVERCLIP = 0.01
MAX_MISMATCH_KL = 0.1
MIN_SAMPLE_SIZE = 0.3


@dataclasses.dataclass(frozen=True)
class Settings:
    """
    What is measured.

    Args:
        tokens (`int`): Longest completion.
        updates (`int`): Optimizer steps; the tokens of all but the first are pooled.
        learning_rate (`float`): Of AdamW.
        reference ([`ClipRange`]): Bounds as used in BF16.
        lower_limits, upper_limits (`tuple[float, float]`): The calibration's search ranges.
        use_engine (`bool`): Whether vLLM samples; else the float8 model itself.
        emulate (`bool` or `None`): As `fp8_emulate`.
        per_layer (`bool`): Whether layers are left in BF16 one at a time, on the first micro-batch.
        seed (`int`): Of sampling and advantages.
    """

    tokens: int = 48
    updates: int = 4
    learning_rate: float = 1e-6
    reference: ClipRange = ClipRange(0.8, 1.24)
    lower_limits: tuple[float, float] = (0.5, 0.9)
    upper_limits: tuple[float, float] = (1.2, 2.0)
    use_engine: bool = True
    emulate: bool | None = None
    per_layer: bool = False
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """
    What was found for one recipe. Shares are in [0, 1], NaN where there is nothing to take a share of.

    Args:
        recipe (`str`): The recipe.
        num_tokens, num_negative_tokens (`int`): Pooled tokens, and those with negative advantage.
        gap (`float`): Mean absolute difference of log-probabilities, engine to float8 trainer, nats; NaN without one.
        mismatch (`dict[str, float]`): `mismatch_metrics` of rollout and trainer; empty without an engine.
        errors (`dict[str, float]`): `error_metrics`; `ratio_noise_std` is the noise that FP8 adds to a log-ratio.
        bf16_floor_std (`float`): Standard deviation of BF16 against BF16 one completion at a time, nats.
        bf16_floor_clipped (`float`): Share of tokens that this alone would throw out of the reference bounds.
        bf16_ratio_std (`float`): Standard deviation of `log r_bf16`: how far the steps moved the policy.
        clip (`dict[str, float]`): `clip_metrics` at the reference bounds.
        alpha_low_bf16 (`float`): Share of negative tokens that BF16 clips at the reference bound.
        calibrated ([`ClipRange`]): Bounds that calibration would settle at on these tokens.
        clip_calibrated (`dict[str, float]`): `clip_metrics` at these bounds.
        entropy (`dict[str, float]`): `entropy_metrics` at the reference bounds.
        layers (`dict[str, float]`): By layer, `ratio_noise_std` with it in BF16, over that with nothing left out.
        verdict (`str`): `"fits"`, `"calibrate"` or `"avoid"`.
        reason (`str`): Why.
    """

    recipe: str
    num_tokens: int
    num_negative_tokens: int
    gap: float
    mismatch: dict[str, float]
    errors: dict[str, float]
    bf16_floor_std: float
    bf16_floor_clipped: float
    bf16_ratio_std: float
    clip: dict[str, float]
    alpha_low_bf16: float
    calibrated: ClipRange
    clip_calibrated: dict[str, float]
    entropy: dict[str, float]
    layers: dict[str, float]
    verdict: str = ""
    reason: str = ""

    def to_json(self) -> dict:
        """For `json.dump`: numbers that are not finite become `None`."""

        def clean(value):
            if isinstance(value, dict):
                return {key: clean(entry) for key, entry in value.items()}
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return clean(dataclasses.asdict(self))


def judge(found: Diagnosis, settings: Settings) -> tuple[str, str]:
    """Verdict and its reason, from the numbers alone."""
    low, high = found.clip["overclip_low_frac_reference"], found.clip["overclip_high_frac_reference"]
    over = f"{low:.1%} of the negative and {high:.1%} of the positive tokens are over-clipped at the reference bounds"
    if found.errors["nonfinite_frac"]:
        return "avoid", f"{found.errors['nonfinite_frac']:.2%} of the importance ratios are not finite."
    if not found.num_negative_tokens or found.num_negative_tokens == found.num_tokens:
        return "avoid", "There are no tokens of both signs to judge by: ask for more completions."
    kl = found.mismatch.get("rollout_corr/k3_kl", 0.0)
    size = found.mismatch.get("rollout_corr/rollout_is_eff_sample_size", 1.0)
    if kl > MAX_MISMATCH_KL or size < MIN_SAMPLE_SIZE:
        return "avoid", (
            f"Rollout and trainer disagree: KL {kl:.3f} nats, effective sample size {size:.2f}. No clip bound "
            "corrects that."
        )
    if max(low, high) <= SMALL_OVERCLIP:
        return "fits", f"{over}, no more than {SMALL_OVERCLIP:.0%}: calibration would change little."
    left = found.clip_calibrated["overclip_low_frac"]
    limits = settings.lower_limits
    if found.calibrated.lower <= limits[0] + 0.02 * (limits[1] - limits[0]):
        return "avoid", (
            f"{over}, and the search for the lower bound ends at its limit of {limits[0]:g}, where {left:.1%} still "
            "are. Use a finer recipe, leave layers in BF16, or widen the limits knowingly."
        )
    reason = (
        f"{over}; bounds of [{found.calibrated.lower:.3f}, {found.calibrated.upper:.3f}] bring the lower share to "
        f"{left:.1%}."
    )
    if found.calibrated.lower <= limits[0] + 0.1 * (limits[1] - limits[0]):
        reason += f" That is near the edge of the search range, {limits[0]:g}: a finer recipe would leave more room."
    return "calibrate", reason


def diagnose(
    path: str,
    recipe: str,
    prompt_ids: list[list[int]],
    settings: Settings = Settings(),  # noqa: B008  (frozen)
    advance: Callable[[str], None] = lambda what: None,
) -> Diagnosis:
    """
    Measure one recipe on one model.

    The model has FP32 master weights, gradients and AdamW's two moments: 16 bytes a parameter.

    Args:
        path (`str`): Model directory or name.
        recipe (`str`): FP8 recipe.
        prompt_ids (`list[list[int]]`): Prompts, one per completion.
        settings ([`Settings`], *optional*): What is measured.
        advance (`Callable[[str], None]`, *optional*): Called before each stage with its name, for a progress bar.

    Raises:
        ValueError: If there are fewer prompts than updates, or the device has no kernel for the recipe.
    """
    if len(prompt_ids) < settings.updates or settings.updates < 2:
        raise ValueError(
            f"{len(prompt_ids)} completions in {settings.updates} updates: each update takes at least one completion, "
            "and the first update, where every BF16 ratio is 1, is left out of the measurement."
        )
    chosen = get_recipe(recipe)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    emulate = resolve_emulate(chosen, device, cuda_capability(), settings.emulate)
    rollout = None
    if settings.use_engine:
        advance("rollout")
        rollout = sample_with_engine(path, chosen.vllm_quantization, prompt_ids, settings.tokens, settings.seed + 1)
    advance("load")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float().eval().to(device)
    convert_to_fp8(model, chosen, emulate=emulate)
    if rollout is None:
        advance("rollout")
        rollout = sample_with_model(model, prompt_ids, settings.tokens, settings.seed + 1)
    return _measure(model, recipe, rollout, settings, advance)


class Scorer:
    """Micro-batches of one rollout, scored in FP8 and in BF16 with the weights that the model has now."""

    def __init__(self, model: PreTrainedModel, rollout: Rollout, updates: int):
        self.model = model
        self.parts = [part.tolist() for part in torch.arange(len(rollout.sequences)).tensor_split(updates)]
        self.rollout = rollout

    def score(self, part: list[int], rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies, `(B, T)`, 0 in the padding."""
        sequences, lengths = [self.rollout.sequences[i] for i in part], [self.rollout.lengths[i] for i in part]
        scored = score_completions(self.model, sequences, lengths, rows or len(part))
        return tuple(pad_sequence(values, batch_first=True) for values in scored)

    @torch.no_grad()
    def bf16(self, part: list[int], rows: int | None = None) -> torch.Tensor:
        with bf16_pass(self.model):
            return self.score(part, rows)[0]

    @torch.no_grad()
    def fp8(self, part: list[int]) -> torch.Tensor:
        return self.score(part)[0]

    def mask(self, part: list[int]) -> torch.Tensor:
        lengths = torch.tensor([self.rollout.lengths[i] for i in part])
        return (torch.arange(lengths.max().item())[None] < lengths[:, None]).to(self.model.device)

    def engine(self, part: list[int]) -> torch.Tensor:
        assert self.rollout.logps is not None
        return pad_sequence([self.rollout.logps[i] for i in part], batch_first=True).to(self.model.device)


def train_and_pool(
    scorer: Scorer,
    old_fp8: list[torch.Tensor],
    old_bf16: list[torch.Tensor],
    settings: Settings,
    advance: Callable[[str], None] = lambda what: None,
) -> TokenPool:
    """
    One optimizer step per micro-batch, with a random advantage per completion, and the tokens of all but the first.

    Args:
        scorer ([`Scorer`]): Model and rollout. The model's weights are moved.
        old_fp8, old_bf16 (`list[torch.Tensor]`): The old policy's log-probabilities by micro-batch, `(B, T)`, nats.
        settings ([`Settings`]): Learning rate and seed.
        advance (`Callable[[str], None]`, *optional*): Called before each step with its name.
    """
    model, rollout, device = scorer.model, scorer.rollout, scorer.model.device
    generator = torch.Generator().manual_seed(settings.seed)
    advantages = torch.randn(len(rollout.sequences), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    collector = TokenCollector()
    for update, part in enumerate(scorer.parts):
        advance(f"update {update + 1}")
        own, old, mask = advantages[part].to(device), old_fp8[update], scorer.mask(part)
        bf16 = scorer.bf16(part) if update else None
        logps, entropies = scorer.score(part)
        ratio = torch.exp(logps - old)
        loss = -((ratio * mask).sum(-1) / mask.sum(-1) * own).mean()
        optimizer.zero_grad()
        loss.backward()
        if bf16 is not None:
            engine = None if rollout.logps is None else scorer.engine(part)
            collector.add(
                per_token_logps=logps.detach(),
                old_per_token_logps=old,
                bf16_per_token_logps=bf16,
                bf16_old_per_token_logps=old_bf16[update],
                advantages=own,
                mask=mask,
                importance_sampling_ratio=None if engine is None else torch.exp(old - engine).clamp(max=2.0),
                sampling_per_token_logps=engine,
                entropies=entropies,
            )
        optimizer.step()
    optimizer.zero_grad()
    return collector.pool(Accelerator(cpu=True))


def _measure(
    model: PreTrainedModel, recipe: str, rollout: Rollout, settings: Settings, advance: Callable[[str], None]
) -> Diagnosis:
    scorer = Scorer(model, rollout, settings.updates)
    first, masks = scorer.parts[0], [scorer.mask(part) for part in scorer.parts]
    advance("old policy")
    old_fp8 = [scorer.fp8(part) for part in scorer.parts]
    old_bf16 = [scorer.bf16(part) for part in scorer.parts]
    advance("BF16 noise floor")
    floors = [scorer.bf16(part, rows=1) - old for part, old in zip(scorer.parts, old_bf16, strict=True)]
    floor = torch.cat([values[mask] for values, mask in zip(floors, masks, strict=True)])
    layers = _layers(model) if settings.per_layer else {}
    before = {}
    for name, linears in layers.items():
        advance(f"layer {name}, before")
        with _in_bf16(linears):
            before[name] = scorer.fp8(first)

    pool = train_and_pool(scorer, old_fp8, old_bf16, settings, advance)

    after = {}
    if layers:
        bf16_moved = (scorer.bf16(first) - old_bf16[0])[masks[0]]
        whole = ((scorer.fp8(first) - old_fp8[0])[masks[0]] - bf16_moved).std()
        for name, linears in layers.items():
            advance(f"layer {name}, after")
            with _in_bf16(linears):
                noise = (scorer.fp8(first) - before[name])[masks[0]] - bf16_moved
            after[name] = (noise.std() / whole).item()

    gap, mismatch = math.nan, {}
    if rollout.logps is not None:
        engines = [scorer.engine(part) for part in scorer.parts]
        sums = [mismatch_sums(*values) for values in zip(old_fp8, engines, masks, strict=True)]
        mismatch = mismatch_metrics(sum(sums, torch.zeros_like(sums[0])))
        gaps = [(old - own)[mask] for old, own, mask in zip(old_fp8, engines, masks, strict=True)]
        gap = torch.cat(gaps).abs().mean().item()
    outside = (floor.exp() < settings.reference.lower) | (floor.exp() > settings.reference.upper)
    solved = _solve(pool, settings)
    found = Diagnosis(
        recipe=recipe,
        gap=gap,
        mismatch=mismatch,
        bf16_floor_std=floor.std().item(),
        bf16_floor_clipped=outside.double().mean().item(),
        layers=after,
        **solved,
    )
    verdict, reason = judge(found, settings)
    return dataclasses.replace(found, verdict=verdict, reason=reason)


def _solve(pool: TokenPool, settings: Settings) -> dict:
    """What the pool says: shares at the reference bounds, and the bounds where damped calibrations would end."""
    reference = current = settings.reference
    for _ in range(24):  # each goes half of the way
        result = calibrate_clip_range(
            pool.fp8_ratio, pool.bf16_ratio, pool.advantages, tis_weights=pool.tis_weights,
            sampling_probs=pool.sampling_probs, reference=reference, current=current,
            lower_limits=settings.lower_limits, upper_limits=settings.upper_limits,
            max_lower_step=1.0, max_upper_step=1.0,
        )  # fmt: skip
        current = result.clip_range
    bf16 = pool.bf16_ratio.log()
    return {
        "num_tokens": len(pool.fp8_ratio),
        "num_negative_tokens": (pool.advantages < 0).sum().item(),
        "errors": error_metrics(pool),
        "bf16_ratio_std": bf16[bf16.isfinite()].std().item(),
        "clip": clip_metrics(pool, reference=reference, in_force=reference),
        "alpha_low_bf16": result.alpha_low_bf16,
        "calibrated": current,
        "clip_calibrated": clip_metrics(pool, reference=reference, in_force=current),
        "entropy": entropy_metrics(pool, reference=reference, in_force=reference),
    }


def _layers(model: PreTrainedModel) -> dict[str, list]:
    """Float8 linears by layer: the part of their name up to the first number, or the whole name."""
    linears = set(fp8_linears(model))
    groups: dict[str, list] = {}
    for name, module in model.named_modules():
        if module in linears:
            found = re.match(r".*?\.\d+(?=\.|$)", name)
            groups.setdefault(found[0] if found else name, []).append(module)
    return groups


@contextlib.contextmanager
def _in_bf16(linears: list) -> Iterator[None]:
    for linear in linears:
        linear.fp8_enabled = False
    try:
        yield
    finally:
        for linear in linears:
            linear.fp8_enabled = True


def rows(found: Diagnosis) -> list[tuple[str, str]]:
    """The diagnosis as label and value, for a table."""
    clip, errors, calibrated = found.clip, found.errors, found.calibrated
    values = [
        ("tokens, of these negative", f"{found.num_tokens:,}, {found.num_negative_tokens:,}"),
        ("gap engine to trainer, nats", _number(found.gap)),
        ("mismatch KL (k3), nats", _number(found.mismatch.get("rollout_corr/k3_kl", math.nan))),
        ("effective sample size", _number(found.mismatch.get("rollout_corr/rollout_is_eff_sample_size", math.nan))),
        ("probability error FP8 to BF16, nats", _number(errors["prob_error_fp8"])),
        ("ratio error, over that", f"{_number(errors['ratio_error_fp8'])}, {errors['error_quotient']:.2f}"),
        ("ratio noise, std, nats", _number(errors["ratio_noise_std"])),
        ("std of log r_bf16, nats", _number(found.bf16_ratio_std)),
        ("BF16 noise floor, std, nats", f"{_number(found.bf16_floor_std)} ({found.bf16_floor_clipped:.1%} out)"),
        (
            "negative clipped, BF16 → FP8",
            f"{found.alpha_low_bf16:.1%} → {clip['clip_frac_low_neg_fp8_reference']:.1%}",
        ),
        (
            "over-clipped low, high",
            f"{clip['overclip_low_frac_reference']:.1%}, {clip['overclip_high_frac_reference']:.1%}",
        ),
        ("calibrated bounds", f"[{calibrated.lower:.3f}, {calibrated.upper:.3f}]"),
        (
            "over-clipped low, high, calibrated",
            f"{found.clip_calibrated['overclip_low_frac']:.1%}, {found.clip_calibrated['overclip_high_frac']:.1%}",
        ),
    ]
    parts = [found.entropy[f"entropy_bin/{label}/overclip_low_part"] for label in ENTROPY_BINS]
    values.append(
        (
            f"over-clipped low by entropy ({', '.join(ENTROPY_BINS)})",
            ", ".join("-" if math.isnan(part) else f"{part:.0%}" for part in parts),
        )
    )
    if found.layers:
        best = sorted(found.layers.items(), key=lambda item: item[1])[:3]
        values.append(("noise left with a layer in BF16", ", ".join(f"{name} {value:.0%}" for name, value in best)))
    return [*values, ("verdict", found.verdict)]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"
