# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Compiling rounds ahead of time: which sizes, whether it pays, and whether values stay the same."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, PreTrainedModel
from transformers.utils import logging

from ..core.caches import DraftCache
from ..core.draft_options import DraftOptions
from ..core.drafter import FalconDraftModel
from ..core.target_parts import TargetHead, check_target, decoder_of
from ..core.target_run import TargetRun
from ..core.target_support import unsupported_reason
from .backend import CpuTarget
from .compiled_passes import CompiledHead, CompiledPasses
from .compiled_rounds import CompiledRounds, compiled
from .packing import is_packed
from .skinny_gemm import linears_of, skinny_gemm

logger = logging.get_logger(__name__)

# Plain steps, trees as float32 likes them (4, 8) and bfloat16 (8, 16), and long continuations from the context.
SIZES = (1, 4, 8, 16, 32)
_LARGEST = 4096
# Tokens of context that sizes are compiled at, and that they are compared at with what is not compiled.
_CONTEXTS = (40, 90)
_TURNS = 5
# Greatest difference of logits, over their greatest value, that rounding explains.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
# All that was compiled for a target, by what it was compiled for.
_made: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], CompiledRounds]]
_made = weakref.WeakKeyDictionary()


@torch.no_grad()
def compile_rounds(
    target: PreTrainedModel,
    sizes: Sequence[int] = SIZES,
    compile_config: CompileConfig | None = None,
    drafter: FalconDraftModel | None = None,
) -> list[int]:
    """
    Compiles a target's forward for trees of a few sizes, and a drafter's passes, by `torch.compile`, until
    [`uncompile_rounds`]. What `generate` does with a drafter then runs compiled where that is faster; all else runs as
    ever. It takes half a minute to a minute and a half a size, and less where `torch.compile` finds in its cache on
    disk what an earlier process compiled. Pack weights before, not afterwards. Outputs differ by rounding.

    Of float32 weights that hold no more than bfloat16 does, or than a file of 4, 5 or 8 bits, compiled forwards of up
    to twelve tokens read a copy in one or two bytes a value, with AVX-512 and MKL; it takes up to half as much memory
    again. Where the weights have changed since, rounds run uncompiled: some values of each are compared in every call.

    Args:
        target ([`PreTrainedModel`]): the target, in evaluation mode.
        sizes (sequence of `int`, *optional*, defaults to `(1, 4, 8, 16, 32)`): tokens of a tree, its root among them.
            Smaller trees are filled up to one of these, larger ones run uncompiled.
        compile_config ([`CompileConfig`], *optional*): backend, mode and options for `torch.compile`; `fullgraph` and
            `dynamic` are given.
        drafter ([`FalconDraftModel`], *optional*): a drafter for this target. Its passes are compiled for as many
            paths as its options have a pass extend (`draft_width`).

    Returns:
        `list[int]`: the sizes for which compiled forwards are faster, and are used.

    Raises:
        `ValueError`: for sizes that are none, for a target whose forward cannot be compiled (in training mode, or by
            torch before 2.8, for example), with the reason, and for a drafter that was made for another target.
        `TypeError`: for a drafter that is none, or that decodes by its repository's own code.
        `RuntimeError`: if `torch.compile` fails, for want of a C++ compiler for example. All is as before then.
    """
    sizes = sorted({*sizes})
    if not sizes or not all(type(size) is int and 1 <= size <= _LARGEST for size in sizes):
        raise ValueError(f"`sizes` is {sizes!r}: give some integers of at least 1 and at most {_LARGEST}.")
    if drafter is not None:
        _check_drafter(drafter, target)
    _check_whether_possible(target)
    uncompile_rounds(target)
    config = compile_config or CompileConfig(mode="default")
    # Whoever packs weights and compiles around every call compiles in the first one only.
    state = is_packed(target), target.dtype, target.device, repr(config)
    made = _made.setdefault(target, {})
    if state not in made:
        made[state] = CompiledRounds(decoder_of(target), target.get_output_embeddings(), config)
    rounds = made[state]
    rounds.compact_weights()
    if not rounds.are_exact:
        raise ValueError(
            f"The rounds of {type(target).__name__} cannot be compiled: its layers have hooks, or another forward, as "
            "adapters and `accelerate` give them. Remove these first."
        )
    if missing := [size for size in sizes if size not in rounds.is_faster]:
        runs = [_run(target, length) for length in _CONTEXTS]
        for size in logging.tqdm(missing, desc="Compiling rounds"):
            rounds.is_faster[size] = _is_faster(rounds, runs, size)
    rounds.sizes = [size for size in sizes if rounds.is_faster[size]]
    if not rounds.sizes:
        logger.warning_once(f"Compiled rounds of {sizes} tokens are not faster than others here: none are used.")
    if drafter is not None:
        _compile_passes(rounds, target, drafter, config)
    compiled[target] = rounds
    return list(rounds.sizes)


def uncompile_rounds(target: PreTrainedModel) -> None:
    """
    Undoes [`compile_rounds`]. Does nothing to other models.

    Args:
        target ([`PreTrainedModel`]): see [`compile_rounds`].
    """
    if (rounds := compiled.pop(target, None)) is not None:
        rounds.drop_weights()


@contextmanager
def compiled_rounds(
    target: PreTrainedModel,
    sizes: Sequence[int] = SIZES,
    compile_config: CompileConfig | None = None,
    drafter: FalconDraftModel | None = None,
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
        A context manager; what it gives is what [`compile_rounds`] returns.
    """
    try:
        yield compile_rounds(target, sizes, compile_config, drafter)
    finally:
        uncompile_rounds(target)


def _check_drafter(drafter: FalconDraftModel, target: PreTrainedModel) -> None:
    if not isinstance(drafter, FalconDraftModel):
        # Code of a repository would look for what is compiled in modules of its own.
        raise TypeError(
            f"`drafter` is a {type(drafter).__module__}.{type(drafter).__qualname__}: give a `FalconDraftModel` of "
            "hf_falcon. A drafter of the Hub is one where `import hf_falcon` comes before it is loaded."
        )
    check_target(drafter, target)


def _check_whether_possible(target: PreTrainedModel) -> None:
    reason = None
    if not hasattr(torch.compiler, "skip_guard_on_globals_unsafe"):
        reason = f"torch {torch.__version__} is too old for it (install 2.8 or later)"
    elif target.get_output_embeddings() is None:
        reason = "it has no LM head (load it with `AutoModelForCausalLM`)"
    if reason is not None:
        raise ValueError(f"The rounds of {type(target).__name__} cannot be compiled: {reason}.")


def _run(target: PreTrainedModel, length: int) -> TargetRun:
    """A target behind `length` tokens."""
    name, vocab_size = type(target).__name__, target.config.get_text_config(decoder=True).vocab_size
    input_ids = torch.arange(length, device=target.device)[None] % vocab_size
    kwargs = {"past_key_values": DynamicCache(config=target.config), "attention_mask": torch.ones_like(input_ids)}
    reason = "it is in training mode (call `eval()` on it first)" if target.training else None
    reason = reason or unsupported_reason(target, input_ids, target.generation_config, kwargs)
    if reason is not None:
        raise ValueError(f"The rounds of {name} cannot be compiled: {reason}.")
    run = TargetRun(target, input_ids, target.generation_config, kwargs)
    run.prefill(input_ids)
    return run


def _is_faster(rounds: CompiledRounds, runs: list[TargetRun], size: int) -> bool:
    """Compiles a size, and compares compiled forwards with others: their values, and how long they take."""
    rounds.sizes = [size]
    subject = f"rounds of {size} tokens"
    with _failures_named(subject), rounds.compiling(size):
        _logits(runs[0], size, rounds)
    for run in runs:
        _check_values(subject, _logits(run, size, rounds), _logits(run, size, None))
    return _takes_less(
        lambda: _logits(runs[-1], size, rounds), lambda: _logits(runs[-1], size, None), runs[-1].model.device
    )


def _logits(run: TargetRun, size: int, rounds: CompiledRounds | None) -> Tensor:
    """Those of a tree of `size` tokens, compiled or not."""
    run.acceleration = CpuTarget(run.model, rounds)
    return run.dry_run(size - 1)


def _compile_passes(
    rounds: CompiledRounds, target: PreTrainedModel, drafter: FalconDraftModel, config: CompileConfig
) -> None:
    """Compiles a drafter's passes, and puts them in use where they are faster."""
    width = DraftOptions.from_generation_config(drafter.generation_config).draft_width
    rows = width * drafter.config.block_size
    made = rounds.made.setdefault(drafter, {})
    passes = made.setdefault((is_packed(drafter), drafter.dtype, drafter.device, rows), CompiledPasses(rows, config))
    head = passes.take(drafter, target)
    if passes.is_faster is None:
        with logging.tqdm(total=1, desc="Compiling draft passes") as progress:
            passes.is_faster = _are_faster(passes, drafter, head)
            progress.update()
    if passes.is_faster:
        rounds.passes[drafter] = passes
    else:
        passes.drop()


def _are_faster(passes: CompiledPasses, drafter: FalconDraftModel, head: CompiledHead) -> bool:
    """Compiles passes, and compares compiled ones with others, as [`_is_faster`] does."""
    dry_runs = [PassDryRun(passes, drafter, head, length) for length in _CONTEXTS]
    subject = f"draft passes of {passes.rows} rows"
    with _failures_named(subject), passes.compiling():
        dry_runs[0].run(is_compiled=True)
    for each in dry_runs:
        _check_values(subject, each.run(is_compiled=True), each.run(is_compiled=False))
    last = dry_runs[-1]
    return _takes_less(lambda: last.run(is_compiled=True), lambda: last.run(is_compiled=False), drafter.device)


class PassDryRun:
    """
    A pass of no meaning.

    Args:
        passes ([`CompiledPasses`]): of the drafter.
        drafter ([`FalconDraftModel`]): the drafter.
        head ([`CompiledHead`]): its head.
        length (`int`): positions that it has seen.
    """

    def __init__(self, passes: CompiledPasses, drafter: FalconDraftModel, head: CompiledHead, length: int):
        self._passes, self._drafter, self._head = passes, drafter, head
        self._linears = linears_of(drafter), linears_of(head.linear)
        self._cache = DraftCache(drafter.config.num_hidden_layers)
        drafter.run_layers(*self._inputs(length), self._cache)
        self._cache.advance(length)

    def run(self, is_compiled: bool) -> Tensor:
        """Logits of all its rows."""
        inputs = self._inputs(self._passes.rows)
        with skinny_gemm(self._drafter, self._linears[0]), skinny_gemm(self._head.linear, self._linears[1]):
            if is_compiled:
                return self._head.logits(self._passes.run_layers(self._drafter, *inputs, self._cache))
            return TargetHead.logits(self._head, self._drafter.run_layers(*inputs, self._cache))

    def _inputs(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        drafter = self._drafter
        size, places = drafter.config.hidden_size, torch.arange(rows, device=drafter.device)
        fused = torch.arange(rows * size, device=drafter.device).float().sin().view(1, rows, size).to(drafter.dtype)
        mask = torch.zeros(1, 1, rows, self._cache.length + rows, dtype=drafter.dtype, device=drafter.device)
        return fused, places[None], places[None], mask


@contextmanager
def _failures_named(subject: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise RuntimeError(
            f"`torch.compile` could not compile {subject}: generate without `compile_rounds`, or see what it says: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _check_values(subject: str, found: Tensor, expected: Tensor) -> None:
    change = (found - expected).abs().max() / expected.abs().max()
    if not change < _ROUNDING[expected.dtype]:
        raise RuntimeError(
            f"Compiled {subject} give other values (logits change by {change:.1e} of the greatest): generate without "
            "`compile_rounds`."
        )


def _takes_less(first: Callable[[], object], second: Callable[[], object], device: torch.device) -> bool:
    """Which of two is faster, each timed some times in turns."""
    took = [math.inf, math.inf]
    for _ in range(_TURNS):
        for place, call in enumerate((first, second)):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            took[place] = min(took[place], time.perf_counter() - start)
    return took[0] < took[1]
