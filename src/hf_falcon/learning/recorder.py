# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Records what the target computes in one call: features of all emitted tokens, and of rejected draft tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.tree import to_device
from .replay_buffer import CallRecord, RejectedPath, prompt_hash

# Newest positions of a prompt that are recorded. More cost time in every step, and teach little.
_PROMPT_POSITIONS = 64


class Owner(Protocol):
    """Who takes the records: a [`Learner`]."""

    def begin_call(self) -> None: ...

    def end_call(self, records: list[CallRecord], counts: CallCounts) -> None: ...

    def learning(self) -> dict[str, Any] | None: ...

    def fail(self, error: Exception) -> None: ...


@dataclass
class CallCounts:
    """New tokens, rounds and accepted draft tokens of a call; `seconds` is its time."""

    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class _Row:
    """A row of the call: its tokens, and features in the order of the text."""

    sequence: Any
    features: list[Tensor]
    # The place of the first feature, counted from the first token of the sequence.
    first: int
    count: int
    most: int
    # Padding tokens before the prompt.
    padding: int
    # Of each rejected path: the place of the token before it, its tokens, and the part of `features` that has it.
    rejected: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)


class CallRecorder:
    """
    Sees the rounds of one call of a drafter that learns, and changes nothing: the part "learning" of the decoding
    loop. In a round it takes references and one selection of rows. It is entered before the call, and left after it,
    also after an error. An error of its own ends the learning, and not the call.

    Args:
        owner: takes the records at the end of the call.
        longest (`int`): new tokens of a row that are recorded, at most.
        vocab_size (`int`): the target's.
        records_rejected (`bool`): whether rejected tokens are recorded.
    """

    def __init__(self, owner: Owner, longest: int, vocab_size: int, records_rejected: bool):
        self._owner, self._longest, self._vocab_size = owner, longest, vocab_size
        self._records_rejected = records_rejected
        self._rows: dict[int, _Row] = {}
        self._counts = CallCounts()

    def __enter__(self) -> CallRecorder:
        self._owner.begin_call()
        return self

    def __exit__(self, *exception: object) -> None:
        records: list[CallRecord] = []
        try:
            # What a call that was broken off has computed is right all the same.
            with torch.inference_mode(False), torch.no_grad():
                records = [record for row in self._rows.values() if (record := self._record(row)) is not None]
        except Exception as error:
            self._fail(error)
        finally:
            self._rows = {}
            self._owner.end_call(records, self._counts)

    def learning(self) -> dict[str, Any] | None:
        """What [`DraftStatistics`] shows."""
        return self._owner.learning()

    def start(self, sequence: Any, prompt: Any) -> None:
        """
        Takes a row's prompt.

        Args:
            sequence ([`TokenSequence`]): the row.
            prompt ([`PromptFeatures`]): the features of its prompt.
        """
        try:
            self._start(sequence, prompt)
        except Exception as error:
            self._fail(error)

    def _start(self, sequence: Any, prompt: Any) -> None:
        self._counts.tokens += 1
        length = sequence.prompt_length
        # A prompt of embeddings, or a prefix that was in the cache, has no tokens here.
        known = min(prompt.features.shape[1], length - prompt.padding, _PROMPT_POSITIONS)
        # A call that drafts nothing reads no features.
        if known > 0 and prompt.features.shape[-1]:
            # A copy: a view would keep the features of a whole prompt.
            features = prompt.features[0, -known:].clone()
            self._rows[id(sequence)] = _Row(
                sequence, [features], length - known, known, known + self._longest, prompt.padding
            )

    def add_round(self, sequence: Any, tree: Any, path: Tensor, accepted: int, features: Tensor) -> None:
        """
        Takes a round of a row.

        Args:
            sequence ([`TokenSequence`]): the row.
            tree ([`DraftTree`]): the tree that was verified.
            path (`torch.LongTensor` of shape `(emitted,)`), accepted (`int`): what [`verify`] returned.
            features (`torch.Tensor` of shape `(1, nodes, ...)`): the target's features of all its nodes, or more.
        """
        try:
            self._add_round(sequence, tree, path, accepted, features)
        except Exception as error:
            self._fail(error)

    def _add_round(self, sequence: Any, tree: Any, path: Tensor, accepted: int, features: Tensor) -> None:
        self._counts.rounds += 1
        self._counts.accepted += accepted
        self._counts.tokens += path.shape[0]
        row = self._rows.get(id(sequence))
        if row is None or row.count >= row.most or path.shape[0] == 0:
            return
        nodes, place, tokens = path, 0, None
        if self._records_rejected and len(tree) > path.shape[0]:
            place, wrong = rejected_nodes(tree, path)
            if len(wrong):
                nodes, tokens = torch.cat((path, wrong)), tree.token_ids[wrong]
        found = features[0, to_device(nodes, features.device)]
        row.features.append(found[: path.shape[0]])
        if tokens is not None:
            row.rejected.append((row.first + row.count + place, tokens, found[path.shape[0] :]))
        row.count += path.shape[0]

    def _fail(self, error: Exception) -> None:
        self._rows = {}
        self._owner.fail(error)

    def _record(self, row: _Row) -> CallRecord | None:
        token_ids = row.sequence.token_ids[0, row.first : row.first + row.count + 1]
        token_ids = token_ids.clamp(0, self._vocab_size - 1).clone()
        prompt_length = row.sequence.prompt_length - row.first
        # A call that was broken off may have emitted less than it has scored.
        count = len(token_ids) - 1
        # Too short to predict anything.
        if count < 4 or len(token_ids) - prompt_length < 2:
            return None
        rejected = [each for each in row.rejected if each[0] - row.first < count]
        parts = [*row.features, *(features for _, _, features in rejected)]
        features, ready = copy_to_host(torch.cat(parts))
        sizes = [row.count, *(len(tokens) for _, tokens, _ in rejected)]
        text, *wrong = features.split(sizes)
        paths = [
            RejectedPath(place - row.first, tokens.clamp(0, self._vocab_size - 1), part)
            for (place, tokens, _), part in zip(rejected, wrong, strict=True)
        ]
        prompt = prompt_hash(row.sequence.token_ids[0, row.padding : row.sequence.prompt_length])
        return CallRecord(token_ids, text[:count], prompt_length, prompt, paths, ready)


def rejected_nodes(tree: Any, path: Tensor) -> tuple[int, Tensor]:
    """
    The longest path of rejected nodes in a tree; of equally long ones the first, which is the most probable.

    Args:
        tree ([`DraftTree`]): the tree.
        path (`torch.LongTensor` of shape `(emitted,)`): its nodes that were right, the root first.

    Returns:
        `int`, how many nodes of `path` are before the last one that the rejected path follows, and `torch.LongTensor`,
        the rejected nodes in order.
    """
    is_right = torch.zeros(len(tree), dtype=torch.bool, device="cpu")
    is_right[path] = True
    ancestors = tree.visible & ~is_right
    leaf = int(ancestors.sum(dim=1).argmax())
    [wrong] = ancestors[leaf].nonzero(as_tuple=True)
    return int((tree.visible[leaf] & is_right).sum()) - 1, wrong


def copy_to_host(features: Tensor) -> tuple[Tensor, Any]:
    """
    A copy on the host in 16 bits a value. The host does not wait for a device.

    Returns:
        `torch.Tensor`, and an event after which it is complete; `None` if it is.
    """
    kept = features.to(torch.bfloat16) if features.dtype.itemsize > 2 else features
    if kept.device.type == "cpu":
        return kept, None
    host = torch.empty(kept.shape, dtype=kept.dtype, device="cpu", pin_memory=True)
    host.copy_(kept, non_blocking=True)
    event = torch.Event(kept.device)
    event.record()
    return host, event
