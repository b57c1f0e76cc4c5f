# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The network's masks: what a position sees, and that padding changes nothing."""

import pytest
import torch
from tiny_models import HIDDEN, new_drafter, new_target, random_tokens
from utilities import close

from hf_falcon.core.draft_session import TargetHead
from hf_falcon.core.modeling_falcon_draft import block_anchors, relaxed_causal_mask
from hf_falcon.training.features import target_features


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_relaxed_causal_mask(block_size):
    torch.manual_seed(0)
    length = 8
    blocks = (torch.arange(length)[None] + torch.tensor([[0], [1], [2]])) // block_size
    valid = torch.arange(length)[None] < torch.tensor([[8], [6], [1]])
    mask, anchors = relaxed_causal_mask(blocks, valid), block_anchors(blocks, block_size)
    assert mask.shape == (3, 1, length, length)
    for b in range(3):
        for row in range(length):
            same = [c for c in range(length) if blocks[b, c] == blocks[b, row]]
            assert anchors[b, row] == same[-1] * block_size + same[-1] - row
            for column in range(length):
                sees = column <= row or column in same
                assert mask[b, 0, row, column] == (row == column or (sees and bool(valid[b, column])))


def test_padding_changes_nothing(target):
    drafter, tokens = new_drafter(target, block_size=3), random_tokens(1, 13)
    features = target_features(target, tokens, torch.ones_like(tokens, dtype=torch.bool))[:, :12]
    blocks = (torch.arange(12)[None] + 1) // 3
    embeds = TargetHead(drafter, target).embed(tokens[:, 1:])
    valid = torch.arange(12)[None] < 8  # ends with a block
    with torch.no_grad():
        short = drafter(features[:, :8], embeds[:, :8], blocks[:, :8])
        padded = drafter(features, embeds, blocks, attention_mask=valid)
    close(padded[:, :8], short)


def test_positions_stay_in_float32():
    """Whatever dtype the model or torch has, and whoever calls first: bfloat16 cannot hold large positions."""
    drafter = new_drafter(new_target("llama"), block_size=1, num_lstm_layers=0).bfloat16()
    features = torch.randn(1, 4, HIDDEN, dtype=torch.bfloat16)
    blocks = torch.arange(4)[None]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode():
            drafter(features, features, blocks)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [each.dtype for each in drafter._frequencies.values()] == [torch.float32]
    # What a call in inference mode has made serves training, too.
    drafter(features, features, blocks).sum().backward()
    assert drafter.layers[0].self_attn.q_proj.weight.grad is not None
