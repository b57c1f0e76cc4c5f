# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The training loss against plain re-implementations."""

import pytest
import torch
import torch.nn.functional as F
from quick import one_in
from tiny_models import HIDDEN, new_drafter
from training_runs import WEIGHTS, draft_batch, each_seeded, seeded

from hf_falcon.training import csgd
from hf_falcon.training.csgd import (
    DistillationWeights,
    DraftBatch,
    TrainingHeads,
    _unrolled_mask,
    draft_loss,
    glance,
    random_blocks,
    shift_left,
)
from hf_falcon.training.distillation import distillation_loss


@pytest.mark.parametrize("steps", [0, 1, 3, 5, 9])
def test_shift_left(steps):
    values = torch.arange(1, 21).reshape(2, 5, 2)
    for row, shifted in zip(values.tolist(), shift_left(values, steps).tolist()):
        assert shifted == row[steps:] + [[0, 0]] * min(steps, len(row))


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


# Block size, LSTM layers, passes.
SHAPES = [(1, 0, 1), (2, 0, 1), (3, 0, 1), (1, 2, 1), (2, 1, 1), (3, 2, 1), (1, 0, 2), (2, 0, 2), (2, 0, 3), (3, 0, 2)]
OPTIONS = [{}, {"conditioning_size": 24}, {"feature_layers": [0, 1]}]


@pytest.mark.parametrize("shape, glancing, option", one_in(3, SHAPES, [False, True], OPTIONS))
def test_draft_loss(target, monkeypatch, shape, glancing, option):
    block_size, lstm_layers, passes = shape
    drafter = new_drafter(target, block_size=block_size, num_lstm_layers=lstm_layers, **option)
    batch = draft_batch(target, layers=drafter.config.feature_layers)
    heads, offsets = TrainingHeads.of(drafter, target), [0, 1 % block_size, block_size - 1]
    shifted = torch.arange(batch.token_ids.shape[1])[None] + torch.tensor(offsets)[:, None]
    monkeypatch.setattr(csgd, "random_blocks", lambda *_: (shifted // block_size, shifted % block_size))
    glanced, distances = torch.zeros_like(batch.valid), []

    def some(judged, distance, ratio, generator):
        distances.append(distance.tolist())
        glanced[:] = judged & (torch.rand(judged.shape, generator=seeded()) < 0.4)
        return glanced

    monkeypatch.setattr(csgd, "glance", some)
    found = draft_loss(
        drafter, heads, batch, seeded(), WEIGHTS, noise=0.0, glancing_ratio=0.4 if glancing else 0.0, passes=passes
    )
    assert bool(glanced.any()) == (glancing and block_size > 1)
    loss, regression, divergence, hits, counts, wrong = plain_loss(
        drafter, heads.target, batch, offsets, glanced, passes
    )
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
    drafter = new_drafter(target, block_size=block_size)
    heads, batch = TrainingHeads.of(drafter, target), draft_batch(target, lengths=[16], prompts=[9])
    read = []

    def distil(predicted, labels, *others):
        read.append(labels)
        return distillation_loss(predicted, labels, *others)

    monkeypatch.setattr(csgd, "distillation_loss", distil)
    draft_loss(drafter, heads, batch, seeded(), WEIGHTS, noise=0.0)
    # Tokens 9 to 15 are the response; the feature before each of them is its label.
    assert torch.equal(read[0], batch.features[0, 8:15])


# The second is shorter than a block, also in the pass that reads what the first has drafted.
@pytest.mark.parametrize("lengths, prompts, passes", [([4, 3], [1, 2], 1), ([2], [1], 2)])
def test_a_batch_without_anything_to_learn(target, lengths, prompts, passes):
    drafter = new_drafter(target, block_size=3, num_lstm_layers=0)
    heads, batch = TrainingHeads.of(drafter, target), draft_batch(target, lengths, prompts)
    found = draft_loss(drafter, heads, batch, seeded(), WEIGHTS, glancing_ratio=0.4, passes=passes)
    found.loss.backward()
    assert found.loss.item() == 0 and not found.counts.any()


@pytest.mark.parametrize(
    "block_size, lstm_layers, passes, option",
    [
        pytest.param(1, 0, 1, {}, marks=pytest.mark.slow),
        pytest.param(2, 0, 1, {}, marks=pytest.mark.slow),
        pytest.param(1, 2, 1, {}, marks=pytest.mark.slow),
        (2, 2, 1, {}),
        pytest.param(2, 0, 2, {}, marks=pytest.mark.slow),
        (2, 0, 1, {"conditioning_size": 24}),
        (1, 0, 2, {"feature_layers": [0, 1]}),
    ],
)
def test_a_drafter_can_learn(target, block_size, lstm_layers, passes, option):
    drafter = new_drafter(target, scale=0, block_size=block_size, num_lstm_layers=lstm_layers, **option).train()
    heads, batch = TrainingHeads.of(drafter, target), draft_batch(target, layers=drafter.config.feature_layers)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3, weight_decay=0.0)
    losses = []
    for step in range(150):
        result = draft_loss(drafter, heads, batch, seeded(step), DistillationWeights(), noise=0.02, passes=passes)
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
        drafter = new_drafter(target, block_size=block_size, num_lstm_layers=0).train()
        if checkpointed:
            drafter.gradient_checkpointing_enable()
        runs = []
        for layer in drafter.layers:
            layer.input_layernorm.register_forward_hook(lambda module, *_, runs=runs: runs.append(module))
        result = draft_loss(
            drafter, TrainingHeads.of(drafter, target), draft_batch(target), seeded(), WEIGHTS, passes=passes
        )
        result.loss.backward()
        found.append([result.loss.detach(), *(parameter.grad for parameter in drafter.parameters())])
        assert len(runs) == passes * len(drafter.layers) * (1 + checkpointed)
    torch.testing.assert_close(*found)


def test_what_learns_without_glancing_learns_with_it_in_mixed_precision(target, monkeypatch):
    cleared, clear = [], torch.clear_autocast_cache

    def learning(ratio):
        drafter = new_drafter(target, block_size=2, num_lstm_layers=0).train()
        heads = TrainingHeads.of(drafter, target, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            # Autocast clears it at its end as well.
            with monkeypatch.context() as patch:
                patch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(ratio) or clear())
                found = draft_loss(drafter, heads, draft_batch(target), seeded(), WEIGHTS, glancing_ratio=ratio)
        found.loss.backward()
        return {name for name, each in drafter.named_parameters() if each.grad is not None and each.grad.any()}

    assert learning(0.0) and learning(0.0) <= learning(0.4)
    # Some versions of torch would go on with the casts of the glance.
    assert cleared == [0.4]


def test_noise_is_drawn_from_the_generator(target):
    drafter = new_drafter(target, num_lstm_layers=0)
    heads, batch = TrainingHeads.of(drafter, target), draft_batch(target)

    def loss(seed, noise):
        torch.manual_seed(torch.seed() % 1000)  # chance elsewhere plays no part
        return draft_loss(drafter, heads, batch, seeded(seed), WEIGHTS, noise, glancing_ratio=0.4).loss.item()

    assert loss(0, 0.1) == loss(0, 0.1) != loss(0, 0.0)
    assert loss(1, 0.1) != loss(0, 0.1)


def test_chance_is_a_sample_s_own(target):
    """What is drawn for a sample depends on neither the others of its batch nor the padding."""
    drafter = new_drafter(target, block_size=3, num_lstm_layers=0)
    heads, batch = TrainingHeads.of(drafter, target), draft_batch(target)
    options = {"noise": 0.5, "glancing_ratio": 0.8}
    together = draft_loss(drafter, heads, batch, seeded(), WEIGHTS, **options)
    counts, loss = torch.zeros_like(together.counts), 0.0
    for rows, length in (([0], 24), ([2, 1], 21)):
        part = DraftBatch(*(getattr(batch, field)[rows] for field in vars(batch)))
        for field in ("features", "token_ids", "valid", "response"):
            setattr(part, field, getattr(part, field)[:, :length])
        found = draft_loss(drafter, heads, part, seeded(), WEIGHTS, **options)
        counts += found.counts
        loss += found.loss.item() * int(found.counts.sum())
    assert torch.equal(counts, together.counts)
    assert loss / int(counts.sum()) == pytest.approx(together.loss.item(), rel=1e-5)


def test_unrolling_an_lstm_is_refused(target):
    drafter = new_drafter(target, num_lstm_layers=1)
    heads, batch = TrainingHeads.of(drafter, target), draft_batch(target)
    for passes, message in ((2, "is 2 and `num_lstm_layers` 1.*Set `unroll_passes=1`"), (0, "is 0: .* at least 1")):
        with pytest.raises(ValueError, match=f"`unroll_passes` {message}"):
            draft_loss(drafter, heads, batch, seeded(), WEIGHTS, passes=passes)
