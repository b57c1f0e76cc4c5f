# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Batches: the rows of one `generate` call, each of which takes a step of plain decoding when it reaches it."""

from __future__ import annotations

from collections.abc import Mapping
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

from .core.interfaces import register_part
from .core.probe import LAYER_OUTPUTS
from .core.target_parts import CACHE_NAME, extra_inputs, first_step, rope_boundary
from .core.verification import Batch, TokenSequence
from .private_names import allowed_tokens_function, beams_of, pad_token

# Steps that the fastest row may be ahead of the slowest: the noise of a step is kept until all rows have used it.
_MOST_STEPS_AHEAD = 64

# Processors and criteria that treat each row by itself and keep no state; by exact type, as a subclass may differ.
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


def install() -> None:
    """Makes the loop verify several rows."""
    register_part("batches", RowsBatch)


class StepNoise:
    """
    The noise of each step of a batch, as plain decoding draws it.

    To draw one token a row, `torch.multinomial` takes the largest p / q, where q is drawn from the exponential
    distribution for all rows and tokens at once. Here q is drawn once a step, in the order of the steps, when the
    first row reaches it. So the random generator also advances from call to call as in plain decoding.
    """

    def __init__(self, rows: int):
        self._rows = rows
        self._first = 0
        self._steps: list[Tensor] = []

    def draw(self, probs: Tensor, row: int, step: int) -> Tensor:
        """
        Draws a row's token of a step.

        Args:
            probs (`torch.Tensor` of shape `(1, vocab_size)`): probabilities of the row.
            row (`int`): which of the rows it is.
            step (`int`): which token of the row it is, from 0; its noise must not be dropped yet.

        Returns:
            `torch.LongTensor` of shape `(1,)`; -1 if probabilities are negative, infinite or NaN.
        """
        while self._first + len(self._steps) <= step:
            self._steps.append(probs.new_empty(self._rows, probs.shape[1]).exponential_())
        # Asked of the token, not of the device now: `emit` refuses the token -1.
        is_valid = (probs >= 0).all() & probs.isfinite().all()
        # The first of equal maxima, like `argmax`, which takes several times as long on a CPU.
        return torch.where(is_valid, (probs / self._steps[step - self._first][row]).max(dim=-1).indices, -1)

    def drop(self, steps: int) -> None:
        """Drops the noise of all steps before `steps`, which no row needs any more."""
        del self._steps[: max(0, steps - self._first)]
        self._first = max(self._first, steps)


class RowsBatch(Batch):
    """
    The sequences of one `generate` call with several rows. Tokens of a step are streamed once all rows have them.

    Args:
        input_ids, logits_processor, stopping_criteria, generation_config, streamer: see [`Batch`].
    """

    def _make_rows(
        self,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
    ) -> list[TokenSequence]:
        self.noise, self._streamed = StepNoise(self.prompts.shape[0]), 0
        self._samples = generation_config.do_sample
        padding = pad_token(generation_config)
        self.padding = None if padding is None else int(padding)
        rows = [
            TokenSequence(
                ids,
                _processors_of_row(logits_processor, row),
                stopping_criteria,
                generation_config,
                draw=partial(self._draw, row),
            )
            for row, ids in enumerate(self.prompts.split(1))
        ]
        for sequence in rows:
            # Recorded for a single row only: see [`DraftStatistics`].
            sequence.near_ties = None
        return rows

    @property
    def token_ids(self) -> Tensor:
        """See [`Batch.token_ids`]."""
        rows = [row.token_ids[0] for row in self.rows]
        if len({len(row) for row in rows}) == 1:
            return torch.stack(rows)
        # A row ends before the others by an EOS token only, and then `generate` has a padding token.
        assert self.padding is not None
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.padding)

    @property
    def steps(self) -> int:
        """Tokens that every row has emitted that has not ended."""
        return min((row.new_tokens for row in self.rows if not row.finished), default=self.longest)

    @property
    def longest(self) -> int:
        """Tokens that the longest row has emitted."""
        return max(row.new_tokens for row in self.rows)

    def tokens_left(self, sequence: TokenSequence) -> int:
        """Tokens that a row may emit now: where samples are drawn, it may be only so far ahead of the others."""
        if not self._samples:
            return sequence.tokens_left
        return min(sequence.tokens_left, self.steps + _MOST_STEPS_AHEAD + 1 - sequence.new_tokens)

    def stream(self) -> None:
        """Streams the steps that all rows have reached, and drops their noise."""
        steps = self.steps
        self.noise.drop(steps)
        if self._streamer is None:
            return
        if steps > self._streamed:
            first = self.prompts.shape[1]
            for step in self.token_ids[:, first + self._streamed : first + steps].unbind(dim=1):
                self._streamer.put(step)
            self._streamed = steps

    @staticmethod
    def refusal_of_call(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: Mapping[str, Any],
    ) -> str | None:
        """The reason why the rows of a batch cannot advance independently in a call, if there is one."""
        parts = ((logits_processor, _ROWWISE_PROCESSORS), (stopping_criteria, _ROWWISE_CRITERIA))
        odd = [type(each).__name__ for given, known in parts for each in given if type(each) not in known]
        # It forces a token only where no row of a prompt has another.
        prefixed = [each for each in logits_processor if type(each) is generation.PrefixConstrainedLogitsProcessor]
        odd += [type(each).__name__ for each in prefixed if beams_of(each) > 1]
        if odd:
            return f"the batch has several rows, and {odd[0]} may look at all of them at once"
        kinds = {type(each) for each in stopping_criteria}
        if generation.EosTokenCriteria not in kinds and kinds - {generation.MaxLengthCriteria}:
            return "the batch has several rows, and without an `eos_token_id` rows that have ended continue"
        if rope_boundary(model.config.get_text_config(decoder=True))[0] is not None:
            return "the batch has several rows, and the target's rotary frequencies depend on the longest"
        if model_kwargs[CACHE_NAME].get_seq_length() > 0:
            return "the batch has several rows and continues from a cache"
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not bool(mask.any(dim=-1).all()):
            return "the batch has a row that is all padding"
        positions = model_kwargs.get("position_ids")
        if positions is not None and positions.dim() > 2:
            return "the batch has several rows, and the target has positions of several kinds"
        if extras := sorted(
            extra_inputs(first_step(model, input_ids, model_kwargs)).keys() - {"output_router_logits"}
        ):
            return f"the batch has several rows, and every new token of the target takes {extras}"
        if model_kwargs.get("inputs_embeds") is not None:
            return "the batch has several rows and is given as `inputs_embeds`"
        outputs = ("output_scores", "output_logits", *LAYER_OUTPUTS)
        wanted = [name for name in outputs if getattr(generation_config, name)]
        if generation_config.return_dict_in_generate and wanted:
            return f"the batch has several rows, and `{wanted[0]}` was asked for, which covers rows that have ended"
        return None

    def _draw(self, row: int, probs: Tensor) -> Tensor:
        return self.noise.draw(probs, row, self.rows[row].new_tokens)


def _processors_of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """Processors that see one row alone, as the `row`-th of the batch."""
    return LogitsProcessorList([_of_row(processor, row) for processor in processors])


def _of_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    if isinstance(processor, generation.PrefixConstrainedLogitsProcessor):
        allowed, number = allowed_tokens_function(processor), row // beams_of(processor)

        def allowed_of_row(_: int, ids: Tensor) -> list[int]:
            return allowed(number, ids)

        # See grammar_processors.py.
        vars(allowed_of_row)["is_stateless"] = getattr(allowed, "is_stateless", False)
        return generation.PrefixConstrainedLogitsProcessor(allowed_of_row, num_beams=1)
    if isinstance(processor, generation.RepetitionPenaltyLogitsProcessor):
        ignored = processor.prompt_ignore_length
        # Newer versions leave out each row's own padding.
        if isinstance(ignored, Tensor):
            return generation.RepetitionPenaltyLogitsProcessor(processor.penalty, ignored[row : row + 1])
    return processor
