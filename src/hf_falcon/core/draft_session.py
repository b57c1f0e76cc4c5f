# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
A drafter at work for a target: the head that it borrows from the target, and its session over one sequence, with its
cache and the state of each branch.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from .caches import DraftCache
from .configuration_falcon_draft import logit_processing
from .interfaces import DraftedBlocks, DrafterAcceleration
from .modeling_falcon_draft import LSTMState, additive_mask, block_anchors, hide_end
from .target_parts import is_quantised, some_values
from .tree import to_device

# Rows of one drafter forward. Masks are rows * context, so a long pause of drafting costs no quadratic memory.
_PREFILL_ROWS = 512
# Rows of a commit after a round, at most, or few more.
ROWS_OF_A_ROUND = 16
# Rows of the identity that a quantised head multiplies at once.
_IDENTITY_ROWS = 256
# Of each target and drafter, the LM head's rows for the draft vocabulary, and marks of what they were copied from.
_heads: weakref.WeakKeyDictionary[
    PreTrainedModel, weakref.WeakKeyDictionary[Any, tuple[nn.Linear, list[TensorMark]]]
] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
# Weight and bias of each quantised head as ordinary tensors.
_dequantised: weakref.WeakKeyDictionary[nn.Module, tuple[Tensor, Tensor | None]] = weakref.WeakKeyDictionary()


class TensorMark:
    """
    Detects whether a tensor was replaced or changed. It refers weakly to the tensor.

    Args:
        tensor (`torch.Tensor`, *optional*): the tensor, if there is one.
    """

    def __init__(self, tensor: Tensor | None):
        self._tensor = None if tensor is None else weakref.ref(tensor)
        self._state = _state_of(tensor)

    def is_of(self, tensor: Tensor | None) -> bool:
        """Whether `tensor` is the marked one and unchanged; `False` too where a change cannot be detected."""
        if tensor is None or self._tensor is None:
            return tensor is self._tensor
        return self._tensor() is tensor and self._state is not None and _state_of(tensor) == self._state


def _state_of(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """What differs after a change; `None` where nothing shows it."""
    if tensor is None or tensor.is_meta or tensor.is_inference():
        return None
    if hasattr(type(tensor), "some_values"):
        # A packed weight takes no new values.
        return ()
    if type(tensor) not in (Tensor, nn.Parameter):
        return None
    # What is written by way of `tensor.data` has the same version. On a device, the host would wait for the values.
    values = some_values(tensor).tolist() if tensor.device.type == "cpu" else []
    return tensor.data_ptr(), tensor._version, tensor.dtype, tensor.device, tensor.shape, repr(values)


class TargetHead:
    """
    Embedding and LM head of a target, for the drafter's vocabulary, with the target's own post-processing.

    One object serves one `generate` call or one training run. The rows of a draft vocabulary are copied once, and kept
    as long as both models live and the target's head is unchanged. The drafter itself stores no part of a target.

    Args:
        drafter ([`FalconDraftModel`]): the drafter.
        target ([`PreTrainedModel`]): the target, a causal language model.
        dtype (`torch.dtype`, *optional*, defaults to the drafter's): dtype of the head.

    Raises:
        `ValueError`: if the drafter was made for a target of another kind or shape.
    """

    def __init__(self, drafter: Any, target: PreTrainedModel, dtype: torch.dtype | None = None):
        drafter.check_target(target)
        config = drafter.config
        # Weak, because a backend keeps heads for a drafter. `None` for the head of other tokens.
        self._drafter: Callable[[], Any] | None = weakref.ref(drafter)
        self._target: Callable[[], Any] = weakref.ref(target)
        self._embedding = target.get_input_embeddings()
        # The drafter may still move: its device is read when it is needed.
        self._example = drafter.norm.weight
        self._dtype = dtype or self._example.dtype
        self._known_ids = None if config.draft_vocab_size is None else drafter.draft_vocab_ids
        self.draft_vocab_size: int = config.draft_vocab_size or _sizes_of(target.get_output_embeddings())[0]
        scale, softcap = logit_processing(target.config)
        # What a Falcon drafter was trained with is in its own configuration.
        self._scale: float = getattr(config, "logit_scale", scale)
        self._softcap: float | None = getattr(config, "logit_softcapping", softcap)

    @cached_property
    def linear(self) -> nn.Linear:
        """The LM head as a linear layer. It is made at its first use, because not all calls draft."""
        drafter = None if self._drafter is None else self._drafter()
        if drafter is None or self._known_ids is None:
            return self._make_linear()
        # Threads may share both models.
        with _lock:
            heads = _heads.setdefault(self._target(), weakref.WeakKeyDictionary())
            output: Any = self._target().get_output_embeddings()
            # What the rows are copied from, and the buffers with their ids.
            of_head = (
                head_parameters(self._target())
                if is_quantised(output)
                else (output.weight, getattr(output, "bias", None))
            )
            sources = [*of_head, *drafter._buffers.values()]
            known, marks = heads.get(drafter, (None, []))
            like = (self._example.device, self._dtype)
            is_current = len(marks) == len(sources) and all(mark.is_of(each) for mark, each in zip(marks, sources))
            if known is None or not is_current or (known.weight.device, known.weight.dtype) != like:
                known = self._make_linear()
                heads[drafter] = known, [TensorMark(each) for each in sources]
            return known

    # Training may use what a call in inference mode has made.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _make_linear(self) -> nn.Linear:
        weight, bias = head_parameters(self._target())
        if self._known_ids is not None:
            ids = self._known_ids.to(weight.device)
            weight, bias = weight[ids], None if bias is None else bias[ids]
        size, hidden_size = weight.shape
        linear = nn.Linear(hidden_size, size, bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.detach().to(self._example.device, self._dtype), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().to(self._example.device, self._dtype), requires_grad=False)
        return linear

    @cached_property
    def vocab_ids(self) -> Tensor | None:
        """Target ids of the draft vocabulary, of shape `(draft_vocab_size,)`; `None` for the whole vocabulary."""
        return None if self._known_ids is None else self._known_ids.to(self.linear.weight.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """
        The target's embeddings of `token_ids` of shape `(...)`, of shape `(..., hidden_size)` and on the drafter's
        device.
        """
        return embed(self._embedding, token_ids, self._example.device)

    def logits(self, features: Tensor) -> Tensor:
        """
        The logits that the target's own forward computes from `features`, for the draft vocabulary.

        Args:
            features (`torch.Tensor` of shape `(..., hidden_size)`): true or predicted features.

        Returns:
            `torch.Tensor` of shape `(..., draft_vocab_size or vocab_size)`.
        """
        # One matrix: for a batch of strided rows the product would copy the weight.
        flat = features.reshape(-1, features.shape[-1]).to(self.linear.weight.dtype)
        logits = self.linear(flat).view(*features.shape[:-1], -1)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Converts ids of the draft vocabulary to ids of the target's vocabulary."""
        return draft_ids if self.vocab_ids is None else self.vocab_ids[draft_ids]

    def for_tokens(self, token_ids: Tensor) -> TargetHead | None:
        """See [`DraftHead.for_tokens`]. Packed and offloaded weights would be unpacked or loaded whole each time."""
        weight = getattr(self._target().get_output_embeddings(), "weight", None)
        if type(weight) is not nn.Parameter or weight.is_meta or int(token_ids.max()) >= weight.shape[0]:
            return None
        other = copy.copy(self)
        other._drafter = None
        for name in ("linear", "vocab_ids"):
            vars(other).pop(name, None)
        other._known_ids, other.draft_vocab_size = to_device(token_ids, weight.device), token_ids.shape[0]
        return other


def embed(embedding: Any, token_ids: Tensor, device: torch.device) -> Tensor:
    """Embeddings of `token_ids` on `device`, without a gradient; the embedding layer may be on another device."""
    weight = embedding.weight
    with torch.no_grad():
        # Offloaded weights have no device, and accelerate's hook moves tokens. PEFT's are for the target's own rows.
        embeds = embedding(token_ids) if weight.is_meta else embedding.forward(token_ids.to(weight.device))
    return embeds.to(device)


def head_parameters(target: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """
    Weight and bias of a target's LM head as ordinary tensors, also if it is packed, quantised, or offloaded by
    accelerate.
    """
    output: Any = target.get_output_embeddings()
    if is_quantised(output):
        return _dequantise(output, target.dtype, target.device)
    weight, bias = output.weight, getattr(output, "bias", None)
    hook = getattr(output, "_hf_hook", None)
    if weight.is_meta and hook is not None:
        hook.pre_forward(output)
        weight, bias = output.weight.detach(), getattr(output, "bias", None)
        hook.post_forward(output, None)
    return weight.to_dense(), bias


@torch.inference_mode(False)
@torch.no_grad()
def _dequantise(head: Any, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """
    Weight and bias of a quantised LM head, whatever its format: its products with the identity give them. They are
    computed once. Its inputs have this dtype and are on this device.
    """
    if head not in _dequantised:
        identity = torch.eye(head.in_features, dtype=dtype, device=device)
        bias = (head.forward(identity[None, :1]) + head.forward(-identity[None, :1]))[0, 0] / 2
        columns = [head.forward(rows[None])[0] - bias for rows in identity.split(_IDENTITY_ROWS)]
        _dequantised[head] = torch.cat(columns).T.contiguous(), bias if bias.any() else None
    return _dequantised[head]


def _sizes_of(head: Any) -> tuple[int, int]:
    """Outputs and inputs of an LM head. The weight of a quantised one may have another shape."""
    return (head.out_features, head.in_features) if is_quantised(head) else tuple(head.weight.shape)


def check_target(drafter: Any, target: PreTrainedModel) -> None:
    """Raises a `ValueError` if a drafter cannot draft for a target. It names the field that differs and the remedy."""
    config = drafter.config
    text_config = target.config.get_text_config(decoder=True)
    output = target.get_output_embeddings()
    if output is None or not (hasattr(output, "weight") or is_quantised(output)):
        raise ValueError(
            f"{type(target).__name__} has no LM head for a drafter to use (`get_output_embeddings()` is "
            f"{type(output).__name__}): use a causal language model whose head is a linear layer."
        )
    # The width of the features, where the drafter itself may be of another width.
    width = "target_hidden_size" if hasattr(config, "target_hidden_size") else "hidden_size"
    found = {
        "target_model_type": text_config.model_type,
        "vocab_size": text_config.vocab_size,
        width: _sizes_of(output)[1],
    }
    for field, value in found.items():
        expected = getattr(config, field, None)
        if expected is not None and value != expected:
            raise ValueError(
                f"The drafter's `{field}` is {expected!r}, but the target has {value!r}: this drafter was made for "
                f"{config.target_name_or_path or 'another target'}. Use that target, or train a drafter for this one."
            )


def check_embedding(drafter: Any, target: PreTrainedModel) -> None:
    """Raises a `ValueError` if the target's embedding has another width than the drafter."""
    embedding: Any = target.get_input_embeddings()
    width = getattr(embedding, "embedding_dim", None) or getattr(getattr(embedding, "weight", None), "shape", [0])[-1]
    expected = drafter.config.hidden_size
    if width != expected:
        raise ValueError(
            f"The target's embedding is {width or '?'} wide and its last hidden state {expected}: a drafter "
            "needs both to be equal."
        )


class RowTable(NamedTuple):
    """
    Indices and mask of the rows of a drafter forward, which depend on their number alone.

    Args:
        blocks (`torch.LongTensor` of shape `(rows,)`): the block of each row.
        anchors (`torch.LongTensor` of shape `(1, rows)`): see [`block_anchors`].
        positions (`torch.LongTensor` of shape `(1, rows)`): positions, from 0.
        mask (`torch.Tensor`): additive mask of the rows among themselves.
    """

    blocks: Tensor
    anchors: Tensor
    positions: Tensor
    mask: Tensor


class BlockSession:
    """
    The [`DraftSession`] of a network that reads one row for each position: [`FalconDraftNetwork`], or another with its
    methods `fuse`, `run_layers` and `condition`.

    Args:
        drafter: the network.
        head: its head, which has an `embed` as [`TargetHead`].
        acceleration ([`DrafterAcceleration`]): how its layers run.
        prompt_positions (`int`, *optional*): newest positions of a prompt that the network reads; all by default.
    """

    def __init__(
        self, drafter: Any, head: Any, acceleration: DrafterAcceleration, prompt_positions: int | None = None
    ):
        self._drafter, self._head, self._acceleration = drafter, head, acceleration
        self._prompt_positions = prompt_positions
        self._block_size: int = drafter.config.block_size
        self._window: int | None = drafter.window
        self._device: torch.device = drafter.device
        self._cache = DraftCache(drafter.config.num_hidden_layers, acceleration.wants_static_shapes)
        self._first_position = 0
        self._committed = 0
        # The LSTM state after the committed positions, and of the blocks of the last pass.
        self._lstm_state: LSTMState | None = None
        self._block_lstm_state: LSTMState | None = None
        # Fused inputs of the last committed positions: a new cut into blocks runs up to k - 1 of them again.
        self._tail: Tensor | None = None
        # Additive mask of the drafted rows that each block of the last pass sees: its ancestors' and its own.
        self._lineage: Tensor | None = None
        # Positions behind the committed ones that the last pass drafted from.
        self._depth = 0
        # Indices and masks on the drafter's device, by the rows of a commit, and by the blocks of a pass.
        self._commit_tables: dict[int, RowTable] = {}
        self._pass_tables: dict[int, RowTable] = {}

    @property
    def is_conditional(self) -> bool:
        """See [`DraftSession`]."""
        return self._drafter.conditioning is not None

    def condition(self, states: Tensor, previous_token_ids: Tensor) -> Tensor:
        """See [`DraftSession.condition`]."""
        return self._drafter.condition(states, self._head.embed(previous_token_ids))

    def commit(
        self, features: Tensor, next_token_ids: Tensor, first_position: int = 0, prompt_embeds: Tensor | None = None
    ) -> Tensor | None:
        """See [`DraftSession.commit`]. Of a prompt only the newest `prompt_positions` positions are read."""
        # Autocast breaks torch's LSTM without instructions for bfloat16. As a decorator all threads would share it.
        with torch.autocast("cpu", enabled=False):
            if self._committed == 0:
                unread = 0 if self._prompt_positions is None else max(0, features.shape[1] - self._prompt_positions)
                features, next_token_ids = features[:, unread:], next_token_ids[:, -(features.shape[1] - unread) :]
                self._first_position = first_position + unread
            features, next_token_ids = features.to(self._device), to_device(next_token_ids, self._device)
            next_embeds = self._head.embed(next_token_ids)
            new, size = features.shape[1], self._block_size
            if prompt_embeds is not None and (missing := new - next_embeds.shape[1]) > 0:
                next_embeds = torch.cat((prompt_embeds[:, -missing:].to(next_embeds), next_embeds), dim=1)
            fused, self._lstm_state = self._drafter.fuse(features, next_embeds, self._lstm_state)
            rows = fused if self._tail is None else torch.cat((self._tail, fused), dim=1)
            # The last known position must end a block. Only the first block of the context may be short.
            needed = min(math.ceil(new / size) * size, rows.shape[1])
            if needed < rows.shape[1]:
                rows = rows[:, -needed:]
            self._committed += new
            self._cache.length = self._committed - needed
            # Chunks of whole blocks, cut from the right like the blocks.
            chunk = max(1, _PREFILL_ROWS // size) * size
            edges = [0, *range(needed % chunk or min(chunk, needed), needed + 1, chunk)]
            for start, end in itertools.pairwise(edges):
                table = self._commit_table(end - start, rows.dtype)
                predicted = self._run_layers(rows[:, start:end], table, table.mask, self._cache.length)
                self._cache.advance(end - start)
            self._tail = rows[:, -(size - 1) :] if size > 1 else rows[:, :0]
            return predicted[:, -size:] if self._committed >= size else None

    def rewind(self) -> None:
        """See [`DraftSession.rewind`]."""
        self._cache.length = self._committed
        self._block_lstm_state, self._lineage, self._depth = self._lstm_state, None, 0

    def extend(self, drafted: DraftedBlocks) -> Tensor:
        """See [`DraftSession.extend`]. The states may also be features of the target, if they are as wide as these."""
        with torch.autocast("cpu", enabled=False):
            size, width, state = self._block_size, drafted.blocks.shape[0], self._block_lstm_state
            if state is not None:
                state = (state[0][:, drafted.blocks], state[1][:, drafted.blocks])
            embeds = self._head.embed(drafted.token_ids)
            fused, self._block_lstm_state = self._drafter.fuse(drafted.states, embeds, state)
            table = self._pass_table(width, fused.dtype)
            before, own = self._lineage, table.mask
            self._lineage = lineage = own if before is None else torch.cat((before[drafted.blocks], own), dim=1)
            mask = lineage if size == 1 else lineage[table.blocks]
            rows, depth = fused.reshape(1, width * size, -1), self._committed + self._depth
            predicted = self._run_layers(rows, table, mask, depth)
            self._cache.advance(width * size)
            self._depth += size
            return predicted.view(width, size, -1)

    def _pass_table(self, width: int, dtype: torch.dtype) -> RowTable:
        """The table of a pass over `width` blocks. Its mask has one row for each block."""
        if width not in self._pass_tables:
            size = self._block_size
            itself = torch.eye(width, dtype=torch.bool, device="cpu").repeat_interleave(size, dim=1)
            blocks = torch.arange(width, device="cpu").repeat_interleave(size)
            positions = torch.arange(size, device="cpu").repeat(width)
            self._pass_tables[width] = self._table(blocks, positions, additive_mask(itself, dtype))
        return self._pass_tables[width]

    def _commit_table(self, count: int, dtype: torch.dtype) -> RowTable:
        """The table of a commit of `count` rows, in blocks cut from the right."""
        table = self._commit_tables.get(count)
        if table is None:
            places = torch.arange(count, device="cpu")
            blocks = (places - count) // self._block_size
            table = self._table(blocks, places, additive_mask(blocks[:, None] >= blocks[None], dtype))
            # A prompt is committed once.
            if count <= ROWS_OF_A_ROUND:
                self._commit_tables[count] = table
        return table

    def _table(self, blocks: Tensor, positions: Tensor, mask: Tensor) -> RowTable:
        parts = blocks, block_anchors(blocks[None], self._block_size), positions[None], mask
        return RowTable(*(to_device(part, self._device) for part in parts))

    def _run_layers(self, fused: Tensor, table: RowTable, mask: Tensor, first_place: int) -> Tensor:
        """
        See [`FalconDraftNetwork.run_layers`]; of this sequence.

        Args:
            table ([`RowTable`]): the table of the rows.
            mask (`torch.Tensor` of shape `(rows, seen)`):
                Additive mask of the last `seen` rows of the cache; all rows before them are visible.
            first_place (`int`): place in the sequence of the rows with position 0 in the table.
        """
        end = self._cache.length + table.anchors.shape[1]
        mask = F.pad(mask, (end - mask.shape[1], 0))
        mask = hide_end(mask, self._cache.seen_slots(end) - end).unflatten(0, (1, 1, -1))
        if self._window is not None:
            # Of committed rows, up to the newest that the row sees. Drafted rows are always near.
            newest = (table.positions[0] + first_place).clamp(max=self._committed - 1)
            slots = torch.arange(mask.shape[-1], device=mask.device)
            distant = slots <= newest[:, None] - self._window
            mask = torch.cat((mask, mask.masked_fill(distant, torch.finfo(mask.dtype).min)), dim=1)
        positions = table.positions + (self._first_position + first_place)
        with self._acceleration.drafting(self._head):
            return self._acceleration.run_layers(fused, table.anchors, positions, mask, self._cache)
