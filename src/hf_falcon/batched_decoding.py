# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Decoding of a batch: each row drafts its own tree, one forward of the target verifies all of them, and each row keeps
its own path. Rows get ahead of each other; what they emit is what plain decoding of the same batch gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    generation,
)
from transformers.generation.streamers import BaseStreamer

from .batched_target import BatchedTargetRun
from .candidate_generator import FalconCandidateGenerator
from .costs import Stopwatch
from .drafting import Drafting
from .near_ties import NearTies
from .pace import Pace
from .statistics import StatisticsRecorder
from .step_noise import MOST_STEPS_AHEAD, StepNoise
from .target import rope_boundary
from .tree import DraftTree, single_node
from .verification import TokenSequence, verify

# What treats each row for itself and keeps nothing from call to call; by exact type, a subclass may do anything.
_ROWWISE_PROCESSORS = {
    generation.EpsilonLogitsWarper,
    generation.EtaLogitsWarper,
    generation.ExponentialDecayLengthPenalty,
    generation.ForcedBOSTokenLogitsProcessor,
    generation.ForcedEOSTokenLogitsProcessor,
    generation.InfNanRemoveLogitsProcessor,
    generation.LogitNormalization,
    generation.MinLengthLogitsProcessor,
    generation.MinNewTokensLengthLogitsProcessor,
    generation.MinPLogitsWarper,
    generation.NoBadWordsLogitsProcessor,
    generation.NoRepeatNGramLogitsProcessor,
    generation.PrefixConstrainedLogitsProcessor,
    generation.RepetitionPenaltyLogitsProcessor,
    generation.SequenceBiasLogitsProcessor,
    generation.SuppressTokensAtBeginLogitsProcessor,
    generation.SuppressTokensLogitsProcessor,
    generation.TemperatureLogitsWarper,
    generation.TopHLogitsWarper,
    generation.TopKLogitsWarper,
    generation.TopPLogitsWarper,
    generation.TypicalLogitsWarper,
    generation.WatermarkLogitsProcessor,
}
_ROWWISE_CRITERIA = {
    generation.EosTokenCriteria,
    generation.MaxLengthCriteria,
    generation.MaxTimeCriteria,
    generation.StopStringCriteria,
}


def why_no_batch(
    model: PreTrainedModel,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
) -> str | None:
    """
    Why the rows of a batch cannot get ahead of each other in this call, as [`why_no_tree`] says it.

    Returns:
        `str`, or `None` where they can.
    """
    parts = ((logits_processor, _ROWWISE_PROCESSORS), (stopping_criteria, _ROWWISE_CRITERIA))
    odd = [type(each).__name__ for given, known in parts for each in given if type(each) not in known]
    if odd:
        return f"the batch has several rows, and {odd[0]} may look at all of them at once"
    kinds = {type(each) for each in stopping_criteria}
    if generation.EosTokenCriteria not in kinds and kinds - {generation.MaxLengthCriteria}:
        return "the batch has several rows, and without an `eos_token_id` rows that have ended are written on"
    if rope_boundary(model.config.get_text_config(decoder=True))[0] is not None:
        return "the batch has several rows, and the target's rotary frequencies depend on the longest"
    if model_kwargs["past_key_values"].get_seq_length() > 0:
        return "the batch has several rows and goes on from a cache"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.any(dim=-1).all()):
        return "the batch has a row that is all padding"
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.dim() > 2:
        return "the batch has several rows, and the target has positions of several kinds"
    if model_kwargs.get("inputs_embeds") is not None:
        return "the batch has several rows and is given as `inputs_embeds`"
    outputs = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    wanted = [name for name in outputs if getattr(generation_config, name)]
    if generation_config.return_dict_in_generate and wanted:
        return f"the batch has several rows, and `{wanted[0]}` was asked for, also of rows that have ended"
    return None


class BatchSequence:
    """
    The sequences of one `generate` call for a batch. What plain decoding does in one step for all rows, each row does
    when it gets there.

    Args:
        input_ids (`torch.LongTensor` of shape `(rows, length)`): the prompts, padded on the left.
        logits_processor ([`LogitsProcessorList`]): processors and warpers of the call.
        stopping_criteria ([`StoppingCriteriaList`]): when rows end.
        generation_config ([`GenerationConfig`]): configuration of the call.
        streamer ([`BaseStreamer`], *optional*): gets the tokens of a step once all rows have them.
    """

    # Asked for where plain decoding runs.
    scores = logits = None

    def __init__(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
    ):
        self.prompts = input_ids
        # Of a single row only: see [`DraftStatistics`].
        self.near_ties = NearTies()
        self.noise = StepNoise(input_ids.shape[0])
        self.samples = generation_config.do_sample
        self.rows = [
            TokenSequence(
                ids,
                _processors_of_row(logits_processor, row),
                stopping_criteria,
                generation_config,
                draw=partial(self._draw, row),
            )
            for row, ids in enumerate(input_ids.split(1))
        ]
        self._padding = generation_config._pad_token_tensor
        self._streamer = streamer
        self._streamed = 0

    @property
    def input_ids(self) -> Tensor:
        """All rows, of shape `(rows, length)`, with padding behind those that ended early."""
        rows = [row.input_ids[0] for row in self.rows]
        if len({len(row) for row in rows}) == 1:
            return torch.stack(rows)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=int(self._padding))

    @property
    def new_tokens(self) -> int:
        """Tokens that were emitted, without padding."""
        return sum(row.new_tokens for row in self.rows)

    @property
    def steps(self) -> int:
        """Tokens that every row has emitted that has not ended."""
        return min((row.new_tokens for row in self.rows if not row.finished), default=self.longest)

    @property
    def longest(self) -> int:
        """Tokens that the longest row has emitted."""
        return max(row.new_tokens for row in self.rows)

    def stream(self) -> None:
        """Hands on the steps that all rows have come to, and forgets their noise."""
        steps = self.steps
        self.noise.forget(steps)
        if self._streamer is not None and steps > self._streamed:
            first = self.prompts.shape[1]
            for step in self.input_ids[:, first + self._streamed : first + steps].unbind(dim=1):
                self._streamer.put(step.cpu())
            self._streamed = steps
            if all(row.finished for row in self.rows):
                self._streamer.end()

    def _draw(self, row: int, probs: Tensor) -> Tensor:
        return self.noise.draw(probs, row, self.rows[row].new_tokens)


def _processors_of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """Processors that see one row alone, as the `row`-th of the batch."""
    return LogitsProcessorList([_of_row(processor, row) for processor in processors])


def _of_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    if isinstance(processor, generation.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return generation.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), num_beams=1)
    if isinstance(processor, generation.RepetitionPenaltyLogitsProcessor):
        ignored = processor.prompt_ignore_length
        # Newer versions leave out each row's own padding.
        if isinstance(ignored, Tensor):
            return generation.RepetitionPenaltyLogitsProcessor(processor.penalty, ignored[row : row + 1])
    return processor


def decode_batch(
    run: BatchedTargetRun,
    generator: FalconCandidateGenerator,
    batch: BatchSequence,
    pace_of: Callable[[int, int], Pace],
    drops_rows: bool,
) -> StatisticsRecorder:
    """
    Rounds of drafting and verifying until all rows of `batch` are finished.

    Args:
        run ([`BatchedTargetRun`]): the target.
        generator ([`FalconCandidateGenerator`]): that of the first row; the others borrow its head.
        batch ([`BatchSequence`]): the rows.
        pace_of (`Callable[[int, int], Pace]`):
            The pace of one row, given how long a path may be and how many rows are not finished.
        drops_rows (`bool`): whether rows that have ended leave the target's cache.
    """
    statistics = StatisticsRecorder(run.model.device)
    with statistics.measure("target"):
        logits, of_prompts = run.prefill(batch.prompts)
    # Taken out by the rows that draft, so that nothing keeps them.
    features = dict(enumerate(of_prompts))
    del of_prompts
    for row, sequence in enumerate(batch.rows):
        sequence.emit(sequence.choose(logits[row][None]))
    batch.stream()
    drafters: dict[int, Drafting] = {}
    # Rows of the target's cache, by their number in the batch, and how many of them were not finished last.
    cached, active = list(range(len(batch.rows))), 0
    no_path = torch.empty(0, dtype=torch.long)
    while not all(sequence.finished for sequence in batch.rows):
        unfinished = [row for row in cached if not batch.rows[row].finished]
        if drops_rows and len(unfinished) < len(cached):
            run.select([cached.index(row) for row in unfinished])
            cached = unfinished
        if len(unfinished) != active:
            active = len(unfinished)
            for row in unfinished:
                pace = pace_of(_depth_limit(batch, row), active)
                if row in drafters:
                    drafters[row].pace = pace
                else:
                    known = features.pop(row)
                    padding = batch.prompts.shape[1] - known.shape[1]
                    drafters[row] = Drafting(_another(generator), batch.rows[row], known, 0, pace, padding)
        with statistics.measure("drafter"):
            drafted = _draft({row: drafters[row] for row in unfinished}, batch)
            trees = [drafted[row] if row in drafted else single_node(batch.rows[row].root) for row in cached]
        watch = Stopwatch()
        with statistics.measure("target"):
            logits, scored = run.score(trees)
        verified = [
            verify(tree, logits[place, : len(tree)], batch.rows[row]) if row in unfinished else (no_path, 0)
            for place, (row, tree) in enumerate(zip(cached, trees))
        ]
        seconds = watch.lap()
        run.keep([path for path, _ in verified])
        for place, (row, tree) in enumerate(zip(cached, trees)):
            path, accepted = verified[place]
            if row in unfinished:
                drafters[row].learn(tree, path, accepted, scored[place : place + 1, path], seconds, logits.shape[1])
                statistics.add_round(len(tree) - 1, accepted)
        batch.stream()
    return statistics


def _draft(drafters: dict[int, Drafting], batch: BatchSequence) -> dict[int, DraftTree]:
    """The trees of a round. The target runs as many nodes for each row as for the largest, so all have one size."""
    rounds = {row: each.draft(_depth_limit(batch, row), len(drafters)) for row, each in drafters.items()}
    best = torch.nn.utils.rnn.pad_sequence(
        [each.best() for each in rounds.values()], batch_first=True, padding_value=-torch.inf
    )
    worth = torch.stack([each.pace.worth(row) for each, row in zip(drafters.values(), best)]).sum(dim=0)
    count = int(worth.argmax())
    return {
        row: each.finish(drafters[row].root, lambda best: min(count, best.shape[0])) for row, each in rounds.items()
    }


def _another(generator: FalconCandidateGenerator) -> FalconCandidateGenerator:
    """A generator for another sequence."""
    return FalconCandidateGenerator(generator.drafter, generator.target, generator.options, generator.head)


def _depth_limit(batch: BatchSequence, row: int) -> int:
    """How long a path of a row may be: see `decoding`; and with noise to keep, how far the row may get ahead."""
    sequence = batch.rows[row]
    limit = sequence.tokens_left - 1
    if batch.samples:
        limit = min(limit, batch.steps + MOST_STEPS_AHEAD - sequence.new_tokens)
    return max(limit, 0)
