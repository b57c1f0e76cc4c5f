# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Verification: plain decoding replayed over the scored tree.

Every emitted token is chosen from the target's logits at its true prefix, by the same processors and, when sampling,
by one multinomial draw in the same order as in plain decoding. So the output is plain decoding's, and under the same
seed the same sample, up to the rounding of the target's own logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .near_ties import NearTies
from .tree import DraftTree

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


class TokenSequence:
    """
    The sequence of one `generate` call: chooses tokens as plain decoding does, and ends where it ends.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, length)`): the prompt.
        logits_processor ([`LogitsProcessorList`]): processors and warpers of the call.
        stopping_criteria ([`StoppingCriteriaList`]): when to end; asked after every token.
        generation_config ([`GenerationConfig`]): configuration of the call.
        streamer ([`BaseStreamer`], *optional*): gets every token as it is emitted.
        draw (`Callable[[Tensor], Tensor]`, *optional*):
            Draws a token of shape `(1,)` from probabilities of shape `(1, vocab_size)`; by one multinomial draw if
            left out, as plain decoding does.
    """

    def __init__(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        draw: Callable[[Tensor], Tensor] | None = None,
    ):
        self.input_ids = input_ids
        self.finished = False
        self.prompt_length = input_ids.shape[1]
        self.max_length: int = generation_config.max_length
        returns_dict = generation_config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if returns_dict and generation_config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if returns_dict and generation_config.output_logits else None
        self.near_ties = NearTies()
        self._processors = logits_processor
        self._criteria = stopping_criteria
        self._do_sample = generation_config.do_sample
        self.streamer = streamer
        self._draw = draw or _draw

    @property
    def root(self) -> Tensor:
        """The newest token, of shape `(1,)`."""
        return self.input_ids[0, -1:]

    @property
    def tokens_left(self) -> int:
        """Tokens until `max_length`."""
        return self.max_length - self.input_ids.shape[1]

    @property
    def new_tokens(self) -> int:
        """Tokens that were emitted."""
        return self.input_ids.shape[1] - self.prompt_length

    @property
    def is_argmax(self) -> bool:
        """Whether a token is the argmax of the target's logits, whatever came before it."""
        return not self._do_sample and not self._processors and self.scores is None and self.logits is None

    def choose(self, logits: Tensor) -> Tensor:
        """
        Chooses the next token.

        Args:
            logits (`torch.Tensor` of shape `(1, vocab_size)`): the target's logits after the sequence.

        Returns:
            `torch.LongTensor` of shape `(1,)`.
        """
        scores = self.process(logits)
        if self._do_sample:
            return self._draw(scores.softmax(dim=-1))
        self.near_ties.observe(logits, scores)
        return scores.argmax(dim=-1)

    def process(self, logits: Tensor) -> Tensor:
        """The scores that the next token is chosen by, in float32, of the shape of `logits`; see `choose`."""
        raw = logits.to(device=self.input_ids.device, dtype=torch.float32, copy=True)
        scores = self._processors(self.input_ids, raw)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (raw,)
        return scores

    def emit(self, token: Tensor) -> None:
        """Appends a token of shape `(1,)`, streams it, and asks the stopping criteria."""
        self.input_ids = torch.cat((self.input_ids, token[None].to(self.input_ids.device)), dim=1)
        if self.streamer is not None:
            self.streamer.put(token.cpu())
        self.finished = bool(self._criteria(self.input_ids, self.scores).all())


def _draw(probs: Tensor) -> Tensor:
    return torch.multinomial(probs, num_samples=1).squeeze(1)


def verify(tree: DraftTree, logits: Tensor, sequence: TokenSequence) -> tuple[Tensor, int]:
    """
    Walks down the tree for as long as the target agrees, emitting every token it chooses.

    Args:
        tree ([`DraftTree`]): the tree of the round.
        logits (`torch.Tensor` of shape `(nodes, vocab_size)`): the target's logits after each node.
        sequence ([`TokenSequence`]): the sequence, whose newest token is the root; grows by what is emitted.

    Returns:
        The nodes whose tokens belong in the target's cache, the root first (`torch.LongTensor`): as many as tokens
        were emitted, for the last emitted token has not been run. And how many emitted tokens were drafted.
    """
    if sequence.is_argmax:
        accepted_path, tokens = greedy_path(tree, logits)
        emitted = 0
        for token in tokens.split(1):
            sequence.emit(token)
            emitted += 1
            if sequence.finished:
                break
        sequence.near_ties.observe(logits[accepted_path[:emitted]])
        return accepted_path[:emitted], min(emitted, accepted_path.shape[0] - 1)
    return walk(tree, sequence, lambda node, children: sequence.choose(logits[node][None]))


def walk(tree: DraftTree, sequence: TokenSequence, choose: Callable[[int, list[int]], Tensor]) -> tuple[Tensor, int]:
    """
    Walks down a tree node by node: the host does, as processors and criteria may read the whole prefix at every step.

    Args:
        tree, sequence: see [`verify`].
        choose (`Callable`): gives the next token, of shape `(1,)`, after a node with these children.

    Returns:
        See [`verify`].
    """
    parents, drafted = tree.parents.tolist(), tree.token_ids.tolist()
    path, node, accepted = [0], 0, 0
    while True:
        children = [i for i in range(node + 1, len(parents)) if parents[i] == node]
        token = choose(node, children)
        sequence.emit(token)
        chosen = int(token)
        child = next((i for i in children if drafted[i] == chosen), None)
        accepted += child is not None
        if child is None or sequence.finished:
            return torch.tensor(path, device=tree.token_ids.device), accepted
        path.append(child)
        node = child


def greedy_path(tree: DraftTree, logits: Tensor) -> tuple[Tensor, Tensor]:
    """
    The longest path that greedy decoding takes, without a loop: a match flag for each node, and all ancestors' flags.

    Returns:
        The path's nodes, the root first, of shape `(accepted + 1,)`, and the tokens to emit, of the same shape: the
        accepted ones and the target's own next one.
    """
    # The first of equal maxima, like `argmax`, which takes several times as long on a CPU.
    choices = logits.max(dim=-1).indices
    matches = tree.token_ids == choices[tree.parents]
    matches[0] = True
    accepted = (matches | ~tree.visible).all(dim=1)
    # Siblings differ in their token, so accepted nodes are one path, in order of depth.
    path = accepted.nonzero()[:, 0]
    return path, choices[path]
