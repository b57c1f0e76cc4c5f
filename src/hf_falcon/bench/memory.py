# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The memory that a drafter adds to its target, counted from the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.candidate_generator import FalconCandidateGenerator
from ..core.interfaces import Drafter


@torch.no_grad()
def drafter_bytes(drafter: Drafter, target: PreTrainedModel, context: int) -> int:
    """
    Bytes that the drafter occupies between two rounds: its weights, its copy of the target's LM head where it has no
    head of its own, its cache and its tree. Tensors that exist only inside a pass, such as masks, do not count.

    Args:
        drafter, target: the drafter and its target.
        context (`int`): tokens of the context, 3 or more.
    """
    if drafter.max_draft_passes == 0:
        # What is looked up is in no tensor.
        return 0
    generator = FalconCandidateGenerator(drafter, target)
    width = target.get_output_embeddings().weight.shape[-1] * (1 + len(drafter.config.feature_layers or ()))
    # The values of the features do not matter, only that rounds at this length have taken place.
    features = torch.zeros(1, context, width, dtype=target.dtype, device=target.device)
    token_ids = torch.zeros(1, context, dtype=torch.long, device=target.device)
    # An upper bound: all tokens but the first count as generated, since only the end of a long prompt is read.
    for new in (slice(0, 1), slice(1, -1), slice(-1, None)):
        generator.commit(features[:, new], token_ids[:, new])
    tree = generator.propose(token_ids, generator.max_depth)
    return _storage_bytes((generator, tree), besides=(target, features, token_ids))


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of a model's weights; tied weights count once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def _storage_bytes(held: Any, besides: Any) -> int:
    """Bytes of the storages of all tensors in `held`. Several views can share one storage."""
    known = {tensor.untyped_storage().data_ptr() for tensor in _tensors(besides, set())}
    storages = [tensor.untyped_storage() for tensor in _tensors(held, set())]
    found = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for pointer, size in found.items() if pointer not in known)


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors in an object, at any depth."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each, seen)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _tensors(vars(value), seen)
