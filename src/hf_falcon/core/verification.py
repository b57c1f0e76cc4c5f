# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Verification: plain decoding replayed over the scored tree.

Every emitted token is chosen from the target's logits at its true prefix, by the same processors and, when sampling,
by one multinomial draw in the same order as in plain decoding. So the output is plain decoding's, and under the same
seed the same sample, up to the rounding of the target's own logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, generation
from transformers.generation.streamers import BaseStreamer

from .interfaces import part
from .tree import DraftTree, to_device, to_host

# Verifies the tree of a row; see [`verify`].
Verification = Callable[[DraftTree, Tensor, "TokenSequence"], tuple[Tensor, int]]

# Criteria that read token ids alone, and so are asked on the host; by exact type, as a subclass may differ.
_HOST_CRITERIA = {generation.MaxLengthCriteria, generation.MaxTimeCriteria, generation.StopStringCriteria}


class TokenSequence:
    """
    The sequence of one `generate` call: chooses tokens as plain decoding does, and ends where it ends.

    The tokens are on the host, where most stopping criteria are asked. They are copied to the target's device when
    something reads them there.

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
        # All tokens, of shape `(1, length)`, on the host.
        self.token_ids = input_ids.cpu()
        self._input_ids = input_ids
        self.finished = False
        self.prompt_length = input_ids.shape[1]
        self.max_length: int = generation_config.max_length
        returns_dict = generation_config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if returns_dict and generation_config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if returns_dict and generation_config.output_logits else None
        # Only a call that returns statistics pays for them.
        self.near_ties = part("near_ties")() if returns_dict and part("near_ties") else None
        self.processors = logits_processor
        # Most calls ask for EOS at every token, and the token is on the host.
        eos = [each for each in stopping_criteria if type(each) is generation.EosTokenCriteria]
        self.eos_token_ids = {token for each in eos for token in each.eos_token_id.reshape(-1).tolist()}
        self._criteria = [each for each in stopping_criteria if each not in eos]
        self._time_limits = [each for each in self._criteria if type(each) is generation.MaxTimeCriteria]
        self._do_sample = generation_config.do_sample
        self.streamer = streamer
        self._draw = draw or _draw

    @property
    def input_ids(self) -> Tensor:
        """All tokens, of shape `(1, length)`, on the target's device."""
        known = self._input_ids.shape[1]
        if known < self.token_ids.shape[1]:
            new = to_device(self.token_ids[:, known:], self._input_ids.device)
            self._input_ids = torch.cat((self._input_ids, new), dim=1)
        return self._input_ids

    @property
    def root(self) -> Tensor:
        """The newest token, of shape `(1,)`, on the host."""
        return self.token_ids[0, -1:]

    @property
    def tokens_left(self) -> int:
        """Tokens until `max_length`."""
        return self.max_length - self.token_ids.shape[1]

    @property
    def new_tokens(self) -> int:
        """Tokens that were emitted."""
        return self.token_ids.shape[1] - self.prompt_length

    def is_late(self) -> bool:
        """Whether the call's `max_time` is over: the next token is the last."""
        return any(bool(limit(self.token_ids, self.scores).all()) for limit in self._time_limits)

    @property
    def is_argmax(self) -> bool:
        """Whether a token is the argmax of the target's logits, whatever came before it."""
        return not self._do_sample and not self.processors and self.scores is None and self.logits is None

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
        if self.near_ties is not None:
            self.near_ties.observe(logits, scores)
        return scores.argmax(dim=-1)

    def process(self, logits: Tensor) -> Tensor:
        """The scores that the next token is chosen by, in float32, of the shape of `logits`; see `choose`."""
        raw = logits.to(device=self._input_ids.device, dtype=torch.float32, copy=True)
        scores = self.processors(self.input_ids, raw)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (raw,)
        return scores

    def emit(self, token: int) -> None:
        """
        Appends a token, asks the stopping criteria, and streams it, in the order of plain decoding.

        Raises:
            `RuntimeError`: as `torch.multinomial`, for the token -1: no token can be drawn from the probabilities.
        """
        if token < 0:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        self.token_ids = torch.cat((self.token_ids, torch.tensor([[token]], device="cpu")), dim=1)
        self.finished = token in self.eos_token_ids
        for criterion in self._criteria:
            ids = self.token_ids if type(criterion) in _HOST_CRITERIA else self.input_ids
            answer = criterion(ids, self.scores)
            self.finished |= bool(answer.all() if isinstance(answer, Tensor) else answer)
        if self.streamer is not None:
            # A criterion may read what the streamer has got.
            self.streamer.put(self.token_ids[0, -1:])


def _draw(probs: Tensor) -> Tensor:
    return torch.multinomial(probs, num_samples=1).squeeze(1)


def verify_rows(
    trees: Sequence[DraftTree], logits: Tensor, sequences: Sequence[TokenSequence], verify_row: Verification
) -> list[tuple[Tensor, int]]:
    """
    Verifies the trees of a round.

    Args:
        trees (sequence of [`DraftTree`]): the tree of each row.
        logits (`torch.Tensor` of shape `(rows, nodes, vocab_size)`): the target's logits after each node.
        sequences (sequence of [`TokenSequence`]): the rows. They grow by what is emitted, unless they have ended.
        verify_row (`Callable`): verifies the tree of a row; see [`verify`].

    Returns:
        For each row what [`verify`] returns; no nodes for a row that had ended.
    """
    choices: Tensor | None = None
    if all(sequence.is_argmax for sequence in sequences):
        # The first of equal maxima, like `argmax`, which takes several times as long on a CPU.
        [choices] = to_host(logits.max(dim=-1).indices)
    outcomes = []
    for row, (tree, sequence) in enumerate(zip(trees, sequences)):
        if sequence.finished:
            outcomes.append((tree.parents[:0], 0))
        elif choices is None:
            outcomes.append(verify_row(tree, logits[row, : len(tree)], sequence))
        else:
            path, accepted = verify_greedy(tree, choices[row, : len(tree)], sequence)
            if sequence.near_ties is not None:
                sequence.near_ties.observe(logits[row, to_device(path, logits.device)])
            outcomes.append((path, accepted))
    return outcomes


def verify(tree: DraftTree, logits: Tensor, sequence: TokenSequence) -> tuple[Tensor, int]:
    """
    Walks down the tree for as long as the target agrees, emitting every token it chooses.

    Args:
        tree ([`DraftTree`]): the tree of the round.
        logits (`torch.Tensor` of shape `(nodes, vocab_size)`): the target's logits after each node.
        sequence ([`TokenSequence`]): the sequence, whose newest token is the root; grows by what is emitted.

    Returns:
        The nodes whose tokens belong in the target's cache, the root first (`torch.LongTensor`): as many as tokens
        were emitted, as the last emitted token has not been run. They are on the host. And how many emitted tokens
        were draft tokens.
    """
    return walk(tree, sequence, lambda node, children: sequence.choose(logits[node][None]))


def verify_greedy(tree: DraftTree, choices: Tensor, sequence: TokenSequence) -> tuple[Tensor, int]:
    """
    Emits the longest path that greedy decoding takes, without a loop over the nodes.

    Args:
        tree, sequence: see [`verify`].
        choices (`torch.LongTensor` of shape `(nodes,)`): the target's next token after each node, on the host.

    Returns:
        See [`verify`].
    """
    path, tokens, emitted = tree.parents, choices, 0
    if len(tree) > 1:
        matches = tree.token_ids == choices[tree.parents]
        matches[0] = True
        # Siblings differ in their token, so nodes that match with all their ancestors are one path, in order of depth.
        path = (matches | ~tree.visible).all(dim=1).nonzero()[:, 0]
        tokens = choices[path]
    for token in tokens.tolist():
        sequence.emit(token)
        emitted += 1
        if sequence.finished:
            break
    return path[:emitted], min(emitted, path.shape[0] - 1)


def walk(tree: DraftTree, sequence: TokenSequence, choose: Callable[[int, list[int]], Tensor]) -> tuple[Tensor, int]:
    """
    Walks down a tree node by node, on the host: processors and criteria may read the whole prefix at every step.

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
        chosen = int(choose(node, children))
        sequence.emit(chosen)
        child = next((i for i in children if drafted[i] == chosen), None)
        accepted += child is not None
        if child is None or sequence.finished:
            return torch.tensor(path, device="cpu"), accepted
        path.append(child)
        node = child


class Batch:
    """
    The sequences of one `generate` call: here a single one. [`~batches.RowsBatch`] has several.

    Args:
        input_ids (`torch.LongTensor` of shape `(rows, length)`): the prompts, of one length by padding.
        logits_processor ([`LogitsProcessorList`]): processors and warpers of the call.
        stopping_criteria ([`StoppingCriteriaList`]): when rows end.
        generation_config ([`GenerationConfig`]): configuration of the call.
        streamer ([`BaseStreamer`], *optional*): gets the tokens.
    """

    # The token behind rows that have ended.
    padding: int | None = None

    def __init__(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
    ):
        self.prompts, self._streamer = input_ids, streamer
        self.rows = self._make_rows(logits_processor, stopping_criteria, generation_config)

    def _make_rows(
        self,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
    ) -> list[TokenSequence]:
        call = logits_processor, stopping_criteria, generation_config
        return [TokenSequence(self.prompts, *call, self._streamer)]

    @property
    def input_ids(self) -> Tensor:
        """See `token_ids`; on the target's device."""
        return to_device(self.token_ids, self.prompts.device)

    @property
    def token_ids(self) -> Tensor:
        """All rows, of shape `(rows, length)`, with padding behind those that ended early; on the host."""
        return self.rows[0].token_ids

    @property
    def new_tokens(self) -> int:
        """Tokens that were emitted, without padding."""
        return sum(row.new_tokens for row in self.rows)

    def tokens_left(self, sequence: TokenSequence) -> int:
        """Tokens that a row may emit now."""
        return sequence.tokens_left

    def stream(self) -> None:
        """Streams what was emitted since the last call. A single row streams each token by itself."""
