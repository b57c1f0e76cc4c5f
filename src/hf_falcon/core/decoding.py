# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The decoding loop: draft a tree, verify it in one forward of the target, keep the longest agreed path."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging

from .candidate_generator import Drafting, FalconCandidateGenerator
from .costs import CostKey, Costs, Stopwatch, in_steps, load, measure, save, still_valid
from .draft_options import DraftOptions, set_by_call
from .modeling_falcon_draft import FalconDraftNetwork
from .policy import AdaptivePolicy, DraftPolicy, acceptance_stats_of
from .sampling import MultiRootCandidateGenerator, SamplingCandidateGenerator, decode_multi_root
from .statistics import FalconGenerateOutput, StatisticsRecorder
from .target_parts import was_trained_for
from .target_run import BatchedTargetRun, LayerOutputs, TargetRun
from .target_support import unsupported_batch_reason, unsupported_reason
from .tree import DraftTree, single_node
from .verification import MOST_STEPS_AHEAD, BatchSequence, TokenSequence, verify

# Fields of a generation configuration for other ways of assisted decoding, and for caches that can be compiled.
_OTHER_WAYS = (
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "target_lookbehind",
    "max_matching_ngram_size",
    "speculation_type",
    "use_mtp",
    "compile_config",
)


logger = logging.get_logger(__name__)


def assisted_decoding(
    target: PreTrainedModel,
    drafter: FalconDraftNetwork,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """
    Generates what plain decoding of `target` generates, with `drafter` proposing trees of tokens. Called by
    `target.generate(assistant_model=drafter)`, which prepares all arguments.

    Returns:
        `torch.LongTensor` of shape `(batch, length)`, or a [`FalconGenerateOutput`] with
        `return_dict_in_generate=True`.

    Raises:
        `ValueError`: for `use_cache=False`, as in transformers' own assisted decoding; for `dola_layers`, which would
            be ignored; for a drafter that was made for another target; for drafting options out of range.
    """
    if not model_kwargs.get("use_cache", True):
        raise ValueError("`use_cache` is False: decoding with an assistant model needs `use_cache=True`.")
    if generation_config.dola_layers is not None:
        raise ValueError(
            f"`dola_layers` is {generation_config.dola_layers!r}: DoLa takes no assistant model, so leave it out."
        )
    reason = "`synced_gpus` is set" if synced_gpus else None
    reason = reason or unsupported_reason(target, input_ids, generation_config, model_kwargs)
    if reason is None and input_ids.shape[0] > 1:
        reason = unsupported_batch_reason(target, logits_processor, stopping_criteria, generation_config, model_kwargs)
    if reason is not None:
        logger.warning_once(f"The assistant model is not used, plain decoding runs: {reason}.")
        output = target._sample(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )
        return FalconGenerateOutput(**output) if isinstance(output, GenerateDecoderOnlyOutput) else output
    unused = [name for name in _OTHER_WAYS if set_by_call(generation_config, name)]
    if unused:
        logger.warning_once(f"{', '.join(f'`{name}`' for name in unused)}: no effect with a Falcon drafter.")
    options = DraftOptions.from_generation_config(drafter.generation_config, generation_config)
    # Of a single prompt of tokens; others are verified exactly.
    verification = options.verification if generation_config.do_sample and input_ids.shape[0] == 1 else "exact"
    generator: FalconCandidateGenerator
    if verification == "speculative":
        generator = SamplingCandidateGenerator(drafter, target, options, logits_processor)
    elif verification == "multi_root" and model_kwargs.get("inputs_embeds") is None:
        logger.warning_once("`verification` is 'multi_root': samples are biased, not distributed as plain decoding's.")
        generator = MultiRootCandidateGenerator(drafter, target, options)
    else:
        generator = FalconCandidateGenerator(drafter, target, options)
    known = acceptance_stats_of(drafter, target)
    if known.is_fit is None:
        known.is_fit = was_trained_for(drafter, target)
    if not known.is_fit:
        logger.warning_once(
            f"The target's weights are not those of {drafter.config.target_name_or_path or 'the model'} that the "
            "drafter was trained for. The output is exact all the same; fewer draft tokens may be accepted."
        )
    if input_ids.shape[0] > 1:
        batch = BatchSequence(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
        statistics, cache = _assist_batch(target, generator, batch, generation_config, model_kwargs)
        return _output(batch, statistics, cache, generation_config)
    sequence = TokenSequence(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
    run = TargetRun(target, input_ids, generation_config, model_kwargs, drafter.config.feature_layers)
    try:
        if isinstance(generator, MultiRootCandidateGenerator):
            statistics = decode_multi_root(run, generator, sequence)
        else:
            statistics = decode(run, generator, sequence)
    finally:
        cache = run.finish()
    if streamer is not None:
        streamer.end()
    return _output(sequence, statistics, cache, generation_config, run.layer_outputs)


def decode(run: TargetRun, generator: FalconCandidateGenerator, sequence: TokenSequence) -> StatisticsRecorder:
    """Rounds of drafting and verifying until `sequence` is finished."""
    statistics = StatisticsRecorder(run.model.device)
    with statistics.measure("target"):
        logits, features = run.prefill(sequence.input_ids)
    sequence.emit(sequence.choose(logits))
    if sequence.finished:
        return statistics
    pace = _pace(run, generator, _depth_limit(run, sequence))
    drafting = Drafting(
        generator, sequence, features, run.length - features.shape[1], pace, prompt_embeds=run.prompt_embeds
    )
    while not sequence.finished:
        with statistics.measure("drafter"):
            tree = drafting.propose(_depth_limit(run, sequence))
        watch = Stopwatch()
        with statistics.measure("target"):
            logits, features = run.score(tree, sequence.input_ids)
        path, accepted = generator.verify(tree, logits, sequence)
        seconds = watch.lap()
        run.keep(path, len(tree))
        drafting.learn(tree, path, accepted, features[:, path], seconds)
        statistics.add_round(len(tree) - 1, accepted)
    return statistics


def _assist_batch(
    target: PreTrainedModel,
    generator: FalconCandidateGenerator,
    batch: BatchSequence,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> tuple[StatisticsRecorder, Cache]:
    """Generates for all rows; what was generated is in `batch` then. Returns statistics, and the cache."""
    run = BatchedTargetRun(target, generation_config, model_kwargs, generator.drafter.config.feature_layers)
    # Rows that have ended leave the cache, unless somebody is to have it.
    cache_is_returned = generation_config.return_dict_in_generate or getattr(run.cache, "_is_user_defined", False)
    try:
        statistics = decode_batch(run, generator, batch, partial(_pace, run, generator), not cache_is_returned)
    except BaseException:
        run.finish(None)
        raise
    return statistics, run.finish(batch.input_ids if cache_is_returned else None)


def _pace(
    run: TargetRun | BatchedTargetRun, generator: FalconCandidateGenerator, limit: int, rows: int = 1
) -> DraftPolicy:
    """
    Who says how much is drafted in this call; measures the target where nothing is known of its costs.

    Args:
        limit (`int`): tokens that a path may have at most.
        rows (`int`, *optional*, defaults to 1): rows of the batch that are not finished.
    """
    options, model = generator.options, run.model
    experience = acceptance_stats_of(generator.drafter, model)
    same_every_round = options.num_assistant_tokens_schedule == "constant" or options.draft_tree != "dynamic"
    # Where no path is allowed the target cannot be timed with one either.
    if same_every_round or limit < 1:
        return DraftPolicy(options, experience, generator.drafter.device)
    nodes = options.num_assistant_tokens
    cost_key = CostKey.of(model, run.length, nodes, rows, run.acceleration.is_packed, run.acceleration.sizes)
    experience = experience.under(cost_key)
    if cost_key not in experience.costs:
        experience.costs[cost_key] = _costs(run, cost_key, experience.costs)
    return AdaptivePolicy(options, experience, generator.drafter.device, experience.costs[cost_key])


def _costs(run: TargetRun | BatchedTargetRun, cost_key: CostKey, known: dict[CostKey, Costs]) -> Costs:
    """Costs that were measured before, by any process, or follow from those of more rows, or are measured now."""
    seconds = load(run.model, cost_key)
    if seconds is not None and still_valid(seconds, run.dry_run, run.model.device):
        return Costs(in_steps(seconds, cost_key.compiled))
    more = [each for each in list(known) if each.rows > cost_key.rows and each[1:] == cost_key[1:]]
    if more:
        nearest = min(more)
        return known[nearest].of_fewer_rows(nearest.rows, cost_key.rows)
    seconds = measure(run.dry_run, cost_key.max_nodes, run.model.device)
    save(run.model, cost_key, seconds)
    return Costs(in_steps(seconds, cost_key.compiled))


def _depth_limit(run: TargetRun, sequence: TokenSequence) -> int:
    """A path may not be longer than the tokens that are wanted, less the target's own."""
    budget, rotary = sequence.tokens_left - 1, run.max_tree_depth()
    return budget if rotary is None else min(budget, rotary)


def _output(
    sequence: TokenSequence | BatchSequence,
    statistics: StatisticsRecorder,
    cache: Cache,
    generation_config: GenerationConfig,
    layer_outputs: LayerOutputs | None = None,
) -> Tensor | GenerateDecoderOnlyOutput:
    """What `generate` returns."""
    if not generation_config.return_dict_in_generate:
        return sequence.input_ids
    return FalconGenerateOutput(
        sequences=sequence.input_ids,
        scores=sequence.scores,
        logits=sequence.logits,
        attentions=None if layer_outputs is None else layer_outputs.attentions,
        hidden_states=None if layer_outputs is None else layer_outputs.hidden_states,
        past_key_values=cache,
        draft_statistics=statistics.result(sequence.new_tokens, sequence.near_ties),
    )


def decode_batch(
    run: BatchedTargetRun,
    generator: FalconCandidateGenerator,
    batch: BatchSequence,
    pace_of: Callable[[int, int], DraftPolicy],
    drops_rows: bool,
) -> StatisticsRecorder:
    """
    Rounds of drafting and verifying until all rows of `batch` are finished.

    Args:
        run ([`BatchedTargetRun`]): the target.
        generator ([`FalconCandidateGenerator`]): that of the first row; the others borrow its head.
        batch ([`BatchSequence`]): the rows.
        pace_of (`Callable[[int, int], DraftPolicy]`):
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
                pace = pace_of(_depth_limit_of_row(batch, row), active)
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
    rounds = {row: each.draft(_depth_limit_of_row(batch, row), len(drafters)) for row, each in drafters.items()}
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


def _depth_limit_of_row(batch: BatchSequence, row: int) -> int:
    """How long a path of a row may be: see `decoding`; and with noise to keep, how far the row may get ahead."""
    sequence = batch.rows[row]
    limit = sequence.tokens_left - 1
    if batch.samples:
        limit = min(limit, batch.steps + MOST_STEPS_AHEAD - sequence.new_tokens)
    return max(limit, 0)
