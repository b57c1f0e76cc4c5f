# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The candidate generator: the drafter and prompt lookup propose the tree of a round. The drafter's logits prefer what
the sequence repeats.

`draft` commits the positions that were accepted since the last round, asks the policy for one decision, and runs its
draft passes. `complete` adds what was looked up, `update` takes the outcome. interfaces.py says what a drafter has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from .costs import Stopwatch
from .draft_options import DraftOptions
from .draft_session import ROWS_OF_A_ROUND
from .interfaces import DraftedBlocks, Drafter, DraftHead, drafter_acceleration, needed_part, part
from .policy import AcceptanceStats, DraftDecision, DraftPolicy, PassCheck, PlainPolicy, RoundOutcome, RoundTime
from .target_parts import FeatureTap
from .tree import Branches, DraftTree, DynamicRound, DynamicTree, collect, to_device

# Tokens of a sequence that repetitions are looked for in, and tokens that a draft vocabulary is extended by, at most.
_CONTEXT_TOKENS, _EXTRA_TOKENS = 4096, 1024
# Positions whose features wait for the drafter, at most, while nothing is drafted.
_MOST_UNCOMMITTED = 1024


class ContextHead:
    """
    A drafter's head for one sequence. It prefers tokens that the sequence repeats, as a cache language model does
    (arXiv 1612.04426): a token that occurred earlier gets a bonus on its logit, by the number of tokens before it that
    are the latest tokens here, too. It also scores the sequence's tokens that the draft vocabulary lacks.

    Args:
        head ([`DraftHead`]): the drafter's head.
        bonuses (sequence of `float`):
            Bonus number n is for a token that followed the latest n tokens; the last one also for more tokens. Without
            any, the logits are the head's, and the vocabulary is the draft vocabulary.
        vocab_size (`int`): tokens of the target's vocabulary.
        device (`torch.device`): the drafter's device.
        latest (`int`, *optional*, defaults to 1): the least number of latest tokens that [`ContextHead.latest`] gives.
    """

    def __init__(
        self, head: DraftHead, bonuses: Sequence[float], vocab_size: int, device: torch.device, latest: int = 1
    ):
        self._head, self._device = head, device
        order = max(latest, len(bonuses) - 1)
        # For each number of equal tokens, up to `order`.
        self._bonuses: Tensor | None = None
        # The latest tokens, the newest first; -1 before the first.
        self._latest = torch.full((order,), -1, device="cpu")
        self._length = 0
        # Of each earlier token: the tokens before it, the newest first, and its column in the logits.
        self._before = torch.empty(0, order, dtype=torch.long, device=device)
        self._columns = torch.empty(0, dtype=torch.long, device=device)
        # The column of each token of the target's vocabulary, or -1; on the host.
        self._column_of = torch.empty(0, device="cpu")
        self._vocab_ids = head.vocab_ids
        if bonuses:
            last = [bonuses[-1]] * (order + 1 - len(bonuses))
            self._bonuses = to_device(torch.tensor([*bonuses, *last], dtype=torch.float32, device="cpu"), device)
            self._column_of = torch.full((vocab_size,), -1, device="cpu")
            # A target's head can leave out tokens that are only read.
            most = min(vocab_size, head.draft_vocab_size)
            known = torch.arange(most, device="cpu") if self._vocab_ids is None else self._vocab_ids.cpu()
            self._column_of[known] = torch.arange(known.shape[0], device="cpu")
        # Tokens that the draft vocabulary lacks, and a head for them.
        self._extra = torch.empty(0, dtype=torch.long, device="cpu")
        self._extra_head: DraftHead | None = None

    def __len__(self) -> int:
        """Tokens of the sequence so far."""
        return self._length

    @property
    def has_bonuses(self) -> bool:
        """Whether there are any."""
        return self._bonuses is not None

    @property
    def vocab_ids(self) -> Tensor | None:
        """As [`DraftHead`]: the ids of the tokens that it scores now."""
        return self._vocab_ids

    def extend(self, token_ids: Tensor) -> None:
        """Adds the sequence's next tokens, of shape `(tokens,)`, on the host."""
        self._length += token_ids.shape[0]
        order = self._latest.shape[0]
        tokens = torch.cat((token_ids.flip(0), self._latest))
        # A copy: a view would keep all of a prompt.
        self._latest = tokens[:order].clone()
        if self._bonuses is None or token_ids.shape[0] == 0:
            return
        self._extend_vocabulary(token_ids)
        # Of the new tokens, the newest first.
        columns, before = self._column_of[token_ids.flip(0)], tokens.unfold(0, order, 1)[1:]
        is_scored = columns >= 0
        self._columns = self._with_new(columns[is_scored], self._columns)
        self._before = self._with_new(before[is_scored], self._before)

    def latest(self) -> Tensor:
        """The latest tokens, the newest first, of shape `(1, tokens)` and on the drafter's device."""
        return to_device(self._latest[None], self._device)

    def logits(self, states: Tensor) -> Tensor:
        """Logits in float32 of the tokens in `vocab_ids`, without bonuses; `states` as in [`DraftHead.logits`]."""
        logits = self._head.logits(states).float()
        if self._extra_head is None:
            return logits
        return torch.cat((logits, self._extra_head.logits(states).float()), dim=-1)

    def prefer_repetitions(self, logits: Tensor, latest: Tensor) -> Tensor:
        """
        Adds the bonuses.

        Args:
            logits (`torch.Tensor` of shape `(branches, vocabulary)`): see `logits`.
            latest (`torch.LongTensor` of shape `(branches, tokens)`): the latest tokens of each branch; see `latest`.

        Returns:
            `torch.Tensor` of the shape of `logits`.
        """
        if self._bonuses is None:
            return logits
        matched = (self._before == latest[:, None]).cumprod(-1).sum(-1)
        columns = self._columns.expand_as(matched)
        # Of a token's places, the one with the most matched tokens counts.
        return logits.scatter_reduce(1, columns, logits.gather(1, columns) + self._bonuses[matched], "amax")

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """As [`DraftHead.to_target_ids`]."""
        return draft_ids if self._vocab_ids is None else self._vocab_ids[draft_ids]

    def _with_new(self, new: Tensor, known: Tensor) -> Tensor:
        rows = torch.cat((to_device(new, self._device), known))
        return rows if rows.shape[0] <= _CONTEXT_TOKENS else rows[:_CONTEXT_TOKENS]

    def _extend_vocabulary(self, token_ids: Tensor) -> None:
        if self._head.vocab_ids is None:
            return
        missing = token_ids[self._column_of[token_ids] < 0].unique()[: _EXTRA_TOKENS - self._extra.shape[0]]
        if missing.shape[0] == 0:
            return
        extra = torch.cat((self._extra, missing))
        head = self._head.for_tokens(extra)
        if head is None:
            return
        self._extra, self._extra_head = extra, head
        self._vocab_ids = torch.cat((self._head.vocab_ids, to_device(extra, self._head.vocab_ids.device)))
        self._column_of[extra] = self._head.draft_vocab_size + torch.arange(extra.shape[0], device="cpu")


def limited_options(options: DraftOptions, drafter: Drafter, target: PreTrainedModel) -> DraftOptions:
    """
    `options`, with no more draft passes than the drafter can run; see [`Drafter`]. Without any pass there is no other
    tree than a dynamic one, whose tokens are looked up, and nothing to draw from.

    Raises:
        `ValueError`: see [`DraftOptions.check_round`].
    """
    most = drafter.max_draft_passes
    if most is not None:
        options = replace(options, num_draft_passes=min(options.num_draft_passes, most))
    if options.num_draft_passes == 0:
        options = replace(options, draft_tree="dynamic", verification="exact")
    options.check_round(drafter.config.block_size, target.config.get_text_config(decoder=True).vocab_size)
    return options


class FalconCandidateGenerator(CandidateGenerator):
    """
    Proposes the trees of one sequence with a drafter and prompt lookup.

    The decoding loop calls `start` after the prompt's forward, then `draft`, `complete` and `update` in every round.
    The assisted decoding of transformers calls `get_candidates`, and gets the tree's likeliest path; for that the
    generator must be used as a context manager, to read the target's features.

    Its state and the drafter's session live as long as one `generate` call.

    Args:
        drafter ([`Drafter`]): the drafter, for example a [`FalconDraftModel`].
        target ([`PreTrainedModel`]): the target that it drafts for.
        options ([`DraftOptions`], *optional*):
            Defaults to the options in `drafter.generation_config`. The draft passes are limited to the drafter's.
        head ([`DraftHead`], *optional*): the head that another generator of the same two models uses.
    """

    def __init__(
        self, drafter: Drafter, target: PreTrainedModel, options: DraftOptions | None = None, head: Any = None
    ):
        self.drafter = drafter
        self.target = target
        options = options or DraftOptions.from_generation_config(drafter.generation_config)
        self.options = limited_options(options, drafter, target)
        self._vocab_size: int = target.config.get_text_config(decoder=True).vocab_size
        self.is_late: Callable[[], bool] = lambda: False
        # Decides how much each round drafts.
        self.policy = DraftPolicy(self.options, AcceptanceStats())
        self._acceleration = drafter_acceleration(drafter, target)
        self.head = head or self._acceleration.head or drafter.make_head(target)
        self.session = drafter.start_session(self.head, self._acceleration)
        # What the head scores in this sequence.
        self.context = ContextHead(
            self.head, self.options.context_bonuses, self._vocab_size, drafter.device, drafter.config.block_size
        )
        self._tap = FeatureTap(target, drafter.config.feature_layers)
        # A drafter that reads no features reads the whole text, which needs no memory while it waits.
        self._reads_text = drafter.config.feature_layers is None
        self._block_size: int = drafter.config.block_size
        self._device = drafter.device
        self._tree = self._build_tree()
        # States of the block after the last committed position.
        self._block: Tensor | None = None
        # The latest tokens before each block of a pass; see [`ContextHead.latest`].
        self._latest = torch.empty(0, device="cpu")
        # The position after the last committed one; `None` before the first commit.
        self._next_position: int | None = None
        # The position of the first feature.
        self._first_position = 0
        # Features that are not committed yet, and their positions.
        self._uncommitted, self._waiting = list[Tensor](), 0
        self._prompt_embeds: Tensor | None = None
        self._padding = 0
        # What looks up how the sequence goes on, and the tokens of the sequence that it knows.
        self.lookup, self._known_tokens = None, 0
        # The round that runs, and what was looked up for it.
        self._found: Any = None
        self._decision = DraftDecision()
        self._checks: list[PassCheck] = []
        self._watch = Stopwatch(self._device)
        # Rows of the batch, new positions of this one, whether they are its first, whether it drafts, and its passes.
        self._rows, self._new_rows, self._is_first, self._drafts, self._passes = 1, 0, False, False, 0

    @property
    def max_depth(self) -> int:
        """Tokens that the deepest path of a tree can have."""
        return self._tree.max_depth

    def start(
        self,
        features: Tensor,
        first_position: int,
        padding: int,
        policy: DraftPolicy,
        is_late: Callable[[], bool] = lambda: False,
        prompt_embeds: Tensor | None = None,
    ) -> None:
        """
        Starts the rounds of a sequence after its prompt and the first new token.

        Args:
            features (`torch.Tensor` of shape `(1, positions, ...)`):
                The target's features of the last `positions` tokens of the prompt.
            first_position (`int`): position of the first of them.
            padding (`int`): padding tokens before the prompt.
            policy ([`DraftPolicy`]): decides how much each round drafts.
            is_late (`Callable[[], bool]`, *optional*):
                Whether the time of the call is over. No further pass is then drafted.
            prompt_embeds (`torch.Tensor`, *optional*): see `commit`.
        """
        self.policy, self.is_late = policy, is_late
        drafts = self.options.num_draft_passes > 0
        self._uncommitted, self._waiting = ([features], features.shape[1]) if drafts else ([], 0)
        self._first_position, self._padding = first_position, padding
        self._prompt_embeds = prompt_embeds
        if self.options.draft_tree == "dynamic" and self.options.prompt_lookup_num_tokens > 0:
            make = part("lookup")
            self.lookup = None if make is None else make(self.drafter, self.target)

    def propose(self, input_ids: Tensor, max_depth: int) -> DraftTree:
        """
        Proposes the tree of a round.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): the sequence so far; its newest token becomes the
            root.
            max_depth (`int`): tokens that a path may have at most.

        Returns:
            [`DraftTree`]: of the root alone where nothing is drafted.
        """
        tree_round = self.draft(input_ids, max_depth)
        self.complete(tree_round)
        return tree_round.finish(input_ids[0, -1:].cpu(), self._decision.size(tree_round.best()))

    def draft(self, input_ids: Tensor, max_depth: int, rows: int = 1) -> Any:
        """
        Starts the drafting of a round. The host does not wait for it.

        Args:
            input_ids, max_depth: see `propose`.
            rows (`int`, *optional*, defaults to 1): rows of the batch that draft one after the other.

        Returns:
            The round. After `complete`, its `finish` makes the [`DraftTree`].
        """
        self._found = self._look_up(input_ids, max_depth)
        self._decision = decision = self.policy.decide(0.0 if self._found is None else self._found.probability)
        self._checks, self._passes, self._drafts = [], 0, False
        drafts = decision.draft and min(max_depth, self.options.num_draft_passes) > 0
        drafts = drafts and (self._next_position is not None or self.policy.begins(max_depth))
        self._watch = Stopwatch(self._device)
        self._rows, self._new_rows, self._is_first = rows, 0, False
        is_full = (waiting := self._waiting) > _MOST_UNCOMMITTED and not self._reads_text
        if waiting and (drafts or (is_full and self._next_position is not None)):
            self._new_rows, self._is_first = waiting, self._next_position is None
            [features, *more], self._uncommitted, self._waiting = self._uncommitted, [], 0
            features = torch.cat((features, *more), dim=1) if more else features
            self.commit(features, self.new_tokens(input_ids, waiting), self._first_position, self._prompt_embeds)
        elif self._next_position is None and not self._reads_text:
            self._drop_oldest(waiting, 0 if isinstance(self.policy, PlainPolicy) else _MOST_UNCOMMITTED)
        tree_round = self._tree.start(max_depth)
        if drafts and self._block is not None:
            self._read_context(input_ids)
            with self._acceleration.drafting(self.head):
                drafted = self._grow(tree_round, self._block, 0)
                # The first block belongs to the commit: a round may have no further pass.
                self._watch.lap()
                self._draft_passes(tree_round, drafted)
        else:
            self._watch.lap()
        self._watch.lap()
        self._drafts = drafts
        return tree_round

    def _drop_oldest(self, waiting: int, most: int) -> None:
        """Drops features of the oldest of `waiting` positions: the first commit then begins at the newest `most`."""
        # Not a few in every round: that would copy all the others.
        if waiting > 2 * most:
            newest = torch.cat(self._uncommitted, dim=1)[:, waiting - most :]
            # A copy: a view would keep all of them.
            self._uncommitted, self._waiting = ([newest.clone()] if most else []), most
            self._first_position += waiting - most

    def complete(self, tree_round: Any) -> None:
        """
        Brings a round to the host, and adds what was looked up.

        Args:
            tree_round: the round that `draft` returned.
        """
        collect([tree_round])
        if isinstance(tree_round, DynamicRound):
            if self._decision.passes is not None and self._decision.node_costs is not None:
                # The questions that were not asked after each pass.
                for depth in range(self._block_size, tree_round.depth + 1, self._block_size):
                    check = self._decision.check_pass(tree_round.paths(depth), tree_round.best(depth))
                    self._checks.append(check)
            if self._decision.likely > 0.0:
                tree_round.add_nodes(*self._found)

    def expected_gain(self, log_probs: Tensor) -> Tensor:
        """The gain of verifying nodes with these `log_probs` in the round; see [`DraftDecision.expected_gain`]."""
        return self._decision.expected_gain(log_probs)

    def update(
        self,
        tree: DraftTree,
        path: Tensor,
        accepted: int,
        features: Tensor,
        watch: Stopwatch | None,
        nodes: int | None = None,
    ) -> None:
        """
        Takes the outcome of a round.

        Args:
            tree ([`DraftTree`]): the tree that was verified.
            path (`torch.LongTensor` of shape `(emitted,)`): its nodes that were right, the root first; on the host.
            accepted (`int`): emitted tokens that were draft tokens.
            features (`torch.Tensor` of shape `(1, emitted, ...)`): the target's features of the path.
            watch ([`Stopwatch`], *optional*): its lap is the target's forward, if the row counts it.
            nodes (`int`, *optional*): nodes that the target ran for the sequence; defaults to the size of the tree.
        """
        if self.options.num_draft_passes:
            self._uncommitted.append(features)
            self._waiting += features.shape[1]
        time = self._round_time(watch, nodes or len(tree))
        self.policy.update(RoundOutcome(self._decision, tree, path, accepted, self._checks, time))

    def _round_time(self, watch: Stopwatch | None, nodes: int) -> RoundTime:
        """The times of the round that are known: the device may still work, and is not waited for."""
        time, drafting = RoundTime(nodes=nodes), self._watch.seconds()
        if watch is not None and (target := watch.seconds()) is not None:
            time.target = sum(target)
        time.passes = self._passes if self._drafts else None
        if drafting is not None:
            commit, time.drafting = (self._rows * lap for lap in drafting)
            # The commit of a prompt, or after a pause of drafting, says nothing of a round's.
            time.commit = commit if 0 < self._new_rows <= ROWS_OF_A_ROUND else None
            time.reading = commit if self._new_rows > ROWS_OF_A_ROUND else 0.0
            time.is_first = self._is_first
        return time

    def commit(
        self, features: Tensor, next_token_ids: Tensor, first_position: int = 0, prompt_embeds: Tensor | None = None
    ) -> None:
        """
        Takes new true features with the tokens one step ahead, and drafts the next block from them.

        Args:
            features, next_token_ids, first_position, prompt_embeds: see [`DraftSession.commit`].
        """
        if self._next_position is None:
            self._next_position = first_position
        self._next_position += features.shape[1]
        next_token_ids = to_device(self._known(next_token_ids), self._device)
        self._block = self.session.commit(features, next_token_ids, first_position, prompt_embeds)

    def new_tokens(self, input_ids: Tensor, new: int) -> Tensor:
        """
        The tokens of a commit.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): the text up to the last of them.
            new (`int`): new positions.

        Returns:
            `torch.LongTensor` of shape `(1, new)`, or shorter behind a prompt without tokens; or the whole text, at
            first, for a drafter that reads it alone.
        """
        is_whole = self._reads_text and self._next_position is None
        return input_ids[:, self._padding if is_whole else max(0, input_ids.shape[1] - new) :]

    def get_candidates(self, input_ids: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        """
        The protocol of transformers' own assisted decoding: the prompt, followed by the tree's likeliest path.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): the accepted tokens so far.
            args, kwargs: more arguments of transformers, not used.

        Returns:
            `torch.LongTensor` of shape `(1, length + drafted)`, and `None`: without draft logits transformers accepts
            a candidate when the target chooses the same token, which is lossless.
        """
        if self._tap.is_empty or not self.options.num_draft_passes:
            return input_ids, None
        # The newest token has no feature yet. The last forward scored the accepted positions first.
        features, known = self._tap.take(), input_ids.shape[1] - 1
        new = features.shape[1] if self._next_position is None else known - self._next_position
        self.commit(features[:, :new], self.new_tokens(input_ids, new), first_position=known - new)
        chain = self.propose(input_ids, self.max_depth).likeliest_path().token_ids[1:]
        return torch.cat((input_ids, chain[None].to(input_ids.device)), dim=1), None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """See [`~transformers.generation.candidate_generator.CandidateGenerator`]; nothing is adapted."""

    def __enter__(self) -> FalconCandidateGenerator:
        self._tap.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._tap.__exit__(*exception)

    def _read_context(self, input_ids: Tensor) -> None:
        self.context.extend(self._known(input_ids[0, self._padding + len(self.context) :]).cpu())
        self._latest = self.context.latest()

    def _look_up(self, input_ids: Tensor, max_depth: int) -> Any:
        if self.lookup is None:
            return None
        new = self._known(input_ids[0, self._padding + self._known_tokens :]).tolist()
        self._known_tokens += len(new)
        self.lookup.extend(new)
        return self.lookup.find(min(self.options.prompt_lookup_num_tokens, self.policy.most_nodes), max_depth)

    def _known(self, token_ids: Tensor) -> Tensor:
        """Token ids within the vocabulary: the placeholders of an image may have others."""
        return token_ids.clamp(0, self._vocab_size - 1)

    def _draft_passes(self, tree_round: Any, drafted: DraftedBlocks | None) -> None:
        """Runs draft passes for as long as they pay, from the blocks on that come after the committed positions."""
        self.session.rewind()
        depth = 0
        while drafted is not None and not self.is_late():
            states = self.session.extend(drafted)
            depth += self._block_size
            self._passes += 1
            drafted = self._grow(tree_round, states, depth)

    def _build_tree(self) -> Any:
        options = self.options
        nodes, depth = options.num_assistant_tokens, options.num_draft_passes * self._block_size
        children = min(options.draft_top_k, nodes, self.head.draft_vocab_size)
        if options.draft_tree == "dynamic":
            return DynamicTree(nodes, depth, children, options.draft_width)
        make = needed_part("static", "draft_tree", "set it to 'dynamic'")
        return make(options, self.drafter, self.head.draft_vocab_size, (nodes, depth, children))

    def _grow(self, tree_round: Any, states: Tensor, depth: int) -> DraftedBlocks | None:
        """
        Grows the tree by the levels of one pass.

        Args:
            states (`torch.Tensor` of shape `(blocks, block_size, state_size)`): states of the pass.
            depth (`int`): depth of the token before its blocks.

        Returns:
            The blocks that the next pass continues, or `None` where there is to be no next pass.
        """
        # Of each offset in the block: candidates; logits, if candidates depend on the branch; or states, if logits do.
        conditional = self.session.is_conditional
        by_branch = conditional or self.context.has_bonuses
        found = (states,) if conditional else (self.context.logits(states),)
        of_offsets = [each.unbind(1) for each in (found if by_branch else self._candidates(*found))]
        # The block of each branch; at first, each block is one. And the conditioned states of each branch so far.
        blocks: Tensor | None = None
        conditioned: list[Tensor] = []
        for offset in range(self._block_size):
            here = tuple(each[offset] if blocks is None else each[offset][blocks] for each in of_offsets)
            if conditional:
                state = self.session.condition(here[0], self._latest[:, 0])
                here = (self.context.logits(state),)
            if by_branch:
                here = self._candidates(self.context.prefer_repetitions(here[0], self._latest))
            log_probs, token_ids, *proposals = here
            correction = self._decision.correction(depth + offset + 1)
            tree_round.add(log_probs + correction if correction else log_probs, token_ids, *proposals)
            ends_block = offset == self._block_size - 1
            if ends_block and self._passes + 1 == self._decision.passes:
                return None
            branches = tree_round.branches()
            if branches is None or (ends_block and not self._continues(branches, tree_round)):
                return None
            rows = branches.rows
            blocks = rows if blocks is None else blocks[rows]
            self._latest = torch.cat((branches.token_ids[:, None], self._latest[rows, :-1]), dim=1)
            if conditional:
                conditioned = [each[rows] for each in (*conditioned, state)]
        assert blocks is not None
        continued = torch.stack(conditioned, dim=1) if conditional else states[blocks]
        return DraftedBlocks(blocks, self._latest[:, : self._block_size].flip(1), continued)

    def _continues(self, branches: Branches, tree_round: Any) -> bool:
        """Whether a further pass is drafted."""
        if self._decision.passes is not None:
            return True
        check = self._decision.check_pass(branches, tree_round.best())
        self._checks.append(check)
        probes = self._decision.probe_pass and len(self._checks) == 1
        return probes or check.continuation >= self._decision.pass_threshold

    def _candidates(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Most probable tokens by `logits` of shape `(..., vocabulary)`: `(..., max_children)`, best first."""
        best = logits.log_softmax(dim=-1).topk(self._tree.max_children, dim=-1)
        return best.values, self.context.to_target_ids(best.indices)
