# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Weights that a new drafter learns from faster than from random ones: copies, and least-squares maps."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ..core.configuration_falcon_draft import FalconDraftConfig
from ..core.draft_session import embed, head_parameters
from ..core.drafter import FalconDraftModel
from ..core.modeling_falcon_draft import additive_mask, relaxed_causal_mask
from ..core.target_parts import decoder_of
from .features import Features, set_feature_statistics, some_features
from .token_file import TokenFile

if TYPE_CHECKING:
    from ..drafters.eagle3 import Eagle3DraftModel

# Ridge of the least squares, as a share of the mean square of a hidden state.
_EAGLE3_RIDGE = 0.05
_FALCON_RIDGE = 0.01
_BLOCKS_RIDGE = 1e-4
# Of what other layers add: with a tenth of it the first choices on other samples were right less often.
_READER_RIDGE = 0.1
# Samples of the least squares for a Falcon drafter. With half of them and the other ridge it learnt a little slower.
_FALCON_SAMPLES = 128
# Of copied layers, as a share of the mean square of a feature: rounding is less, another kind of layer far more.
_LARGEST_ERROR = 0.01
# What a position of a block keeps of its own input, beside the anchor. With 0.1 the first choices were right as often,
# with 0.5 less often.
_SHARE_OF_OWN = 0.2
# The drafter's names for the norms of layers that normalise their outputs, too (Gemma 2 and 3).
_POST_NORMS = {
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
# Of the scale that the target's head reads. Untrained states are mostly wrong, and at the full scale the first losses
# were several times those of a uniform distribution.
_SHARE_OF_SCALE = 0.3


def like_last_layer(config: FalconDraftConfig, target: PreTrainedModel) -> FalconDraftConfig:
    """
    The configuration of a new drafter, changed so that its layers can be copies of the target's last ones, but for the
    width of the MLP: with their biases, norms and activation. `config` itself, if they would still have other weights.
    """
    found = _last_layers(target, 1)
    if not found:
        return config
    attention = getattr(found[0], "self_attn", None)
    text_config = target.config.get_text_config(decoder=True)
    activation = getattr(text_config, "hidden_activation", None) or getattr(text_config, "hidden_act", None)
    changed = copy.deepcopy(config)
    changed.attention_bias = getattr(getattr(attention, "q_proj", None), "bias", None) is not None
    changed.use_qk_norm = hasattr(attention, "q_norm")
    changed.use_post_norms = hasattr(found[0], "pre_feedforward_layernorm")
    if isinstance(activation, str) and activation in ACT2FN:
        changed.hidden_act = activation
    with torch.device("meta"):
        drafter = FalconDraftModel(_as_wide(changed, target))
    return changed if _same_shapes(drafter.layers[0], found[0]) else config


@torch.no_grad()
def error_of_copies(config: FalconDraftConfig, target: PreTrainedModel, rows: Tensor) -> float:
    """
    How far copies of the target's last layers are from computing its features in a drafter of this configuration, if
    its MLPs are as wide.

    Args:
        config ([`FalconDraftConfig`]): the configuration.
        target ([`PreTrainedModel`]): the target.
        rows (`torch.Tensor` of shape `(length, 2 * hidden_size)`): features of a sample, and what the layers read.

    Returns:
        `float`: the mean square of the error, as a share of that of a feature; infinite if the layers cannot be
        copied, or the error is so large that they are of another kind.
    """
    return _copy_last_layers(FalconDraftModel(_as_wide(config, target)), target, rows)


def _as_wide(config: FalconDraftConfig, target: PreTrainedModel) -> FalconDraftConfig:
    """The configuration, with MLPs as wide as the target's if its own are narrower."""
    wide = copy.deepcopy(config)
    width = getattr(target.config.get_text_config(decoder=True), "intermediate_size", None)
    if isinstance(width, int):
        wide.intermediate_size = max(width, config.intermediate_size)
    return wide


@torch.no_grad()
def start_falcon(
    drafter: FalconDraftModel, target: PreTrainedModel, data: TokenFile, stored: Features | None = None
) -> bool:
    """
    Gives a new drafter without an LSTM weights of the target. Its decoder layers and its norm are copies of the
    target's last ones, where these compute the same in the drafter. A narrower MLP keeps the inner units that
    contribute most to the target's ([`narrow_mlps`]). The linear fusion is the least-squares map from a feature and
    the next token to what the layers read: in the target, the hidden states of the position to predict. Outputs of
    the target's `feature_layers` add what of the rest they explain.
    Layers that cannot be copied stay random, and the fusion then estimates the predicted feature itself.

    Args:
        drafter ([`FalconDraftModel`]): the drafter, with the statistics of the target's features.
        target ([`PreTrainedModel`]): its target.
        data ([`TokenFile`]): the training data.
        stored ([`StoredFeatures`] or [`JoinedFeatures`], *optional*):
            Its features. The target runs only if these lack the layer below the copied ones.

    Returns:
        `bool`: whether the layers are copies.
    """
    if drafter.fusion.lstm is not None:
        return False
    width, ahead = drafter.config.hidden_size, drafter.config.block_size
    before = target.config.get_text_config(decoder=True).num_hidden_layers - len(drafter.layers) - 1
    read = drafter.config.feature_layers
    samples = some_features(target, data, [max(before, 0), *read], _FALCON_SAMPLES, stored)
    copied = before >= 0 and _start_layers(drafter, target, [rows[:, : 2 * width] for _, rows in samples])
    embedding = target.get_input_embeddings()
    pairs, outputs = [], []
    for token_ids, rows in samples:
        features, hidden, others = rows.split((width, width, len(read) * width), dim=1)
        normalised = (features - drafter.feature_mean) / drafter.feature_std
        embeds = drafter.fusion.embedding_norm(embed(embedding, token_ids[1:], torch.device("cpu")).float())
        # Position i has feature i and token i + 1, and predicts feature i + k. Many targets have extreme hidden states
        # at position 0, which would outweigh all others.
        count = max(0, len(token_ids) - ahead)
        inputs = torch.cat((normalised[:count], embeds[:count]), dim=1)
        pairs.append((inputs[1:], (hidden if copied else normalised)[ahead:][1:]))
        outputs.append(others[:count][1:])
    drafter.fusion.linear.weight.copy_(_least_squares(pairs, _FALCON_RIDGE).T)
    if drafter.layer_reader is not None:
        _start_reader(drafter, pairs, outputs)
    return copied


def _start_reader(drafter: FalconDraftModel, pairs: list[tuple[Tensor, Tensor]], outputs: list[Tensor]) -> None:
    """
    Makes the outputs of the target's layers add what of the fusion's error they explain. Drafted positions have no
    such outputs, so the fusion itself stays.

    Args:
        drafter ([`FalconDraftModel`]): the drafter, with its fusion.
        pairs (list of pairs of `torch.Tensor`): inputs of the fusion, and what it should give.
        outputs (list of `torch.Tensor` of shape `(rows, layers * hidden_size)`): the layers' outputs there.
    """
    reader, fusion = drafter.layer_reader, drafter.fusion.linear.weight
    assert reader is not None
    explained = []
    for (inputs, wanted), rows in zip(pairs, outputs, strict=True):
        parts = rows.chunk(len(reader.norms), dim=-1)
        normalised = torch.cat([norm(part) for norm, part in zip(reader.norms, parts, strict=True)], dim=-1)
        explained.append((normalised, wanted - inputs @ fusion.T))
    correction = _least_squares(explained, _READER_RIDGE)
    # The fusion multiplies what the reader gives by its weights for features: the reader gives what becomes the
    # correction.
    reader.linear.weight.copy_(_least_squares([(fusion[:, : len(fusion)], correction.T)], _BLOCKS_RIDGE))


@torch.no_grad()
def start_blocks(
    drafter: FalconDraftModel, target: PreTrainedModel, data: TokenFile, block_size: int, conditioning_size: int
) -> FalconDraftModel:
    """
    A drafter of blocks, from a trained one of one token a pass. It keeps the weights. The anchor gives each position
    of a block the least-squares estimate of what the trained layers would read at the position that it predicts: this
    is known at the first position, the newest input itself. The conditioning corrects nothing yet.

    Args:
        drafter ([`FalconDraftModel`]): the drafter of one token a pass, with a linear fusion.
        target ([`PreTrainedModel`]): its target.
        data ([`TokenFile`]): the training data.
        block_size, conditioning_size (`int`): see [`FalconDraftConfig`].

    Raises:
        `ValueError`: if the drafter has an LSTM.
    """
    if drafter.fusion.lstm is not None:
        raise ValueError(
            f"`block_size` is {block_size}, but the drafter of `init_from` has one token a pass and "
            f"{drafter.config.num_lstm_layers} LSTM layers, and blocks can start only from one without: leave out "
            "`block_size`, or give a drafter with `num_lstm_layers` 0."
        )
    config = copy.deepcopy(drafter.config)
    config.block_size, config.conditioning_size, config.block_anchor = block_size, conditioning_size, True
    started = FalconDraftModel(config)
    started.load_state_dict(drafter.state_dict(), strict=False)
    embedding = target.get_input_embeddings()
    # Of each distance from the last position.
    pairs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(block_size)]
    for token_ids, features in some_features(target, data, config.feature_layers):
        embeds = embed(embedding, token_ids[1:], torch.device("cpu")).float()
        # Without the position of an extreme hidden state, see `start_falcon`.
        read = drafter.fuse(features[None, :-1], embeds[None])[0][0, 1:]
        for distance, of_distance in enumerate(pairs):
            # The last position n of a block is known. This position, n - distance, predicts from what n + ahead reads.
            ahead, count = block_size - 1 - distance, len(read) - block_size + 1
            if count > 0:
                newest = _SHARE_OF_OWN * read[distance:][:count]
                of_distance.append((newest, read[distance + ahead :][:count] - _SHARE_OF_OWN * read[:count]))
    started.fusion.linear.weight.mul_(_SHARE_OF_OWN)
    assert started.anchor is not None
    started.anchor.weight.copy_(torch.cat([_least_squares(each, _BLOCKS_RIDGE).T for each in pairs]))
    if started.conditioning is not None:
        started.conditioning.embedding_norm.load_state_dict(drafter.fusion.embedding_norm.state_dict())
        started.conditioning.down_proj.weight.zero_()
    started.generation_config = copy.deepcopy(drafter.generation_config)
    return started


def _start_layers(drafter: FalconDraftModel, target: PreTrainedModel, samples: list[Tensor]) -> bool:
    """
    Copies the target's last layers, through a drafter with MLPs as wide as the target's if these are narrower.

    Args:
        samples (list of `torch.Tensor` of shape `(length, 2 * hidden_size)`): as of [`_copy_last_layers`].

    Returns:
        `bool`: whether the layers were copied.
    """
    config = _as_wide(drafter.config, target)
    if config.intermediate_size == drafter.config.intermediate_size:
        return _copy_last_layers(drafter, target, samples[0]) < math.inf
    wide = FalconDraftModel(config)
    set_feature_statistics(wide, drafter.feature_mean, drafter.feature_std)
    if _copy_last_layers(wide, target, samples[0]) == math.inf:
        return False
    narrow_mlps(drafter, wide, [rows[:, drafter.config.hidden_size :] for rows in samples])
    return True


def narrow_mlps(drafter: FalconDraftModel, wide: FalconDraftModel, samples: list[Tensor]) -> None:
    """
    Gives a drafter the layers of another one with wider MLPs. Of the inner units of an MLP those are kept whose
    contributions to its output have the largest mean squares; the output is the least-squares estimate of the wide
    one's from these.

    Args:
        drafter, wide ([`FalconDraftModel`]): the drafter, and the other one, which has its norm and anchor, too.
        samples (list of `torch.Tensor` of shape `(length, hidden_size)`): what the layers read.
    """
    layers: list[Any] = list(wide.layers)
    inner: list[list[Tensor]] = [[] for _ in layers]
    handles = [
        layer.mlp.down_proj.register_forward_pre_hook(
            lambda module, inputs, found=found: found.append(inputs[0].flatten(0, -2))
        )
        for layer, found in zip(layers, inner, strict=True)
    ]
    for rows in samples:
        places = torch.arange(len(rows))[None]
        wide.run_layers(rows[None], places, places, additive_mask(relaxed_causal_mask(places), rows.dtype))
    for handle in handles:
        handle.remove()
    for mine, theirs, found in zip(drafter.layers, layers, inner, strict=True):
        # Without the position of extreme hidden states, see `start_falcon`.
        down = theirs.mlp.down_proj.weight
        shares = sum((each[1:].square().sum(dim=0) for each in found), down.new_zeros(())) * down.square().sum(dim=0)
        kept = shares.topk(drafter.config.intermediate_size).indices.sort().values
        weights = theirs.state_dict()
        for name in ("gate_proj", "up_proj"):
            weights[f"mlp.{name}.weight"] = weights[f"mlp.{name}.weight"][kept]
        # What is left to fit is the output of the other units: little data then leaves the copied weights.
        others = (each[1:] @ down.T - each[1:, kept] @ down[:, kept].T for each in found)
        correction = _least_squares(((each[1:, kept], rest) for each, rest in zip(found, others)), _FALCON_RIDGE)
        weights["mlp.down_proj.weight"] = down[:, kept] + correction.T
        mine.load_state_dict(weights)
    drafter.norm.load_state_dict(wide.norm.state_dict())
    drafter.feature_mean.copy_(wide.feature_mean)
    if drafter.anchor is not None:
        drafter.anchor.weight.zero_()


def _copy_last_layers(drafter: FalconDraftModel, target: PreTrainedModel, rows: Tensor) -> float:
    """
    Copies the target's last layers and its final norm into the drafter. The mean of features, which the norm's output
    already has, and the anchor of blocks start at zero.

    Args:
        rows (`torch.Tensor` of shape `(length, 2 * hidden_size)`): features of a sample, and what the layers read.

    Returns:
        `float`: see [`error_of_copies`]. If it is infinite, the drafter is as before.
    """
    norm = getattr(decoder_of(target), "norm", None)
    if norm is None:
        return math.inf
    copies = [*zip(drafter.layers, _last_layers(target, len(drafter.layers))), (drafter.norm, norm)]
    if not all(_same_shapes(mine, theirs) for mine, theirs in copies):
        return math.inf
    kept = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    for mine, theirs in copies:
        for name, part, weight in _weights(theirs):
            # An RMS norm makes its gain of ones. Some models' weights are the gain less 1 (Gemma).
            gain = weight.ndim == 1 and name.endswith("weight")
            mine.get_parameter(name).copy_(part(torch.ones_like(weight)) if gain else weight)
    drafter.norm.weight.div_(drafter.feature_std)
    drafter.feature_mean.zero_()
    if drafter.anchor is not None:
        drafter.anchor.weight.zero_()
    features, hidden = rows[None].chunk(2, dim=-1)
    places = torch.arange(len(rows))[None]
    mask = additive_mask(relaxed_causal_mask(places), hidden.dtype)
    # Layers of other positions, activations or norms may have weights of the same names.
    wrong = drafter.run_layers(hidden, places, places, mask) - features
    error = float(wrong.square().mean() / features.square().mean())
    if not error <= _LARGEST_ERROR:
        drafter.load_state_dict(kept)
        return math.inf
    return error


def _last_layers(target: PreTrainedModel, count: int) -> list[nn.Module]:
    return list(getattr(decoder_of(target), "layers", ()))[-count:]


def _weights(module: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """The weights of a layer or a norm: the drafter's name, the module that has the weight, and the weight."""
    names = _POST_NORMS if hasattr(module, "pre_feedforward_layernorm") else {}
    for path, part in module.named_modules():
        first, *others = path.split(".")
        for name, weight in part.named_parameters(recurse=False):
            yield ".".join(filter(None, (names.get(first, first), *others, name))), part, weight


def _same_shapes(mine: nn.Module, theirs: nn.Module) -> bool:
    shapes = {name: weight.shape for name, weight in mine.named_parameters()}
    return shapes == {name: weight.shape for name, _, weight in _weights(theirs)}


@torch.no_grad()
def start_eagle3(drafter: Eagle3DraftModel, target: PreTrainedModel, data: TokenFile) -> None:
    """
    Starts the head of a new drafter with the target's rows, and `fc` as the least-squares map from the target's hidden
    states to its feature at the same position. What the drafter feeds back, an estimate of the next feature for the
    head, is then of the same kind as what it reads. (A map to the next feature gave fewer right choices at every
    depth.)

    Args:
        drafter ([`Eagle3DraftModel`]): the drafter, with its draft vocabulary.
        target ([`PreTrainedModel`]): its target, of the same hidden size.
        data ([`TokenFile`]): the training data.
    """
    rows = torch.cat([features for _, features in some_features(target, data, drafter.config.feature_layers)])
    width = drafter.config.target_hidden_size
    features, hidden = rows.split((width, rows.shape[1] - width), dim=1)
    scale = features.square().mean(dim=0).sqrt().clamp_min(1e-4)
    drafter.fc.weight.copy_(_least_squares([(hidden, features / scale)], _EAGLE3_RIDGE).T)
    drafter.norm.weight.copy_(_SHARE_OF_SCALE * scale)
    head = head_parameters(target)[0].detach()
    ids = drafter.draft_vocab_ids
    drafter.lm_head.weight.copy_(head if ids is None else head[ids.to(head.device)])


def _least_squares(pairs: Iterable[tuple[Tensor, Tensor]], ridge: float) -> Tensor:
    """
    The map of a ridge regression.

    Args:
        pairs (iterable of pairs of `torch.Tensor`):
            Inputs of shape `(rows, inputs)` and outputs of shape `(rows, outputs)`. Only one pair at a time is held in
            double precision.
        ridge (`float`): as a share of the mean square of an input.

    Returns:
        `torch.Tensor` of shape `(inputs, outputs)`.
    """
    squares, products, rows = torch.zeros(()), torch.zeros(()), 0
    for inputs, outputs in pairs:
        doubles = inputs.double()
        squares = squares + doubles.T @ doubles
        products = products + doubles.T @ outputs.double()
        rows += len(inputs)
    # A few of a target's hidden values are larger than all others by orders of magnitude.
    scale = (squares.diagonal() / rows).sqrt().clamp_min(1e-6)[:, None]
    squares = squares / (scale * scale.T)
    squares.diagonal().add_(ridge * rows)
    return (torch.linalg.solve(squares, products / scale) / scale).float()
