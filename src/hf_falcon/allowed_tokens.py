# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Constrained decoding: the drafter drafts no token that the logits processors of the call forbid.

A processor says what it allows by a method `allowed_tokens(prefix_ids)`. It gets the prompt and the tokens behind it,
a `torch.LongTensor` of shape `(length,)` on the host, and returns the ids of the tokens that may follow, or a boolean
mask of the vocabulary, or `None` if it allows all. The prefix ends with draft tokens that may never be accepted: the
method must leave the processor's state as it is. It is asked about allowed prefixes only, and never behind EOS.
Drafts change no output, so a wrong answer costs time alone. grammar_processors.py answers for known processors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging

from .core.candidate_generator import ContextHead, FalconCandidateGenerator
from .core.interfaces import register_part
from .core.tree import to_device
from .core.verification import TokenSequence
from .grammar_processors import asker
from .lookup import LookedUp, TextLookup

logger = logging.get_logger(__name__)

# What a forbidden token's logit is lowered by. It is finite: where no token is allowed, nothing changes.
_PENALTY = 1e4


class AllowedTokens:
    """
    What the processors of a call allow behind the drafts of one sequence.

    Args:
        askers (`list[Callable[[Tensor], Any]]`): methods `allowed_tokens`; see above.
        sequence ([`TokenSequence`]): the sequence.
        vocab_size (`int`): tokens of the target's vocabulary.
    """

    def __init__(self, askers: list[Callable[[Tensor], Any]], sequence: TokenSequence, vocab_size: int):
        self._askers, self._sequence, self._vocab_size = askers, sequence, vocab_size
        # The answers of this round, and the length of the sequence in it.
        self._known: dict[tuple[int, ...], Tensor | None] = {}
        self._length = 0

    def behind(self, path: tuple[int, ...]) -> Tensor | None:
        """
        The tokens that may follow `path`, which are draft tokens behind the sequence.

        Returns:
            `torch.BoolTensor` of shape `(vocab_size,)`, on the host; `None` if all may follow. Nothing follows EOS or
            a token that is not allowed.
        """
        length = self._sequence.token_ids.shape[1]
        if length != self._length:
            self._known, self._length = {}, length
        if path not in self._known:
            self._known[path] = self._nothing if self._is_over(path) else self._ask(path)
        return self._known[path]

    def _is_over(self, path: tuple[int, ...]) -> bool:
        if not path:
            return False
        before = self.behind(path[:-1])
        return path[-1] in self._sequence.eos_token_ids or (before is not None and not before[path[-1]])

    @property
    def _nothing(self) -> Tensor:
        return torch.zeros(self._vocab_size, dtype=torch.bool, device="cpu")

    def _ask(self, path: tuple[int, ...]) -> Tensor | None:
        prefix = torch.cat((self._sequence.token_ids[0], torch.tensor(path, dtype=torch.long, device="cpu")))
        mask: Tensor | None = None
        for ask in list(self._askers):
            try:
                answer = ask(prefix)
                found = None if answer is None else self._mask(answer)
            # It is the user's code, and the call works without its answer.
            except Exception as error:
                logger.warning_once(
                    f"`allowed_tokens` of a logits processor failed ({type(error).__name__}: {error}): it is not "
                    "asked again in this call. The output is exact all the same; fewer draft tokens may be accepted."
                )
                self._askers.remove(ask)
                continue
            mask = found if mask is None or found is None else mask & found
        return mask

    def _mask(self, answer: Any) -> Tensor:
        answer = torch.as_tensor(answer, device="cpu")
        if answer.dtype == torch.bool:
            return F.pad(answer[: self._vocab_size], (0, max(0, self._vocab_size - answer.shape[0])))
        return self._nothing.index_fill(0, answer.reshape(-1).long(), True)


class ConstrainedHead(ContextHead):
    """
    A [`ContextHead`] that lowers the logits of tokens that are not allowed behind a branch.

    Args:
        generator ([`FalconCandidateGenerator`]): the generator of the sequence.
        allowed ([`AllowedTokens`]): of the sequence.
        vocab_size (`int`): tokens of the target's vocabulary.
    """

    def __init__(self, generator: FalconCandidateGenerator, allowed: AllowedTokens, vocab_size: int):
        drafter = generator.drafter
        bonuses, block_size = generator.options.context_bonuses, drafter.config.block_size
        super().__init__(generator.head, bonuses, vocab_size, drafter.device, block_size)
        self._allowed, self._deepest, self._vocab_size = allowed, generator.max_depth, vocab_size
        # What the vocabulary was when its ids were copied to the host, and the copy.
        self._copied: Tensor | None = None
        self._host_ids: Tensor | None = None
        # Draft tokens before the level that comes next.
        self._depth = 0

    @property
    def has_bonuses(self) -> bool:
        """`True`: each branch has logits of its own."""
        return True

    def extend(self, token_ids: Tensor) -> None:
        """See [`ContextHead.extend`]. A round begins with it."""
        super().extend(token_ids)
        self._depth = 0

    def latest(self) -> Tensor:
        """See [`ContextHead.latest`]; with room for all tokens of a branch."""
        return F.pad(super().latest(), (0, self._deepest), value=-1)

    def prefer_repetitions(self, logits: Tensor, latest: Tensor) -> Tensor:
        """See [`ContextHead.prefer_repetitions`]. It is called once for each level."""
        logits = super().prefer_repetitions(logits, latest[:, : latest.shape[1] - self._deepest])
        paths = latest[:, : self._depth].flip(1).tolist()
        self._depth += 1
        masks = [self._allowed.behind(tuple(path)) for path in paths]
        if all(mask is None for mask in masks):
            return logits
        everything = torch.ones(self._vocab_size, dtype=torch.bool, device="cpu")
        allowed = torch.stack([everything if mask is None else mask for mask in masks])
        if self.vocab_ids is not self._copied:
            self._copied, self._host_ids = self.vocab_ids, None if self.vocab_ids is None else self.vocab_ids.cpu()
        # A target's head can leave out tokens that are only read.
        allowed = allowed[:, : logits.shape[-1]] if self._host_ids is None else allowed[:, self._host_ids]
        return logits - to_device((~allowed).to(logits.dtype) * _PENALTY, logits.device)


class ConstrainedLookup:
    """
    A [`TextLookup`] without the continuations that are not allowed.

    Args:
        lookup ([`TextLookup`]): the lookup of the sequence.
        allowed ([`AllowedTokens`]): of the sequence.
    """

    def __init__(self, lookup: TextLookup, allowed: AllowedTokens):
        self._lookup, self._allowed = lookup, allowed

    def extend(self, token_ids: list[int]) -> None:
        """See [`TextLookup.extend`]."""
        self._lookup.extend(token_ids)

    def find(self, limit: int, max_depth: int) -> LookedUp:
        """See [`TextLookup.find`]."""
        kept = LookedUp([], [], [])
        # Of each node that is kept: its path and its number. The first is the end of the sequence.
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        numbers = {-1: -1}
        for node, (token, parent, log_prob) in enumerate(zip(*self._lookup.find(limit, max_depth))):
            before = self._allowed.behind(paths[parent]) if parent in paths else None
            if parent not in paths or (before is not None and not before[token]):
                continue
            paths[node], numbers[node] = (*paths[parent], token), len(kept.token_ids)
            kept.token_ids.append(token)
            kept.parents.append(numbers[parent])
            kept.log_probs.append(log_prob)
        return kept


def constrain(generator: FalconCandidateGenerator, sequence: TokenSequence) -> None:
    """
    Tells a generator, which has started, what the processors of its sequence allow.

    Args:
        generator ([`FalconCandidateGenerator`]): the generator.
        sequence ([`TokenSequence`]): the sequence that it drafts for.
    """
    found = [asker(processor, sequence.prompt_length) for processor in sequence.processors]
    askers = [ask for ask in found if ask is not None]
    if not askers:
        return
    vocab_size = generator.target.config.get_text_config(decoder=True).vocab_size
    allowed = AllowedTokens(askers, sequence, vocab_size)
    if generator.options.num_draft_passes:
        generator.context = ConstrainedHead(generator, allowed, vocab_size)
    if generator.lookup is not None:
        generator.lookup = ConstrainedLookup(generator.lookup, allowed)


def install() -> None:
    """Registers it for every later call of this process."""
    register_part("constrain", constrain)
