# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Forwards whose rows do not depend on how many rows run together. In bfloat16 and float16 a forward over several tokens
rounds differently from forwards over one token, because kernels add in another order. Two kinds of operations do so:

- attention. Here it adds in float64. The order then changes a sum by some 1e-16 of its size, which the rounding to 16
  bits removes. No mask, no place in the cache and no number of rows matters any more.
- products. oneDNN adds up a single row in blocks of 512 inputs, and several rows in blocks of 1,024; with AMX, it adds
  up to 32 rows up in another order than more; and torch computes very small products itself. Here fewer rows are
  filled up, mostly to two, which takes as long, and more are multiplied in parts. Other devices choose kernels by
  shape, so all parts have one shape there.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from ..core.hook import attention_implementation
from ..core.target_parts import CACHE_NAMES, decoder_of
from ..private_names import replace_sdpa, sdpa_attention_forward
from .compact_weights import own_forward
from .grouped_attention import OTHER_ARGUMENTS, grouped_sdpa
from .packed_layouts import OneDnnLayout, has_bfloat16_products

_DTYPES = (torch.bfloat16, torch.float16)
# The numbers of rows of a product on devices other than a CPU.
_ROWS_ON_DEVICES = range(64, 65)
# A forward of more tokens than these is a prompt's, which plain and assisted decoding run alike.
_MOST_ROWS = 256
# Numbers of rows that are compared; and how many of them that are alike suffice, which is a usual tree.
_SIZES = (*range(1, 9), 10, 12, 14, 16, 17, 20, 24, 28, 31, 32, 33, 36, 40, 48, 56, 64, 96, 128, 192, 256)
_ENOUGH = 16
# Rows that are multiplied for each number, in parts of that number; for a larger one a single part.
_COMPARED_ROWS = 64
# Outputs of the weight that it is done with, at most, and those that differ from each other. More change no order.
_MOST_OUTPUTS, _OUTPUTS = 4096, 512
# Its values, at most, where there are no instructions for its dtype: a product of it takes long.
_MOST_SLOW_VALUES = 1 << 22
# An attribute of masks: their forms in float64 for groups of heads, by the size of the group.
_FORMS = "_hf_falcon_wide"
# Keys and values in float64, by thread: new memory of that size for every layer would take longer than attention.
_wide: dict[tuple[int, str], Tensor] = {}
_lock = threading.Lock()
# The targets inside, and in how many of them each module is. A copy of a target is not among them.
_targets: weakref.WeakKeyDictionary[PreTrainedModel, _Inside] = weakref.WeakKeyDictionary()
_modules: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


class _Inside:
    """Of a target inside: how many contexts it is in, and the modules that it had when it entered the first."""

    def __init__(self) -> None:
        self.contexts = 1
        self.modules: list[nn.Module] = []
        self.hooks: list[Any] = []


class _Here(threading.local):
    """Of this thread: whether a target's forward of few tokens behind others runs, as a round's and a plain step's."""

    is_step = False


_here = _Here()


class RowInvariantForward:
    """
    The forward of a linear layer whose rows do not depend on their number. A prompt's forward is as it is: plain and
    assisted decoding run it alike. A copy of the layer has the layer's own forward.

    Args:
        linear (`torch.nn.Linear`): the layer, packed or not.
        rows (`range`): the numbers of rows of its products; see [`alike_rows`].
    """

    def __init__(self, linear: nn.Linear, rows: range):
        self._linear, self._least, self._most = linear, rows[0], rows[-1]

    def __call__(self, input: Tensor) -> Tensor:
        linear = self._linear
        forward: Callable[[Tensor], Tensor] = partial(type(linear).forward, linear)
        rows = input.numel() // linear.in_features
        # Code is compiled for rounds only.
        is_step = torch.compiler.is_compiling() or _here.is_step
        is_alike = self._least <= rows <= self._most or (rows > self._most and not is_step)
        if rows == 0 or is_alike or input.shape[-1] != linear.in_features:
            return forward(input)
        parts = input.reshape(rows, -1).split(self._most)
        outputs = [forward(self._filled(part))[: part.shape[0]] for part in parts]
        return torch.cat(outputs).view(*input.shape[:-1], -1)

    def _filled(self, rows: Tensor) -> Tensor:
        missing = self._least - rows.shape[0]
        return torch.cat((rows, rows[:1].expand(missing, -1))) if missing > 0 else rows

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has no attributes yet when this is called for it.
        return getattr, (self._linear, "forward")


def _before_forward(target: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    given = (named.get("input_ids"), named.get("inputs_embeds"), *inputs)
    tokens = next((each for each in given if each is not None), None)
    count = tokens.shape[1] if isinstance(tokens, Tensor) and tokens.dim() > 1 else 0
    caches = (named[name] for name in CACHE_NAMES if isinstance(named.get(name), Cache))
    _here.is_step = count == 1 or (count <= _MOST_ROWS and any(cache.get_seq_length() > 0 for cache in caches))


def _after_forward(*arguments: Any) -> None:
    _here.is_step = False


@contextmanager
def row_invariant(target: PreTrainedModel) -> Iterator[None]:
    """
    Inside a `with` statement, plain and assisted decoding of a target in bfloat16 or float16 give the same tokens,
    because no row of a forward depends on how many rows run together:

    ```python
    with hf_falcon.row_invariant(target):
        plain = target.generate(**inputs)
        assisted = target.generate(**inputs, assistant_model=drafter)  # the same tokens
    ```

    Both run with other kernels than outside, so the tokens of plain decoding inside and outside may differ at
    near-ties. All threads that use the target take part. In float32 nothing changes. Rounds that were compiled inside
    run inside, and those that were compiled outside run outside.
    `hf-falcon doctor --exactness` shows what differs, by module.

    On devices other than a CPU every product of a round or a step has 64 rows. That was tried on a simulated device
    only.

    Args:
        target ([`PreTrainedModel`]): a target with "sdpa" attention, on a device with float64.

    Raises:
        `ValueError`: if the target is on a device without float64, or has another attention or one of its own.
    """
    if decoder_of(target).dtype not in _DTYPES:
        yield
        return
    if (reason := unsupported_reason(target)) is not None:
        raise ValueError(reason)
    _enter(target)
    try:
        yield
    finally:
        _leave(target)


def unsupported_reason(target: Any) -> str | None:
    """Why [`row_invariant`] does not support a target, and the remedy; `None` if it does."""
    name = type(target).__name__
    if not isinstance(target, PreTrainedModel):
        return f"{name} is no transformers model: give the model whose `generate` is called."
    if any(parameter.device.type in ("meta", "mps") for parameter in target.parameters()):
        return f"{name} is on {target.device.type!r}, which has no float64: `row_invariant` needs it, so move it."
    attention = attention_implementation(target.config.get_text_config(decoder=True))
    if attention != "sdpa":
        return (
            f"{name} has {attention!r} attention, which `row_invariant` does not know: load it with "
            '`attn_implementation="sdpa"`, if it supports that.'
        )
    for module in target.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and "scaled_dot_product_attention" in code.co_names:
            return (
                f"{name}'s {type(module).__name__} calls torch's attention itself, which `row_invariant` cannot "
                "replace: use the target outside of it."
            )
    return None


def is_row_invariant(target: PreTrainedModel) -> bool:
    """Whether a target is inside [`row_invariant`]."""
    return target in _targets


@cache
def alike_rows(in_features: int, out_features: int, dtype: torch.dtype) -> range:
    """
    Numbers of rows with which the product of each row has the same bits, with the weight as it is as well as packed:
    the smallest numbers that suffice for usual trees, or the longest range there is. They are measured, on sums that
    nearly cancel, where another order shows in most values.
    """
    rows, weight = _rows_and_weight(in_features, out_features, dtype)
    ways: list[Callable[[Tensor], Tensor]] = [lambda part: F.linear(part, weight)]
    if dtype == torch.bfloat16 and has_bfloat16_products():
        packed = OneDnnLayout(weight)
        ways.append(lambda part: packed.product(part, None))
    ranges: list[range] = []
    before: list[Tensor] = []
    for size in _SIZES:
        # A few rows alone would show too little.
        parts = rows[: max(size, _COMPARED_ROWS // size * size)].split(size)
        products = [torch.cat([way(part) for part in parts]) for way in ways]
        if ranges and all(map(_are_alike, products, before)):
            ranges[-1] = range(ranges[-1].start, size + 1)
        else:
            ranges.append(range(size, size + 1))
        before = products
    return next((each for each in ranges if len(each) >= _ENOUGH), max(ranges, key=len))


def _rows_and_weight(in_features: int, out_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows, and a weight of that many outputs, whose products nearly cancel."""
    generator = torch.Generator().manual_seed(0)
    half = in_features // 2
    order = torch.randperm(half, generator=generator)
    parts = []
    for sign, count in ((-1, _SIZES[-1]), (1, min(out_features, _OUTPUTS))):
        part = torch.randn(count, in_features, generator=generator)
        part[:, half : 2 * half] = sign * part[:, order]
        parts.append(part.to(dtype))
    rows, weight = parts
    # The number of outputs decides how oneDNN adds up as well.
    outputs = min(out_features, _MOST_OUTPUTS)
    if dtype != torch.bfloat16 or not has_bfloat16_products():
        outputs = min(outputs, max(len(weight), _MOST_SLOW_VALUES // in_features))
    return rows, weight.repeat(-(-outputs // len(weight)), 1)[:outputs]


def _are_alike(product: Tensor, other: Tensor) -> bool:
    both = min(len(product), len(other))
    return torch.equal(product[:both], other[:both])


def row_invariant_sdpa(
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
    As transformers' `sdpa_attention_forward`. For few tokens of a target inside [`row_invariant`] it computes in
    float64.

    Args:
        query (`torch.Tensor` of shape `(batch, heads, rows, head_dim)`): queries.
        key, value (`torch.Tensor` of shape `(batch, kv_heads, slots, head_dim)`): keys and values.
        attention_mask (`torch.Tensor` of shape `(batch, 1, rows, slots)`, *optional*): boolean or additive.

    Returns:
        `torch.Tensor` of shape `(batch, rows, heads, head_dim)`, and `None` in the place of attention weights.
    """
    batch, heads, rows, _ = query.shape
    # A prompt without a cache has as many rows as slots. It sees no mask, and needs none.
    is_step = rows == 1 or (rows <= _MOST_ROWS and rows < key.shape[2] and attention_mask is not None)
    beyond = dropout > 0.0 or any(kwargs.get(name) is not None for name in OTHER_ARGUMENTS)
    shares_mask = attention_mask is None or attention_mask.shape[1] == 1
    # Code is compiled for one target, inside or outside.
    is_inside = torch.compiler.is_compiling() or module in _modules
    if not is_step or beyond or not shares_mask or not is_inside:
        return grouped_sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    group = heads // key.shape[1]
    queries = query.double().reshape(batch, -1, group * rows, query.shape[-1])
    mask = None if attention_mask is None else _form(attention_mask, group)
    keys, values = _in_float64(key, "keys"), _in_float64(value, "values")
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
    mixed = mixed.reshape(batch, heads, rows, -1).transpose(1, 2)
    return mixed.to(query.dtype, memory_format=torch.contiguous_format), None


def _in_float64(states: Tensor, name: str) -> Tensor:
    """Keys or values in float64, valid until the thread asks for these of another layer."""
    if states.device.type != "cpu" or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return states.double()
    key, size = (threading.get_ident(), name), states.numel()
    buffer = _wide.get(key)
    if buffer is None or buffer.numel() < size:
        lives = {thread.ident for thread in threading.enumerate()}
        for ended in [each for each in list(_wide) if each[0] not in lives]:
            _wide.pop(ended, None)
        # What is made in inference mode cannot be written outside of it.
        with torch.inference_mode(False):
            # Room for the tokens to come.
            _wide[key] = buffer = torch.empty(2 * size, dtype=torch.float64, device="cpu")
    return buffer[:size].view(states.shape).copy_(states)


def _form(mask: Tensor, group: int) -> Tensor:
    """The mask repeated for a group of heads, additive, in float64; all layers share it."""
    if torch.compiler.is_compiling():
        # Compiled code cannot store it. Of equal operations it computes one.
        return _additive(mask).repeat(1, 1, group, 1)
    forms: dict[int, Tensor] = getattr(mask, _FORMS, {})
    if group not in forms:
        forms[group] = _additive(mask).repeat(1, 1, group, 1)
        setattr(mask, _FORMS, forms)
    return forms[group]


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.double()
    return torch.zeros_like(mask, dtype=torch.float64).masked_fill_(~mask, torch.finfo(torch.float64).min)


def _enter(target: PreTrainedModel) -> None:
    with _lock:
        stock = sdpa_attention_forward, grouped_sdpa
        if not _targets and not any(replace_sdpa(each, row_invariant_sdpa) for each in stock):
            raise ValueError('Another library has replaced transformers\' "sdpa" attention: `row_invariant` needs it.')
        if target in _targets:
            _targets[target].contexts += 1
            return
        _targets[target] = inside = _Inside()
        try:
            inside.hooks.append(target.register_forward_pre_hook(_before_forward, with_kwargs=True))
            inside.hooks.append(target.register_forward_hook(_after_forward, always_call=True))
            for module in target.modules():
                _modules[module] = _modules.get(module, 0) + 1
                inside.modules.append(module)
                _give_forward(module)
        except BaseException:
            _restore(target)
            raise


def _give_forward(module: nn.Module) -> None:
    # Another target may share the module.
    if not isinstance(module, nn.Linear) or own_forward(module) is not None or not module.weight.numel():
        return
    rows = _ROWS_ON_DEVICES
    if module.weight.device.type == "cpu":
        rows = alike_rows(module.in_features, module.out_features, module.weight.dtype)
    if rows != range(1, _SIZES[-1] + 1):
        vars(module)["forward"] = RowInvariantForward(module, rows)


def _leave(target: PreTrainedModel) -> None:
    with _lock:
        _targets[target].contexts -= 1
        if not _targets[target].contexts:
            _restore(target)


def _restore(target: PreTrainedModel) -> None:
    """The lock is held."""
    inside = _targets.pop(target)
    for hook in inside.hooks:
        hook.remove()
    for module in inside.modules:
        _modules[module] -= 1
        if not _modules[module]:
            del _modules[module]
            if isinstance(vars(module).get("forward"), RowInvariantForward):
                del vars(module)["forward"]
    if not _targets:
        _wide.clear()
        replace_sdpa(row_invariant_sdpa, sdpa_attention_forward)
