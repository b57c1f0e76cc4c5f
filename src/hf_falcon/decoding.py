# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The decoding loop: draft a tree, verify it in one forward of the target, keep the longest agreed path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging

from .borrowed_head import was_trained_for
from .candidate_generator import FalconCandidateGenerator
from .costs import Circumstances, Costs, Stopwatch, load, measure, save
from .draft_options import DraftOptions
from .modeling_falcon_draft import FalconDraftModel
from .multi_root import MultiRootCandidateGenerator, decode_multi_root
from .pace import AdaptivePace, Pace, RoundTime, experience_of
from .retrieval import ContextIndex
from .speculative import SamplingCandidateGenerator
from .statistics import FalconGenerateOutput, StatisticsRecorder
from .target import TargetRun, why_no_tree
from .verification import TokenSequence

logger = logging.get_logger(__name__)

# Positions that a round adds, or little more.
_ROWS_OF_A_ROUND = 16


def assisted_decoding(
    target: PreTrainedModel,
    drafter: FalconDraftModel,
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
        `torch.LongTensor` of shape `(1, length)`, or with `return_dict_in_generate=True` a [`FalconGenerateOutput`].

    Raises:
        `ValueError`: for `use_cache=False`, as in transformers' own assisted decoding; for a drafter that was made for
            another target; for drafting options out of range.
    """
    if not model_kwargs.get("use_cache", True):
        raise ValueError("`use_cache` is False: decoding with an assistant model needs `use_cache=True`.")
    reason = "`synced_gpus` is set" if synced_gpus else None
    reason = reason or why_no_tree(target, input_ids, generation_config, model_kwargs)
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
    options = DraftOptions.from_generation_config(drafter.generation_config)
    generator: FalconCandidateGenerator
    if options.verification == "speculative" and generation_config.do_sample:
        generator = SamplingCandidateGenerator(drafter, target, options, logits_processor)
    elif options.verification == "multi_root" and generation_config.do_sample:
        logger.warning_once("`verification` is 'multi_root': samples are biased, not distributed as plain decoding's.")
        generator = MultiRootCandidateGenerator(drafter, target, options)
    else:
        generator = FalconCandidateGenerator(drafter, target, options)
    if not was_trained_for(drafter, target):
        logger.warning_once(
            f"The target's weights are not those of {drafter.config.target_name_or_path or 'the model'} that the "
            "drafter was trained for. The output is exact all the same; fewer draft tokens may be accepted."
        )
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
    if not generation_config.return_dict_in_generate:
        return sequence.input_ids
    return FalconGenerateOutput(
        sequences=sequence.input_ids,
        scores=sequence.scores,
        logits=sequence.logits,
        past_key_values=cache,
        draft_statistics=statistics.result(sequence.input_ids.shape[1] - sequence.prompt_length),
    )


def decode(run: TargetRun, generator: FalconCandidateGenerator, sequence: TokenSequence) -> StatisticsRecorder:
    """Rounds of drafting and verifying until `sequence` is finished."""
    statistics = StatisticsRecorder(run.model.device)
    with statistics.measure("target"):
        logits, features = run.prefill(sequence.input_ids)
    sequence.emit(sequence.choose(logits))
    if sequence.finished:
        return statistics
    pace = _pace(run, generator, sequence)
    options = generator.options
    index, lookup = ContextIndex(), options.prompt_lookup_num_tokens if options.draft_tree == "dynamic" else 0
    # Features of the newest positions but one that the drafter has not seen; each goes with the token one step ahead.
    unseen = [features]
    while not sequence.finished:
        limit = _depth_limit(run, sequence)
        if lookup:
            index.extend(sequence.input_ids[0, len(index) :].tolist())
        guess = pace.guess(index.continuation(min(lookup, limit)))
        drafts, time, watch = pace.drafts(guess), RoundTime(), Stopwatch()
        with statistics.measure("drafter"):
            if drafts:
                new = sum(each.shape[1] for each in unseen)
                generator.commit(torch.cat(unseen, dim=1), sequence.input_ids[:, -new:], run.length - new)
                unseen = []
                seconds = watch.lap()
                # Many rows at once, the prompt or what a pause left, are no round's share.
                time.commit = seconds if new <= _ROWS_OF_A_ROUND else None
            tree = generator.propose(sequence.root.to(run.model.device), limit, pace, guess, drafts)
            time.drafting, time.passes = watch.lap(), generator.passes if drafts else None
        with statistics.measure("target"):
            logits, features = run.score(tree, sequence.input_ids)
        length = sequence.input_ids.shape[1]
        path, accepted = generator.verify(tree, logits, sequence)
        time.target = watch.lap()
        run.keep(path, len(tree))
        unseen.append(features[:, path])
        emitted = sequence.input_ids[0, length:].tolist()
        pace.observe(tree, path, emitted, accepted, time)
        statistics.add_round(len(tree) - 1, accepted)
    return statistics


def _pace(run: TargetRun, generator: FalconCandidateGenerator, sequence: TokenSequence) -> Pace:
    """Who says how much is drafted in this call; measures the target where nothing is known of its costs."""
    options, model = generator.options, run.model
    experience = experience_of(generator.drafter, model)
    same_every_round = options.num_assistant_tokens_schedule == "constant" or options.draft_tree != "dynamic"
    # Where no path is allowed the target cannot be timed with one either.
    if same_every_round or _depth_limit(run, sequence) < 1:
        return Pace(options, experience, generator.drafter.device)
    nodes = options.num_assistant_tokens
    circumstances = Circumstances.of(model, run.length, nodes)
    if circumstances not in experience.costs:
        seconds = load(model, circumstances)
        if seconds is None:
            seconds = measure(run.rehearse, nodes, model.device)
            save(model, circumstances, seconds)
        experience.costs[circumstances] = Costs(seconds)
    return AdaptivePace(options, experience, generator.drafter.device, experience.costs[circumstances])


def _depth_limit(run: TargetRun, sequence: TokenSequence) -> int:
    """A path may not be longer than the tokens that are wanted, less the target's own."""
    budget, rotary = sequence.tokens_left - 1, run.max_tree_depth()
    return budget if rotary is None else min(budget, rotary)
