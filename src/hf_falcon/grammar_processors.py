# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
What logits processors allow behind a prefix, without a change of their state. Those of xgrammar and outlines keep the
state of one text, so the drafts are matched apart from it, by the grammar that the processor holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PrefixConstrainedLogitsProcessor

from .private_names import allowed_tokens_function

# Answers for a prefix; see allowed_tokens.py.
Asker = Callable[[Tensor], Any]


class GrammarTokens:
    """
    The tokens that a compiled grammar of xgrammar allows.

    Args:
        grammar (`xgrammar.CompiledGrammar`): the grammar.
        prompt_length (`int`): tokens of the prompt, which the grammar does not match.
    """

    def __init__(self, grammar: Any, prompt_length: int):
        # Who made a grammar has imported it.
        xgrammar: Any = sys.modules["xgrammar"]
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._words = xgrammar.allocate_token_bitmask(1, grammar.tokenizer_info.vocab_size)
        self._prompt_length = prompt_length
        self._matched: list[int] = []

    def __call__(self, prefix_ids: Tensor) -> Tensor | None:
        """See [`Asker`]. `None` behind a text that the grammar does not match."""
        tokens = prefix_ids[self._prompt_length :].tolist()
        same = _common(tokens, self._matched)
        if same < len(self._matched):
            self._matcher.rollback(len(self._matched) - same)
            del self._matched[same:]
        for token in tokens[same:]:
            if not self._matcher.accept_token(token):
                return None
            self._matched.append(token)
        if self._matcher.is_terminated():
            return None
        self._matcher.fill_next_token_bitmask(self._words)
        # 32 tokens a word.
        return ((self._words[0][:, None] >> torch.arange(32, dtype=torch.int32, device="cpu")) & 1).bool().flatten()


class IndexTokens:
    """
    The tokens that an index of outlines-core allows.

    Args:
        index (`outlines_core.Index`): the index.
        prompt_length (`int`): tokens of the prompt, which the index does not match.
    """

    def __init__(self, index: Any, prompt_length: int):
        self._index, self._prompt_length = index, prompt_length
        # The text that was asked for last, and the states before and after each of its tokens.
        self._matched: list[int] = []
        self._states: list[int] = [index.get_initial_state()]
        # The answer in each state: a text comes back to the same ones.
        self._masks: dict[int, Tensor | None] = {}

    def __call__(self, prefix_ids: Tensor) -> Tensor | None:
        """See [`Asker`]. `None` behind a text that the index does not match."""
        tokens = prefix_ids[self._prompt_length :].tolist()
        same = _common(tokens, self._matched)
        del self._matched[same:], self._states[same + 1 :]
        for token in tokens[same:]:
            state = self._index.get_next_state(self._states[-1], token)
            if state is None:
                return None
            self._matched.append(token)
            self._states.append(state)
        state = self._states[-1]
        if state not in self._masks:
            allowed = self._index.get_allowed_tokens(state)
            self._masks[state] = _mask(torch.tensor(allowed, device="cpu")) if allowed else None
        return self._masks[state]


def _common(tokens: list[int], others: list[int]) -> int:
    """How many tokens two texts begin with in common. Slices are compared faster than tokens."""
    low, high = 0, min(len(tokens), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _mask(token_ids: Tensor) -> Tensor:
    """The ids as a boolean mask, which is smaller."""
    return torch.zeros(int(token_ids.max()) + 1, dtype=torch.bool, device="cpu").index_fill(0, token_ids, True)


# By module and name: the packages need not be installed. By exact class, as a subclass may differ.
_MAKERS: dict[str, Callable[[Any, int], Asker]] = {
    "xgrammar.contrib.hf.LogitsProcessor": lambda each, start: GrammarTokens(each.compiled_grammars[0], start),
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": lambda each, start: GrammarTokens(
        each.compiled_grammar, start
    ),
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": lambda each, start: IndexTokens(each.index, start),
}


class _Late:
    """An [`Asker`] that is made when it is first asked: what fails there is no error of the call."""

    def __init__(self, make: Callable[[], Asker]):
        self._make = make
        self._asker: Asker | None = None

    def __call__(self, prefix_ids: Tensor) -> Any:
        self._asker = self._asker or self._make()
        return self._asker(prefix_ids)


def asker(processor: Any, prompt_length: int) -> Asker | None:
    """
    What answers for a processor.

    Args:
        processor ([`~transformers.LogitsProcessor`]): of the call.
        prompt_length (`int`): tokens of the prompt.

    Returns:
        Its method `allowed_tokens`; or what matches its grammar; or a call's `prefix_allowed_tokens_fn` whose
        attribute `is_stateless` is true, for others may count on being asked once a token. `None` without any.
    """
    method = getattr(processor, "allowed_tokens", None)
    if callable(method):
        return method
    if type(processor) is PrefixConstrainedLogitsProcessor:
        allowed = allowed_tokens_function(processor)
        return (lambda prefix_ids: allowed(0, prefix_ids)) if getattr(allowed, "is_stateless", False) else None
    kind = type(processor)
    make = _MAKERS.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if make is None else _Late(lambda: make(processor, prompt_length))
