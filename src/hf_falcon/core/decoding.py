# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The decoding loop: draft a tree, verify it in one forward of the target, keep the longest agreed path.

`generate` calls `assisted_decoding` (by hook.py). One round is then four calls: `generator.propose`, `run.score`,
`verify`, `run.accept`; `generator.update` takes the outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging

from .candidate_generator import FalconCandidateGenerator, limited_options
from .costs import CostKey, costs_of
from .draft_options import DraftOptions, set_by_call
from .draft_session import weights_difference
from .hook import is_user_defined, sample
from .interfaces import Drafter
from .policy import AdaptivePolicy, DraftPolicy, PlainPolicy, acceptance_stats_of
from .sampling import MultiRootCandidateGenerator, SamplingCandidateGenerator, decode_multi_root, verify_speculative
from .statistics import FalconGenerateOutput, LayerOutputs, StatisticsRecorder
from .target_parts import chain_reason, unsupported_batch_reason, unsupported_chain_reason, unsupported_reason
from .target_run import BatchedTargetRun, ChainRun, TargetRun, chain_fault
from .tree import DraftTree, collect, single_node, to_device, to_host
from .verification import MOST_STEPS_AHEAD, BatchSequence, TokenSequence, verify, verify_greedy

logger = logging.get_logger(__name__)

# Verifies the tree of a round; see [`verification.verify`].
Verify = Callable[[DraftTree, Tensor, TokenSequence], tuple[Tensor, int]]

# Fields of a generation configuration that other kinds of assisted decoding, and caches that can be compiled, read.
_UNUSED_FIELDS = (
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "target_lookbehind",
    "max_matching_ngram_size",
    "speculation_type",
    "use_mtp",
    "compile_config",
)


def assisted_decoding(
    target: PreTrainedModel,
    drafter: Drafter,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """
    Generates what plain decoding of `target` generates, with `drafter` proposing trees of tokens.

    Args:
        target ([`PreTrainedModel`]): the target, whose `generate` was called.
        drafter ([`Drafter`]): the drafter.
        input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs:
            What `generate` prepared.

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
    # Why the target takes chains only, if it does.
    chains = None if reason is not None else chain_reason(target, input_ids, model_kwargs)
    if chains is not None:
        reason = unsupported_chains(target, chains, input_ids, generation_config, model_kwargs)
    if reason is None and input_ids.shape[0] > 1:
        reason = unsupported_batch_reason(
            target, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )
    if reason is not None:
        logger.warning_once(f"The assistant model is not used, plain decoding runs: {reason}.")
        output = sample(
            target,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )
        return FalconGenerateOutput(**output) if isinstance(output, GenerateDecoderOnlyOutput) else output
    options = DraftOptions.from_generation_config(drafter.generation_config, generation_config)
    options = limited_options(options, drafter, target)
    if chains is not None:
        logger.info(f"The target verifies chains, and no trees: {chains}.")
        options = replace(options, verification="exact", draft_tree="dynamic", draft_top_k=1, draft_width=1)
    drafter.check_target(target)
    _warn_of_unused_fields(generation_config)
    _warn_of_other_weights(drafter, target)
    if input_ids.shape[0] > 1:
        batch = BatchSequence(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
        statistics, cache = _assist_batch(target, drafter, options, batch, generation_config, model_kwargs)
        return _output(batch, statistics, cache, generation_config)
    # Before the target runs: an option that does not fit raises its error here.
    decode_sequence = _decoder(drafter, target, options, logits_processor, generation_config, model_kwargs)
    sequence = TokenSequence(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
    make_run = TargetRun if chains is None else ChainRun
    run = make_run(target, input_ids, generation_config, model_kwargs, drafter.config.feature_layers)
    try:
        statistics = decode_sequence(run, sequence)
    finally:
        cache = run.finish()
    if streamer is not None:
        streamer.end()
    return _output(sequence, statistics, cache, generation_config, run.layer_outputs)


def unsupported_chains(
    target: PreTrainedModel,
    chains: str,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> str | None:
    """
    The reason why a target that takes no trees is decoded plainly in this call; see [`unsupported_reason`].

    Args:
        target ([`PreTrainedModel`]): the target.
        chains (`str`): why it takes no trees; see [`chain_reason`].
        input_ids, generation_config, model_kwargs: what `generate` prepared.

    Returns:
        `str`, or `None` where it verifies chains.
    """
    more = "the batch has several rows" if input_ids.shape[0] > 1 else None
    more = more or unsupported_chain_reason(target, generation_config, model_kwargs)
    if more is not None:
        return f"{chains}, and {more}"
    return chain_fault(target, generation_config, model_kwargs)


def _decoder(
    drafter: Drafter,
    target: PreTrainedModel,
    options: DraftOptions,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> Callable[[Any, TokenSequence], StatisticsRecorder]:
    """Decodes one sequence by the call's `verification`; greedy decoding is always exact."""
    verification = options.verification if generation_config.do_sample else "exact"
    if verification == "speculative":
        sampling = SamplingCandidateGenerator(drafter, target, options, logits_processor)
        verify_draws = partial(verify_speculative, head=sampling.context)
        return lambda run, sequence: decode(run, sampling, sequence, verify_draws)
    if verification == "multi_root" and drafter.max_draft_passes is not None:
        raise ValueError(
            f"`verification` is 'multi_root', which drafts behind several tokens at once, but a "
            f"{type(drafter).__name__} drafts behind one token: set it to 'exact' or 'speculative'."
        )
    if verification == "multi_root" and model_kwargs.get("inputs_embeds") is None:
        logger.warning_once("`verification` is 'multi_root': samples are biased, not distributed as plain decoding's.")
        roots = MultiRootCandidateGenerator(drafter, target, options)
        return lambda run, sequence: decode_multi_root(run, roots, sequence)
    generator = FalconCandidateGenerator(drafter, target, options)
    return lambda run, sequence: decode(run, generator, sequence)


def decode(
    run: TargetRun | ChainRun, generator: FalconCandidateGenerator, sequence: TokenSequence, verify: Verify = verify
) -> StatisticsRecorder:
    """
    Runs rounds of drafting and verifying until `sequence` is finished.

    Args:
        run ([`TargetRun`]): the target.
        generator ([`FalconCandidateGenerator`]): proposes the trees.
        sequence ([`TokenSequence`]): the sequence, of which the prompt is not run yet.
        verify (`Callable`, *optional*): verifies a tree; exactly by default.
    """
    statistics = StatisticsRecorder()
    with statistics.measure("target", run.model.device):
        logits, features = run.prefill(sequence.input_ids)
    sequence.emit(int(sequence.choose(logits)))
    if sequence.finished:
        return statistics
    policy = _policy(run, generator.drafter, generator.options, _depth_limit(run, sequence))
    generator.is_late = sequence.is_late
    generator.start(features, run.length - features.shape[1], policy, prompt_embeds=run.prompt_embeds)
    while not sequence.finished:
        with statistics.measure("drafter", generator.drafter.device):
            tree = generator.propose(sequence.token_ids, _depth_limit(run, sequence))
            tree = tree.likeliest_path() if isinstance(run, ChainRun) else tree
        nodes = run.deferred + len(tree)
        with statistics.measure("target", run.model.device) as watch:
            logits, features = run.score(tree, sequence.token_ids)
        path, accepted = verify(tree, logits, sequence)
        run.accept(path)
        features = features[:, to_device(path, features.device)]
        generator.update(tree, path, accepted, features, sequence.token_ids, watch, nodes)
        statistics.add_round(len(tree) - 1, accepted)
    return statistics


def decode_batch(
    run: BatchedTargetRun, drafter: Drafter, options: DraftOptions, batch: BatchSequence, drops_rows: bool
) -> StatisticsRecorder:
    """
    Runs rounds of drafting and verifying until all rows of `batch` are finished. Each row drafts its own tree, one
    forward of the target verifies all of them, and each row keeps its own path.

    Args:
        run ([`BatchedTargetRun`]): the target.
        drafter ([`Drafter`]): the drafter of all rows.
        options ([`DraftOptions`]): options of the call.
        batch ([`BatchSequence`]): the rows.
        drops_rows (`bool`): whether rows that have ended leave the target's cache.
    """
    statistics = StatisticsRecorder()
    with statistics.measure("target", run.model.device):
        logits, of_prompts = run.prefill(batch.prompts)
    # A row takes its features out once it drafts, so that nothing else keeps them.
    features = dict(enumerate(of_prompts))
    del of_prompts
    for row, sequence in enumerate(batch.rows):
        sequence.emit(int(sequence.choose(logits[row][None])))
    batch.stream()
    generators: dict[int, FalconCandidateGenerator] = {}
    head: Any = None
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
            limit = max(_depth_limit_of_row(batch, row) for row in unfinished)
            for row in unfinished:
                policy = _policy(run, drafter, options, limit, active)
                if row in generators:
                    generators[row].policy = policy
                else:
                    known = features.pop(row)
                    generators[row] = FalconCandidateGenerator(drafter, run.model, options, head)
                    head = generators[row].head
                    generators[row].is_late = batch.rows[row].is_late
                    generators[row].start(known, 0, policy, padding=batch.prompts.shape[1] - known.shape[1])
        with statistics.measure("drafter", drafter.device):
            drafted = _propose({row: generators[row] for row in unfinished}, batch)
            trees = [drafted[row] if row in drafted else single_node(batch.rows[row].root) for row in cached]
        with statistics.measure("target", run.model.device) as watch:
            logits, scored = run.score(trees)
        choices: Tensor | None = None
        if all(sequence.is_argmax for sequence in batch.rows):
            [choices] = to_host(logits.max(dim=-1).indices)
        verified = [(no_path, 0)] * len(cached)
        for place, (row, tree) in enumerate(zip(cached, trees)):
            if row in unfinished and choices is not None:
                verified[place] = verify_greedy(tree, choices[place, : len(tree)], batch.rows[row])
            elif row in unfinished:
                verified[place] = verify(tree, logits[place, : len(tree)], batch.rows[row])
        run.accept([path for path, _ in verified])
        for place, (row, tree) in enumerate(zip(cached, trees)):
            path, accepted = verified[place]
            if row in unfinished:
                generators[row].update(
                    tree,
                    path,
                    accepted,
                    scored[place : place + 1, to_device(path, scored.device)],
                    batch.rows[row].token_ids,
                    watch,
                    logits.shape[1],
                )
                statistics.add_round(len(tree) - 1, accepted)
        batch.stream()
    return statistics


def _propose(generators: dict[int, FalconCandidateGenerator], batch: BatchSequence) -> dict[int, DraftTree]:
    """The trees of a round. The target runs as many nodes for each row as for the largest, so all have one size."""
    rounds = {
        row: each.draft(batch.rows[row].token_ids, _depth_limit_of_row(batch, row), len(generators))
        for row, each in generators.items()
    }
    collect(list(rounds.values()))
    for row, each in generators.items():
        each.complete(rounds[row])
    found = [each.best() for each in rounds.values()]
    best = torch.nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=-torch.inf)
    gain = torch.stack([each.expected_gain(row) for each, row in zip(generators.values(), best)]).sum(dim=0)
    size = int(gain.argmax())
    return {
        row: each.finish(batch.rows[row].root, lambda best: min(size, best.shape[0])) for row, each in rounds.items()
    }


def _assist_batch(
    target: PreTrainedModel,
    drafter: Drafter,
    options: DraftOptions,
    batch: BatchSequence,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> tuple[StatisticsRecorder, Cache]:
    """Generates for all rows of `batch`. Returns statistics, and the cache."""
    run = BatchedTargetRun(target, generation_config, model_kwargs, drafter.config.feature_layers)
    # Rows that have ended leave the cache, unless the caller gets it.
    cache_is_returned = generation_config.return_dict_in_generate or is_user_defined(run.cache)
    try:
        statistics = decode_batch(run, drafter, options, batch, not cache_is_returned)
    except BaseException:
        run.finish(None)
        raise
    return statistics, run.finish(batch.input_ids if cache_is_returned else None)


def _policy(
    run: TargetRun | ChainRun | BatchedTargetRun,
    drafter: Drafter,
    options: DraftOptions,
    limit: int,
    rows: int = 1,
) -> DraftPolicy:
    """
    The drafting policy of a call.

    Args:
        limit (`int`): tokens that a path may have at most.
        rows (`int`, *optional*, defaults to 1): rows of the batch that are not finished.
    """
    model = run.model
    stats = acceptance_stats_of(drafter, model)
    # On a device other than a CPU, a question after a pass would wait for the device.
    ahead = drafter.device.type != "cpu"
    if limit < 1:
        return PlainPolicy(options, stats)
    if options.num_assistant_tokens_schedule == "constant" or options.draft_tree != "dynamic":
        return DraftPolicy(options, stats, ahead)
    key = CostKey.of(
        model, run.length, options.num_assistant_tokens, rows, run.acceleration.is_packed, run.acceleration.sizes
    )
    stats = stats.under(key)
    costs = costs_of(model, key, stats.costs)
    if isinstance(run, ChainRun):
        run.costs = costs
    return AdaptivePolicy(options, stats, costs, drafter.config.block_size, ahead, run.most_deferred)


def _depth_limit(run: TargetRun | ChainRun, sequence: TokenSequence) -> int:
    """A path may not be longer than the tokens that are left, minus the target's own."""
    budget, rotary = sequence.tokens_left - 1, run.max_tree_depth()
    return budget if rotary is None else min(budget, rotary)


def _depth_limit_of_row(batch: BatchSequence, row: int) -> int:
    """See `_depth_limit`; where samples are drawn a row may also be only so many steps ahead of the others."""
    sequence = batch.rows[row]
    limit = sequence.tokens_left - 1
    if batch.samples:
        limit = min(limit, batch.steps + MOST_STEPS_AHEAD - sequence.new_tokens)
    return max(limit, 0)


def _warn_of_unused_fields(generation_config: GenerationConfig) -> None:
    unused = [name for name in _UNUSED_FIELDS if set_by_call(generation_config, name)]
    if unused:
        logger.warning_once(f"{', '.join(f'`{name}`' for name in unused)}: no effect with a Falcon drafter.")


def _warn_of_other_weights(drafter: Drafter, target: PreTrainedModel) -> None:
    stats = acceptance_stats_of(drafter, target)
    if stats.is_compared:
        return
    stats.is_compared = True
    if (difference := weights_difference(drafter, target)) is not None:
        logger.warning_once(f"{difference} The output is exact all the same; fewer draft tokens may be accepted.")


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
