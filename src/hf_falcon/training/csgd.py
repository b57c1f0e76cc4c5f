# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Coupled Sequential Glancing Distillation (Falcon, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..core.draft_session import TargetHead
from ..core.drafter import DraftModel
from ..core.modeling_falcon_draft import additive_mask, block_anchors
from .distillation import distillation_loss
from .estimated_tau import TOP
from .training_cache import TrainingCache

# The recipe of Falcon, and of drafters with a head of their own (EAGLE-3).
_DEFAULTS = {
    "regression_weight": 1.0,
    "distillation_weight": 0.1,
    "soft_label_share": 0.9,
    "feature_noise": 0.1,
    "unroll_passes": 1,
}
_DEFAULTS_WITHOUT_FEATURES = {
    "regression_weight": 0.0,
    "distillation_weight": 1.0,
    "soft_label_share": 1.0,
    "feature_noise": 0.0,
    "unroll_passes": 3,
}


def default_recipe(drafter: DraftModel) -> dict[str, Any]:
    """The defaults of the distillation for a drafter; see [`FalconTrainingArguments`]."""
    return _DEFAULTS if drafter.predicts_features else _DEFAULTS_WITHOUT_FEATURES


@dataclass
class DraftBatch:
    """
    One batch of sequences, padded on the right to `length`.

    Args:
        features (`torch.Tensor` of shape `(batch, length, (1 + layers) * hidden_size)`):
            The target's features `f_i`, followed by the outputs of the drafter's `feature_layers`.
        token_ids (`torch.LongTensor` of shape `(batch, length)`): the tokens `t_i`.
        valid (`torch.BoolTensor` of shape `(batch, length)`): `False` on padding.
        response (`torch.BoolTensor` of shape `(batch, length)`): `True` where `t_i` belongs to a response.
        sample (`torch.LongTensor` of shape `(batch,)`): the number of each row's sample in the data.
    """

    features: Tensor
    token_ids: Tensor
    valid: Tensor
    response: Tensor
    sample: Tensor


@dataclass
class DraftLoss:
    """
    Loss of one batch, and its parts.

    Args:
        loss (`torch.Tensor`, scalar): weighted regression and distillation, averaged over passes.
        regression, distillation (`torch.Tensor`, scalar): the two parts.
        correct (`torch.Tensor` of shape `(passes * block_size, 3)`): loss positions at each depth whose target token
            is among the drafter's first 1, 3 and 8 choices.
        counts (`torch.Tensor` of shape `(passes * block_size,)`): loss positions at each depth.
    """

    loss: Tensor
    regression: Tensor
    distillation: Tensor
    correct: Tensor
    counts: Tensor


@dataclass
class DistillationWeights:
    """
    Weights of the loss (Falcon, equations 7 to 9).

    Args:
        regression (`float`, *optional*, defaults to 1.0): weight of SmoothL1 between features.
        distillation (`float`, *optional*, defaults to 0.1): weight of the token distributions (w_dist).
        soft (`float`, *optional*, defaults to 0.9): share of the divergence against the hard cross-entropy (alpha).
        divergence (`str`, *optional*, defaults to `"kl"`): see [`distillation_loss`].
        pass_decay (`float`, *optional*, defaults to 1.0): weight of an unrolled pass relative to the one before.
    """

    regression: float = 1.0
    distillation: float = 0.1
    soft: float = 0.9
    divergence: str = "kl"
    pass_decay: float = 1.0

    def of_passes(self, passes: int) -> list[float]:
        """The weight of each pass; their mean is 1."""
        weights = [self.pass_decay**index for index in range(passes)]
        return [weight * passes / sum(weights) for weight in weights]


def shift_left(values: Tensor, steps: int) -> Tensor:
    """`values[:, i + steps]` at index i, of shape `(batch, length, ...)`; zeros past the end."""
    shifted = torch.zeros_like(values)
    if steps < values.shape[1]:
        shifted[:, : values.shape[1] - steps] = values[:, steps:]
    return shifted


def judged_positions(response: Tensor, valid: Tensor, block_size: int) -> Tensor:
    """
    Positions whose prediction counts: i, if the token that it predicts, at i + block_size + 1, belongs to a response.

    Returns:
        `torch.BoolTensor` of shape `(batch, length)`.
    """
    return shift_left(response & valid, block_size + 1)


def random_blocks(length: int, block_size: int, generators: list[torch.Generator]) -> tuple[Tensor, Tensor]:
    """
    Cuts each sequence into blocks at a random offset, so that training covers every alignment: in decoding, blocks end
    at the newest token. There is one generator for each sequence.

    Returns:
        Two `torch.LongTensor` of shape `(batch, length)`: the block of each position, and its place in that block.
    """
    offsets = torch.stack([torch.randint(block_size, (1,), generator=generator) for generator in generators])
    shifted = torch.arange(length)[None] + offsets
    return shifted // block_size, shifted % block_size


def glance(loss_positions: Tensor, distance: Tensor, ratio: float, generators: list[torch.Generator]) -> Tensor:
    """
    Chooses the positions whose input is replaced by the correct one, k steps ahead: one contiguous run of
    `ratio * distance` loss positions in each sample, at a random place (Falcon, equation 6).

    Args:
        loss_positions (`torch.BoolTensor` of shape `(batch, length)`): positions that count.
        distance (`torch.Tensor` of shape `(batch,)`): Hamming distance between drafter and target on them.
        ratio (`float`): lambda.
        generators (`list[torch.Generator]`): sources of the random places, one for each sample.

    Returns:
        `torch.BoolTensor` of shape `(batch, length)`.
    """
    rank = loss_positions.cumsum(dim=1) - 1
    available = loss_positions.sum(dim=1)
    wanted = torch.minimum((ratio * distance).long(), available)
    place = torch.cat([torch.rand(1, generator=generator) for generator in generators]).to(available.device)
    start = (place * (available - wanted + 1)).long()
    return loss_positions & (rank >= start[:, None]) & (rank < (start + wanted)[:, None])


def check_unrolling(drafter: DraftModel, passes: int, name: str = "unroll_passes") -> None:
    """
    Checks a number of unrolled passes, the argument `name`.

    Raises:
        `ValueError`: for fewer than one pass, and for more than one pass of a drafter with an LSTM.
    """
    if passes < 1:
        raise ValueError(f"`{name}` is {passes}: set it to at least 1.")
    lstm_layers = getattr(drafter.config, "num_lstm_layers", 0)
    if passes > 1 and lstm_layers > 0:
        raise ValueError(
            f"`{name}` is {passes} and `num_lstm_layers` {lstm_layers}: only drafters "
            f"without an LSTM can be unrolled. Set `{name}=1` or `num_lstm_layers=0`."
        )


@dataclass
class TrainingHeads:
    """
    The heads of a drafter in training.

    Args:
        draft ([`DraftHead`]): the drafter's: the target's, or one of its own.
        target ([`TargetHead`]): the target's, over the draft vocabulary.
    """

    draft: Any
    target: TargetHead

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters of a head of its own, as they are now: FSDP replaces them."""
        return [] if self.draft is self.target else self.draft.parameters()

    @classmethod
    def of(cls, drafter: DraftModel, target: PreTrainedModel, dtype: torch.dtype | None = None) -> TrainingHeads:
        """The heads of `drafter` for `target`; the target's is in `dtype`, by default the drafter's."""
        of_target = TargetHead(drafter, target, dtype)
        if drafter.predicts_features:
            return cls(of_target, of_target)
        return cls(drafter.make_head(target), of_target)


def draft_loss(
    drafter: DraftModel,
    heads: TrainingHeads,
    batch: DraftBatch,
    generator: torch.Generator,
    weights: DistillationWeights,
    noise: float = 0.1,
    glancing_ratio: float = 0.0,
    passes: int = 1,
) -> DraftLoss:
    """
    The loss of one batch (Falcon, algorithm 1). For a drafter with a head of its own, this is EAGLE-3's training-time
    test: there is no regression and no noise.

    Args:
        drafter ([`DraftModel`]): the drafter in training.
        heads ([`TrainingHeads`]): its head, and the target's.
        batch ([`DraftBatch`]): sequences and the target's features of them.
        generator (`torch.Generator`):
            A CPU generator. All random draws depend on it and on `batch.sample` alone: the draws for a sample do not
            depend on the batch that the sample is in.
        weights ([`DistillationWeights`]): weights of the loss.
        noise (`float`, *optional*, defaults to 0.1):
            Uniform noise in (-noise, noise) on normalised input features, against the drift of fed-back features.
        glancing_ratio (`float`, *optional*, defaults to 0.0):
            Lambda of this step. Ignored at `block_size=1`, as a block then has no other token to learn from, and for
            drafters of a single pass, such as Medusa's heads: they read the end of a block alone, where a glance would
            show them the text that they predict.
        passes (`int`, *optional*, defaults to 1):
            Draft passes unrolled: pass j + 1 reads the features that pass j predicted (HASS, EAGLE-3).

    Returns:
        [`DraftLoss`]
    """
    check_unrolling(drafter, passes)
    block_size, hidden_size = drafter.config.block_size, heads.target.linear.in_features
    regresses = drafter.predicts_features
    length = batch.token_ids.shape[1]
    device = batch.features.device
    seed = int(torch.randint(2**31, (), generator=generator))
    generators = [torch.Generator().manual_seed(seed + sample) for sample in batch.sample.tolist()]
    block_ids, place_in_block = (t.to(device) for t in random_blocks(length, block_size, generators))
    targets, layer_outputs = batch.features.split((hidden_size, batch.features.shape[-1] - hidden_size), dim=-1)
    features = batch.features
    if regresses:
        uniform = torch.zeros(targets.shape, device=device)
        for row, valid, own in zip(uniform, batch.valid.sum(dim=1).tolist(), generators, strict=True):
            # Drawn on the device, from a seed of the row's generator: copying this many numbers would take long.
            noise_generator = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=own)))
            row[:valid].uniform_(-noise, noise, generator=noise_generator)
        features = torch.cat((targets + (uniform * drafter.feature_std).to(targets.dtype), layer_outputs), dim=-1)
    embeds = heads.draft.embed(shift_left(batch.token_ids, 1))

    # The prediction at i is compared with feature i + k, which predicts the token at i + k + 1.
    labels = shift_left(targets, block_size)
    judged = judged_positions(batch.response, batch.valid, block_size)
    place = place_in_block[judged]
    # Token t_{i+k}, the one before the token that the prediction at i predicts. Inside a block it is a token of the
    # same block: the true token here, the branch's token in decoding.
    previous = shift_left(embeds, block_size - 1)

    given, given_embeds = features, embeds
    if glancing_ratio > 0 and block_size > 1 and drafter.max_draft_passes != 1:
        with torch.no_grad():
            first = drafter.condition(draft_pass(drafter, features, embeds, block_ids, batch.valid), previous)[judged]
            wrong = torch.zeros_like(judged)
            ranks = distillation_loss(first[None], labels[judged], heads.draft, heads.target, weights.soft)[1]
            wrong[judged] = ranks[0] > 0
            glanced = glance(judged, wrong.sum(dim=1), glancing_ratio, generators)
        # With pytorch's issue 158232, autocast goes on with the casts that it makes here, which have no gradients.
        torch.clear_autocast_cache()
        given = torch.where(glanced[..., None], shift_left(batch.features, block_size), features)
        given_embeds = torch.where(glanced[..., None], shift_left(embeds, block_size), embeds)

    predictions = []
    cache = None
    for index in range(1, passes + 1):
        cache = TrainingCache(cache) if passes > 1 else None
        predicted = draft_pass(drafter, given, given_embeds, block_ids, batch.valid, index, cache)
        predicted = drafter.condition(predicted, previous)
        predictions.append(predicted[judged])
        # The next pass has no glancing. Feature i was predicted at i - k; the first k positions have no prediction.
        start = features[:, :block_size, :hidden_size] if regresses else torch.zeros_like(predicted[:, :block_size])
        given = torch.cat((start, predicted[:, : max(0, length - block_size)]), dim=1)
        given_embeds = embeds

    chosen, expected = torch.stack(predictions), labels[judged]
    regression = torch.zeros((), device=device)
    if regresses:
        error = (chosen.float() - expected.float()) / drafter.feature_std
        of_passes = F.smooth_l1_loss(error, torch.zeros_like(error), reduction="none").sum(dim=(1, 2))
        # Not `mean`, which is NaN if no position of a batch counts.
        regression = torch.dot(of_passes, of_passes.new_tensor(weights.of_passes(passes))) / max(1, error.numel())
    distillation, ranks = distillation_loss(
        chosen,
        expected,
        heads.draft,
        heads.target,
        weights.soft,
        heads.parameters,
        weights.divergence,
        weights.of_passes(passes),
    )
    offsets = [place == offset for offset in range(block_size)]
    correct = [torch.stack([(of_pass[here] < top).sum() for top in TOP]) for of_pass in ranks for here in offsets]
    counts = [here.sum() for _ in range(passes) for here in offsets]
    loss = weights.regression * regression + weights.distillation * distillation
    return DraftLoss(loss, regression.detach(), distillation.detach(), torch.stack(correct), torch.stack(counts))


def draft_pass(
    drafter: DraftModel,
    features: Tensor,
    embeds: Tensor,
    block_ids: Tensor,
    valid: Tensor,
    passes: int = 1,
    cache: TrainingCache | None = None,
) -> Tensor:
    """Predictions of the last of `passes` unrolled passes, all positions at once."""
    fused, _ = drafter.fuse(features, embeds)
    positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
    mask = additive_mask(_unrolled_mask(block_ids, valid, passes), fused.dtype)
    return drafter.run_layers(fused, block_anchors(block_ids, drafter.config.block_size), positions, mask, cache)


def _unrolled_mask(block_ids: Tensor, valid: Tensor, passes: int) -> Tensor:
    """
    Mask of the last of `passes` unrolled passes over the keys of all passes. Of the first pass, a block sees the
    blocks at least `passes - 1` back (true features); of pass p, the one block that pass p drafted on the way to it.

    Returns:
        `torch.BoolTensor` of shape `(batch, 1, length, passes * length)`.
    """
    ahead = block_ids[:, :, None] - block_ids[:, None, :]
    itself = torch.eye(block_ids.shape[1], dtype=torch.bool, device=block_ids.device)
    seen = [ahead >= passes - 1] + [ahead == passes - p for p in range(2, passes + 1)]
    visible = torch.cat([part & (valid[:, None, :] | itself) for part in seen], dim=-1)
    return visible[:, None]
