# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Attention of a round's few rows over a long context, where several query heads share keys and values: on a CPU
transformers copies these once for every query head, in every layer, which takes longer than attention itself.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_SDPA = "sdpa"
# An attribute of masks that are ours: their forms for a group of heads, by the size of the group.
_FORMS = "_hf_falcon_grouped"
# What transformers' function heeds and ours does not; newer versions may have more.
_OTHER_ARGUMENTS = {"softcap", *inspect.signature(sdpa_attention_forward).parameters} - {
    *("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "kwargs")
}
_lock = threading.Lock()
_users = 0


@contextmanager
def grouped_attention(masks: Iterable[Tensor]) -> Iterator[None]:
    """
    Inside, layers whose attention is transformers' own `sdpa` and that get one of these very masks attend by
    [`grouped_sdpa`]. Layers that get another mask, or none, go on as ever, in this thread and in others.

    Args:
        masks (iterable of `torch.Tensor` of shape `(batch, 1, rows, slots)`): additive masks of one forward.
    """
    for mask in masks:
        if mask.device.type == "cpu":
            setattr(mask, _FORMS, {})
    _install()
    try:
        yield
    finally:
        _uninstall()


def form_ahead(mask: Tensor, group: int) -> Tensor | None:
    """The form of a mask for groups of `group` heads, made before a layer asks for it; `None` for other masks."""
    forms = getattr(mask, _FORMS, None)
    if forms is None or group == 1:
        return None
    return forms.setdefault(group, form_of(mask, group))


def form_of(mask: Tensor, group: int) -> Tensor:
    """The form that all layers of a kind share, of shape `(batch, 1, group * rows, slots)`."""
    return mask.repeat(1, 1, group, 1)


def _install() -> None:
    global _users
    with _lock:
        _users += 1
        if ALL_ATTENTION_FUNCTIONS[_SDPA] is sdpa_attention_forward:
            # Replaced and never removed: other threads look it up at the same time.
            AttentionInterface.register(_SDPA, grouped_sdpa)


def _uninstall() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0 and ALL_ATTENTION_FUNCTIONS[_SDPA] is grouped_sdpa:
            AttentionInterface.register(_SDPA, sdpa_attention_forward)


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """
    transformers' `sdpa_attention_forward`, but where the mask is marked the query heads of a group become rows of one
    head, and no key or value is copied.

    Args:
        query (`torch.Tensor` of shape `(batch, heads, rows, head_dim)`): queries.
        key, value (`torch.Tensor` of shape `(batch, kv_heads, slots, head_dim)`): keys and values.

    Returns:
        `torch.Tensor` of shape `(batch, rows, heads, head_dim)`, and `None` in the place of attention weights.
    """
    forms: dict[int, Tensor] | None = getattr(attention_mask, _FORMS, None)
    batch, heads, rows, _ = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    beyond = dropout > 0.0 or any(kwargs.get(name) is not None for name in _OTHER_ARGUMENTS)
    # While a forward is compiled nothing can be put aside for other layers: what they need is there before.
    is_missing = forms is not None and group not in forms and torch.compiler.is_compiling()
    if attention_mask is None or forms is None or is_missing or group == 1 or beyond:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if group not in forms:
        forms[group] = form_of(attention_mask, group)
    queries = query.reshape(batch, kv_heads, group * rows, -1)
    mixed = F.scaled_dot_product_attention(queries, key, value, attn_mask=forms[group], scale=scaling)
    return mixed.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous(), None
