# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The start of a Falcon drafter from its target. That of EAGLE-3 is in test_eagle3_training.py."""

import pytest
import torch
from quick import one_in
from tiny_models import new_target
from training_runs import token_file

from hf_falcon.core.configuration_falcon_draft import FalconDraftConfig
from hf_falcon.core.drafter import FalconDraftModel
from hf_falcon.core.modeling_falcon_draft import additive_mask, relaxed_causal_mask
from hf_falcon.training.features import feature_statistics, set_feature_statistics, some_features
from hf_falcon.training.start import like_last_layer, narrow_mlps, start_blocks, start_falcon

# Of Gemma 3's four layers the last two are of one kind: all layers of a drafter have the same rotary frequencies.
LAYERS = {"gemma3": {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2}}
GEMMA3_NAMES = {
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "post_attention_layernorm.weight": "pre_feedforward_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}
DATA = token_file(samples=40, lengths=(10, 40))


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def vary_norms_and_biases(target):
    """New models have norms of ones and biases of zeros, which nothing could be confused with."""
    torch.manual_seed(3)
    for parameter in target.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.rand_like(parameter) * 0.5)


def new(target, **fields):
    config = FalconDraftConfig.from_target(target, **{"block_size": 1, "num_lstm_layers": 0, **fields})
    torch.manual_seed(0)
    drafter = FalconDraftModel(like_last_layer(config, target)).eval()
    set_feature_statistics(drafter, *feature_statistics(target, DATA))
    return drafter


def inputs_and_hidden(drafter, target, ahead, layer):
    """Outputs of the fusion, and the hidden states that it should predict: of `layer`, or normalised features."""
    fused, wanted = [], []
    for tokens, rows in some_features(target, DATA, [] if layer is None else [layer]):
        features, hidden = rows[:, : drafter.config.hidden_size], rows[:, drafter.config.hidden_size :]
        embeds = target.get_input_embeddings()(tokens[1:])
        inputs = features[None, :-ahead], embeds[None, : len(tokens) - ahead]
        fused.append(drafter.fuse(*inputs)[0][0, 1:])
        normalised = (features - drafter.feature_mean) / drafter.feature_std
        wanted.append((normalised if layer is None else hidden)[ahead:][1:])
    return torch.cat(fused), torch.cat(wanted)


def check_least_squares(drafter, target, ahead, layer):
    """The map is better than none, and a minimum: a map that differs a little is worse."""
    fused, wanted = inputs_and_hidden(drafter, target, ahead, layer)
    error = (fused - wanted).square().mean()
    assert error < wanted.square().mean()
    weight = drafter.fusion.linear.weight
    for seed in range(3):
        torch.manual_seed(seed)
        change = torch.randn_like(weight) * 0.3
        weight.add_(change)
        assert (inputs_and_hidden(drafter, target, ahead, layer)[0] - wanted).square().mean() > error
        weight.sub_(change)


@torch.no_grad()
@pytest.mark.parametrize("kind, block_size", one_in(2, ["llama", "mistral", "qwen2", "qwen3", "gemma3"], [1, 2]))
def test_layers_are_copied_and_the_fusion_estimates_what_they_read(kind, block_size):
    target = new_target(kind, **LAYERS.get(kind, {"num_hidden_layers": 4}))
    vary_norms_and_biases(target)
    drafter = new(target, block_size=block_size, num_hidden_layers=2)
    start_falcon(drafter, target, DATA)
    for mine, theirs in zip(drafter.layers, target.model.layers[2:]):
        # The weights of Gemma's norms are the gain less 1.
        of_norms = kind == "gemma3"
        for name, weight in mine.named_parameters():
            other = theirs.get_parameter(GEMMA3_NAMES.get(name, name) if of_norms else name)
            is_gain = weight.ndim == 1 and name.endswith("weight")
            torch.testing.assert_close(weight, other + 1 if of_norms and is_gain else other)
    check_least_squares(drafter, target, block_size, layer=1)
    # Given the target's own hidden states, the drafter computes the target's features.
    _, rows = some_features(target, DATA, [1])[0]
    features, hidden = rows[None].chunk(2, dim=-1)
    places = torch.arange(len(rows))[None]
    found = drafter.run_layers(hidden, places, places, additive_mask(relaxed_causal_mask(places), hidden.dtype))
    torch.testing.assert_close(found, features, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(
    "kind, fields",
    [
        ("llama", {"intermediate_size": 400}),
        # Projections of another form, other positions, and no layer before the copied ones.
        ("phi3", {}),
        ("llama", {"rope_theta": 3.0}),
        ("llama", {"num_hidden_layers": 2}),
    ],
)
def test_layers_of_another_kind_stay_as_they_are(kind, fields):
    target = new_target(kind, **({} if "num_hidden_layers" in fields else {"num_hidden_layers": 4}))
    drafter = new(target, **{"num_hidden_layers": 2, **fields})
    before = weights_of(drafter)
    start_falcon(drafter, target, DATA)
    changed = {name for name, tensor in drafter.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"fusion.linear.weight"}
    check_least_squares(drafter, target, 1, layer=None)


@torch.no_grad()
def test_a_narrower_mlp_keeps_the_units_that_count():
    target = new_target("llama", num_hidden_layers=4)
    width, kept = target.config.intermediate_size, target.config.intermediate_size // 2
    for layer in target.model.layers[2:]:
        # Only every other unit has an output.
        layer.mlp.down_proj.weight[:, 1::2] = 0
    drafter = new(target, num_hidden_layers=2, intermediate_size=kept)
    assert drafter.config.intermediate_size == kept < width
    start_falcon(drafter, target, DATA)
    for mine, theirs in zip(drafter.layers, target.model.layers[2:]):
        for name, weight in mine.named_parameters():
            other = theirs.get_parameter(name)
            if name.startswith("mlp"):
                other = other[:, ::2] if "down" in name else other[::2]
            torch.testing.assert_close(weight, other)
    check_least_squares(drafter, target, 1, layer=1)


@torch.no_grad()
def test_a_narrower_mlp_estimates_the_wide_one():
    target = new_target("llama", num_hidden_layers=4)
    samples = [rows[:, target.config.hidden_size :] for _, rows in some_features(target, DATA, [2])]
    wide, narrow = (new(target, num_hidden_layers=1, **size) for size in ({}, {"intermediate_size": 24}))
    start_falcon(wide, target, DATA)
    narrow_mlps(narrow, wide, samples)
    mine, theirs = narrow.layers[0].mlp, wide.layers[0].mlp
    rows = wide.layers[0].post_attention_layernorm(torch.cat(samples))
    error = (mine(rows) - theirs(rows)).square().mean()
    chosen = [place for place, row in enumerate(theirs.up_proj.weight) if (row == mine.up_proj.weight).all(1).any()]
    assert len(chosen) == 24
    mine.down_proj.weight.copy_(theirs.down_proj.weight[:, chosen])
    assert error < (mine(rows) - theirs(rows)).square().mean()


def test_a_drafter_with_an_lstm_keeps_its_weights(target):
    drafter = new(target, num_lstm_layers=1)
    before = weights_of(drafter)
    start_falcon(drafter, target, DATA)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@torch.no_grad()
@pytest.mark.parametrize("block_size", [2, 3])
def test_blocks_start_from_a_drafter_of_one_token(block_size):
    """Each position of a block reads an estimate of what the trained layers would read; the first has all of it."""
    target = new_target("llama", num_hidden_layers=4)
    drafter = new(target, num_hidden_layers=2, draft_vocab_size=20)
    drafter.set_draft_vocabulary(torch.arange(5, 25))
    start_falcon(drafter, target, DATA)
    drafter.generation_config.context_bonuses = [0.5, 1.0]
    blocks = start_blocks(drafter, target, DATA, block_size, conditioning_size=8)
    assert (blocks.config.block_size, blocks.config.conditioning_size) == (block_size, 8)
    assert blocks.generation_config.context_bonuses == [0.5, 1.0]
    kept = weights_of(blocks)
    for name, weight in weights_of(drafter).items():
        if name != "fusion.linear.weight":
            assert torch.equal(kept[name], weight)
    token_ids, features = some_features(target, DATA)[0]
    embeds = target.get_input_embeddings()(token_ids[1:])
    read = drafter.fuse(features[None, :-1], embeds[None])[0][0]
    own = blocks.fuse(features[None, :-1], embeds[None])[0][0]
    last, count = block_size - 1, len(read) - 2 * block_size
    projections = blocks.anchor(own).unflatten(-1, (block_size, -1))
    for place in range(block_size):
        # Of all blocks that the sample can be cut into, but for the first one.
        hidden = own[1 + place :][:count] + projections[1 + last :, last - place][:count]
        wanted = read[1 + last + place :][:count]
        assert (hidden - wanted).square().mean() < (0.05 if place == 0 else 0.95) * wanted.square().mean()
    # The conditioning corrects nothing.
    predicted = torch.randn(3, drafter.config.hidden_size)
    torch.testing.assert_close(blocks.condition(predicted, embeds[:3]), predicted)


def test_blocks_do_not_start_from_an_lstm():
    target = new_target("llama")
    drafter = new(target, num_lstm_layers=1)
    with pytest.raises(ValueError, match="^`block_size` is 2, but .* 1 LSTM layers.*leave out"):
        start_blocks(drafter, target, DATA, 2, 0)
