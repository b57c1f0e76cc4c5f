# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Attention of a few rows over a long context, for targets whose query heads share keys and values (grouped-query
attention). On a CPU transformers copies keys and values once for each query head, in every layer, which takes longer
than attention itself. The attention here copies nothing.
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

from ..private_names import replace_sdpa, sdpa_attention_forward

# An attribute that marks the masks of a round. It holds their forms for a group of heads, by the size of the group.
_FORMS = "_hf_falcon_grouped"
# Arguments that transformers' function reads and the one here does not; newer versions may have more.
OTHER_ARGUMENTS = {"softcap", *inspect.signature(sdpa_attention_forward or len).parameters} - {
    *("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "kwargs")
}
_lock = threading.Lock()
_users = 0


@contextmanager
def grouped_attention(masks: Iterable[Tensor]) -> Iterator[None]:
    """
    Inside, layers with transformers' own `sdpa` attention run [`grouped_sdpa`] if they get one of these mask objects.
    Layers that get another mask, or none, run as before, in this thread and in others. Masks on another device
    change nothing.

    Args:
        masks (iterable of `torch.Tensor` of shape `(batch, 1, rows, slots)`): additive masks of one forward.
    """
    masks = list(masks)
    if any(mask.device.type != "cpu" for mask in masks):
        yield
        return
    for mask in masks:
        setattr(mask, _FORMS, {})
    _install()
    try:
        yield
    finally:
        _uninstall()


def form_ahead(mask: Tensor, group: int) -> Tensor | None:
    """Makes the form of a marked mask for groups of `group` heads before a layer needs it; `None` for other masks."""
    forms = getattr(mask, _FORMS, None)
    if forms is None or group == 1:
        return None
    return forms.setdefault(group, form_of(mask, group))


def forms_of(mask: Tensor) -> dict[int, Tensor]:
    """The forms of a mask that exist, by the size of the group in ascending order; none for a mask without a mark."""
    forms = getattr(mask, _FORMS, None)
    return dict(sorted(forms.items())) if forms else {}


def set_forms(mask: Tensor, forms: dict[int, Tensor]) -> None:
    """Marks a mask with these forms, if there are any."""
    if forms:
        setattr(mask, _FORMS, forms)


def form_of(mask: Tensor, group: int) -> Tensor:
    """The mask repeated for a group of heads, of shape `(batch, 1, group * rows, slots)`; all layers share it."""
    return mask.repeat(1, 1, group, 1)


def _install() -> None:
    global _users
    with _lock:
        _users += 1
        replace_sdpa(sdpa_attention_forward, grouped_sdpa)


def _uninstall() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            replace_sdpa(grouped_sdpa, sdpa_attention_forward)


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
    As transformers' `sdpa_attention_forward`. If the mask is marked, the query heads of a group become rows of one
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
    beyond = dropout > 0.0 or any(kwargs.get(name) is not None for name in OTHER_ARGUMENTS)
    # Compiled code cannot store a form for other layers: `form_ahead` has made it, or this layer runs as before.
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
