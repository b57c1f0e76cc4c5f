# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Compiled rounds that `hf-falcon tune --compile` built, or a process in the background: the first call with a drafter
loads them, and says so once. What only `compile_rounds` kept waits for the next `compile_rounds`: a script does not
change how others round.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import CompileConfig, PreTrainedModel
from transformers.utils import logging

from ..core.draft_options import DraftOptions
from ..cost_files import cache_folder
from .compiled_passes import CompilableDrafter, CompiledPasses
from .compiled_rounds import CompiledRounds, compiled, compiled_passes_of, compiled_rounds_of
from .kept_programs import shelf_of
from .packing import is_packed
from .row_invariant import is_row_invariant

logger = logging.get_logger(__name__)

# The states of models for which it was tried, or declined.
_tried: weakref.WeakKeyDictionary[nn.Module, set[object]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def rounds_for(target: PreTrainedModel) -> CompiledRounds | None:
    """The compiled rounds of a target; at its first call also those that `hf-falcon tune --compile` kept."""
    # First whether there is a folder: the state of a target takes a walk over its modules.
    if target not in compiled and _may_be_kept(target):
        _once(target, None, lambda: _load_rounds(target))
    return compiled_rounds_of(target)


def passes_for(drafter: Any, target: PreTrainedModel) -> CompiledPasses | None:
    """The compiled passes of a drafter for a target, kept ones as well."""
    rounds = compiled.get(target)
    if rounds is not None and rounds.is_kept and drafter not in rounds.passes:
        _once(drafter, id(rounds), lambda: _load_passes(rounds, drafter, target))
    return compiled_passes_of(drafter, target)


def decline(target: PreTrainedModel) -> None:
    """From now on the target's kept rounds are used only after `compile_rounds`."""
    _tried.setdefault(target, set()).add(None)


def has_declined(target: PreTrainedModel) -> bool:
    """Whether `decline` was called last."""
    return None in _tried.get(target, ())


def undo_decline(target: PreTrainedModel) -> None:
    """Undoes `decline`: the next call looks for kept rounds."""
    _tried.pop(target, None)


def stop_expecting(target: PreTrainedModel) -> None:
    """Undoes `expect_rounds`, but not `decline`."""
    _tried.get(target, set()).intersection_update({None})


def expect_rounds(target: PreTrainedModel) -> None:
    """Calls do not look for kept rounds of the target as it is now: `load_rounds` comes, between two calls."""
    _tried.setdefault(target, set()).add((None, _state(target)))


def load_rounds(target: PreTrainedModel) -> None:
    """
    Loads the rounds that another process has kept meanwhile. Calls may run at the same time, and do not wait.

    Raises:
        `RuntimeError`: if there are none for the target as it is now, or they cannot be loaded.
    """
    rounds = _kept_rounds(target)
    if rounds is None:
        raise RuntimeError("what was built is not for the target as it is now.")
    with _lock:
        # Meanwhile `uncompile_rounds` or `compile_rounds` was called.
        if has_declined(target) or target in compiled:
            rounds.drop_weights()
        else:
            _use(target, rounds)


def offer_rounds(target: PreTrainedModel) -> None:
    """Later processes use the rounds that are kept for a target as it is now, without being asked."""
    shelf_of(target).offer()


def offers_packed_rounds(target: PreTrainedModel) -> bool:
    """Whether compiled rounds are offered for a target with packed weights, and none for the target as it is."""
    if not _may_be_kept(target) or is_packed(target):
        return False
    return shelf_of(target, packed=True).is_offered and not shelf_of(target).is_offered


def _once(model: nn.Module, about: object, load: Callable[[], None]) -> None:
    with _lock:
        tried = _tried.setdefault(model, set())
        state = about, _state(model)
        if None in tried or state in tried:
            return
        tried.add(state)
        try:
            load()
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            logger.warning_once(f"Kept compiled code could not be loaded ({reason}): rounds run uncompiled.")


def _state(model: Any) -> tuple[object, ...]:
    return is_packed(model), is_row_invariant(model), model.dtype, model.device


def _may_be_kept(model: Any) -> bool:
    if model.device.type != "cpu" or model.training:
        return False
    try:
        return (cache_folder() / "compiled").is_dir()
    except OSError:
        # Another user's home, for example.
        return False


def _load_rounds(target: PreTrainedModel) -> None:
    if (rounds := _kept_rounds(target)) is not None:
        _use(target, rounds)


def _kept_rounds(target: PreTrainedModel) -> CompiledRounds | None:
    # Inside `row_invariant` only code runs that this process has compared with uncompiled code.
    if is_row_invariant(target):
        return None
    shelf, name = shelf_of(target), type(target).__name__
    if not shelf.is_offered:
        if different := shelf.differences():
            logger.warning_once(
                f"The compiled code that is kept for {name} was compiled for another state ({', '.join(different)} "
                "differ): rounds run uncompiled. `hf-falcon tune --compile` compiles for this one."
            )
        return None
    rounds = CompiledRounds(target, CompileConfig(), shelf)
    rounds.is_kept = True
    with torch.no_grad():
        rounds.take_weights()
        if not rounds.are_exact or not rounds.load():
            rounds.drop_weights()
            return None
    rounds.sizes = sorted(size for size, is_faster in rounds.is_faster.items() if is_faster)
    return rounds


def _use(target: PreTrainedModel, rounds: CompiledRounds) -> None:
    compiled[target] = rounds
    logger.warning_once(
        f"Rounds of {type(target).__name__} run compiled code that is kept on this machine (`hf-falcon tune "
        "--compile`). Outputs differ by rounding; `hf_falcon.uncompile_rounds(target)` switches it off."
    )


def _load_passes(rounds: CompiledRounds, drafter: Any, target: PreTrainedModel) -> None:
    is_compilable = isinstance(drafter, CompilableDrafter)
    if not is_compilable or not _may_be_kept(drafter):
        return
    shelf = shelf_of(target, drafter)
    if not shelf.exists():
        return
    width = DraftOptions.from_generation_config(drafter.generation_config).draft_width
    passes = CompiledPasses(width * drafter.config.block_size, CompileConfig(), shelf)
    with torch.no_grad():
        passes.take(drafter, target)
        if passes.load(drafter) and passes.is_faster:
            rounds.passes[drafter] = passes
        else:
            passes.drop()
