# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The tokens of a target and of a language model that drafts for it: the same ones, or others. With others, the draft
model proposes the tokens that both know, and reads the text in its own tokens (universal assisted decoding, and the
intersection of both vocabularies of arXiv 2502.05202).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The sign of a space in a byte-level vocabulary.
_SPACE = "Ġ"
# What an incomplete character is decoded to.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# A part of a text is encoded as a whole until it has so many tokens; and places that are tried to divide it.
_PART, _TRIES = 512, 32
# The tokenizer of each model's checkpoint, or why none was found.
_tokenizers: weakref.WeakKeyDictionary[PreTrainedModel, PreTrainedTokenizerBase | str] = weakref.WeakKeyDictionary()
_loading = threading.Lock()


def tokenizer_of(model: PreTrainedModel) -> PreTrainedTokenizerBase | str:
    """The tokenizer of the checkpoint that a model was loaded from, by its `name_or_path`; or why there is none."""
    # Of several threads one loads it.
    with _loading:
        if model not in _tokenizers:
            try:
                # transformers imports it where it is first asked for.
                name = model.name_or_path
                _tokenizers[model] = transformers.AutoTokenizer.from_pretrained(name) if name else "it has no name"
            # A checkpoint without a tokenizer, and one that is not there: libraries raise errors of many kinds.
            except Exception as error:
                _tokenizers[model] = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".")
        return _tokenizers[model]


def vocab_size(model: PreTrainedModel) -> int:
    """Tokens of a model's vocabulary, with rows that no token has."""
    size: int = model.config.get_text_config(decoder=True).vocab_size
    return size


class Translation(Protocol):
    """The text of one sequence in the draft model's tokens."""

    def extend(self, token_ids: Sequence[int]) -> tuple[int, list[int]]:
        """
        Adds the text's next tokens, of the target's vocabulary.

        Returns:
            How many of the draft model's tokens so far stay, and the tokens that follow these.
        """


class Vocabulary(Protocol):
    """
    The tokens that a draft model and its target share.

    Attributes:
        draft_ids, target_ids (`torch.LongTensor` of shape `(tokens,)`, *optional*):
            Their ids on both sides, on the host. `None` where the ids of each are the same, from 0 on.
        size (`int`): their number.
    """

    draft_ids: Tensor | None
    target_ids: Tensor | None
    size: int

    def translate(self) -> Translation:
        """Starts a text."""


def vocabulary_of(
    target: PreTrainedModel,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
) -> Vocabulary:
    """
    What two models share. Without tokenizers, models with vocabularies of one size have the same tokens.

    Args:
        target, model ([`PreTrainedModel`]): the target and the draft model.
        tokenizer, draft_tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Their tokenizers; by default those of their checkpoints.

    Raises:
        `ValueError`: if the vocabularies differ in size and a tokenizer is not found, or if they share no token.
    """
    sizes = vocab_size(target), vocab_size(model)
    if sizes[0] == sizes[1] and (tokenizer is None or draft_tokenizer is None):
        return SameTokens(*sizes)
    own = tokenizer or tokenizer_of(target)
    other = draft_tokenizer or tokenizer_of(model)
    if isinstance(own, str) or isinstance(other, str):
        sides = (("target", own), ("draft model", other))
        missing = [f"{name} ({each})" for name, each in sides if isinstance(each, str)]
        raise ValueError(
            f"The draft model's `vocab_size` is {sizes[1]}, but the target has {sizes[0]}: their tokens may differ, "
            f"and no tokenizer was found for the {' and the '.join(missing)}: give `tokenizer` (the target's) and "
            "`assistant_tokenizer` (the draft model's) to `generate`, or use a draft model with the target's tokens."
        )
    known, drafted = _tokens(own, sizes[0]), _tokens(other, sizes[1])
    if known == drafted:
        return SameTokens(*sizes)
    shared = sorted((known[text], drafted[text]) for text in known.keys() & drafted.keys())
    if not shared:
        raise ValueError(
            "The draft model's tokenizer and the target's have no token in common: use a draft model with the "
            "target's tokens."
        )
    return OtherTokens(own, other, shared)


def _tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[str, int]:
    """The ids of a tokenizer's tokens, by their strings, with one sign for a space; of tokens that the model knows."""
    pieces = tokenizer.tokenize(" ")
    sign = pieces[0][0] if pieces and pieces[0] else _SPACE
    special = set(tokenizer.all_special_tokens)
    return {
        text if text in special else text.replace(sign, _SPACE): token
        for text, token in tokenizer.get_vocab().items()
        if token < size
    }


class SameTokens:
    """
    One vocabulary. A model may have more rows than its tokenizer has tokens, so sizes may differ.

    Args:
        target_size, draft_size (`int`): rows of the target's and of the draft model's vocabulary.
    """

    draft_ids: Tensor | None = None

    def __init__(self, target_size: int, draft_size: int):
        self.size = min(target_size, draft_size)
        self.target_ids = None if self.size == target_size else torch.arange(self.size, device="cpu")

    def translate(self) -> _SameText:
        """See [`Vocabulary.translate`]."""
        return _SameText(self.size)


class _SameText:
    def __init__(self, size: int):
        self._size, self._length = size, 0

    def extend(self, token_ids: Sequence[int]) -> tuple[int, list[int]]:
        """See [`Translation.extend`]."""
        kept, self._length = self._length, self._length + len(token_ids)
        return kept, [min(token, self._size - 1) for token in token_ids]


class OtherTokens:
    """
    Two vocabularies that share some tokens.

    Args:
        tokenizer, draft_tokenizer ([`~transformers.PreTrainedTokenizerBase`]): the target's and the draft model's.
        shared (sequence of `tuple[int, int]`): the tokens of both, as ids of the target and of the draft model.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        draft_tokenizer: PreTrainedTokenizerBase,
        shared: Sequence[tuple[int, int]],
    ):
        self.tokenizer, self.draft_tokenizer = tokenizer, draft_tokenizer
        self.size = len(shared)
        self.target_ids: Tensor | None
        self.draft_ids: Tensor | None
        self.target_ids, self.draft_ids = torch.tensor(shared, device="cpu").unbind(dim=1)
        # Tokens that stand for no text, as the start of an answer. The draft model reads those that it knows.
        ids = dict(shared)
        # Other added tokens are text, such as Gemma's line breaks.
        added = tokenizer.added_tokens_decoder.items()
        special = {*tokenizer.all_special_ids, *(token for token, each in added if each.special)}
        self.special = {token: ids.get(token) for token in special}
        # What the draft model expects before every text.
        self.start = self._encoded_start()

    def translate(self) -> _OtherText:
        """See [`Vocabulary.translate`]."""
        return _OtherText(self)

    def encode(self, text: str) -> list[int]:
        """A text in the draft model's tokens."""
        return list(self.draft_tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """The text of the target's tokens after others: some tokenizers leave out a space that a text begins with."""
        start, text = (
            self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
            for ids in (after, [*after, *token_ids])
        )
        return text[len(start) :]

    def _encoded_start(self) -> list[int]:
        token = self.draft_tokenizer.bos_token_id
        return [token] if token is not None and self.draft_tokenizer.encode("a")[:1] == [token] else []


class _OtherText:
    def __init__(self, vocabulary: OtherTokens):
        self._vocabulary = vocabulary
        # The draft model's tokens of the text, and how many of them do not change any more.
        self._tokens: list[int] = []
        self._fixed = 0
        # The target's tokens of the part that may change, and the text's token before them.
        self._part: list[int] = []
        self._last: list[int] = []
        # Its length when no place was found to divide it, as in a text without spaces.
        self._undivided = 0

    def extend(self, token_ids: Sequence[int]) -> tuple[int, list[int]]:
        """See [`Translation.extend`]. The newest tokens may join those before them: that part is encoded anew."""
        vocabulary, before = self._vocabulary, self._tokens
        tokens = before[: self._fixed] if before else list(vocabulary.start)
        self._fixed = len(tokens)
        for token in token_ids:
            if token not in vocabulary.special:
                self._part.append(token)
                continue
            tokens = tokens[: self._fixed] + self._encoded_part()
            known, self._part, self._last, self._undivided = vocabulary.special[token], [], [], 0
            # The start of a text may be in the target's tokens as well.
            if known is not None and tokens != [known]:
                tokens.append(known)
            self._fixed = len(tokens)
        self._divide(tokens)
        self._tokens = tokens = tokens[: self._fixed] + self._encoded_part()
        kept = next((i for i, (a, b) in enumerate(zip(before, tokens)) if a != b), min(len(before), len(tokens)))
        return kept, tokens[kept:]

    def _encoded_part(self) -> list[int]:
        # An incomplete character waits for its other bytes.
        return self._vocabulary.encode(self._vocabulary.decode(self._part, self._last).rstrip(_INCOMPLETE))

    def _divide(self, tokens: list[int]) -> None:
        """Fixes the beginning of a long part, where a word begins that no earlier token reaches into."""
        if len(self._part) < self._undivided + _PART:
            return
        vocabulary, middle = self._vocabulary, len(self._part) // 2
        whole = vocabulary.encode(vocabulary.decode(self._part, self._last))
        for place in range(middle, middle - _TRIES, -1):
            last = self._part[place - 1 : place]
            first = vocabulary.decode(self._part[:place], self._last)
            rest = vocabulary.decode(self._part[place:], last)
            if not (first[-1:].isalnum() and rest[:1].isspace()):
                continue
            encoded = vocabulary.encode(first)
            if encoded + vocabulary.encode(rest) == whole:
                tokens[self._fixed :] = encoded
                self._fixed, self._part, self._last, self._undivided = len(tokens), self._part[place:], last, 0
                return
        self._undivided = len(self._part)
