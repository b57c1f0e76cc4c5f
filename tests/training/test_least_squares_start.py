# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The start of a Falcon drafter by least squares. That of EAGLE-3 is in test_eagle3_training.py."""

import pytest
import torch
from tiny_models import new_drafter
from training_runs import token_file

from hf_falcon.training.features import feature_statistics, some_features
from hf_falcon.training.least_squares_start import start_falcon


def pairs(drafter, target, data, ahead):
    """Inputs of the fusion, and the features that it should predict, both normalised."""
    fused, wanted = [], []
    for tokens, features in some_features(target, data):
        embeds = target.get_input_embeddings()(tokens[1:])
        fused.append(drafter.fuse(features[None, :-ahead], embeds[None, : len(tokens) - ahead])[0][0])
        wanted.append((features[ahead:] - drafter.feature_mean) / drafter.feature_std)
    return torch.cat(fused), torch.cat(wanted)


@torch.no_grad()
@pytest.mark.parametrize("block_size", [1, 2])
def test_the_fusion_predicts_the_feature_ahead(target, block_size):
    data = token_file(samples=40, lengths=(10, 40))
    drafter = new_drafter(target, block_size=block_size, num_lstm_layers=0)
    drafter.set_feature_statistics(*feature_statistics(target, data))
    fused, wanted = pairs(drafter, target, data, block_size)
    before = (fused - wanted).square().mean()
    start_falcon(drafter, target, data)
    fused, wanted = pairs(drafter, target, data, block_size)
    after = (fused - wanted).square().mean()
    assert after < 0.9 * wanted.square().mean() and after < 0.9 * before
    # It is a minimum: any other map of the same size is worse.
    weight = drafter.fusion.linear.weight
    for seed in range(3):
        torch.manual_seed(seed)
        change = torch.randn_like(weight) * 0.1
        weight.add_(change)
        assert (pairs(drafter, target, data, block_size)[0] - wanted).square().mean() > after
        weight.sub_(change)


def test_a_drafter_with_an_lstm_keeps_its_weights(target):
    drafter = new_drafter(target, num_lstm_layers=1)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    start_falcon(drafter, target, token_file())
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, before[name]), name
