# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The decoding loop: draft a tree, verify it in one forward of the target, keep the longest agreed path.

`generate` calls `assisted_decoding` (by hook.py). One round of `decode` is then four calls: `_propose`, `run.score`,
`verify_rows`, `run.accept`; the generators' `update` takes the outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from .draft_statistics import FalconGenerateOutput, StatisticsRecorder
from .hook import is_user_defined, sample
from .interfaces import Drafter, RowsDecoder, TargetAcceleration, drafter_files, needed_part, part, target_acceleration
from .policy import AdaptivePolicy, DraftPolicy, PlainPolicy, acceptance_stats_of
from .probe import CHAINS, PLAIN, TREES, Verdict, verdict_of_call
from .target_parts import CACHE_NAME, peft_sets
from .target_run import TargetRun
from .tree import DraftTree, collect, to_device
from .verification import Batch, TokenSequence, Verification, verify, verify_rows

logger = logging.get_logger(__name__)

# Fields of a generation configuration that other kinds of assisted decoding, and caches that can be compiled, read.
_UNUSED_FIELDS = ["assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind", "target_lookbehind"]
_UNUSED_FIELDS += ["max_matching_ngram_size", "speculation_type", "use_mtp", "compile_config"]


@dataclass(frozen=True)
class Row:
    """
    One row of a call.

    Args:
        place (`int`): its place among the rows of the target's cache.
        sequence ([`TokenSequence`]): its tokens.
        generator ([`FalconCandidateGenerator`]): proposes its trees.
    """

    place: int
    sequence: TokenSequence
    generator: FalconCandidateGenerator


def assisted_decoding(
    target: PreTrainedModel,
    drafter: Drafter,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    *,
    observer: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """
    Generates what plain decoding of `target` generates, with `drafter` proposing trees of tokens.

    Args:
        target ([`PreTrainedModel`]): the target, whose `generate` was called.
        drafter ([`Drafter`]): the drafter.
        input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs:
            What `generate` prepared.
        observer ([`CallRecorder`], *optional*): of the part "learning".

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
    verdict = Verdict(PLAIN, "`synced_gpus` is set" if synced_gpus else None)
    # Of two tokens one is the prompt's forward's, and the other a plain step's. A first call warms up all the same.
    is_short = generation_config.max_length - input_ids.shape[1] <= 2 and not generation_config.return_dict_in_generate
    if not synced_gpus and not (is_short and acceptance_stats_of(drafter, target).is_compared):
        call = input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        verdict = verdict_of_call(target, *call)
    if verdict.way == PLAIN:
        if verdict.reason is not None:
            logger.warning_once(f"The assistant model is not used, plain decoding runs: {verdict.reason}.")
        # Short calls read the prompt as longer ones do.
        acceleration = target_acceleration(target) if verdict.reason is None else TargetAcceleration()
        with acceleration.reading():
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
        # Targets that write speech return more.
        return FalconGenerateOutput(**output) if type(output) is GenerateDecoderOnlyOutput else output
    options = DraftOptions.from_generation_config(drafter.generation_config, generation_config)
    options = limited_options(options, drafter, target)
    if verdict.way == CHAINS:
        logger.info(f"The target verifies chains, and no trees: {verdict.reason}.")
        options = replace(options, verification="exact", draft_tree="dynamic", draft_top_k=1, draft_width=1)
    drafter.check_target(target)
    if unused := [name for name in _UNUSED_FIELDS if set_by_call(generation_config, name)]:
        logger.warning_once(f"{', '.join(f'`{name}`' for name in unused)}: no effect with a Falcon drafter.")
    _warn_of_other_weights(drafter, target)
    # Before the target runs: an option that does not fit raises its error here.
    decode_rows = _decoder(drafter, target, options, input_ids, logits_processor, generation_config, model_kwargs)
    make_batch = Batch if input_ids.shape[0] == 1 else part("batches")
    batch = make_batch(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
    make_run = TargetRun if verdict.way == TREES else part("chains")
    # Only draft passes read features.
    layers = drafter.config.feature_layers if options.num_draft_passes else None
    run = make_run(target, input_ids, generation_config, model_kwargs, layers)
    run.observer = observer
    cache_is_returned = generation_config.return_dict_in_generate or is_user_defined(run.cache)
    try:
        statistics = decode_rows(run, batch, not cache_is_returned)
    except BaseException:
        run.finish()
        raise
    cache = run.finish(batch.token_ids if cache_is_returned else None)
    if streamer is not None:
        # Its reader may go on with the call's cache.
        streamer.end()
    return _output(batch, statistics, cache, generation_config, run)


def _decoder(
    drafter: Drafter,
    target: PreTrainedModel,
    options: DraftOptions,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> RowsDecoder:
    """Decodes the rows by the call's `verification`; greedy decoding and batches are always exact."""
    is_exact = not generation_config.do_sample or input_ids.shape[0] > 1
    name = "exact" if is_exact else options.verification
    # Several roots need tokens.
    if name == "speculative" or (name == "multi_root" and model_kwargs.get("inputs_embeds") is None):
        return needed_part(name, "verification", "set it to 'exact'")(drafter, target, options, logits_processor)
    first = FalconCandidateGenerator(drafter, target, options)

    def decode_exactly(run: TargetRun, batch: Batch, drops_rows: bool) -> StatisticsRecorder:
        others = [FalconCandidateGenerator(drafter, target, options, first.head) for _ in batch.rows[1:]]
        return decode(run, [first, *others], batch, drops_rows)

    return decode_exactly


def decode(
    run: TargetRun,
    generators: Sequence[FalconCandidateGenerator],
    batch: Batch,
    drops_rows: bool = False,
    verify_row: Verification = verify,
) -> StatisticsRecorder:
    """
    Runs rounds of drafting and verifying until all rows of `batch` are finished. Each row drafts its own tree, one
    forward of the target verifies all of them, and each row keeps its own path.

    Args:
        run ([`TargetRun`]): the target; or a run of chains.
        generators (sequence of [`FalconCandidateGenerator`]): propose the trees, one for each row.
        batch ([`Batch`]): the rows, of which the prompts are not run yet.
        drops_rows (`bool`, *optional*, defaults to `False`): whether rows that have ended leave the target's cache.
        verify_row (`Callable`, *optional*): verifies the tree of a single row; exactly by default.
    """
    statistics, device = StatisticsRecorder(), run.model.device
    with statistics.measure("target", device):
        logits, prompts = run.prefill(batch.prompts)
    rows = [Row(place, *each) for place, each in enumerate(zip(batch.rows, generators))]
    for row in rows:
        row.sequence.emit(int(row.sequence.choose(logits[row.place][None])))
    batch.stream()
    # The rows in the target's cache, and how many rows drafted last.
    cached, drafting = rows, 0
    while unfinished := [row for row in cached if not row.sequence.finished]:
        if drops_rows and len(unfinished) < len(cached):
            drops_rows = not peft_sets(run.model, "adapter_names")
            if drops_rows:
                run.select([row.place for row in unfinished])
                # Rows may end before any of them drafts.
                prompts = prompts and [prompts[row.place] for row in unfinished]
                unfinished = cached = [replace(row, place=place) for place, row in enumerate(unfinished)]
        if len(unfinished) != drafting:
            policy = _policy(run, unfinished, batch, len(cached))
            for row in unfinished:
                if drafting:
                    row.generator.policy = policy
                else:
                    if run.observer is not None:
                        run.observer.start(row.sequence, prompts[row.place])
                    row.generator.start(*prompts[row.place], policy, row.sequence.is_late, run.prompt_embeds)
                    if (constrain := part("constrain")) is not None:
                        constrain(row.generator, row.sequence)
            # Nothing else keeps the prompt's features: a row drops them once it drafts.
            prompts, drafting = [], len(unfinished)
        with statistics.measure("drafter", generators[0].drafter.device):
            drafted = _propose(run, unfinished, batch)
            # What plain decoding runs of a row that has ended fits in beside them.
            most = max(map(len, drafted.values()))
            trees = [
                drafted.get(row.place) or run.rest(row.place, row.sequence.token_ids, most, batch.padding)
                for row in cached
            ]
        with statistics.measure("target", device) as watch:
            logits, features = run.score(trees, [row.sequence.token_ids for row in cached])
        nodes = run.deferred + logits.shape[1]
        outcomes = verify_rows(trees, logits, [row.sequence for row in cached], verify_row)
        run.accept([path for path, _ in outcomes])
        for row in unfinished:
            tree, (path, accepted) = trees[row.place], outcomes[row.place]
            found = features if len(cached) == 1 else features[row.place : row.place + 1]
            if run.observer is not None:
                run.observer.add_round(row.sequence, tree, path, accepted, found)
            found = found[:, to_device(path, features.device)]
            # One forward is one timing, whatever the number of rows.
            timed = watch if row is unfinished[0] else None
            row.generator.update(tree, path, accepted, found, timed, nodes)
            statistics.add_round(len(tree) - 1, accepted)
        batch.stream()
    return statistics


def _propose(run: TargetRun, rows: Sequence[Row], batch: Batch) -> dict[int, DraftTree]:
    """
    The trees of a round, by the places of their rows. The target runs as many nodes for each row as for the largest,
    so all have one size.
    """
    rounds = [row.generator.draft(row.sequence.token_ids, _depth_limit(run, row, batch), len(rows)) for row in rows]
    collect(rounds)
    for row, each in zip(rows, rounds):
        row.generator.complete(each)
    found, size = [each.best() for each in rounds], 0
    # A static tree ranks no nodes, and has one size.
    if any(map(len, found)):
        best = torch.nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=-torch.inf)
        left = torch.tensor([row.sequence.tokens_left for row in rows], device="cpu")
        gains = torch.stack([row.generator.expected_gain(each) for row, each in zip(rows, best)])
        size = common_size(gains, left)
    trees = {row.place: each.finish(row.sequence.root, size) for row, each in zip(rows, rounds)}
    return trees if run.takes_trees else {place: tree.likeliest_path() for place, tree in trees.items()}


def common_size(gains: Tensor, left: Tensor) -> int:
    """The nodes that shrink a soft maximum of the tokens that rows have `left`: a batch ends with its slowest row."""
    return int(((left[:, None] - left.max() - gains.double()) / left.max().double().sqrt()).logsumexp(dim=0).argmin())


def _policy(run: TargetRun, rows: Sequence[Row], batch: Batch, cached: int) -> DraftPolicy:
    """The drafting policy of `rows`, which are not finished, in forwards of `cached` rows."""
    model, drafter, options = run.model, rows[0].generator.drafter, rows[0].generator.options
    stats = acceptance_stats_of(drafter, model)
    # On a device other than a CPU, a question after a pass would wait for the device; a tree of paths has none.
    ahead = drafter.device.type != "cpu" and isinstance(options.draft_tree, str)
    # A path may grow again later in the call, where rotary frequencies that end it change.
    if max(batch.tokens_left(row.sequence) for row in rows) < 2:
        return PlainPolicy(options, stats)
    if options.num_assistant_tokens_schedule == "constant" or options.draft_tree != "dynamic":
        return DraftPolicy(options, stats, ahead)
    backend = run.acceleration
    key = CostKey.of(model, run.length, options.num_assistant_tokens, cached, backend.is_packed, backend.sizes)
    stats = stats.under(key)
    costs = costs_of(model, key, stats.costs)
    run.costs = costs
    return AdaptivePolicy(options, stats, costs, drafter.config.block_size, ahead, run.most_deferred)


def _depth_limit(run: TargetRun, row: Row, batch: Batch) -> int:
    """A path may not be longer than the tokens that the row may still emit, minus the target's own."""
    limit, deepest = batch.tokens_left(row.sequence) - 1, run.max_tree_depth(row.place)
    return max(0, limit if deepest is None else min(limit, deepest))


def _warn_of_other_weights(drafter: Drafter, target: PreTrainedModel) -> None:
    stats = acceptance_stats_of(drafter, target)
    if stats.is_compared:
        return
    stats.is_compared = True
    if (difference := drafter_files().difference(drafter, target)) is not None:
        logger.warning_once(f"{difference} The output is exact all the same; fewer draft tokens may be accepted.")


def _output(
    batch: Batch, statistics: StatisticsRecorder, cache: Cache, generation_config: GenerationConfig, run: TargetRun
) -> Tensor | GenerateDecoderOnlyOutput:
    """What `generate` returns."""
    if not generation_config.return_dict_in_generate:
        return batch.input_ids
    # Calls for several rows do not ask for scores, logits or the outputs of layers.
    first, layer_outputs = batch.rows[0], run.layer_outputs
    found = statistics.result(batch.new_tokens, first.near_ties)
    found.learning = None if run.observer is None else run.observer.learning()
    return FalconGenerateOutput(
        sequences=batch.input_ids,
        scores=first.scores,
        logits=first.logits,
        attentions=layer_outputs.attentions,
        hidden_states=layer_outputs.hidden_states,
        draft_statistics=found,
        **{CACHE_NAME: cache},
    )
