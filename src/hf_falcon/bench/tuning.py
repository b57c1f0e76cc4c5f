# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Measures the cost of a round on this machine, and predicts the speed-up of trees of each size."""

from __future__ import annotations

import io
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel

from ..chains import ChainRun
from ..core.candidate_generator import FalconCandidateGenerator, limited_options
from ..core.costs import CostKey, Costs, Stopwatch
from ..core.draft_options import DraftOptions
from ..core.interfaces import Drafter, target_acceleration
from ..core.policy import AcceptanceStats, DraftDecision, DraftPolicy, PassCheck, acceptance_stats_of
from ..core.probe import CHAINS, TREES
from ..core.target_parts import CACHE_NAME, FeatureTap, rope_boundary
from ..core.target_run import TargetRun
from ..core.tree import Branches, chain
from ..cost_files import save
from ..drafters.language_model_runs import most_positions
from ..verdicts import verdict_of_prompt

# Draft nodes at which the target is timed; between them its time is interpolated.
_SIZES = (0, 1, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127)
# Share of the measuring time that each number of threads gets. Fewer threads are recommended where a tree takes less
# than this share of the seconds with all threads.
_PART, _CLEARLY = 0.1, 0.95


@dataclass
class Tuning:
    """
    The measurements and predictions of [`tune`].

    Args:
        cost_key ([`CostKey`]): the conditions that the times hold for.
        seconds (`dict[int, float]`): seconds of the target's forward by draft nodes.
        commit, draft_pass (`float`): seconds of a commit with the first block, and of each further draft pass.
        expected (`torch.Tensor` of shape `(passes, nodes + 1)`):
            Accepted draft tokens a round that the drafter's own probabilities predict.
        speedups (`torch.Tensor` of the same shape): predicted speed-up over plain decoding.
        draft_calibration (`list[float]`): accepted tokens over the drafter's own probability, by depth.
        seconds_by_threads (`dict[int, tuple[float, float]]`): see [`seconds_by_threads`], with trees of `nodes` nodes.
    """

    cost_key: CostKey
    seconds: dict[int, float]
    commit: float
    draft_pass: float
    expected: Tensor
    speedups: Tensor
    draft_calibration: list[float]
    seconds_by_threads: dict[int, tuple[float, float]]

    @property
    def passes(self) -> int:
        """Draft passes of the fastest tree."""
        return int(self.speedups.argmax()) // self.speedups.shape[1] + 1

    @property
    def nodes(self) -> int:
        """Draft nodes of the fastest tree."""
        return int(self.speedups.argmax()) % self.speedups.shape[1]

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {
            "seconds": self.seconds,
            "commit": self.commit,
            "draft_pass": self.draft_pass,
            "expected": self.expected.tolist(),
            "speedup": self.speedups.tolist(),
            "nodes": self.nodes,
            "passes": self.passes,
            "draft_calibration": self.draft_calibration,
            "seconds_by_threads": self.seconds_by_threads,
            **self.cost_key._asdict(),
        }


def tune(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: list[dict[str, Tensor]],
    context: int,
    max_new_tokens: int,
    seconds: float,
) -> Tuning:
    """
    Measures a target and its drafter, and saves the target's times for later calls of `generate`.

    Args:
        target, drafter: the models. The drafting options of the drafter's generation configuration are changed.
        prompts (`list[dict[str, torch.Tensor]]`): the inputs of `generate`, one prompt each.
        context (`int`): tokens before the round that is timed, or as many as the target has positions for.
        max_new_tokens (`int`): tokens of an answer, at most.
        seconds (`float`): how long the target is timed.

    Raises:
        `ValueError`: for static trees, which have one size, and for a drafter of another target.
    """
    # A drafter may only know the layers that it reads once it knows the target.
    drafter.check_target(target)
    # All sizes are tried: a threshold would end the search early.
    drafter.generation_config.assistant_confidence_threshold = 0.0
    options = limited_options(DraftOptions.from_generation_config(drafter.generation_config), drafter, target)
    if options.draft_tree != "dynamic":
        raise ValueError(f"`draft_tree` is {options.draft_tree!r}: only dynamic trees have a size to be tuned.")
    if verdict_of_prompt(target, prompts[0]["input_ids"]).way == CHAINS:
        # As in its calls: a path of likeliest tokens.
        options = replace(options, draft_top_k=1, draft_width=1)
    acceleration = target_acceleration(target, reads_layers=bool(drafter.config.feature_layers))
    nodes = options.num_assistant_tokens
    if (table := most_positions(target)) is not None:
        context = max(1, min(context, table - nodes - 1))
    cost_key = CostKey.of(target, context, nodes, 1, acceleration.is_packed, acceleration.sizes)
    layers = drafter.config.feature_layers
    measured = target_seconds(target, context, nodes, seconds, layers)
    save(target, cost_key, measured)
    known = acceptance_stats_of(drafter, target)
    # Tokens of prompt lookup would take nodes from the drafter's tree, which is measured here.
    drafter.generation_config.prompt_lookup_num_tokens = 0
    drafter.generation_config.draft_calibration = []
    drafter.generation_config.num_assistant_tokens_schedule = "heuristic"
    texts = []
    for inputs in tqdm(prompts, unit="prompt", desc="Answers to draft", leave=False):
        text = target.generate(**inputs, assistant_model=drafter, max_new_tokens=max_new_tokens, do_sample=False)
        texts.append((text, inputs["input_ids"].shape[1]))
    calibration = [round(share.value, 3) for share in known.depths]
    expected, commit, draft_pass = drafting(drafter, target, texts, options)
    gains = speedups(expected, Costs(measured).target(nodes), commit / measured[0], draft_pass / measured[0])
    found = Tuning(cost_key, measured, commit, draft_pass, expected, gains, calibration, {})
    found.seconds_by_threads = seconds_by_threads(target, context, max(1, found.nodes), _PART * seconds, layers)
    return found


@dataclass(frozen=True)
class _AllPasses(DraftDecision):
    """
    Drafts all passes, and notes after each the expected accepted tokens of the best 0, 1, 2, ... nodes. A lap of
    `watch` ends with the first.
    """

    nodes: int = 0
    watch: Stopwatch | None = None
    expected: list[Tensor] = field(default_factory=list)

    def check_pass(self, branches: Branches, log_probs: Tensor) -> PassCheck:
        self._note(log_probs)
        return PassCheck(math.inf, 0.0)

    def size(self, log_probs: Tensor) -> int:
        self._note(log_probs)
        return 0

    def _note(self, log_probs: Tensor) -> None:
        if self.watch is not None and not self.expected:
            self.watch.lap()
        tokens = torch.zeros(self.nodes + 1, device=log_probs.device)
        tokens[1 : 1 + log_probs.shape[0]] = log_probs.exp()
        self.expected.append(tokens.cumsum(dim=0).cpu())


class _Recorder(DraftPolicy):
    """Has every round draft all passes, and keeps what it expected."""

    def __init__(self, options: DraftOptions, watch: Stopwatch):
        super().__init__(options, AcceptanceStats())
        self.expected: list[Tensor] = []
        self._watch = watch

    def decide(self, likely: float = 0.0) -> DraftDecision:
        """See [`DraftPolicy.decide`]."""
        return _AllPasses(nodes=self._options.num_assistant_tokens, watch=self._watch, expected=self.expected)


@torch.no_grad()
def target_seconds(
    target: PreTrainedModel, context: int, max_nodes: int, seconds: float, feature_layers: Sequence[int] | None = ()
) -> dict[int, float]:
    """
    Seconds of the target's forward by draft nodes.

    Args:
        target ([`PreTrainedModel`]): the target.
        context (`int`): tokens before the forward; for chains up to twice as many.
        max_nodes (`int`): draft nodes, at most.
        seconds (`float`): how long it is timed, at least once for each size.
        feature_layers (`list[int]`, *optional*): the layers that a drafter reads; compiled rounds give none.
    """
    config, table = target.config.get_text_config(decoder=True), most_positions(target)
    if rope_boundary(config)[0] == context:
        # Where the prompt runs anew in every round.
        context += 1
    input_ids = torch.randint(config.vocab_size, (1, context)).to(target.device)
    takes_trees = verdict_of_prompt(target, input_ids).way == TREES

    def start() -> TargetRun | ChainRun:
        kwargs = {CACHE_NAME: DynamicCache(config=target.config), "use_cache": True}
        make_run = TargetRun if takes_trees else ChainRun
        run = make_run(target, input_ids, target.generation_config, kwargs, feature_layers)
        run.prefill(input_ids)
        return run

    run = start()
    times: dict[int, list[float]] = {size: [] for size in (*(size for size in _SIZES if size < max_nodes), max_nodes)}
    begin = time.perf_counter()
    while (is_first := not all(times.values())) or time.perf_counter() - begin < seconds:
        # Each size gets the same time.
        size = min(times, key=lambda size: sum(times[size]) if times[size] or not is_first else -1.0)
        watch = Stopwatch(target.device)
        text = torch.zeros(1, run.length + 1, dtype=torch.long)
        run.score([chain(torch.zeros(size + 1, dtype=torch.long))], [text])
        watch.lap()
        times[size].append(sum(watch.seconds(wait=True) or ()))
        # A recurrent state would have to run rejected tokens again. A tree's are dropped: the context stays as long.
        run.accept([torch.arange(0 if takes_trees else size + 1)])
        if run.length > 2 * context or (table is not None and context < run.length >= table - max_nodes - 1):
            run = start()
    return {size: statistics.median_low(found) for size, found in times.items()}


def seconds_by_threads(
    target: PreTrainedModel, context: int, nodes: int, seconds: float, feature_layers: Sequence[int] | None = ()
) -> dict[int, tuple[float, float]]:
    """
    Seconds of the target's forward for a single token and for a tree of `nodes` draft nodes, by threads: as many as
    torch uses now, half as many, and so on. Empty if the target is not on a CPU, or torch uses one thread.
    """
    most, found = torch.get_num_threads(), {}
    counts = [most // 2**step for step in range(most.bit_length())]
    if target.device.type != "cpu" or len(counts) == 1:
        return {}
    try:
        for count in counts:
            torch.set_num_threads(count)
            took = target_seconds(target, context, nodes, seconds, feature_layers)
            found[count] = took[0], took[nodes]
    finally:
        torch.set_num_threads(most)
    return found


@torch.no_grad()
def drafting(
    drafter: Drafter, target: PreTrainedModel, texts: list[tuple[Tensor, int]], options: DraftOptions
) -> tuple[Tensor, float, float]:
    """
    Drafts at every position of some answers, as `generate` may.

    Args:
        drafter, target, options: the drafter, its target, its options.
        texts (list of `torch.LongTensor` of shape `(1, length)` and `int`): prompts with their answers, each of 3
            tokens or more; and the tokens of the prompt.

    Returns:
        Expected accepted tokens by passes and nodes, of shape `(passes, nodes + 1)`, from the drafter's own
        probabilities; and median seconds of a commit with the first block, and of each further pass.
    """
    total, places = torch.zeros(options.num_draft_passes, options.num_assistant_tokens + 1), 0
    commits, passes = [], []
    for text, prompt_length in texts:
        with FeatureTap(target, drafter.config.feature_layers) as tap:
            target(text)
        features = tap.take()
        generator = FalconCandidateGenerator(drafter, target, options)
        begin = max(1, prompt_length - 1)
        for place in range(begin, text.shape[1] - 1):
            watch = Stopwatch(drafter.device)
            generator.policy = recorder = _Recorder(options, watch)
            new = slice(0 if place == begin else place, place + 1)
            generator.commit(features[:, new], generator.new_tokens(text[:, : new.stop + 1], new.stop - new.start))
            generator.propose(text[:, : place + 2], generator.max_depth)
            watch.lap()
            first, further = watch.seconds(wait=True) or (0.0, 0.0)
            commits.append(first)
            passes.append(further / max(1, options.num_draft_passes - 1))
            if len(recorder.expected) == options.num_draft_passes:
                total += torch.stack(recorder.expected)
                places += 1
    return total / max(1, places), statistics.median(commits), statistics.median(passes)


def speedups(expected: Tensor, target: list[float], commit: float, draft_pass: float) -> Tensor:
    """
    Predicted speed-up over plain decoding by passes and nodes.

    Args:
        expected (`torch.Tensor` of shape `(passes, nodes + 1)`): accepted draft tokens of a round.
        target (`list[float]`): the target's time for 0, 1, ..., `nodes` draft nodes, in plain steps.
        commit, draft_pass (`float`): the time of a commit and of a further pass, in plain steps.

    Returns:
        `torch.Tensor` of the shape of `expected`.
    """
    drafted = commit + draft_pass * torch.arange(expected.shape[0])
    return (1.0 + expected) / (torch.tensor(target)[None] + drafted[:, None])


def fastest_count(seconds: dict[int, tuple[float, float]]) -> int:
    """The number of threads with which trees are fastest, or the first number if it is hardly slower."""
    first, best = next(iter(seconds)), min(seconds, key=lambda count: seconds[count][1])
    return best if seconds[best][1] < _CLEARLY * seconds[first][1] else first


def picture(gains: Tensor) -> bytes:
    """Predicted speed-up over nodes and passes as a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes: Any = figure.subplots()
    passes, nodes = gains.shape
    image = axes.imshow(gains.numpy(), aspect="auto", origin="lower", extent=(-0.5, nodes - 0.5, 0.5, passes + 0.5))
    axes.set_xlabel("draft nodes that are verified")
    axes.set_ylabel("draft passes")
    axes.set_yticks(range(1, passes + 1))
    figure.colorbar(image, label="times plain decoding, predicted")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
