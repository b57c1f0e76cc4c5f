# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Samples and batches: what is drawn, in what order, and what fills up the last batch."""

import pytest
import torch
from training_runs import seeded, token_file, trainer

from hf_falcon.commands.train import frequent_tokens
from hf_falcon.training.token_file import TokenFile
from hf_falcon.training.trainer import (
    FILLER,
    DraftSamples,
    LengthGroupedSampler,
    collate,
)


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
