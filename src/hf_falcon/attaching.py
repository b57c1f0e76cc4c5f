# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Drafters that a call of `generate` does not give as objects: attached ones, and those given by name."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

from .core.candidate_generator import limited_options
from .core.draft_options import DraftOptions
from .core.hook import default_generation_params, is_drafter, plain_reason, register_finder
from .cpu.background_builds import build_in_background, check_background_build, end_build
from .drafters.auto import AutoDrafter
from .drafters.lookup_drafter import LOOKUP
from .drafters.mtp import MTP
from .learning.learner import (
    check_whether_it_learns,
    learner_of,
    learning_options,
    refuse_other_drafter,
    start_learning,
)
from .learning.options import LearningOptions

logger = logging.get_logger(__name__)

# The attached drafter of each target, and the one that it loaded last by its name; also of names without weights of
# their own, which take no other's place. They are freed with the target.
_attached: weakref.WeakKeyDictionary[PreTrainedModel, Any] = weakref.WeakKeyDictionary()
_loading = threading.RLock()
_loaded: weakref.WeakKeyDictionary[PreTrainedModel, dict[Any, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def attach(
    target: PreTrainedModel,
    drafter: PreTrainedModel | str | os.PathLike[str] = LOOKUP,
    learn: bool | str | os.PathLike[str] | LearningOptions = False,
    compile: bool = False,
) -> None:
    """
    Makes `target.generate` draft without an argument, also where a pipeline or transformers' server calls it. It
    replaces a drafter that was attached before. Nothing is attached to a copy of the target.

    A call runs as without an attached drafter, if

    - it has an `assistant_model`; `None` is plain decoding,
    - it has a `custom_generate`,
    - its mode is not greedy search or sampling: beam search, or transformers' own prompt lookup
      (`prompt_lookup_num_tokens` above 0),
    - it has an argument that no drafter supports: `use_cache=False`, `cache_implementation="paged"`,
      `assistant_tokenizer`, `num_assistant_tokens_schedule="heuristic_transient"`,
    - the target has a decoding loop of its own, is in training mode with dropout, noise or gradient checkpointing, or
      is the assistant of another model,
    - the target was changed so that the drafter no longer fits, or a drafting option that plain decoding ignores is
      out of range; one warning says how.

    Args:
        target ([`PreTrainedModel`]): the target.
        drafter ([`DraftModel`], `str` or `os.PathLike`, *optional*, defaults to `"lookup"`):
            The drafter, its name on the Hub or its folder; "lookup" is prompt lookup alone, for any target, and "mtp"
            the multi-token-prediction head of the target's checkpoint. By name it is loaded at once, in the target's
            dtype and on its device.
        learn (`bool`, `str`, `os.PathLike` or [`LearningOptions`], *optional*, defaults to `False`):
            Whether the drafter learns from the calls ([`Learner`]); a folder to keep what it learns in; or options.
        compile (`bool`, *optional*, defaults to `False`):
            On a CPU, whether rounds run compiled code ([`compile_rounds`]) as soon as there is some: at once if it is
            kept on this machine, or once a child process has built it from the folder or the Hub's cache that the
            target was loaded from. The child stands still during calls with a drafter, and ends with this process or
            with [`detach`]. A build that fails is one warning. Later processes use the code without being asked.

    Raises:
        `TypeError`: if the target is not a transformers model that generates, or the drafter is another model.
        `ValueError`: if the drafter was made for another target, is of a method that is not read, or cannot learn;
            with `compile`, if no code can be built in the background, such as on another device than a CPU and inside
            `row_invariant`.
        `OSError`: if there is no drafter of that name, or the Hub cannot be reached.
    """
    _check_generates(target)
    if isinstance(drafter, (str, os.PathLike)):
        drafter = _load(target, drafter)
    if not is_drafter(drafter):
        raise TypeError(
            f"`drafter` is a {type(drafter).__name__}, not a drafter of hf_falcon: give a drafter, such as a "
            "`FalconDraftModel`, or the name or the folder of one. A smaller language model drafts as "
            "`hf_falcon.CausalLMDrafter(model)`."
        )
    drafter.check_target(target)
    if compile:
        check_background_build(target)
    options = None
    if learn is not False:
        check_whether_it_learns(drafter)
        # What is refused ends no other learner.
        options = learning_options(learn)
        if options.folder is not None:
            refuse_other_drafter(drafter, options.folder)
    earlier = attached_drafter(target)
    ended = _end_learning(earlier, target)
    if options is not None:
        try:
            start_learning(drafter, target, options)
        except BaseException:
            # The earlier drafter stays attached.
            if ended is not None:
                start_learning(earlier, target, ended)
            raise
    _attached[target] = drafter
    if compile:
        build_in_background(target, drafter)


def detach(target: PreTrainedModel) -> None:
    """
    Undoes [`attach`], and ends the learning of the drafter and a build of compiled code. Nothing happens if no drafter
    is attached.

    Args:
        target ([`PreTrainedModel`]): the target.

    Raises:
        `TypeError`: if the target is not a transformers model that generates, to which nothing can be attached.
    """
    _check_generates(target)
    end_build(target)
    _end_learning(_attached.pop(target, None), target)


def _check_generates(target: Any) -> None:
    if not isinstance(target, PreTrainedModel) or not isinstance(target, GenerationMixin):
        raise TypeError(
            f"`target` is a {type(target).__name__}: give the transformers model whose `generate` is called, such as "
            "a `LlamaForCausalLM`, without a wrapper."
        )


def _end_learning(drafter: Any, target: PreTrainedModel) -> LearningOptions | None:
    """Ends what a drafter learns from this target. Returns the options that it learnt with."""
    learner = None if drafter is None else learner_of(drafter)
    if learner is None or not learner.is_of(target):
        return None
    learner.close()
    return learner.options


def attached_drafter(target: PreTrainedModel) -> Any:
    """The drafter that is attached to a target, or `None`."""
    return _attached.get(target)


class AttachedDrafters:
    """Finds attached drafters, and loads drafters by name; a [`~hook.DrafterFinder`]."""

    def find(self, target: PreTrainedModel, name: str | os.PathLike[str] | None) -> Any:
        """See [`~hook.DrafterFinder`]."""
        return attached_drafter(target) if name is None else _load(target, name)

    def takes(
        self, target: PreTrainedModel, drafter: Any, settings: dict[str, Any], arguments: dict[str, Any]
    ) -> bool:
        """
        Whether transformers would decode a call plainly, and nothing in it is refused with a drafter; see [`attach`].
        """
        if (target.training and _trains_otherwise(target)) or arguments.get("assistant_tokenizer") is not None:
            return False
        if not settings.get("use_cache", True) or settings.get("cache_implementation") == "paged":
            return False
        # Such a loop may refuse an assistant.
        if plain_reason(target) is not None:
            return False
        if settings.get("is_assistant") or settings.get("num_assistant_tokens_schedule") == "heuristic_transient":
            return False
        # Outside a forward DeepSpeed keeps parts of weights (ZeRO-3).
        head = getattr(target.get_output_embeddings(), "weight", None)
        if isinstance(head, torch.Tensor) and head.numel() == 0:
            return False
        config = GenerationConfig()
        # `generate` fills in the defaults before it asks for the mode.
        for name, value in {**default_generation_params(), **settings}.items():
            setattr(config, name, value)
        # With 0 the drafter looks nothing up; transformers would look up a number of tokens that it then refuses.
        config.prompt_lookup_num_tokens = config.prompt_lookup_num_tokens or None
        if config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            return False
        try:
            drafter.check_target(target)
            _check_options(drafter, target, settings)
        # The target was changed after `attach`, such as by `resize_token_embeddings`, or the call has a value that
        # plain decoding does not read. It generates all the same.
        except ValueError as error:
            logger.warning_once(f"The attached drafter is not used, plain decoding runs: {error}")
            return False
        return True

    @contextmanager
    def refusing(self, assistant: Any) -> Iterator[None]:
        """Inside, transformers may refuse a language model as the assistant: its error then names our drafter."""
        try:
            yield
        except ValueError as error:
            refusal = str(error)
            is_of_assistant = re.search("assisted (gen|decod)", refusal, re.IGNORECASE)
            if not isinstance(assistant, PreTrainedModel) or is_drafter(assistant) or not is_of_assistant:
                raise
            remedy = "`assistant_model=hf_falcon.CausalLMDrafter(assistant_model)` takes this call."
            raise ValueError(f"{refusal.rstrip('`.')}. {remedy}") from error


def install() -> None:
    """Makes `generate` find attached drafters, and drafters by name."""
    register_finder(AttachedDrafters())


def _trains_otherwise(target: PreTrainedModel) -> bool:
    """
    Whether forwards in training mode differ from others: with dropout, or noise in a router, every forward draws, and
    with gradient checkpointing the cache stays empty.
    """
    for module in target.modules():
        if getattr(module, "gradient_checkpointing", False) or (isinstance(module, _DropoutNd) and module.p > 0):
            return True
        # Modules have values of their own: `attention_dropout`, `layerdrop`, `router_jitter_noise`.
        own = [value for name, value in vars(module).items() if "drop" in name or "jitter" in name]
        if any(isinstance(value, float) and value > 0 for value in own):
            return True
    return False


def _check_options(drafter: Any, target: PreTrainedModel, settings: dict[str, Any]) -> None:
    """
    Raises:
        `ValueError`: for a drafting option of a call that is out of range, if plain decoding ignores all that are set.
    """
    names = [field.name for field in fields(DraftOptions)]
    given = {name: settings[name] for name in names if settings.get(name) is not None}
    plain = GenerationConfig()
    if given and all(hasattr(plain, name) for name in given):
        own = {name: getattr(drafter.generation_config, name, None) for name in names}
        options = {name: value for name, value in {**own, **given}.items() if value is not None}
        limited_options(DraftOptions(**options), drafter, target)


def _renew_lock() -> None:
    """In a fork, the lock is as it was in some thread of the parent."""
    global _loading
    _loading = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _load(target: PreTrainedModel, name: str | os.PathLike[str]) -> Any:
    """
    Loads the drafter in a folder or a repository of the Hub, in the target's dtype and on its device. Each target
    loads it once, and again after the folder was saved again.
    """
    config_file = Path(name, "config.json")
    saved = config_file.stat().st_mtime_ns if config_file.is_file() else None
    wanted, place = (name, saved, target.dtype, target.device), name if name in (LOOKUP, MTP) else None
    known, drafter = _loaded.get(target, {}).get(place, (None, None))
    if known == wanted:
        return drafter
    # One thread at a time: transformers replaces functions of its own while it loads.
    with _loading:
        known, drafter = _loaded.get(target, {}).get(place, (None, None))
        if known == wanted:
            return drafter
        # Parameters that are made in inference mode could not be used outside it.
        with torch.inference_mode(False):
            drafter = AutoDrafter.from_pretrained(name, target.dtype, target).to(target.device).eval()
        _loaded.setdefault(target, {})[place] = wanted, drafter
        return drafter
