# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The replay buffer: what the target computed in earlier calls, some of it held out; in memory, and bounded."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..training.csgd import DraftBatch

# Texts of one prompt that are kept: a prompt that is asked again and again does not fill the buffer.
_OF_ONE_PROMPT = 4
# Held-out texts. A new one replaces another by chance, so that they are of all calls, and not of the latest alone.
HELD_OUT_TEXTS, _NEWEST_SHARE = 32, 0.1
# Positions of a forward in training, at most: it is not interrupted.
MOST_ROWS = 256
# The positions of a batch are a multiple of this. oneDNN makes and keeps code for each size of a product: some hundred
# kilobytes and milliseconds, for each layer.
ROWS_MULTIPLE = 32
# Positions of the text before rejected tokens that are learnt from with them.
_CONTEXT_ROWS = 12
# Rejected paths in a forward.
_MOST_PATHS = 8


class RejectedPath(NamedTuple):
    """
    Draft tokens that were rejected, one behind the other.

    Args:
        place (`int`): the place in the text of the token before them.
        token_ids (`torch.LongTensor` of shape `(tokens,)`): the tokens.
        features (`torch.Tensor` of shape `(tokens, ...)`): the target's features of them.
    """

    place: int
    token_ids: Tensor
    features: Tensor


@dataclass(eq=False)
class CallRecord:
    """
    One row of a call.

    Args:
        token_ids (`torch.LongTensor` of shape `(length,)`): the end of its prompt, and its new tokens.
        features (`torch.Tensor` of shape `(length - 1, ...)`):
            The target's features of all tokens but the last, which the target has not read.
        prompt_length (`int`): how many of the tokens are of the prompt.
        prompt (`str`): identifies the whole prompt.
        rejected (`list[RejectedPath]`): draft tokens that the target read in vain.
        ready (*optional*): an event of a device that still copies the features.
    """

    token_ids: Tensor
    features: Tensor
    prompt_length: int
    prompt: str
    rejected: list[RejectedPath] = field(default_factory=list)
    ready: Any = None
    # How often it was learnt from, and its number among all records.
    uses: int = 0
    number: int = 0
    # Hits of the weights that it was scored with, by their name and version; see gate.py.
    scores: dict[str, tuple[int, Tensor]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        parts = [self.token_ids, self.features]
        parts += [tensor for path in self.rejected for tensor in (path.token_ids, path.features)]
        return sum(part.nbytes for part in parts)

    @property
    def new_tokens(self) -> int:
        """Tokens that were generated."""
        return len(self.token_ids) - self.prompt_length

    def wait(self) -> None:
        """Waits until the features are on the host."""
        if self.ready is not None:
            self.ready.synchronize()
            self.ready = None

    def batch(self, device: torch.device, start: int = 0, rows: int = MOST_ROWS) -> DraftBatch:
        """The text as a batch of one sample, at most `rows` positions from `start` on."""
        self.wait()
        token_ids, features = self.token_ids[start : start + rows], self.features[start : start + rows]
        # The last token has no feature, and no prediction is compared with one.
        missing = len(token_ids) - len(features)
        features = torch.nn.functional.pad(features, (0, 0, 0, missing))
        places = torch.arange(len(token_ids), device="cpu") + start
        response = places >= self.prompt_length
        return _batch([token_ids], [features], [response], self.number, device)

    def rejected_batch(self, device: torch.device, chance: random.Random) -> DraftBatch:
        """Some of the rejected paths as a batch, one in a sample: each with the text before it."""
        self.wait()
        paths = chance.sample(self.rejected, min(_MOST_PATHS, len(self.rejected)))
        rows = []
        for path in paths:
            start = max(0, path.place + 1 - _CONTEXT_ROWS)
            before = slice(start, path.place + 1)
            # What the target chose behind the path is in the feature of its end, and has no token here: the last token
            # stands for it.
            token_ids = torch.cat((self.token_ids[before], path.token_ids, path.token_ids[-1:]))
            features = torch.cat((self.features[before], path.features, path.features[-1:]))
            response = torch.arange(len(token_ids), device="cpu") > path.place + 1 - start
            rows.append((token_ids, features, response))
        ids, features_of, responses = (list(parts) for parts in zip(*rows))
        return _batch(ids, features_of, responses, self.number, device)


def _batch(
    token_ids: list[Tensor], features: list[Tensor], response: list[Tensor], number: int, device: torch.device
) -> DraftBatch:
    pad = torch.nn.utils.rnn.pad_sequence
    lengths = torch.tensor([len(each) for each in token_ids], device="cpu")
    missing = -int(lengths.max()) % ROWS_MULTIPLE
    ids = torch.nn.functional.pad(pad(token_ids, batch_first=True), (0, missing))
    return DraftBatch(
        torch.nn.functional.pad(pad(features, batch_first=True), (0, 0, 0, missing)).to(device),
        ids.to(device),
        (torch.arange(ids.shape[1], device="cpu") < lengths[:, None]).to(device),
        torch.nn.functional.pad(pad(response, batch_first=True), (0, missing)).to(device),
        number + torch.arange(len(token_ids), device="cpu"),
    )


class ReplayBuffer:
    """
    Records of calls to learn from, and held-out ones. Whether a prompt is held out depends on the prompt alone.

    Args:
        most_bytes (`float`): bytes of all records, at most; the oldest are dropped.
        held_out (`float`): share of the prompts that are held out.
        uses (`int`): how often a record is learnt from, at most.
        chance (`random.Random`): source of the random draws.
    """

    def __init__(self, most_bytes: float, held_out: float, uses: int, chance: random.Random):
        self._most_bytes, self.held_out_share, self._uses, self._chance = most_bytes, held_out, uses, chance
        self.records: list[CallRecord] = []
        self.held_out: list[CallRecord] = []
        # Records so far, and held-out ones among them.
        self.seen = 0
        self.seen_held_out = 0

    def __iter__(self) -> Iterator[CallRecord]:
        return iter([*self.records, *self.held_out])

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(record.nbytes for record in self)

    def add(self, record: CallRecord) -> None:
        """Takes the record of a call. A prompt that was asked before often enough replaces its oldest record."""
        self.seen += 1
        record.number = self.seen
        # The first digits of a hash are a number that is uniform over prompts.
        if int(record.prompt[:8], 16) < self.held_out_share * 16**8:
            self._hold_out(record)
        else:
            same = [each for each in self.records if each.prompt == record.prompt]
            if len(same) >= _OF_ONE_PROMPT:
                # What was learnt from its text so often is known.
                record.uses = same[0].uses
                self.records.remove(same[0])
            self.records.append(record)
        # Each part has its share of the memory.
        for part, share in ((self.held_out, self.held_out_share), (self.records, 1 - self.held_out_share)):
            total = sum(each.nbytes for each in part)
            while total > share * self._most_bytes:
                total -= part.pop(0).nbytes

    def draw(self) -> CallRecord | None:
        """A record to learn from: one of those that were used least; `None` if there is none."""
        least = min((record.uses for record in self.records), default=self._uses)
        if least >= self._uses:
            return None
        record = self._chance.choice([each for each in self.records if each.uses == least])
        record.uses += 1
        return record

    def _hold_out(self, record: CallRecord) -> None:
        # A rejected token is no part of what is compared.
        record.rejected = []
        same = next((each for each in self.held_out if each.prompt == record.prompt), None)
        if same is not None:
            self.held_out[self.held_out.index(same)] = record
            return
        self.seen_held_out += 1
        if len(self.held_out) < HELD_OUT_TEXTS:
            self.held_out.append(record)
        elif self._chance.random() < max(_NEWEST_SHARE, HELD_OUT_TEXTS / self.seen_held_out):
            self.held_out[self._chance.randrange(HELD_OUT_TEXTS)] = record


def prompt_hash(token_ids: Tensor) -> str:
    """Identifies the tokens of a prompt."""
    return hashlib.sha256(token_ids.cpu().numpy().tobytes()).hexdigest()
