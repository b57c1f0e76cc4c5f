# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The memory that a drafter takes."""

import pytest
from eagle3_models import REFERENCES, new_eagle3, reference_target
from tiny_models import new_drafter, tiny_target

from hf_falcon import AutoDrafter
from hf_falcon.bench.memory import drafter_bytes, weight_bytes


@pytest.mark.parametrize("draft_vocab_size", [None, 30])
def test_drafter_memory(draft_vocab_size):
    target = tiny_target()
    drafter = new_drafter(target, num_lstm_layers=0, block_size=1, draft_vocab_size=draft_vocab_size)
    drafter.generation_config.draft_tree = "static"
    found = drafter_bytes(drafter, target, 300)
    weights = sum(parameter.nbytes for parameter in drafter.parameters())
    # Two layers of keys and values, in buffers with 128 spare slots.
    cache = 2 * 2 * (299 + 128) * 16 * 4
    head = 0 if draft_vocab_size is None else 30 * 32 * 4
    # Means and deviations, ids, the tree, and the newest features.
    assert weights + cache + head < found < weights + cache + head + 6000
    assert drafter_bytes(drafter, target, 599) - found == 2 * 2 * 299 * 16 * 4
    assert weight_bytes(target) == sum(p.nbytes for p in target.parameters())


@pytest.mark.parametrize("has_embedding", [False, True])
def test_memory_of_an_eagle3_drafter(has_embedding):
    """It has a head of its own, and perhaps an embedding; it keeps nothing of the target."""
    target = tiny_target()
    drafter = new_eagle3(target, has_embedding=has_embedding, draft_vocab_size=40)
    drafter.generation_config.draft_tree = "static"
    found = drafter_bytes(drafter, target, 300)
    cache = 2 * (299 + 128) * 16 * 4
    weights = weight_bytes(drafter)
    # The tables of the vocabulary, the tree, and the newest features.
    assert weights + cache < found < weights + cache + 6000
    assert drafter_bytes(drafter, target, 599) - found == 2 * 299 * 16 * 4


def test_memory_of_a_drafter_whose_file_names_no_layers():
    drafter, target = AutoDrafter.from_pretrained(REFERENCES / "eagle3_original"), reference_target("eagle3_original")
    assert drafter.config.eagle_aux_hidden_state_layer_ids is None
    assert drafter_bytes(drafter, target, 20) > weight_bytes(drafter)
