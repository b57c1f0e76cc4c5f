# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""EAGLE-3 in training: the loss is that of unrolled passes over the drafter's own states, and its head learns too."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import HIDDEN, random_tokens
from training_runs import token_file
from utilities import close

from hf_falcon.core.modeling_falcon_draft import additive_mask
from hf_falcon.drafters.eagle3 import Eagle3DraftModel
from hf_falcon.drafters.eagle3_config import Eagle3DraftConfig
from hf_falcon.training.csgd import DistillationWeights, DraftBatch, TrainingHeads, draft_loss
from hf_falcon.training.features import target_features
from hf_falcon.training.start import start_eagle3
from hf_falcon.training.training_cache import TrainingCache

SIZE = 24
FLAGS = [{}, {"norm_output": True, "fc_norm": True}, {"norm_before_residual": True, "num_hidden_layers": 2}]


def eagle3_drafter(target, **fields):
    torch.manual_seed(0)
    config = Eagle3DraftConfig.from_target(target, draft_vocab_size=SIZE, **fields)
    drafter = Eagle3DraftModel(config)
    drafter.set_draft_vocabulary(torch.arange(0, 2 * SIZE, 2))
    with torch.no_grad():
        drafter.lm_head.weight.copy_(target.get_output_embeddings().weight[drafter.draft_vocab_ids])
        drafter.norm.weight.copy_(torch.rand(HIDDEN) + 0.5)
    return drafter


def batch_of(target, drafter, lengths, prompts):
    tokens = torch.nn.utils.rnn.pad_sequence([random_tokens(n, seed=n) for n in lengths], batch_first=True)
    places = torch.arange(tokens.shape[1])[None]
    valid = places < torch.tensor(lengths)[:, None]
    response = valid & (places >= torch.tensor(prompts)[:, None])
    features = target_features(target, tokens, valid, drafter.config.feature_layers)
    return DraftBatch(features, tokens, valid, response, torch.arange(len(lengths)))


def plain_loss(target, drafter, batch, passes, soft):
    """Position by position: the path of `passes` states that decoding would draft with the true tokens."""
    ids, losses = drafter.draft_vocab_ids, []
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    for row in range(len(batch.token_ids)):
        length = int(batch.valid[row].sum())
        tokens, features = batch.token_ids[row, :length], batch.features[row, :length]
        for start in range(length):
            cache, given = None, features[None, : start + 1]
            for index in range(passes):
                place = start + index
                if place + 2 >= length:
                    break
                embeds = embedding(tokens[None, 1 : start + 2] if index == 0 else tokens[None, place + 1 : place + 2])
                cache = TrainingCache(cache)
                fused, _ = drafter.fuse(given, embeds)
                rows = fused.shape[1]
                visible = torch.ones(rows, place + 1, dtype=torch.bool).tril(place + 1 - rows)
                positions = torch.arange(place + 1 - rows, place + 1)[None]
                states = drafter.run_layers(
                    fused, None, positions, additive_mask(visible, fused.dtype)[None, None], cache
                )
                given = states[:, -1:]
                if batch.response[row, place + 2]:
                    state = given if drafter.config.norm_output else drafter.norm(given)
                    drafted = drafter.lm_head(state)[0, 0].log_softmax(-1)
                    true = head(features[place + 1, :HIDDEN])[ids].log_softmax(-1)
                    divergence = (true.exp() * (true - drafted)).sum()
                    losses.append(soft * divergence - (1 - soft) * drafted[true.argmax()])
    return torch.stack(losses).sum()


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("passes", [1, 3])
def test_the_loss_is_that_of_drafted_paths(target, flags, passes):
    drafter = eagle3_drafter(target, **flags)
    heads, batch = TrainingHeads.of(drafter, target), batch_of(target, drafter, [12, 9], [5, 4])
    weights = DistillationWeights(regression=0.0, distillation=1.0, soft=0.8)
    found = draft_loss(drafter, heads, batch, torch.Generator().manual_seed(0), weights, noise=0.1, passes=passes)
    assert found.regression.item() == 0
    # The prompts are long enough that every counted position has a state of each earlier pass.
    expected = plain_loss(target, drafter, batch, passes, soft=0.8)
    close(found.loss * found.counts.sum(), expected, 1e-4)

    gradients = torch.autograd.grad(expected / found.counts.sum(), list(drafter.parameters()), allow_unused=True)
    found.loss.backward()
    for (name, parameter), gradient in zip(drafter.named_parameters(), gradients, strict=True):
        if gradient is None or (flags.get("norm_output") is None and name == "norm.weight" and parameter.grad is None):
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            close(parameter.grad, gradient, 1e-4)
    assert drafter.lm_head.weight.grad.abs().max() > 0


@torch.no_grad()
def test_the_start(target):
    """The head has the target's rows, and `fc` predicts the target's feature far better than its mean does."""
    drafter, data = eagle3_drafter(target), token_file(samples=40, lengths=(30, 60))
    start_eagle3(drafter, target, data)
    assert torch.equal(drafter.lm_head.weight, target.get_output_embeddings().weight[drafter.draft_vocab_ids])
    tokens = torch.cat([data.sample(index)[0][:30][None] for index in range(len(data))])
    rows = target_features(target, tokens, torch.ones_like(tokens).bool(), drafter.config.feature_layers).flatten(0, 1)
    predicted, features = drafter.fc(rows[:, HIDDEN:]), rows[:, :HIDDEN]
    # The scale of the norm is a share of the features'.
    close(
        drafter.norm.weight / drafter.norm.weight.mean(),
        (scale := features.square().mean(0).sqrt()) / scale.mean(),
        0.1,
    )
    features = features / scale
    spread = (features - features.mean(dim=0)).square().mean()
    assert (predicted - features).square().mean() < 0.2 * spread


def test_a_head_of_its_own_learns(target):
    drafter = eagle3_drafter(target)
    heads, batch = TrainingHeads.of(drafter, target), batch_of(target, drafter, [20, 20, 16], [4, 6, 3])
    optimizer, losses = torch.optim.Adam(drafter.parameters(), lr=3e-3), []
    before = F.normalize(drafter.lm_head.weight.detach().clone(), dim=-1)
    for step in range(30):
        generator = torch.Generator().manual_seed(step)
        result = draft_loss(drafter, heads, batch, generator, DistillationWeights(0.0, 1.0, 1.0), passes=2)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        losses.append(result.loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert (F.normalize(drafter.lm_head.weight, dim=-1) - before).abs().max() > 1e-3
