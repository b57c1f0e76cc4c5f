# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The candidate generator: the drafter and prompt lookup propose the tree of a round."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from .acceleration import drafter_acceleration
from .caches import DraftCache
from .costs import Stopwatch
from .draft_options import DraftOptions
from .modeling_falcon_draft import FalconDraftNetwork, LSTMState, additive_mask
from .policy import AcceptanceStats, DraftPolicy, LookupMatch, LookupPath, RoundTime
from .target_parts import FeatureTap, TargetHead
from .tree import DraftTree, DynamicRound, DynamicTree, StaticRound, StaticTree, static_paths
from .verification import TokenSequence, verify

# Lengths of the ends of the context that are looked up, the longest first: a longer match is likelier to go on.
_LENGTHS = (8, 5, 4, 3, 2)

# A match is not followed back further than this.
_LONGEST_MATCH = 32

# Newest positions of a prompt that the drafter reads: with these the shipped one accepts as much as with all of 1,000.
_PROMPT_ROWS = 128

# Rows of one drafter forward. Masks are rows * context, so what a long pause left costs no quadratic memory.
_PREFILL_ROWS = 512

# Positions that a round adds, or little more.
_ROWS_OF_A_ROUND = 16


class PromptLookup:
    """Where each short run of tokens was last seen in a context that grows. A token costs the same at any length."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # The place behind the last occurrence of every run.
        self._places: dict[tuple[int, ...], int] = {}
        # The place behind the longest run that ends the context and that it had before.
        self._place: int | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Takes the context's next tokens."""
        for token in token_ids:
            self._tokens.append(token)
            end, self._place = len(self._tokens), None
            for length in _LENGTHS:
                if length <= end:
                    run = tuple(self._tokens[end - length :])
                    if self._place is None:
                        self._place = self._places.get(run)
                    self._places[run] = end

    def continuation(self, limit: int) -> LookupMatch:
        """What followed where the context was like its end before: `limit` tokens at most."""
        place, end = self._place, len(self._tokens)
        if place is None or limit < 1:
            return LookupMatch([], 0)
        matched = 0
        while (
            matched < min(place, _LONGEST_MATCH)
            and self._tokens[place - 1 - matched] == self._tokens[end - 1 - matched]
        ):
            matched += 1
        # A text that repeats itself goes on repeating: behind its end the continuation is read from its own beginning.
        return LookupMatch([self._tokens[place + offset % (end - place)] for offset in range(limit)], matched)


class DraftedBlocks(NamedTuple):
    """
    The blocks that a pass continues: the block of the pass before that each runs through (`(width,)`), its tokens
    there (`(width, block_size)`) and the features that led to them (`(width, block_size, hidden_size)`).
    """

    blocks: Tensor
    token_ids: Tensor
    features: Tensor


class FalconCandidateGenerator(CandidateGenerator):
    """
    Proposes the tree of a round with a [`FalconDraftModel`].

    The decoding loop calls `propose` and `commit`. Stock assisted decoding calls `get_candidates`, and gets the
    tree's most probable path; for that the generator must be used as a context manager, to see the target's features.

    Its state (what is committed, the drafter's cache, the LSTM state) lives as long as one `generate` call.

    Args:
        drafter ([`FalconDraftModel`]): the drafter.
        target ([`PreTrainedModel`]): the target it drafts for.
        options ([`DraftOptions`], *optional*): defaults to those of `drafter.generation_config`.
        head ([`TargetHead`], *optional*): the head that another generator of these two has borrowed.
    """

    def __init__(
        self,
        drafter: FalconDraftNetwork,
        target: PreTrainedModel,
        options: DraftOptions | None = None,
        head: TargetHead | None = None,
    ):
        self.drafter = drafter
        self.target = target
        self._acceleration = drafter_acceleration(drafter, target)
        self.head = head or self._acceleration.head or TargetHead(drafter, target)
        self.options = options or DraftOptions.from_generation_config(drafter.generation_config)
        self._block_size = drafter.config.block_size
        self._device = drafter.device
        self._tree = self._build_tree()
        self._cache = DraftCache(drafter.config.num_hidden_layers)
        self._lstm_state: LSTMState | None = None
        # Fused inputs of the last committed positions: a new cut into blocks runs up to k - 1 of them again.
        self._tail: Tensor | None = None
        self._block_features: Tensor | None = None
        self._first_position = 0
        self._committed = 0
        self._tap = FeatureTap(target, drafter.config.feature_layers)
        # Draft passes of the last round after its first block, which comes with the commit.
        self.passes = 0

    def __enter__(self) -> FalconCandidateGenerator:
        self._tap.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._tap.__exit__(*exception)

    @property
    def max_depth(self) -> int:
        """Tokens that the deepest path of a tree can have."""
        return self._tree.max_depth

    def commit(
        self, features: Tensor, next_token_ids: Tensor, first_position: int = 0, prompt_embeds: Tensor | None = None
    ) -> None:
        """
        Takes new true features with the tokens one step ahead, and drafts the next block from them. Of a prompt only
        the end is read.

        Args:
            features (`torch.Tensor` of shape `(1, new, ...)`): see [`FalconDraftModel.forward`]; of the new positions.
            next_token_ids (`torch.LongTensor` of shape `(1, new)`): the token after each of these positions.
            first_position (`int`, *optional*, defaults to 0):
                Position of the first feature of all; counts in the first call only.
            prompt_embeds (`torch.Tensor` of shape `(1, length, hidden_size)`, *optional*):
                The prompt's embeddings, where it has no tokens: `next_token_ids` then are fewer, those at the end.
        """
        if self._committed == 0:
            features, unread = features[:, -_PROMPT_ROWS:], max(0, features.shape[1] - _PROMPT_ROWS)
            next_token_ids = next_token_ids[:, -_PROMPT_ROWS:]
            self._first_position = first_position + unread
        features, next_embeds = features.to(self._device), self.head.embed(next_token_ids.to(self._device))
        new, size = features.shape[1], self._block_size
        if prompt_embeds is not None and (missing := new - next_embeds.shape[1]) > 0:
            next_embeds = torch.cat((prompt_embeds[:, -missing:].to(next_embeds), next_embeds), dim=1)
        fused, self._lstm_state = self.drafter.fuse(features, next_embeds, self._lstm_state)
        rows = fused if self._tail is None else torch.cat((self._tail, fused), dim=1)
        # The last known position must end a block. Whole blocks are cut from the right; the first may be short only
        # where the context begins.
        needed = min(math.ceil(new / size) * size, rows.shape[1])
        rows = rows[:, -needed:]
        self._committed += new
        self._cache.length = self._committed - needed
        # Chunks of whole blocks, cut from the right like the blocks.
        chunk = max(1, _PREFILL_ROWS // size) * size
        edges = [0, *range(needed % chunk or min(chunk, needed), needed + 1, chunk)]
        for start, end in itertools.pairwise(edges):
            predicted = self._run_committed(rows[:, start:end])
        self._tail = rows[:, -(size - 1) :] if size > 1 else rows[:, :0]
        self._block_features = predicted[:, -size:] if self._committed >= size else None

    def propose(
        self,
        root: Tensor,
        max_depth: int,
        pace: DraftPolicy | None = None,
        guess: LookupPath | None = None,
        drafts: bool = True,
    ) -> DraftTree:
        """
        Drafts the tree of a round.

        Args:
            root, max_depth, guess, drafts: see [`FalconCandidateGenerator.draft`].
            pace ([`DraftPolicy`], *optional*): says how much is drafted; the options do if left out.

        Returns:
            [`DraftTree`]: of the root alone where nothing can be drafted.
        """
        pace = pace or DraftPolicy(self.options, AcceptanceStats(), self._device)
        return self.draft(root, max_depth, pace, guess, drafts).finish(root.to(self._device), pace.size)

    def draft(
        self, root: Tensor, max_depth: int, pace: DraftPolicy, guess: LookupPath | None = None, drafts: bool = True
    ) -> StaticRound | DynamicRound:
        """
        Drafts for a round.

        Args:
            root (`torch.LongTensor` of shape `(1,)`): the newest token, which the target chose.
            max_depth (`int`): tokens that a path may have at most.
            pace ([`DraftPolicy`]): says how much is drafted.
            guess ([`LookupPath`], *optional*): a path of at most `max_depth` tokens that a dynamic tree takes in.
            drafts (`bool`, *optional*, defaults to `True`): `False` has the round hold the guess alone.

        Returns:
            The round, whose tree is still to be cut to a size.
        """
        root = root.to(self._device)
        tree_round = self._tree.start(max_depth)
        self.passes = 0
        if drafts and self._block_features is not None and max_depth > 0:
            with self._acceleration.drafting(self.head):
                self._draft(tree_round, self._grow(tree_round, self._block_features, root, 0, pace), pace)
        if guess is not None and isinstance(tree_round, DynamicRound):
            tree_round.add_path(*guess)
        return tree_round

    def _draft(self, tree_round: StaticRound | DynamicRound, drafted: DraftedBlocks | None, pace: DraftPolicy) -> None:
        """Runs draft passes for as long as they pay, from the blocks on that come after the committed positions."""
        size, base = self._block_size, self._committed
        states = self._lstm_state
        # Which drafted blocks each block of the last pass sees: those of its ancestors, in drafting order.
        lineage = torch.zeros(1, 0, dtype=torch.bool, device=self._device)
        self._cache.length = base
        depth = 0
        while drafted is not None:
            if states is not None:
                states = (states[0][:, drafted.blocks], states[1][:, drafted.blocks])
            fused, states = self.drafter.fuse(drafted.features, self.head.embed(drafted.token_ids), states)
            width = drafted.blocks.shape[0]
            itself = torch.eye(width, dtype=torch.bool, device=self._device)
            lineage = torch.cat((lineage[drafted.blocks], itself), dim=1)
            inside = lineage.repeat_interleave(size, 0).repeat_interleave(size, 1)
            before = torch.ones(width * size, base, dtype=torch.bool, device=self._device)
            positions = self._first_position + base + depth + torch.arange(size, device=self._device)
            ends = torch.arange(width * size, device=self._device) // size * size + size - 1
            predicted = self._run_layers(
                fused.reshape(1, width * size, -1),
                ends[None],
                positions.repeat(width)[None],
                additive_mask(torch.cat((before, inside), dim=1), fused.dtype)[None, None],
            ).view(width, size, -1)
            self._cache.advance(width * size)
            depth += size
            self.passes += 1
            drafted = self._grow(tree_round, predicted, drafted.token_ids[:, -1], depth, pace)

    def verify(self, tree: DraftTree, logits: Tensor, sequence: TokenSequence) -> tuple[Tensor, int]:
        """See [`verification.verify`]."""
        return verify(tree, logits, sequence)

    def get_candidates(self, input_ids: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        """
        The stock protocol: the prompt followed by the tree's most probable path.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): the accepted tokens so far.
            args, kwargs: what else transformers passes; not used.

        Returns:
            `torch.LongTensor` of shape `(1, length + drafted)`, and `None`: without draft logits transformers accepts
            a candidate when the target chooses the same token, which is lossless.
        """
        if self._tap.is_empty:
            return input_ids, None
        features, length = self._tap.take(), input_ids.shape[1]
        # The newest token has no feature yet. Of what the last forward scored, the accepted positions come first.
        known = length - 1
        new = known - self._first_position - self._committed if self._committed else features.shape[1]
        self.commit(features[:, :new], input_ids[:, length - new :], first_position=known - new)
        tree = self.propose(input_ids[0, -1:], self.max_depth)
        leaf = tree.depths.argmax()
        chain = tree.token_ids[tree.visible[leaf]][1:]
        return torch.cat((input_ids, chain[None].to(input_ids.device)), dim=1), None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """See [`~transformers.generation.candidate_generator.CandidateGenerator`]; nothing is adapted."""

    def _run_layers(self, fused: Tensor, ends: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        """See [`FalconDraftNetwork.run_layers`]; of this sequence."""
        with self._acceleration.drafting(self.head):
            return self._acceleration.run_layers(self.drafter, fused, ends, position_ids, mask, self._cache)

    def _build_tree(self) -> StaticTree | DynamicTree:
        options = self.options
        nodes, depth = options.num_assistant_tokens, options.num_draft_passes * self._block_size
        children = min(options.draft_top_k, nodes, self.head.draft_vocab_size)
        if options.draft_tree == "dynamic":
            return DynamicTree(nodes, depth, children, options.draft_width)
        if isinstance(options.draft_tree, str):
            return StaticTree(static_paths(nodes, depth, children), self._device)
        tree = StaticTree(options.draft_tree, self._device)
        if tree.max_children > self.head.draft_vocab_size:
            raise ValueError(
                f"`draft_tree` has child rank {tree.max_children - 1}, but the drafter knows "
                f"{self.head.draft_vocab_size} tokens: use ranks below that."
            )
        return tree

    def _run_committed(self, rows: Tensor) -> Tensor:
        """Runs committed positions through the decoder layers, in blocks cut from the right, and keeps their rows."""
        count, size, start = rows.shape[1], self._block_size, self._cache.length
        places = torch.arange(count, device=self._device)
        blocks = (places - count) // size
        before = torch.ones(count, start, dtype=torch.bool, device=self._device)
        visible = torch.cat((before, blocks[:, None] >= blocks[None]), dim=1)
        ends = count - 1 + (blocks + 1) * size
        predicted = self._run_layers(
            rows,
            ends[None],
            (self._first_position + start + places)[None],
            additive_mask(visible, rows.dtype)[None, None],
        )
        self._cache.advance(count)
        return predicted

    def _grow(
        self, tree_round: StaticRound | DynamicRound, predicted: Tensor, newest: Tensor, depth: int, pace: DraftPolicy
    ) -> DraftedBlocks | None:
        """
        Grows the tree by the levels of one pass.

        Args:
            predicted (`torch.Tensor` of shape `(blocks, block_size, hidden_size)`): what the pass predicted.
            newest (`torch.LongTensor` of shape `(blocks,)`): the token before the first one of each block.
            depth (`int`): its depth.
            pace ([`DraftPolicy`]): says whether there is to be a next pass.

        Returns:
            The blocks that the next pass continues, or `None` where there is to be no next pass.
        """
        conditional = self.drafter.conditioning is not None
        marginals = None if conditional else self._candidates(predicted)
        blocks = torch.arange(predicted.shape[0], device=self._device)
        tokens, features = newest[:, None], predicted[:, :0]
        for offset in range(self._block_size):
            here = predicted[blocks, offset]
            if marginals is None:
                here = self.drafter.condition(here, self.head.embed(tokens[:, -1]))
                log_probs, token_ids, *proposals = self._candidates(here)
            else:
                log_probs, token_ids, *proposals = (each[blocks, offset] for each in marginals)
            tree_round.add(log_probs + pace.correction(depth + offset + 1), token_ids, *proposals)
            branches = tree_round.branches()
            ends_block = offset == self._block_size - 1
            if branches is None or (ends_block and not pace.another_pass(branches, tree_round.best())):
                return None
            blocks = blocks[branches.rows]
            tokens = torch.cat((tokens[branches.rows], branches.token_ids[:, None]), dim=1)
            features = torch.cat((features, here[:, None]), dim=1)[branches.rows]
        return DraftedBlocks(blocks, tokens[:, 1:], features)

    def _candidates(self, features: Tensor) -> tuple[Tensor, ...]:
        """Most probable tokens for features of shape `(..., hidden_size)`: `(..., max_children)`, best first."""
        log_probs = self.head.logits(features).float().log_softmax(dim=-1)
        # A drafter that overflows must not break the order that the tree is cut by.
        best = log_probs.nan_to_num(nan=-torch.inf).topk(self._tree.max_children, dim=-1)
        return best.values, self.head.to_target_ids(best.indices)


class Drafting:
    """
    The drafting of one sequence.

    Args:
        generator ([`FalconCandidateGenerator`]): the sequence's own.
        sequence ([`TokenSequence`]): the sequence, prompt and first new token.
        features (`torch.Tensor` of shape `(1, positions, ...)`):
            The target's features of the last `positions` tokens but that new one.
        first_position (`int`): position of the first of them.
        pace ([`DraftPolicy`]): says how much is drafted.
        padding (`int`, *optional*, defaults to 0): tokens at the start of the sequence that are no text.
        prompt_embeds (`torch.Tensor`, *optional*): see [`FalconCandidateGenerator.commit`].
    """

    def __init__(
        self,
        generator: FalconCandidateGenerator,
        sequence: TokenSequence,
        features: Tensor,
        first_position: int,
        pace: DraftPolicy,
        padding: int = 0,
        prompt_embeds: Tensor | None = None,
    ):
        self.generator = generator
        self.sequence = sequence
        self.pace = pace
        self._first_position = first_position
        self._padding = padding
        self._prompt_embeds = prompt_embeds
        self._index = PromptLookup()
        options = generator.options
        self._lookup = options.prompt_lookup_num_tokens if options.draft_tree == "dynamic" else 0
        # Features of the newest positions but one that the drafter has not seen; each goes with the token one step
        # ahead.
        self._unseen = [features]
        self._time = RoundTime()

    def propose(self, limit: int) -> DraftTree:
        """Drafts the tree of a round; see [`Drafting.draft`]."""
        return self.draft(limit).finish(self.root, self.pace.size)

    @property
    def root(self) -> Tensor:
        """The newest token, where the drafter is."""
        return self.sequence.root.to(self.generator.drafter.device)

    def draft(self, limit: int, share: int = 1) -> StaticRound | DynamicRound:
        """
        Drafts for a round, whose tree is still to be cut to a size.

        Args:
            limit (`int`): tokens that a path may have at most.
            share (`int`, *optional*, defaults to 1): sequences that draft one after the other in this round.
        """
        ids, generator, pace = self.sequence.input_ids, self.generator, self.pace
        if self._lookup:
            self._index.extend(ids[0, self._padding + len(self._index) :].tolist())
        guess = pace.guess(self._index.continuation(min(self._lookup, limit)))
        drafts, watch, self._time = limit > 0 and pace.drafts(guess), Stopwatch(), RoundTime()
        if drafts:
            new = sum(each.shape[1] for each in self._unseen)
            unseen = torch.cat(self._unseen, dim=1)
            generator.commit(unseen, ids[:, -new:], self._first_position, self._prompt_embeds)
            self._unseen = []
            seconds = watch.lap() * share
            # Many positions at once, the prompt or what a pause left, are no round's share.
            self._time.commit = seconds if new <= _ROWS_OF_A_ROUND else None
        tree_round = generator.draft(self.root, limit, pace, guess, drafts)
        self._time.drafting, self._time.passes = watch.lap() * share, generator.passes if drafts else None
        return tree_round

    def learn(
        self, tree: DraftTree, path: Tensor, accepted: int, features: Tensor, seconds: float, nodes: int | None = None
    ) -> None:
        """
        Takes what became of a tree.

        Args:
            tree ([`DraftTree`]): the tree.
            path (`torch.LongTensor` of shape `(emitted,)`): its nodes that were right, the root first.
            accepted (`int`): how many emitted tokens it had.
            features (`torch.Tensor` of shape `(1, emitted, ...)`): features of these nodes.
            seconds (`float`): what the target took.
            nodes (`int`, *optional*): nodes that it ran for the sequence; those of the tree if left out.
        """
        self._unseen.append(features)
        emitted = self.sequence.input_ids[0, self.sequence.input_ids.shape[1] - path.shape[0] :].tolist()
        self._time.target, self._time.nodes = seconds, nodes or len(tree)
        self.pace.observe(tree, path, emitted, accepted, self._time)
