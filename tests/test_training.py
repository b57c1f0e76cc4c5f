# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Training: the loss against plain re-implementations, and a run that stops and goes on as if it had not."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from draft_fixtures import HIDDEN, VOCAB, random_tokens, tiny_drafter, tiny_target
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedTokenizerFast, TrainerCallback, TrainerState, modeling_utils
from transformers.trainer_utils import get_last_checkpoint

from hf_falcon import FalconDraftConfig, FalconDraftModel
from hf_falcon.commands import main as entry
from hf_falcon.commands import plan, train
from hf_falcon.commands.train import frequent_tokens
from hf_falcon.core.checkpoint_files import weights_fingerprint
from hf_falcon.core.target_parts import TargetHead
from hf_falcon.training import csgd, distillation, features
from hf_falcon.training.csgd import (
    DistillationWeights,
    DraftBatch,
    _unrolled_mask,
    draft_loss,
    glance,
    random_blocks,
    shift_left,
)
from hf_falcon.training.distillation import distillation_loss
from hf_falcon.training.estimated_tau import estimated_tau_chain, estimated_tau_tree
from hf_falcon.training.features import StoredFeatures, feature_statistics, target_features
from hf_falcon.training.final_tau import decoded_tau
from hf_falcon.training.plot import TrainingPlot, draw
from hf_falcon.training.provenance import git_revision
from hf_falcon.training.token_file import TokenFile
from hf_falcon.training.trainer import (
    FILLER,
    DraftSamples,
    FalconTrainer,
    FalconTrainingArguments,
    LengthGroupedSampler,
    collate,
)

WEIGHTS = DistillationWeights(regression=0.7, distillation=0.3, soft=0.6)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(autouse=True)
def no_plot(monkeypatch):
    """Drawing takes longer than the tiny trainings do; the tests of the plot put it back."""
    monkeypatch.setattr("hf_falcon.training.plot.draw", lambda log_history: None)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def each_seeded(samples, first=0):
    return [seeded(first + sample) for sample in range(samples)]


def token_file(samples=7, seed=5, lengths=(10, 20), prompt=4) -> TokenFile:
    generator = seeded(seed)
    tokens = [
        torch.randint(3, VOCAB, (int(length),), generator=generator)
        for length in torch.randint(*lengths, (samples,), generator=generator)
    ]
    return TokenFile.from_samples(tokens, [prompt] * samples, [0.0] * samples, VOCAB)


def draft_batch(target, lengths=(24, 17, 21), prompts=(12, 13, 20), layers=()) -> DraftBatch:
    samples = [
        {"sample": i, "token_ids": random_tokens(n, seed=n), "prompt_length": p}
        for i, (n, p) in enumerate(zip(lengths, prompts))
    ]
    fields = collate(samples)
    return DraftBatch(target_features(target, fields["token_ids"], fields["valid"], layers), **fields)


# The pieces of the loss.


@pytest.mark.parametrize("steps", [0, 1, 3, 5, 9])
def test_shift_left(steps):
    values = torch.arange(1, 21).reshape(2, 5, 2)
    for row, shifted in zip(values.tolist(), shift_left(values, steps).tolist()):
        assert shifted == (row[steps:] + [[0, 0]] * steps)[: len(row)] if steps < 5 else [[0, 0]] * 5


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_random_blocks(block_size):
    blocks, places = random_blocks(9, block_size, each_seeded(200))
    for row, place in zip(blocks.tolist(), places.tolist()):
        assert row[0] == 0 and place == [(place[0] + i) % block_size for i in range(9)]
        assert row == [(place[0] + i) // block_size for i in range(9)]
    # Every offset is met, about as often.
    assert places[:, 0].bincount(minlength=block_size).min() > 200 / block_size / 2
    again = random_blocks(9, block_size, each_seeded(200))
    assert torch.equal(blocks, again[0]) and torch.equal(places, again[1])


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.4, 1.0])
def test_glance(ratio):
    torch.manual_seed(0)
    loss_positions = torch.rand(300, 12) < torch.rand(300, 1)
    distance = (torch.rand(300) * (loss_positions.sum(dim=1) + 1)).long()
    glanced = glance(loss_positions, distance, ratio, each_seeded(300))
    firsts = set()
    for row, allowed, wrong in zip(glanced, loss_positions, distance.tolist()):
        # Numbered among the loss positions, a run has no gaps.
        chosen = row[allowed].nonzero()[:, 0].tolist()
        assert len(chosen) == int(row.sum()) == int(ratio * wrong + 1e-6)
        assert chosen == list(range(chosen[0], chosen[0] + len(chosen))) if chosen else True
        firsts.update(chosen[:1])
    assert torch.equal(glanced, glance(loss_positions, distance, ratio, each_seeded(300)))
    if ratio:
        others = glance(loss_positions, distance, ratio, each_seeded(300, first=1))
        assert len(firsts) > 3 and not torch.equal(glanced, others)


def test_a_run_may_lie_anywhere():
    loss_positions = torch.tensor([[False, True, True, False, True, True, False]]).expand(200, 7)
    glanced = glance(loss_positions, torch.full((200,), 4), 0.5, each_seeded(200))
    expected = {(1, 2), (2, 4), (4, 5)}
    assert {tuple(row.nonzero()[:, 0].tolist()) for row in glanced} == expected


@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_unrolled_mask(block_size, passes):
    length = 9
    blocks = (torch.arange(length)[None] + torch.tensor([[0], [1]])) // block_size
    valid = torch.arange(length)[None] < torch.tensor([[9], [6]])
    mask = _unrolled_mask(blocks, valid, passes)
    assert mask.shape == (2, 1, length, passes * length)
    for b in range(2):
        for row in range(length):
            for key in range(passes * length):
                of_pass, column = key // length + 1, key % length
                behind = int(blocks[b, row] - blocks[b, column])
                # The last block with true features, and all before; then one block of each pass up to this one.
                sees = behind >= passes - 1 if of_pass == 1 else behind == passes - of_pass
                assert mask[b, 0, row, key] == (sees and (bool(valid[b, column]) or row == column))


@pytest.mark.parametrize("kind, draft_vocab_size", [("llama", None), ("llama", 20), ("gemma2", None), ("gemma2", 20)])
@pytest.mark.parametrize("soft", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("chunk", [1, 150, 1 << 21])
def test_distillation_loss(monkeypatch, kind, draft_vocab_size, soft, chunk):
    monkeypatch.setattr(distillation, "_CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(distillation, "_CHUNK_ROWS", 1)
    target = tiny_target(kind)
    head = TargetHead(tiny_drafter(target, draft_vocab_size=draft_vocab_size), target)
    torch.manual_seed(0)
    labels = torch.randn(11, HIDDEN)
    predicted = (labels + torch.randn(2, 11, HIDDEN)).requires_grad_()

    p, q = head.logits(labels).softmax(dim=-1), head.logits(predicted).softmax(dim=-1)
    hard = -q.log()[:, torch.arange(11), p.argmax(dim=-1)]
    expected = (soft * (p * (p / q).log()).sum(dim=-1) + (1 - soft) * hard).mean()
    (expected_gradient,) = torch.autograd.grad(3 * expected, predicted)

    loss, ranks = distillation_loss(predicted, labels, head, soft)
    (gradient,) = torch.autograd.grad(3 * loss, predicted)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)
    for found, order in zip(ranks.tolist(), q.argsort(dim=-1, descending=True).tolist(), strict=True):
        assert found == [row.index(token) for row, token in zip(order, p.argmax(dim=-1).tolist(), strict=True)]
    assert 0 in ranks and ranks.max() > 2

    # Without a gradient, as glancing calls it.
    again, ranks_again = distillation_loss(predicted.detach(), labels, head, soft)
    assert torch.equal(again, loss) and torch.equal(ranks_again, ranks)


# The loss as a whole.


def plain_loss(drafter, head, batch, offsets, glanced, passes):
    """`draft_loss` without noise: sample by sample, block by block, each from a forward over its own whole past."""
    k = drafter.config.block_size
    sums, hits, counts = torch.zeros(2), torch.zeros(passes * k, 3), torch.zeros(passes * k)
    positions, wrong = 0, []
    for row, offset in enumerate(offsets):
        length = int(batch.valid[row].sum())
        wide, tokens = batch.features[row, :length], batch.token_ids[row, :length]
        truth = wide[:, :HIDDEN]
        judged = [i for i in range(length - k - 1) if batch.response[row, i + k + 1]]
        embeds = head.embed(torch.cat((tokens[1:], tokens.new_zeros(1))))
        blocks = (torch.arange(length) + offset) // k
        # What each prediction is conditioned on: the token before the one that is read from it.
        previous = torch.cat((embeds[k - 1 :], embeds.new_zeros(k - 1, HIDDEN)))
        clean = drafter.condition(drafter(wide[None], embeds[None], blocks[None])[0], previous)
        wrong.append(
            sum(int(head.logits(clean[i]).argmax()) != int(head.logits(truth[i + k]).argmax()) for i in judged)
        )

        given, given_embeds = wide.clone(), embeds.clone()
        for i in judged:
            if glanced[row, i]:
                given[i], given_embeds[i] = wide[i + k], embeds[i + k]
        # What pass p reads at each position: true features, or what pass p - 1 predicted for it.
        inputs = [given]
        for number in range(1, passes + 1):
            predicted = torch.zeros(length, HIDDEN)
            for block in blocks.unique().tolist():
                rows, row_embeds, row_blocks = [], [], []
                for p in range(1, number + 1):
                    behind = block - blocks
                    here = behind >= number - 1 if p == 1 else behind == number - p
                    rows.append(inputs[p - 1][here])
                    row_embeds.append((given_embeds if p == 1 else embeds)[here])
                    row_blocks.append(blocks[here])
                if len(rows[-1]) == 0:
                    continue
                places = torch.cat([(blocks == b).nonzero()[:, 0] for b in torch.cat(row_blocks).unique()])
                found = drafter(
                    torch.cat(rows)[None], torch.cat(row_embeds)[None], torch.cat(row_blocks)[None], places[None]
                )[0]
                here = blocks == block
                predicted[here] = drafter.condition(found[-int(here.sum()) :], previous[here])
            for i in judged:
                log_p, log_q = (head.logits(feature).log_softmax(-1) for feature in (truth[i + k], predicted[i]))
                best = int(log_p.argmax())
                error = (predicted[i] - truth[i + k]) / drafter.feature_std
                sums[0] += F.smooth_l1_loss(error, torch.zeros_like(error)).detach()
                kl = (log_p.exp() * (log_p - log_q)).sum()
                sums[1] += (WEIGHTS.soft * kl - (1 - WEIGHTS.soft) * log_q[best]).detach()
                depth = (number - 1) * k + (i + offset) % k
                counts[depth] += 1
                better = int((log_q > log_q[best]).sum())
                hits[depth] += torch.tensor([better == 0, better < 3, better < 8])
            positions += len(judged)
            # The target's layers say nothing of what is drafted.
            inputs.append(F.pad(torch.cat((truth[:k], predicted[:-k])), (0, wide.shape[-1] - HIDDEN)))
    regression, divergence = (sums / positions).tolist()
    loss = WEIGHTS.regression * regression + WEIGHTS.distillation * divergence
    return loss, regression, divergence, hits, counts, wrong


@pytest.mark.parametrize(
    "block_size, lstm_layers, passes",
    [(1, 0, 1), (2, 0, 1), (3, 0, 1), (1, 2, 1), (2, 1, 1), (3, 2, 1), (1, 0, 2), (2, 0, 2), (2, 0, 3), (3, 0, 2)],
)
@pytest.mark.parametrize("glancing", [False, True])
@pytest.mark.parametrize("option", [{}, {"conditioning_size": 24}, {"feature_layers": [0, 1]}])
def test_draft_loss(target, monkeypatch, block_size, lstm_layers, passes, glancing, option):
    drafter = tiny_drafter(target, block_size=block_size, num_lstm_layers=lstm_layers, **option)
    batch = draft_batch(target, layers=drafter.config.feature_layers)
    head, offsets = TargetHead(drafter, target), [0, 1 % block_size, block_size - 1]
    shifted = torch.arange(batch.token_ids.shape[1])[None] + torch.tensor(offsets)[:, None]
    monkeypatch.setattr(csgd, "random_blocks", lambda *_: (shifted // block_size, shifted % block_size))
    glanced, distances = torch.zeros_like(batch.valid), []

    def some(judged, distance, ratio, generator):
        distances.append(distance.tolist())
        glanced[:] = judged & (torch.rand(judged.shape, generator=seeded()) < 0.4)
        return glanced

    monkeypatch.setattr(csgd, "glance", some)
    found = draft_loss(
        drafter, head, batch, seeded(), WEIGHTS, noise=0.0, glancing_ratio=0.4 if glancing else 0.0, passes=passes
    )
    assert bool(glanced.any()) == (glancing and block_size > 1)
    loss, regression, divergence, hits, counts, wrong = plain_loss(drafter, head, batch, offsets, glanced, passes)
    values = [found.loss.item(), found.regression.item(), found.distillation.item()]
    assert values == pytest.approx([loss, regression, divergence], rel=1e-4)
    assert torch.equal(found.counts.float(), counts) and torch.equal(found.correct.float(), hits)
    # Each token of a response is predicted once in a pass, and nothing else is.
    assert int(counts.sum()) == passes * int(batch.response.sum())
    if glancing and block_size > 1:
        assert distances == [wrong]


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_only_responses_are_learnt(target, monkeypatch, block_size):
    """The token at which a response begins counts, the last one of the prompt does not."""
    drafter = tiny_drafter(target, block_size=block_size)
    head, batch = TargetHead(drafter, target), draft_batch(target, lengths=[16], prompts=[9])
    read = []

    def distil(predicted, labels, head, soft):
        read.append(labels)
        return distillation_loss(predicted, labels, head, soft)

    monkeypatch.setattr(csgd, "distillation_loss", distil)
    draft_loss(drafter, head, batch, seeded(), WEIGHTS, noise=0.0)
    # Tokens 9 to 15 are the response; the feature before each of them is its label.
    assert torch.equal(read[0], batch.features[0, 8:15])


def test_a_batch_without_anything_to_learn(target):
    drafter = tiny_drafter(target, block_size=3)
    batch = draft_batch(target, lengths=[4, 3], prompts=[1, 2])
    found = draft_loss(drafter, TargetHead(drafter, target), batch, seeded(), WEIGHTS, glancing_ratio=0.4)
    found.loss.backward()
    assert found.loss.item() == 0 and not found.counts.any()


@pytest.mark.parametrize(
    "block_size, lstm_layers, passes, option",
    [
        (1, 0, 1, {}),
        (2, 0, 1, {}),
        (1, 2, 1, {}),
        (2, 2, 1, {}),
        (2, 0, 2, {}),
        (2, 0, 1, {"conditioning_size": 24}),
        (1, 0, 2, {"feature_layers": [0, 1]}),
    ],
)
def test_a_drafter_can_learn(target, block_size, lstm_layers, passes, option):
    drafter = tiny_drafter(target, scale=0, block_size=block_size, num_lstm_layers=lstm_layers, **option).train()
    head, batch = TargetHead(drafter, target), draft_batch(target, layers=drafter.config.feature_layers)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3, weight_decay=0.0)
    losses = []
    for step in range(150):
        result = draft_loss(drafter, head, batch, seeded(step), DistillationWeights(), noise=0.02, passes=passes)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        losses.append(result.loss.item())
    assert sum(losses[-5:]) < 0.25 * sum(losses[:5])
    assert (result.correct[:, 0] / result.counts > 0.8).all()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in drafter.parameters())


@pytest.mark.parametrize("block_size, passes", [(1, 1), (2, 3)])
def test_checkpointed_activations(target, block_size, passes):
    """The same loss and gradients, from activations that are computed twice."""
    found = []
    for checkpointed in (False, True):
        drafter = tiny_drafter(target, block_size=block_size, num_lstm_layers=0).train()
        if checkpointed:
            drafter.gradient_checkpointing_enable()
        runs = []
        for layer in drafter.layers:
            layer.input_layernorm.register_forward_hook(lambda module, *_, runs=runs: runs.append(module))
        result = draft_loss(
            drafter, TargetHead(drafter, target), draft_batch(target), seeded(), WEIGHTS, passes=passes
        )
        result.loss.backward()
        found.append([result.loss.detach(), *(parameter.grad for parameter in drafter.parameters())])
        assert len(runs) == passes * len(drafter.layers) * (1 + checkpointed)
    torch.testing.assert_close(*found)


def test_noise_is_drawn_from_the_generator(target):
    drafter = tiny_drafter(target, num_lstm_layers=0)
    head, batch = TargetHead(drafter, target), draft_batch(target)

    def loss(seed, noise):
        torch.manual_seed(torch.seed() % 1000)  # chance elsewhere plays no part
        return draft_loss(drafter, head, batch, seeded(seed), WEIGHTS, noise, glancing_ratio=0.4).loss.item()

    assert loss(0, 0.1) == loss(0, 0.1) != loss(0, 0.0)
    assert loss(1, 0.1) != loss(0, 0.1)


def test_chance_is_a_sample_s_own(target):
    """What is drawn for a sample depends on neither the others of its batch nor the padding."""
    drafter = tiny_drafter(target, block_size=3, num_lstm_layers=0)
    head, batch = TargetHead(drafter, target), draft_batch(target)
    options = {"noise": 0.5, "glancing_ratio": 0.8}
    together = draft_loss(drafter, head, batch, seeded(), WEIGHTS, **options)
    counts, loss = torch.zeros_like(together.counts), 0.0
    for rows, length in (([0], 24), ([2, 1], 21)):
        part = DraftBatch(*(getattr(batch, field)[rows] for field in vars(batch)))
        for field in ("features", "token_ids", "valid", "response"):
            setattr(part, field, getattr(part, field)[:, :length])
        found = draft_loss(drafter, head, part, seeded(), WEIGHTS, **options)
        counts += found.counts
        loss += found.loss.item() * int(found.counts.sum())
    assert torch.equal(counts, together.counts)
    assert loss / int(counts.sum()) == pytest.approx(together.loss.item(), rel=1e-5)


def test_unrolling_an_lstm_is_refused(target):
    drafter = tiny_drafter(target, num_lstm_layers=1)
    head, batch = TargetHead(drafter, target), draft_batch(target)
    for passes, message in ((2, "is 2 and `num_lstm_layers` 1.*Set `unroll_passes=1`"), (0, "is 0: .* at least 1")):
        with pytest.raises(ValueError, match=f"`unroll_passes` {message}"):
            draft_loss(drafter, head, batch, seeded(), WEIGHTS, passes=passes)


# The data.


def test_frequent_tokens():
    samples = [torch.tensor([9, 9, 9, 5, 5, 7]), torch.tensor([9, 4, 4, 4, 5])]
    data = TokenFile.from_samples(samples, [3, 1], [0.0, 0.0], 10)
    # Of the responses alone: 5 three times, 4 three times, 7 once.
    found, share = frequent_tokens(data, 10, 2)
    assert found.tolist() == [4, 5] and share == pytest.approx(6 / 7)
    assert frequent_tokens(data, 10, 10)[0].tolist() == list(range(10))


def test_samples_and_batches():
    data = TokenFile.from_samples([torch.arange(5), torch.arange(9), torch.arange(7)], [2, 3, 6], [0.0] * 3, 64)
    samples = DraftSamples(data, [0, 1, 2], max_length=6)
    # The last one's prompt alone fills it.
    assert len(samples) == 2 and samples.lengths == [5, 6]
    batch = collate([samples[0], samples[1]])
    assert batch["token_ids"].tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5]]
    assert batch["valid"].tolist() == [[True] * 5 + [False], [True] * 6]
    assert batch["response"].tolist() == [[False] * 2 + [True] * 3 + [False], [False] * 3 + [True] * 3]
    assert "features" not in batch
    with pytest.raises(ValueError, match="response within `max_length` .2. tokens: raise it"):
        DraftSamples(data, [0, 1, 2], max_length=2)


@pytest.mark.parametrize("samples, batch_size", [(1, 4), (10, 3), (64, 4), (501, 4)])
def test_sampler(samples, batch_size):
    lengths = torch.randint(5, 500, (samples,), generator=seeded()).tolist()
    sampler = LengthGroupedSampler(lengths, batch_size, seed=3)
    first = list(sampler)
    assert sorted(first) == list(range(samples)) and len(sampler) == samples
    assert list(sampler) == list(LengthGroupedSampler(lengths, batch_size, seed=3)) == first
    if samples < 64:
        return
    for other in (LengthGroupedSampler(lengths, batch_size, seed=4), LengthGroupedSampler(lengths, batch_size, 3)):
        other.set_epoch(0 if other._seed == 4 else 1)
        assert list(other) != first and sorted(other) == sorted(first)

    def padding(order):
        batches = [[lengths[i] for i in order[b : b + batch_size]] for b in range(0, samples, batch_size)]
        return sum(len(batch) * max(batch) - sum(batch) for batch in batches)

    assert padding(first) < 0.2 * padding(range(samples))


@pytest.mark.parametrize("size", [8, 10, 16])
def test_an_order_is_cut_or_filled_up(size):
    order = list(LengthGroupedSampler(list(range(5, 15)), 4, seed=3))
    found = LengthGroupedSampler(list(range(5, 15)), 4, seed=3, size=size)
    assert list(found) == (order + [FILLER] * 6)[:size] and len(found) == size


def test_a_filler_counts_for_nothing(target, tmp_path):
    samples = DraftSamples(token_file(), [3, 4], 64)
    batch = collate([samples[FILLER], samples[1]])
    assert batch["sample"].tolist() == [FILLER, 4] and batch["valid"].sum(dim=1).tolist() == [1, samples.lengths[1]]
    run = trainer(target, tmp_path, save_strategy="no")
    sums = []
    for items in ([0, 1], [FILLER, 1, FILLER, 0]):
        run._sums.take(lambda values: sums.append(values) or values)
        run.compute_loss(run.model.eval(), collate([samples[item] for item in items]))
    run._sums.take(lambda values: sums.append(values) or values)
    torch.testing.assert_close(sums[0], sums[1])
    assert not run.compute_loss(run.model, collate([samples[FILLER]])).isnan()


def test_feature_statistics(target):
    data = token_file()
    mean, std = feature_statistics(target, data)
    rows = torch.cat([target_features(target, *whole(data, i))[0] for i in range(len(data))])
    torch.testing.assert_close(mean, rows.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(std, rows.std(0), rtol=1e-4, atol=1e-5)


def whole(data, index):
    token_ids = data.sample(index)[0][None]
    return token_ids, torch.ones_like(token_ids, dtype=torch.bool)


@pytest.mark.parametrize("layers", [[], [1, 0]])
def test_stored_features(target, tmp_path, monkeypatch, layers):
    monkeypatch.setattr(features, "_SHARD_TOKENS", 40)
    data = token_file()
    stored = StoredFeatures(tmp_path, target, data, layers)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 3
    for index in range(len(data)):
        expected = target_features(target, *whole(data, index), layers)[0]
        found = stored.sample(index)
        assert found.dtype == torch.bfloat16 and found.shape == expected.shape
        torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
    samples = DraftSamples(data, [0, 1], 8, stored)
    assert torch.equal(collate([samples[0], samples[1]])["features"][1], stored.sample(1)[:8])

    # A missing shard is computed again, the others are not touched.
    before = [shard.stat().st_mtime_ns for shard in shards]
    again = shards[1].read_bytes()
    shards[1].unlink()
    StoredFeatures(tmp_path, target, data, layers)
    assert shards[1].read_bytes() == again
    assert [shards[i].stat().st_mtime_ns for i in (0, 2)] == [before[0], before[2]]


@pytest.mark.parametrize("other", ["target", "tokens", "layers"])
def test_stored_features_of_something_else(target, tmp_path, other):
    StoredFeatures(tmp_path, target, token_file())
    arguments = {
        "target": (tiny_target(seed=8), token_file()),
        "tokens": (target, token_file(seed=6)),
        "layers": (target, token_file(), [0]),
    }[other]
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))}` holds features of.*give another folder"):
        StoredFeatures(tmp_path, *arguments)


def test_no_room_for_features(target, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(
        OSError, match=f"{re.escape(str(tmp_path))}` has .* GB free and the features need .* leave out"
    ):
        StoredFeatures(tmp_path, target, token_file())
    assert not list(tmp_path.glob("*.safetensors"))


# The trainer.


class Interrupt(TrainerCallback):
    """A user's Ctrl-C, right after a checkpoint was written."""

    def __init__(self, step):
        self.step = step

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def trainer(target, folder, callback=None, train_file=None, changes=None, **arguments):
    data = train_file or token_file()
    drafter = tiny_drafter(target, scale=0, **{"num_lstm_layers": 1, **(changes or {})})
    defaults = {
        "max_steps": 10,
        "per_device_train_batch_size": 2,
        "save_steps": 1,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = FalconTrainingArguments(output_dir=str(folder), **{**defaults, **arguments})
    held_out = DraftSamples(data, [0, 1, 2], 64)
    found = FalconTrainer(drafter, target, args, DraftSamples(data, list(range(len(data))), 64), held_out)
    if callback is not None:
        found.add_callback(callback)
    return found


def logged(run):
    """What a run logs after its last start, without what depends on the clock."""
    return [
        {name: value for name, value in logs.items() if name != "tokens_per_second"}
        for logs in run.state.log_history
        if "loss" in logs
    ]


@pytest.fixture(scope="module")
def unbroken(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    run = trainer(target, folder)
    run.train()
    return folder, run


@pytest.mark.parametrize("stop", [3, 4, 6, 8])  # of 4 steps an epoch: within one, and between two
def test_a_resumed_run_is_as_if_it_had_not_stopped(target, unbroken, tmp_path, stop):
    first = trainer(target, tmp_path, Interrupt(stop))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    second = trainer(target, tmp_path)
    torch.manual_seed(99)
    second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    assert second.state.global_step == 10 and len(logged(second)) == 10
    for found, expected in zip(logged(second), logged(unbroken[1])):
        assert found == pytest.approx(expected, abs=1e-6)
    for name, tensor in unbroken[1]._drafter.state_dict().items():
        torch.testing.assert_close(second._drafter.state_dict()[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_a_run_with_gradient_accumulation_resumes(target, tmp_path):
    options = {"gradient_accumulation_steps": 3, "max_steps": 4}
    whole_run = trainer(target, tmp_path / "whole", **options)
    whole_run.train()
    with pytest.raises(KeyboardInterrupt):
        trainer(target, tmp_path, Interrupt(2), **options).train()
    second = trainer(target, tmp_path, **options)
    second.train(resume_from_checkpoint=True)
    assert logged(second) == logged(whole_run)
    for name, tensor in whole_run._drafter.state_dict().items():
        torch.testing.assert_close(second._drafter.state_dict()[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_what_a_run_logs(unbroken):
    _, run = unbroken
    losses = [row["loss"] for row in logged(run)]
    assert len(losses) == 10 and sum(losses[-3:]) < 0.9 * sum(losses[:3])
    weights = run.args
    for row in logged(run):
        parts = weights.regression_weight * row["regression"] + weights.distillation_weight * row["distillation"]
        assert row["loss"] == pytest.approx(parts, abs=2e-4)
        for depth in (1, 2):
            assert 0 <= row[f"top1_depth{depth}"] <= row[f"top3_depth{depth}"] <= row[f"top8_depth{depth}"] <= 1


def test_glancing_falls_to_zero(target, tmp_path, monkeypatch):
    ratios = []

    def recorded(*args, glancing_ratio, **kwargs):
        ratios.append(glancing_ratio)
        return draft_loss(*args, glancing_ratio=glancing_ratio, **kwargs)

    monkeypatch.setattr("hf_falcon.training.trainer.draft_loss", recorded)
    run = trainer(target, tmp_path, max_steps=4, save_strategy="no", glancing_ratio=0.8)
    run.train()
    assert ratios == pytest.approx([0.8, 0.6, 0.4, 0.2])
    run.evaluate()
    assert ratios[4:] == [0.0]


def test_a_checkpoint_is_a_drafter(unbroken, target):
    folder, run = unbroken
    checkpoint = folder / "checkpoint-10"
    loaded = FalconDraftModel.from_pretrained(checkpoint)
    for name, tensor in run._drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert not {"training_args.bin", "pytorch_model.bin"} & set(os.listdir(checkpoint))
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(loaded.state_dict())
    prompt = random_tokens(1, 6)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(target.generate(prompt, assistant_model=loaded, **options), target.generate(prompt, **options))


def test_training_leaves_the_target_alone(target, unbroken):
    for name, tensor in tiny_target().state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor)


def test_the_time_limit_saves_and_stops(target, tmp_path):
    run = trainer(target, tmp_path, max_minutes=0.0, save_steps=100)
    run.train()
    assert run.state.global_step == 1
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def break_weights(run, at):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == at:
                with torch.no_grad():
                    run._drafter.norm.weight.fill_(float("nan"))

    run.add_callback(Break())


def test_a_loss_that_is_no_number(target, tmp_path):
    run = trainer(target, tmp_path, save_strategy="no")
    break_weights(run, at=2)
    kept = tmp_path / "nan_batch_step_2.safetensors"
    message = f"The loss is nan at step 2: lower `learning_rate` .0.01. .*{re.escape(str(kept))}"
    with pytest.raises(FloatingPointError, match=message):
        run.train()
    # The batch of the third step, as far as it can be told from the data.
    batch = load_file(kept)
    order = list(run._get_train_sampler())[4:6]
    expected = collate([run.train_dataset[index] for index in order])
    assert set(batch) == {"features", "token_ids", "valid", "response", "sample"}
    for name, tensor in expected.items():
        assert torch.equal(batch[name], tensor), name
    features = target_features(target, expected["token_ids"], expected["valid"])
    torch.testing.assert_close(batch["features"], features)


def test_broken_weights_are_not_saved(target, tmp_path):
    run = trainer(target, tmp_path)
    break_weights(run, at=3)
    with pytest.raises(FloatingPointError, match="weights that are not finite at step 3.*resume from the last check"):
        run.train()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "checkpoint-2", "nan_batch_step_3.safetensors"]


class Died(BaseException):
    """Stands for `kill -9`: nothing runs after it."""


def die_at(monkeypatch, event):
    """Dies in the middle of the n-th of all the calls that change something on the disk."""
    events = []

    def dying(call, half):
        def wrapped(*args, **kwargs):
            events.append(call)
            if len(events) == event:
                half(*args, **kwargs)
                raise Died
            return call(*args, **kwargs)

        return wrapped

    def half_save(content, path, *args, **kwargs):
        Path(path).write_bytes(b"half")

    def half_removed(folder, *args, **kwargs):
        for file in sorted(Path(folder).rglob("*.*"))[::2]:
            file.unlink()

    def nothing(*args, **kwargs):
        pass

    monkeypatch.setattr(torch, "save", dying(torch.save, half_save))
    monkeypatch.setattr(modeling_utils, "safe_save_file", dying(modeling_utils.safe_save_file, half_save))
    monkeypatch.setattr(TrainerState, "save_to_json", dying(TrainerState.save_to_json, half_save))
    monkeypatch.setattr(shutil, "rmtree", dying(shutil.rmtree, half_removed))
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, dying(getattr(os, name), nothing))
    return events


def test_a_run_that_dies_while_it_saves(target, unbroken, tmp_path, monkeypatch):
    complete = sorted(os.listdir(unbroken[0] / "checkpoint-10"))
    deaths, last = 0, 0
    while True:
        run = trainer(target, tmp_path, save_total_limit=2)
        last_checkpoint = get_last_checkpoint(tmp_path)
        with monkeypatch.context() as patched:
            # Each time a little later in the save of a checkpoint, in the end in one after it.
            die_at(patched, deaths + 1)
            try:
                run.train(resume_from_checkpoint=last_checkpoint)
                break
            except Died:
                deaths += 1
        found = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
        # What is there is complete, and what was there before is not lost.
        assert max(found, default=0) >= last and len(found) >= min(last, 2)
        last = max(found, default=0)
        for step in found:
            folder = tmp_path / f"checkpoint-{step}"
            assert sorted(os.listdir(folder)) == complete
            assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == step
            FalconDraftModel.from_pretrained(folder)
    assert deaths > 10 and sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-9"]
    assert logged(run) == logged(unbroken[1])
    for name, tensor in unbroken[1]._drafter.state_dict().items():
        torch.testing.assert_close(run._drafter.state_dict()[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_the_best_checkpoint_is_kept_and_loaded(target, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
    options |= {"metric_for_best_model": "regression", "greater_is_better": False}
    run = trainer(target, tmp_path, max_steps=4, **options)
    # The first is the best, whatever is learnt.
    values = iter([0.0, 1.0, 1.0, 1.0])
    take = run.evaluate
    run.evaluate = lambda *args, **kwargs: {**take(*args, **kwargs), "eval_regression": next(values)}
    run.train()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "checkpoint-4"]
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == run.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    best = FalconDraftModel.from_pretrained(tmp_path / "checkpoint-1")
    for name, tensor in best.state_dict().items():
        assert torch.equal(run._drafter.state_dict()[name], tensor)


def test_evaluation(target, tmp_path):
    run = trainer(target, tmp_path, save_strategy="no")
    first, second = run.evaluate(), run.evaluate()
    clock = "eval_tokens_per_second"
    assert {n: v for n, v in first.items() if n != clock} == {n: v for n, v in second.items() if n != clock}
    assert {"eval_regression", "eval_distillation", "eval_top1_depth1", "eval_top8_depth2"} <= set(first)
    run.train()
    last = run.evaluate()
    assert last["eval_loss"] < 0.8 * first["eval_loss"]
    # Two depths: the second counts only after the first.
    top1 = last["eval_top1_depth1"], last["eval_top1_depth2"]
    assert last["eval_estimated_tau_chain"] == pytest.approx(top1[0] + top1[0] * top1[1], abs=1e-4)
    assert last["eval_estimated_tau_chain"] <= last["eval_estimated_tau_tree"] <= 2


def test_evaluation_of_more_passes_than_are_trained(target, tmp_path):
    run = trainer(
        target,
        tmp_path,
        changes={"num_lstm_layers": 0},
        save_strategy="no",
        max_steps=2,
        unroll_passes=2,
        eval_passes=3,
    )
    run.train()
    assert "top8_depth4" in logged(run)[0] and "top1_depth5" not in logged(run)[0]
    metrics = run.evaluate()
    assert "eval_top8_depth6" in metrics and "eval_top1_depth7" not in metrics
    with pytest.raises(ValueError, match="`eval_passes` is 2 and `num_lstm_layers` 1.*Set `eval_passes=1`"):
        trainer(target, tmp_path, eval_passes=2)


def test_estimated_tau_of_a_chain():
    assert estimated_tau_chain([(0.5, 0.6, 0.7), (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)]) == pytest.approx(0.5 + 0.2 + 0.02)
    assert estimated_tau_chain([]) == 0


@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 72, 10**4])
def test_estimated_tau_of_a_tree(nodes):
    accuracy = [(0.5, 0.7, 0.8), (0.4, 0.5, 0.9)]
    ranks = [[0.5, 0.1, 0.1] + [0.02] * 5, [0.4, 0.05, 0.05] + [0.08] * 5]
    paths = ranks[0] + [first * second for first in ranks[0] for second in ranks[1]]
    expected = sum(sorted(paths, reverse=True)[:nodes])
    assert estimated_tau_tree(accuracy, nodes) == pytest.approx(expected)
    if nodes >= len(paths):
        assert expected == pytest.approx(0.8 + 0.8 * 0.9)


def test_evaluation_does_not_disturb_training(target, unbroken, tmp_path):
    run = trainer(target, tmp_path, save_strategy="no", eval_strategy="steps", eval_steps=2)
    run.train()
    assert logged(run) == logged(unbroken[1])
    assert sum("eval_loss" in logs for logs in run.state.log_history) == 5


def test_mixed_precision(target, unbroken, tmp_path):
    run = trainer(target, tmp_path, save_strategy="no", bf16=True)
    run.train()
    assert run._drafter.dtype == torch.float32
    losses, expected = ([logs["loss"] for logs in logged(of)] for of in (run, unbroken[1]))
    assert losses == pytest.approx(expected, rel=0.1) and losses != expected


@pytest.mark.parametrize("quiet", [True, False])
def test_the_progress_bar_can_be_turned_off(target, tmp_path, capfd, quiet):
    trainer(target, tmp_path, max_steps=2, save_strategy="no", disable_tqdm=quiet).train()
    captured = capfd.readouterr()
    assert ("d1=" in captured.err) == (not quiet) and ("regression" in captured.out) == quiet


def test_provenance(target, unbroken, tmp_path):
    folder, run = unbroken
    found = json.loads((folder / "checkpoint-10" / "provenance.json").read_text())
    assert set(found["versions"]) == {"python", "torch", "transformers", "hf_falcon"}
    assert found["target"] == {"name_or_path": target.name_or_path, "fingerprint": weights_fingerprint(target)}
    data = token_file()
    digest = hashlib.sha256(data.tokens.numpy().tobytes()).hexdigest()
    assert found["data"] == {"tokens_sha256": digest, "tokens": len(data.tokens), "samples": 7, "sources": []}
    assert found["arguments"]["learning_rate"] == 1e-2 and found["arguments"]["output_dir"] == str(folder)
    assert (found["seed"], found["steps"]) == (42, 10)
    # Two and a half epochs of seven samples, in batches of two: the tokens of the third epoch's first two batches.
    lengths = run.train_dataset.lengths
    sampler = run._get_train_sampler()
    sampler.set_epoch(2)
    assert found["tokens_seen"] == 2 * sum(lengths) + sum(lengths[i] for i in list(sampler)[:4])

    # A resumed run counts on; held-out samples do not count.
    shutil.copytree(folder / "checkpoint-4", tmp_path / "checkpoint-4")
    again = trainer(target, tmp_path, eval_strategy="steps", eval_steps=3)
    again.train(resume_from_checkpoint=True)
    again.save_model()
    assert json.loads((tmp_path / "provenance.json").read_text())["tokens_seen"] == found["tokens_seen"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_revision(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_revision() is None
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for words in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *words], check=True)
    assert re.fullmatch("[0-9a-f]{40}", git_revision())
    (tmp_path / "file").touch()
    subprocess.run(["git", "add", "file"], check=True)
    assert re.fullmatch("[0-9a-f]{40}-dirty", git_revision())
    monkeypatch.setenv("PATH", "")
    assert git_revision() is None


# The command.


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A target with its tokenizer, and a token file, in folders."""
    folder = tmp_path_factory.mktemp("workplace")
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w0")
    tiny_target().save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    token_file(samples=30).save(folder / "tokens.safetensors")
    return folder


def test_held_out_samples_that_are_too_long(workplace, tmp_path, capsys):
    samples = [torch.arange(3, 12)] * 19 + [torch.arange(3, 40)]
    path = tmp_path / "tokens.safetensors"
    TokenFile.from_samples(samples, [4] * 19 + [30], [0.0] * 20, VOCAB).save(path)
    options = {"data": path, "max_length": 20, "plan": True}
    with pytest.raises(
        ValueError, match="^Held out, .*: None of 1 samples .* raise it. Or change `eval_samples` .1.:"
    ):
        train.main(arguments(workplace, tmp_path, eval_samples=1, **options))
    assert train.main(arguments(workplace, tmp_path, eval_samples=0, **options)) == 0
    assert train.main(arguments(workplace, tmp_path, eval_samples=2, **options)) == 0
    assert "1 samples held out" in capsys.readouterr().out


def arguments(workplace, output, **changes):
    given = {
        "data": workplace / "tokens.safetensors",
        "target": workplace / "target",
        "target_dtype": "float32",
        "output_dir": output,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        # As in the paper: what has most parts.
        "block_size": 2,
        "num_lstm_layers": 2,
        "num_draft_layers": 1,
        "report_to": "none",
        "use_cpu": True,
        "final_tau_prompts": 0,
        **changes,
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def test_train_command(workplace, tmp_path):
    output = tmp_path / "new" / "drafter"
    options = {"draft_vocab_size": 20, "features_dir": tmp_path / "features", "block_size": 3, "eval_samples": 2}
    options |= {"feature_layers": 0, "final_tau_prompts": 1, "intermediate_size": 40, "num_key_value_heads": 1}
    assert train.main(arguments(workplace, output, **options)) == 0
    files = {"config.json", "model.safetensors", "trainer_state.json", "provenance.json", "README.md"}
    assert files <= set(os.listdir(output))
    card = ModelCard.load(output / "README.md")
    assert "speculative-decoding" in card.data.tags and "steps," in card.text
    assert "training_args.bin" not in os.listdir(output)
    config = json.loads((output / "config.json").read_text())
    assert (config["block_size"], config["num_lstm_layers"], config["num_hidden_layers"]) == (3, 2, 1)
    assert (config["intermediate_size"], config["num_key_value_heads"]) == (40, 1)
    assert config["target_model_type"] == "llama" and config["target_fingerprint"] and config["feature_layers"] == [0]

    drafter = FalconDraftModel.from_pretrained(output)
    data = TokenFile.load(workplace / "tokens.safetensors")
    assert torch.equal(drafter.draft_vocab_ids, frequent_tokens(data, VOCAB, 20)[0])
    mean, std = feature_statistics(tiny_target(), data)
    torch.testing.assert_close(drafter.feature_mean, mean)
    torch.testing.assert_close(drafter.feature_std, std)

    # A drafter to start from.
    assert (
        train.main(arguments(workplace, tmp_path / "next", init_from=output, max_steps=1, gradient_checkpointing=True))
        == 0
    )
    assert FalconDraftModel.from_pretrained(tmp_path / "next").config.block_size == 3


@pytest.mark.parametrize("prompts", [0, 2])
def test_what_a_run_leaves_to_look_at(workplace, tmp_path, capsys, monkeypatch, prompts):
    monkeypatch.setattr("hf_falcon.training.plot.draw", draw)
    options = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1, "final_tau_prompts": prompts}
    # A piece that is not the last decodes nothing.
    assert train.main(arguments(workplace, tmp_path, max_minutes=0, **options)) == 0
    assert "decoded" not in capsys.readouterr().out
    assert train.main(arguments(workplace, tmp_path, **options)) == 0
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [row["step"] for row in history if "eval_top8_depth2" in row] == [2, 3]
    assert all(0 <= row["eval_estimated_tau_tree"] <= 2 for row in history if "eval_loss" in row)
    final = [row for row in history if "final_tau" in row]
    assert len(final) == (prompts > 0) == ("2 held-out prompts decoded: " in (printed := capsys.readouterr().out))
    assert (" tokens a round (tau " in printed) == (prompts > 0)
    assert all(0 <= row["final_alpha"] <= 1 for row in final)
    image = (tmp_path / "training.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 10_000


def test_decoded_tau(target):
    prompts = [random_tokens(6, seed=seed) for seed in (3, 4)]
    found = decoded_tau(target, tiny_drafter(target), prompts, max_new_tokens=20)
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    each = [
        target.generate(p[None], assistant_model=tiny_drafter(target), **options).draft_statistics for p in prompts
    ]
    rounds, accepted = sum(s.rounds for s in each), sum(s.accepted_tokens for s in each)
    assert found == {"final_tau": accepted / rounds, "final_alpha": accepted / sum(s.new_tokens for s in each)}


def test_nothing_to_plot():
    assert draw([]) is None and draw([{"step": 3, "train_loss": 1.0}]) is None


def test_the_plot_is_drawn_anew(target, tmp_path, monkeypatch):
    lengths = []
    monkeypatch.setattr("hf_falcon.training.plot.draw", lambda history: lengths.append(len(history)))
    trainer(target, tmp_path, TrainingPlot(), max_steps=3).train()
    assert lengths == [1, 4]  # the first checkpoint, and the end with its summary
    monkeypatch.setattr("hf_falcon.training.plot._SECONDS", -1)
    trainer(target, tmp_path, TrainingPlot(), max_steps=3).train()
    assert lengths[2:] == [1, 2, 3, 4]


def test_no_plot_without_matplotlib(target, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hf_falcon.training.plot.draw", draw)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = trainer(target, tmp_path, TrainingPlot(), max_steps=2)
    run.train()
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "hf_falcon.training.plot"]
    assert "pip install hf-falcon[train]" in warning and not (tmp_path / "training.png").exists()


def test_the_same_command_goes_on(workplace, tmp_path):
    command = arguments(workplace, tmp_path, max_minutes=0)
    for step in (1, 2, 3, 3):
        assert train.main(command) == 0
        state = json.loads((tmp_path / "trainer_state.json").read_text())
        assert state["global_step"] == step
    whole_run = tmp_path / "whole"
    assert train.main(arguments(workplace, whole_run)) == 0
    pieces, expected = (FalconDraftModel.from_pretrained(folder) for folder in (tmp_path, whole_run))
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(pieces.state_dict()[name], tensor, rtol=0, atol=1e-6, msg=name)


# The plan.


def test_plan(workplace, tmp_path, capsys, monkeypatch):
    def no_weights(*args, **kwargs):
        raise AssertionError("weights are read")

    monkeypatch.setattr(train, "load_target", no_weights)
    options = {"plan": True, "draft_vocab_size": 20, "features_dir": tmp_path / "features", "save_steps": 2}
    output = tmp_path / "new" / "drafter"
    assert train.main(arguments(workplace, output, gradient_accumulation_steps=2, **options)) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert os.listdir(tmp_path) == []

    target, data = tiny_target(), TokenFile.load(workplace / "tokens.safetensors")
    drafter = FalconDraftModel(FalconDraftConfig.from_target(target, num_hidden_layers=1, draft_vocab_size=20))
    sizes = [sum(p.numel() for p in model.parameters()) for model in (target, drafter)]
    assert f"llama, {sizes[0]:,} parameters, float32, on cpu" in rows["target"]
    assert f" {sizes[1]:,} parameters: block size 2, 2 LSTM layers, 1 decoder layers, 20 tokens" in rows["drafter"]
    tokens = int(data.offsets[27])
    expected = f"27 samples of {tokens:,} tokens, {tokens - 27 * 4} of them of responses; 3 samples held out"
    assert expected in rows["data"]
    assert "3 of 8 samples (1 processes x 4 x 2 accumulated), 0.75 epochs" in rows["steps"]
    assert f"{round(0.75 * tokens):,} tokens" in rows["presented"]
    assert "2 checkpoints of " in rows["disk"] and "of features in" in rows["disk"]
    assert "estimated" in rows["memory"]


@pytest.mark.parametrize(
    "changes, message", [({"block_size": 0}, "`block_size` is 0"), ({"max_length": 4}, "raise it")]
)
def test_a_plan_finds_mistakes(workplace, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train.main(arguments(workplace, tmp_path, plan=True, **changes))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"dataloader_drop_last": True},
        {"dataloader_drop_last": True, "gradient_accumulation_steps": 2},
        {"save_strategy": "epoch"},
        {"max_steps": 5},
    ]
    + [{"save_steps": 0.3}, {"save_total_limit": 2}],
)
def test_a_plan_counts_as_trainer_does(target, tmp_path, options):
    run = trainer(target, tmp_path, **{"max_steps": -1, "num_train_epochs": 1.5, "save_steps": 2, **options})
    per_epoch, steps = plan.training_steps(7, run.args)
    run.train()
    assert run.state.global_step == steps and run.state.epoch == pytest.approx(steps / per_epoch, abs=0.26)
    assert len(list(tmp_path.glob("checkpoint-*"))) == plan.checkpoints(steps, per_epoch, run.args)


@pytest.mark.parametrize("lstm_layers, layers, passes", [(0, 1, 1), (0, 2, 1), (2, 1, 1), (0, 1, 2)])
def test_planned_activations(lstm_layers, layers, passes):
    target = tiny_target(hidden_size=128, intermediate_size=340, num_attention_heads=4)
    changes = {"intermediate_size": 340, "num_lstm_layers": lstm_layers, "num_hidden_layers": layers}
    drafter = tiny_drafter(target, **changes).train()
    own = {p.untyped_storage()._cdata for model in (target, drafter) for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes(), tensor
        return tensor

    lengths = (64, 64, 64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        batch = draft_batch(target, lengths, prompts=(1, 1, 1))
        result = draft_loss(drafter, TargetHead(drafter, target), batch, seeded(), WEIGHTS, passes=passes)
    planned = plan.activation_bytes(drafter.config, len(lengths), lengths[0], passes)
    assert result.loss.requires_grad and planned == pytest.approx(sum(size for size, _ in kept.values()), rel=0.15)


@pytest.mark.parametrize("block_size, passes", [(1, 1), (1, 3), (2, 1)])
def test_planned_work(workplace, tmp_path, capsys, block_size, passes):
    target = tiny_target(vocab_size=1024, hidden_size=128, intermediate_size=340, num_attention_heads=4)
    target.save_pretrained(tmp_path / "target")
    token_file(samples=4, lengths=(24, 25), prompt=8).save(tmp_path / "tokens.safetensors")
    options = {"block_size": block_size, "unroll_passes": passes, "num_lstm_layers": 0, "max_steps": 1, "plan": True}
    paths = {"data": tmp_path / "tokens.safetensors", "target": tmp_path / "target"}
    assert train.main(arguments(workplace, tmp_path, **paths, **options)) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("work"))
    work, share, hours = re.search(
        r"(\S+) floating-point operations, (\d+)% of .*: (\S+) hours at 100 TFLOP/s", row
    ).groups()
    assert float(hours) == pytest.approx(float(work) / 1e14 / 3600, rel=0.01)

    changes = {"block_size": block_size, "num_lstm_layers": 0, "num_hidden_layers": 1, "intermediate_size": 340}
    drafter = tiny_drafter(target, **changes).train()
    with FlopCounterMode(display=False) as counter:
        batch = draft_batch(target, lengths=(24,) * 4, prompts=(8,) * 4)
        read = counter.get_total_flops()
        head = TargetHead(drafter, target)
        draft_loss(drafter, head, batch, seeded(), WEIGHTS, glancing_ratio=0.4, passes=passes).loss.backward()
    assert float(work) == pytest.approx(counter.get_total_flops(), rel=0.1)
    assert int(share) == pytest.approx(100 * read / counter.get_total_flops(), rel=0.1)


def test_a_plan_reads_stored_features_once(workplace, tmp_path, capsys):
    shares = []
    for options in ({}, {"features_dir": tmp_path / "features"}):
        train.main(arguments(workplace, tmp_path, plan=True, max_steps=100, **options))
        shares.append(int(re.search(r"(\d+)% of them the target's", capsys.readouterr().out)[1]))
    assert shares[1] < shares[0] / 5


# How a step's eight samples are shared: processes, samples of a batch, accumulated batches.
SHARES = [(1, 8, 1), (1, 2, 4), (2, 4, 1), (2, 2, 2)]
LOSSES = {
    "glancing": {"block_size": 2, "glancing_ratio": 0.8},
    "unrolled": {"block_size": 1, "num_lstm_layers": 0, "unroll_passes": 2},
}
# transformers 5.17 loads the optimiser to a device "cpu:0", which torch knows nothing of.
CANNOT_RESUME = transformers.__version__.startswith("5.17.")
# Accelerate shards on accelerators only: with one more argument, the CPUs pass for some.
RUN_ALL = """
import json, sys
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from hf_falcon.commands import train

plain = AcceleratorState.__init__

def pretend(self, *args, **kwargs):
    if not AcceleratorState._shared_state:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plain(self, *args, **kwargs)

if len(sys.argv) > 2:
    AcceleratorState.__init__ = pretend
for command in json.loads(sys.argv[1]):
    assert train.main(command) == 0
    assert (AcceleratorState().distributed_type == DistributedType.FSDP) == (len(sys.argv) > 2)
"""


@pytest.fixture(scope="module")
def shared_runs(workplace, tmp_path_factory):
    """The folder of the runs that learn the same from the same samples, in one and in two processes."""
    folder = tmp_path_factory.mktemp("shared")
    # Of 27 samples, three are left for the fourth step, and three more are held out: fewer than a process takes.
    token_file(samples=30, lengths=(6, 60)).save(folder / "tokens.safetensors")
    options = {"data": folder / "tokens.safetensors", "max_steps": 6, "logging_steps": 1, "feature_noise": 0.5}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1e-2, "eval_samples": 3}
    options |= {"per_device_eval_batch_size": 2}
    commands = {1: [], 2: [], "fsdp": []}
    for name, changes in LOSSES.items():
        for processes, batch, accumulated in SHARES:
            sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated}
            output = folder / f"{name}-{processes}-{batch}-{accumulated}"
            commands[processes].append(arguments(workplace, output, **options, **changes, **sizes))
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    output = folder / "unrolled-fsdp"
    commands["fsdp"].append([*arguments(workplace, output, **options, **LOSSES["unrolled"], **sizes), "--fsdp"])
    # They stop after each step, and go on.
    options |= {"max_minutes": 0, **LOSSES["glancing"], **sizes}
    if not CANNOT_RESUME:
        commands[2] += 6 * [arguments(workplace, folder / "pieces", **options)]
    commands["fsdp"] += 6 * [[*arguments(workplace, folder / "pieces-fsdp", **options), "--fsdp"]]
    for command in commands[1]:
        assert train.main(command) == 0
    script = folder / "run_all.py"
    script.write_text(RUN_ALL)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script]
    for arguments_of_script in ([json.dumps(commands[2])], [json.dumps(commands["fsdp"]), "fsdp"]):
        subprocess.run([*launch, *arguments_of_script], check=True, timeout=600)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [f"{name}-{p}-{b}-{a}" for name in LOSSES for p, b, a in SHARES[1:]] + ["unrolled-fsdp", "pieces", "pieces-fsdp"],
)
def test_a_step_is_the_same_however_it_is_shared(shared_runs, run):
    if run == "pieces" and CANNOT_RESUME:
        pytest.skip("transformers cannot resume several processes on CPUs")
    names = ("unrolled-1-8-1" if run.startswith("unrolled") else "glancing-1-8-1", run)
    histories = []
    for name in names:
        state = json.loads((shared_runs / name / "trainer_state.json").read_text())
        rows = [row for row in state["log_history"] if "loss" in row or "eval_loss" in row]
        # Not the place in the epoch: a short step has fewer batches.
        clocks = ("epoch", "tokens_per_second", "eval_tokens_per_second")
        histories.append([{name: value for name, value in row.items() if name not in clocks} for row in rows])
    assert len(histories[0]) == len(histories[1]) == 6 + 3
    for expected, found in zip(*histories):
        assert found == pytest.approx(expected, abs=1e-4)
    provenance = [json.loads((shared_runs / name / "provenance.json").read_text()) for name in names]
    assert provenance[0]["tokens_seen"] == provenance[1]["tokens_seen"]
    expected, found = (FalconDraftModel.from_pretrained(shared_runs / name).state_dict() for name in names)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-3, msg=name)


@pytest.mark.slow
def test_kill_9(workplace, tmp_path):
    """Real processes and a real SIGKILL, at random moments of a run that saves after every step."""
    options = {"max_steps": 60, "save_steps": 1, "save_total_limit": 3, "logging_steps": 1, "eval_samples": 2}
    options |= {"eval_strategy": "steps", "eval_steps": 5}
    assert train.main(arguments(workplace, tmp_path / "whole", **options)) == 0
    command = [sys.executable, "-m", "hf_falcon", "train", *arguments(workplace, tmp_path / "killed", **options)]
    chance = random.Random(0)
    for kill in range(1, 5):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while get_last_step(tmp_path / "killed") < 8 * kill and process.poll() is None:
                time.sleep(0.005)
            time.sleep(0.1 * chance.random())
            assert process.poll() is None
        finally:
            process.kill()
            process.wait()
    assert get_last_step(tmp_path / "killed") < 60
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    histories = []
    for name in ("whole", "killed"):
        history = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        for row in history:
            for clock in [name for name in row if "per_second" in name or "runtime" in name]:
                del row[clock]
        histories.append([row for row in history if "train_loss" not in row])
    assert len(histories[0]) >= 60 and histories[0] == histories[1]
    whole, killed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


def get_last_step(folder) -> int:
    return max((int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")), default=0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_size": 0}, "`block_size` is 0"),
        ({"architecture": "medusa"}, "`architecture` is 'medusa': choose one of falcon, medusa_like"),
        ({"draft_vocab_size": 65}, "`draft_vocab_size` is 65: set it between 1 and `vocab_size` (64)"),
        ({"max_length": 4}, "`max_length` (4) tokens: raise it"),
        ({"unroll_passes": 2}, "Set `unroll_passes=1` or `num_lstm_layers=0`"),
        ({"data": "nowhere.safetensors"}, "There is no token file nowhere.safetensors"),
        ({"target_dtype": "int8"}, "`dtype` is 'int8'; choose one of"),
        ({"blocksize": 3}, "Unknown argument `--blocksize`: did you mean `--block_size`?"),
        ({"data": "large"}, f"`data` has token {VOCAB}, but the target's `vocab_size` is {VOCAB}: give token files"),
        (
            {"learning_rate": 1e30, "max_grad_norm": 0, "max_steps": 9},
            "The loss is nan at step 1: lower `learning_rate`",
        ),
    ],
)
def test_wrong_arguments(workplace, tmp_path, capsys, monkeypatch, changes, message):
    monkeypatch.delenv("HF_FALCON_DEBUG", raising=False)
    if changes.get("data") == "large":
        changes = {"data": tmp_path / "large.safetensors"}
        TokenFile.from_samples([torch.tensor([1, 2, VOCAB])], [1], [0.0], VOCAB + 1).save(changes["data"])
    assert entry.main(["train", *arguments(workplace, tmp_path, **changes)]) == 1
    # A progress bar may stand around it.
    error = capsys.readouterr().err
    assert "hf-falcon train: error: " in error and message in error and "Traceback" not in error
