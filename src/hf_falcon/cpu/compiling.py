# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`compile_rounds`: compiles trees of a few sizes ahead of time, checks the values, and keeps the sizes that pay."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CompileConfig, DynamicCache, PreTrainedModel
from transformers.utils import logging

from ..core.caches import DraftCache
from ..core.draft_options import DraftOptions
from ..core.drafter import DraftModel
from ..core.modeling_falcon_draft import hide_end
from ..core.probe import TREES
from ..core.target_parts import CACHE_NAME, decoder_layers
from ..core.target_run import TargetRun
from ..core.tree import chain
from ..verdicts import verdict_of_prompt
from .backend import CpuTarget
from .compiled_code import captures_graphs
from .compiled_passes import CompilableDrafter, CompiledHead, CompiledPasses
from .compiled_rounds import CompiledRounds, compiled
from .kept_programs import shelf_of
from .kept_rounds import decline, has_declined, undo_decline
from .packing import is_packed
from .programs import CannotBeBuilt, kind_of
from .row_invariant import is_row_invariant
from .skinny_gemm import linears_of, skinny_gemm

logger = logging.get_logger(__name__)

# Plain steps, the tree sizes that pay in float32 (4, 8) and bfloat16 (8, 16), and long paths of prompt lookup.
SIZES = (1, 4, 8, 16, 32)
_LARGEST = 4096
# Tokens of context: sizes are compiled at the first length, and compared with uncompiled forwards at both.
_CONTEXTS = (40, 90)
_TURNS, _TRIES = 5, 3
# Texts that compiled rounds have to give the same bits for, inside `row_invariant`.
_TEXTS = 8
# The greatest difference of logits, relative to the greatest logit, that rounding explains.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
# All compiled rounds of each target, by packing, dtype, device, configuration and the kinds of its layers.
_made: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], CompiledRounds]]
_made = weakref.WeakKeyDictionary()


@torch.no_grad()
def compile_rounds(
    target: PreTrainedModel,
    sizes: Sequence[int] = SIZES,
    compile_config: CompileConfig | None = None,
    drafter: DraftModel | None = None,
) -> list[int]:
    """
    Compiles a target's forward for trees of a few sizes, and a drafter's passes, until [`uncompile_rounds`].
    `generate` with a drafter then runs compiled code for the sizes that are faster; everything else runs as before.
    On a CPU each kind of layer becomes a program of torch's AOTInductor, which stays on disk for later processes.
    Where no program can be made, and with a `compile_config`, `torch.compile` compiles in every process. Pack weights
    before, not afterwards. Outputs differ by rounding.

    With MKL, compiled forwards of up to 12 tokens (AVX-512) or 16 (AVX2) read a compact copy of float32 weights, in
    one or two bytes a value, if the values fit bfloat16 or the grid of a file of 4, 5 or 8 bits. The copies take up
    to 0.6 times as much memory again. On a processor without products in bfloat16, forwards of up to 16 tokens read
    a copy of weights in bfloat16, of the same size, and multiply in float32. Packed weights of layers with the same
    input are read side by side, from a copy, if these have at most 4 million values together; with AMX, in bfloat16,
    all weights of at most that size are read from a copy, packed or not. On Linux 6.1 or later these copies move to
    huge pages, as in [`pack_weights`]. If a weight has changed since, rounds run uncompiled: every call detects
    changes by sampling each weight.

    Args:
        target ([`PreTrainedModel`]): the target, in evaluation mode.
        sizes (sequence of `int`, *optional*, defaults to `(1, 4, 8, 16, 32)`): tokens of a tree, its root included.
            Smaller trees are padded to one of these sizes; larger trees run uncompiled.
        compile_config ([`CompileConfig`], *optional*): backend, mode and options for `torch.compile`; `fullgraph` and
            `dynamic` are fixed.
        drafter ([`DraftModel`], *optional*): a drafter for this target. Its passes are compiled for its own
            `draft_width`, if it has passes of this kind; DFlash drafters run as they are.

    Returns:
        `list[int]`: the sizes for which compiled forwards are faster, and are used.

    Raises:
        `ValueError`: for invalid sizes, for a target whose forward cannot be compiled (it is in training mode, for
            example), with the reason, and for a drafter that was made for another target.
        `TypeError`: for a drafter of another class, or one that was loaded with its repository's own code.
        `RuntimeError`: if `torch.compile` fails, for example without a C++ compiler. Nothing is compiled then.
    """
    sizes = sorted({*sizes})
    if not sizes or not all(type(size) is int and 1 <= size <= _LARGEST for size in sizes):
        raise ValueError(f"`sizes` is {sizes!r}: give some integers of at least 1 and at most {_LARGEST}.")
    if drafter is not None:
        _check_drafter(drafter, target)
    check_whether_possible(target)
    uncompile_rounds(target)
    graphs = captures_graphs(target.device)
    config = compile_config or CompileConfig(mode="reduce-overhead" if graphs else "default")
    # A caller that packs weights and compiles around every call compiles in the first call only.
    layers = decoder_layers(target)
    state = is_packed(target), is_row_invariant(target), target.dtype, target.device, repr(config)
    state = *state, *map(kind_of, layers)
    made = _made.setdefault(target, {})
    if state not in made or not made[state].are_of(layers):
        made[state] = CompiledRounds(target, config, shelf_of(target) if _can_be_built(target, config) else None)
    rounds = made[state]
    try:
        _compile(rounds, target, sizes)
    except CannotBeBuilt as error:
        logger.debug(f"The rounds of {type(target).__name__} are compiled in every process: {error}")
        rounds = made[state] = CompiledRounds(target, config)
        _compile(rounds, target, sizes)
    rounds.sizes = [size for size in sizes if rounds.is_faster[size]]
    if not rounds.sizes:
        logger.warning_once(f"Compiled rounds of {sizes} tokens are not faster on this machine: none are used.")
    if isinstance(drafter, CompilableDrafter):
        try:
            _compile_passes(rounds, target, drafter, config)
        except BaseException:
            for passes in rounds.made.get(drafter, {}).values():
                passes.drop()
            rounds.drop_weights()
            raise
    elif drafter is not None and getattr(drafter, "max_draft_passes", None) != 0:
        logger.warning_once(
            f"The draft passes of a {type(drafter).__name__} cannot be compiled: they run as they are."
        )
    compiled[target] = rounds
    return list(rounds.sizes)


def _compile(rounds: CompiledRounds, target: PreTrainedModel, sizes: list[int]) -> None:
    """
    Takes the target's weights of now, and compiles the sizes that are not compiled yet, also in no earlier process.
    """
    rounds.take_weights()
    try:
        _compile_missing(rounds, target, sizes)
    except BaseException:
        rounds.drop_weights()
        raise


def _compile_missing(rounds: CompiledRounds, target: PreTrainedModel, sizes: list[int]) -> None:
    if not rounds.are_exact:
        raise ValueError(
            f"The rounds of {type(target).__name__} cannot be compiled: its layers have hooks, or forwards of their "
            "own, as from adapters and `accelerate`, or are compiled already. Remove these first."
        )
    if any(size not in rounds.is_faster for size in sizes):
        rounds.load()
    if missing := [size for size in sizes if size not in rounds.is_faster]:
        runs = [_run(target, length, rounds) for length in _CONTEXTS]
        for size in logging.tqdm(missing, desc="Compiling rounds"):
            rounds.is_faster[size] = _is_faster(rounds, runs, size)
        rounds.keep()


def uncompile_rounds(target: PreTrainedModel) -> None:
    """
    Undoes [`compile_rounds`]. Other models stay as they are.

    Args:
        target ([`PreTrainedModel`]): see [`compile_rounds`].
    """
    decline(target)
    if (rounds := compiled.pop(target, None)) is not None:
        rounds.drop_weights()


@contextmanager
def compiled_rounds(
    target: PreTrainedModel,
    sizes: Sequence[int] = SIZES,
    compile_config: CompileConfig | None = None,
    drafter: DraftModel | None = None,
) -> Iterator[list[int]]:
    """
    Compiles a target's rounds as [`compile_rounds`] does, inside a `with` statement:

    ```python
    with hf_falcon.packed_weights(target, drafter), hf_falcon.compiled_rounds(target, drafter=drafter):
        target.generate(**inputs, assistant_model=drafter)
    ```

    Args:
        target, sizes, compile_config, drafter: see [`compile_rounds`].

    Returns:
        A context manager, whose value is the result of [`compile_rounds`].
    """
    had_declined = has_declined(target)
    try:
        yield compile_rounds(target, sizes, compile_config, drafter)
    finally:
        uncompile_rounds(target)
        if not had_declined:
            # What `hf-falcon tune --compile` kept is used again.
            undo_decline(target)


def refresh_passes(drafter: Any) -> None:
    """
    Makes compiled passes of a drafter read its weights of now, after these were changed. Where its code cannot, it
    runs uncompiled.

    Args:
        drafter ([`DraftModel`]): the drafter.
    """
    for target, rounds in list(compiled.items()):
        passes = rounds.passes.get(drafter)
        if passes is not None:
            passes.take(drafter, target)
            if passes.is_faster is None:
                passes.drop()
                del rounds.passes[drafter]


def _check_drafter(drafter: DraftModel, target: PreTrainedModel) -> None:
    if not isinstance(drafter, DraftModel):
        # The code of a repository would look for compiled passes in its own modules.
        raise TypeError(
            f"`drafter` is a {type(drafter).__module__}.{type(drafter).__qualname__}: give a `FalconDraftModel` of "
            "hf_falcon. For a drafter of the Hub, `import hf_falcon` before you load it."
        )
    drafter.check_target(target)


def check_whether_possible(target: PreTrainedModel) -> None:
    """
    Raises:
        `ValueError`: if the rounds of a target cannot be compiled, with the reason.
    """
    if target.get_output_embeddings() is None:
        raise ValueError(
            f"The rounds of {type(target).__name__} cannot be compiled: it has no LM head (load it with "
            "`AutoModelForCausalLM`)."
        )


def _can_be_built(model: nn.Module, config: CompileConfig) -> bool:
    """
    Whether torch's AOTInductor is tried, whose code can be kept: not with options for `torch.compile`, and not inside
    `row_invariant`, for which code is compiled and compared in every process.
    """
    own = config.to_dict()
    is_default = own["backend"] == "inductor" and own["mode"] in (None, "default") and not own["options"]
    return is_default and model.device.type == "cpu" and not is_row_invariant(model)


def _run(target: PreTrainedModel, length: int, rounds: CompiledRounds | None = None) -> TargetRun:
    """A target that has run `length` tokens."""
    name, vocab_size = type(target).__name__, target.config.get_text_config(decoder=True).vocab_size
    input_ids = torch.arange(length, device=target.device)[None] % vocab_size
    kwargs = {CACHE_NAME: DynamicCache(config=target.config), "attention_mask": torch.ones_like(input_ids)}
    reason = "it is in training mode (call `eval()` on it first)" if target.training else None
    if reason is None and (verdict := verdict_of_prompt(target, input_ids)).way != TREES:
        reason = verdict.reason
    if reason is not None:
        raise ValueError(f"The rounds of {name} cannot be compiled: {reason}.")
    run = TargetRun(target, input_ids, target.generation_config, kwargs)
    # The cache gets the shapes that compiled forwards want.
    run.acceleration = CpuTarget(target, rounds)
    run.prefill(input_ids)
    return run


def _is_faster(rounds: CompiledRounds, runs: list[TargetRun], size: int) -> bool:
    """Compiles a size, and compares the values and the times of compiled and uncompiled forwards."""
    subject = f"rounds of {size} tokens"
    with _failures_named(subject), rounds.compiling(size):
        for run, tokens in zip(runs, rounds.examples(size)):
            rounds.sizes = [tokens]
            _logits(run, tokens, rounds)
    rounds.sizes = [size]
    if not rounds.bind():
        raise CannotBeBuilt("the programs do not fit their own layers")
    for run in runs:
        if rounds.shelf is None:
            _check_values(subject, _logits(run, size, rounds), _logits(run, size, None))
            continue
        with rounds.checking(size, partial(_check_outputs, subject)):
            _logits(run, size, rounds)
    if rounds.is_row_invariant and not _are_equal(rounds, runs, size):
        logger.warning_once(f"Compiled {subject} do not run inside `row_invariant`: they round differently here.")
        return False
    return _takes_less(
        lambda: _logits(runs[-1], size, rounds), lambda: _logits(runs[-1], size, None), runs[-1].model.device
    )


def _are_equal(rounds: CompiledRounds, runs: list[TargetRun], size: int) -> bool:
    """Whether compiled and uncompiled forwards give the same bits, for several texts."""
    return all(
        torch.equal(_logits(run, size, rounds, text), _logits(run, size, None, text))
        for run in runs
        for text in range(_TEXTS)
    )


def _logits(run: TargetRun, size: int, rounds: CompiledRounds | None, text: int = 0) -> Tensor:
    """The logits of a tree of `size` tokens, compiled or not; `text` is the number of some text."""
    run.acceleration = CpuTarget(run.model, rounds)
    # Nothing is accepted, so the next forward has the same context.
    before = torch.zeros(1, run.length + 1, dtype=torch.long)
    vocab_size = run.model.config.get_text_config(decoder=True).vocab_size
    tokens = (torch.arange(size) + 1) * 7919 * text % vocab_size
    logits, _ = run.score([chain(tokens)], [before])
    return logits


def _compile_passes(rounds: CompiledRounds, target: PreTrainedModel, drafter: Any, config: CompileConfig) -> None:
    """Compiles a drafter's passes, and uses them if they are faster."""
    width = DraftOptions.from_generation_config(drafter.generation_config).draft_width
    rows = width * drafter.config.block_size
    made = rounds.made.setdefault(drafter, {})
    state = is_packed(drafter), drafter.dtype, drafter.device, rows
    if state not in made:
        can_be_built = rounds.shelf is not None and _can_be_built(drafter, config)
        made[state] = CompiledPasses(rows, config, shelf_of(target, drafter) if can_be_built else None)
    passes = made[state]
    head = passes.take(drafter, target)
    if passes.is_faster is None and not passes.load(drafter):
        with logging.tqdm(total=1, desc="Compiling draft passes") as progress:
            try:
                passes.is_faster = _are_faster(passes, drafter, head)
            except CannotBeBuilt as error:
                logger.debug(f"The passes of {type(drafter).__name__} are compiled in every process: {error}")
                passes = made[state] = CompiledPasses(rows, config)
                head = passes.take(drafter, target)
                passes.is_faster = _are_faster(passes, drafter, head)
            passes.keep()
            progress.update()
    if passes.is_faster:
        rounds.passes[drafter] = passes
    else:
        passes.drop()


def _are_faster(passes: CompiledPasses, drafter: Any, head: CompiledHead) -> bool:
    """Compiles passes, and compares compiled and uncompiled passes, as [`_is_faster`] does."""
    dry_runs = [PassDryRun(passes, drafter, head, length) for length in _CONTEXTS]
    subject = f"draft passes of {passes.rows} rows"
    with _failures_named(subject), passes.compiling():
        for each in dry_runs[: 1 if passes.shelf is None else 2]:
            each.run(is_compiled=True)
    if not passes.bind():
        raise CannotBeBuilt("the programs do not fit the drafter")
    for each in dry_runs:
        _check_values(subject, each.run(is_compiled=True), each.run(is_compiled=False))
    last = dry_runs[-1]
    return _takes_less(lambda: last.run(is_compiled=True), lambda: last.run(is_compiled=False), drafter.device)


class PassDryRun:
    """
    A dummy draft pass, for timing.

    Args:
        passes ([`CompiledPasses`]): the drafter's compiled passes.
        drafter ([`CompilableDrafter`]): the drafter.
        head ([`CompiledHead`]): its head.
        length (`int`): the number of cached positions.
    """

    def __init__(self, passes: CompiledPasses, drafter: Any, head: CompiledHead, length: int):
        self._passes, self._drafter, self._head = passes, drafter, head
        self._linears = linears_of(drafter), linears_of(head.linear)
        self._cache = DraftCache(drafter.config.num_hidden_layers, captures_graphs(drafter.device))
        drafter.run_layers(*self._inputs(length), self._cache)
        self._cache.advance(length)

    def run(self, is_compiled: bool) -> Tensor:
        """The logits of all rows."""
        inputs = self._inputs(self._passes.rows)
        with skinny_gemm(self._drafter, self._linears[0]), skinny_gemm(self._head.linear, self._linears[1]):
            if is_compiled:
                return self._head.logits(self._passes.run_layers(self._drafter, *inputs, self._cache))
            return self._head.plain.logits(self._drafter.run_layers(*inputs, self._cache))

    def _inputs(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        drafter = self._drafter
        size, places = drafter.config.hidden_size, torch.arange(rows, device=drafter.device)
        states = torch.arange(rows * size, device=drafter.device).float().sin().view(1, rows, size).to(drafter.dtype)
        fused, _ = drafter.fuse(states, states)
        end = self._cache.length + rows
        masks = 1 if drafter.window is None else 2
        mask = torch.zeros(1, masks, rows, end, dtype=drafter.dtype, device=drafter.device)
        mask = hide_end(mask, self._cache.seen_slots(end) - end)
        return fused, places[None], places[None], mask


@contextmanager
def _failures_named(subject: str) -> Iterator[None]:
    try:
        yield
    except CannotBeBuilt:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise RuntimeError(
            f"`torch.compile` could not compile {subject}: {type(error).__name__}: {reason}. Remove that cause, or "
            "generate without `compile_rounds`."
        ) from error


def _check_values(subject: str, found: Tensor, expected: Tensor) -> None:
    change = (found - expected).abs().max() / expected.abs().max()
    if not change < _ROUNDING[expected.dtype]:
        raise RuntimeError(
            f"Compiled {subject} give other values (they change by {change:.1e} of the greatest): generate "
            "without `compile_rounds`."
        )


def _check_outputs(subject: str, found: Any, expected: Any) -> None:
    pairs = [(found, expected)] if torch.is_tensor(expected) else zip(found, expected)
    for one, other in pairs:
        _check_values(subject, one, other)


def _takes_less(first: Callable[[], object], second: Callable[[], object], device: torch.device) -> bool:
    """Whether the first call is faster than the second. Both are timed in turns."""
    took = [math.inf, math.inf]
    # On a busy machine, a few turns more.
    for _ in range(_TRIES):
        for _ in range(_TURNS):
            for place, call in enumerate((first, second)):
                start = time.perf_counter()
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                took[place] = min(took[place], time.perf_counter() - start)
        if took[0] < took[1]:
            return True
    return False
