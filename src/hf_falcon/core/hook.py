# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The hook: it makes `generate(assistant_model=drafter)` work, as transformers has no plug-in point for it.

This is also the only file of the core that uses private names of transformers. The docstring of each function says
why it needs the name, and what happens if a version of transformers lacks it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import transformers
from torch import Tensor
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Set on the wrappers. Two copies of this file (the package's, and the Hub's) wrap once, for the drafters of both.
_MARK = "_is_falcon_hook"
# Set on `GenerationMixin` after `disable`.
DISABLED = "_falcon_hook_is_disabled"


class DrafterFinder(Protocol):
    """Finds the drafters of calls that do not give one as an object."""

    def find(self, target: Any, name: str | os.PathLike[str] | None) -> Any:
        """The drafter of this name, or the target's attached one; what is no drafter is left to transformers."""

    def takes(self, target: Any, drafter: Any, settings: dict[str, Any], arguments: dict[str, Any]) -> bool:
        """
        Whether a call that names no assistant drafts with the attached drafter.

        Args:
            target ([`PreTrainedModel`]): the target.
            drafter ([`DraftModel`]): the drafter.
            settings (`dict`): what the user set for the call.
            arguments (`dict`): the call's keyword arguments.
        """

    def refusing(self, assistant: Any) -> AbstractContextManager[object]:
        """Inside, transformers may refuse an assistant that is no drafter: its error then names ours."""


def _shared(name: str, make: Callable[[], Any]) -> Any:
    """What all copies of this file share: the one whose function is called need not be the one that wraps."""
    if not hasattr(GenerationMixin, name):
        setattr(GenerationMixin, name, make())
    return getattr(GenerationMixin, name)


# Finds the drafters of calls that name none, or give a name. The installed package registers it.
_finders: list[DrafterFinder] = _shared("_falcon_finders", list)
# The attribute of a prepared generation configuration that holds the settings of the call.
_SETTINGS = "_falcon_call_settings"
# The settings of the `generate` call that this thread or task is in: `generate` passes on no argument of ours.
_settings_of_call: ContextVar[dict[str, Any] | None] = ContextVar("settings_of_call", default=None)


def register_finder(finder: DrafterFinder) -> None:
    """Takes what finds the drafters of later calls."""
    _finders[:] = [finder]


def install() -> None:
    """
    Wraps `generate` and transformers' assisted decoding. A call with a Falcon drafter then runs the drafter's own
    decoding loop; a call with any other assistant runs as before. This happens on import and when a drafter is made.
    Nothing happens after [`disable`], or if another copy of this code came first.
    """
    if getattr(GenerationMixin, DISABLED, False):
        return
    for name, wrap in _WRAPPERS.items():
        stock = getattr(GenerationMixin, name, None)
        if stock is None or hasattr(stock, _MARK):
            continue
        # `wraps`, because `generate` reads the signature of the method that it calls.
        wrapper = functools.wraps(stock)(wrap(stock))
        # Itself: others that wrap it in turn copy its attributes.
        setattr(wrapper, _MARK, wrapper)
        setattr(GenerationMixin, name, wrapper)


def enable() -> None:
    """Undoes [`disable`]."""
    setattr(GenerationMixin, DISABLED, False)
    install()


def disable() -> None:
    """Restores transformers' own methods, for every drafter, until [`enable`]."""
    setattr(GenerationMixin, DISABLED, True)
    for name in _WRAPPERS:
        found: Any = getattr(GenerationMixin, name, None)
        if hasattr(found, _MARK) and getattr(found, _MARK) is found:
            setattr(GenerationMixin, name, found.__wrapped__)


def call_settings(generation_config: GenerationConfig | None) -> dict[str, Any] | None:
    """
    The fields of a generation configuration that the user set for a `generate` call: as arguments of the call, in its
    `generation_config`, or in the target's. Values that `generate` filled in are not among them. The result is `None`
    if the configuration does not come from `generate` with a Falcon drafter.
    """
    return getattr(generation_config, _SETTINGS, None)


def is_drafter(assistant: Any) -> bool:
    # By an attribute and not by class: code loaded from the Hub is another module.
    return assistant is not None and getattr(type(assistant), "is_falcon_drafter", False)


def _wrap_generate(stock: Callable[..., Any]) -> Callable[..., Any]:
    """
    Wraps `generate`, which is public. It refuses arguments that it does not know, and it fills in defaults before it
    calls any other method: only a wrapper of `generate` sees the options of a call.
    """
    signature = inspect.signature(stock)

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        more: dict[str, Any] = call.arguments.setdefault("kwargs", {})
        is_named = "assistant_model" in call.arguments
        assistant: Any = call.arguments.get("assistant_model")
        # Others may have wrapped this function before it was switched off.
        is_off = getattr(GenerationMixin, DISABLED, False)
        # A custom `generate` gets all arguments unchanged. If it calls `generate` again, this wrapper runs then.
        if is_off or (is_named and assistant is None) or call.arguments.get("custom_generate") is not None:
            return stock(self, *args, **kwargs)
        if not is_named or isinstance(assistant, (str, os.PathLike)):
            assistant = _find(self, assistant)
        if not is_drafter(assistant):
            return stock(self, *args, **kwargs)
        names = type(assistant).draft_option_names
        settings = _settings_in(getattr(self, "generation_config", None))
        settings |= _settings_in(call.arguments.get("generation_config"))
        # An argument that is `None` unsets the field.
        settings |= {name: value for name, value in more.items() if name in names or _has_field(name)}
        if not is_named and not _finders[0].takes(self, assistant, settings, more):
            return stock(self, *args, **kwargs)
        private_name(GenerationMixin, "_assisted_decoding", "hand a call to the drafter")
        call.arguments["assistant_model"] = assistant
        for name in names:
            if not _has_field(name):
                more.pop(name, None)
        token = _settings_of_call.set(settings)
        try:
            return stock(*call.args, **call.kwargs)
        finally:
            _settings_of_call.reset(token)

    return generate


def _find(target: Any, name: Any) -> Any:
    if _finders:
        return _finders[0].find(target, name)
    if name is None:
        return None
    raise ValueError(
        f"`assistant_model` is {str(name)!r}: only the package loads drafters by name (`pip install hf-falcon`, "
        "`import hf_falcon`); or give what `AutoModel.from_pretrained` returns for it."
    )


@functools.cache
def _has_field(name: str) -> bool:
    """Whether `generate` takes an argument of this name by itself."""
    return hasattr(GenerationConfig(), name)


def _settings_in(config: GenerationConfig | None) -> dict[str, Any]:
    """The fields that a configuration sets. transformers leaves fields at `None` until a call needs their defaults."""
    found = {name: value for name, value in vars(config).items() if value is not None} if config is not None else {}
    defaults = default_generation_params()
    # In transformers 5.17 a pipeline fills in all defaults before it calls `generate`: what differs from them is set.
    if defaults and all(name in found for name, value in defaults.items() if value is not None):
        found = {name: value for name, value in found.items() if name not in defaults or value != defaults[name]}
    return found


def _wrap_assisted_decoding(stock: Callable[..., Any]) -> Callable[..., Any]:
    """
    Wraps the decoding loop that `generate` runs with an assistant. If transformers lacks it, a call with a drafter
    raises an error that names it.
    """

    def assisted_decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        assistant: Any = kwargs.get("assistant_model")
        if not is_drafter(assistant):
            with _refusing(assistant):
                return stock(self, *args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("assistant_model", "inputs_tensor")}
        settings, config = _settings_of_call.get(), kwargs.get("generation_config")
        if settings is not None and config is not None:
            # `generate` has copied the configuration for this call.
            setattr(config, _SETTINGS, settings)
        return assistant.assisted_decoding(self, *args, **kwargs)

    return assisted_decoding


def _wrap_validate_generation_mode(stock: Callable[..., Any]) -> Callable[..., Any]:
    """
    Wraps the checks of `generate` for assisted decoding. A Falcon drafter supports all calls of plain decoding, also
    several sequences a prompt, and targets that keep a recurrent state. If transformers lacks this method, it may
    refuse these calls with its own error.
    """

    def validate(self: Any, mode: GenerationMode, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
        if is_drafter(assistant := kwargs.get("assistant_model")):
            if mode == GenerationMode.ASSISTED_GENERATION:
                mode = GenerationMode.SAMPLE if config.do_sample else GenerationMode.GREEDY_SEARCH
            if "assistant_tokenizer" in kwargs and not getattr(assistant, "reads_tokenizers", False):
                raise ValueError(f"`assistant_tokenizer`: a {type(assistant).__name__} reads none, so leave it out.")
            # The drafter's own check of its target has the better error.
            kwargs = {name: value for name, value in kwargs.items() if name != "assistant_model"}
        with _refusing(kwargs.get("assistant_model")):
            stock(self, mode, config, kwargs)

    return validate


def _refusing(assistant: Any) -> AbstractContextManager[object]:
    return _finders[0].refusing(assistant) if _finders else nullcontext()


_WRAPPERS = {
    "generate": _wrap_generate,
    "_assisted_decoding": _wrap_assisted_decoding,
    "_validate_generation_mode": _wrap_validate_generation_mode,
}


# Private names that the decoding loop uses.


def private_name(owner: Any, name: str, use: str) -> Any:
    """
    Looks up a private name without which a call cannot go on.

    Raises:
        `RuntimeError`: if this version of transformers lacks it, with the remedy.
    """
    found = getattr(owner, name, None)
    if found is None:
        raise RuntimeError(
            f"transformers {transformers.__version__} has no `{name}`, which hf_falcon needs to {use}: install a "
            "newer hf_falcon, or an older transformers (5.17 or later)."
        )
    return found


def prefill(
    model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Any:
    """
    Runs the prompt exactly as plain decoding does: in chunks if the call asks for them, and from a cache that holds
    some of it already. All arguments are as `generate` prepared them. Returns the output of the model's forward.
    Without `_prefill` no call can be drafted for, and an error says so.
    """
    run = private_name(model, "_prefill", "run the prompt")
    return run(input_ids, generation_config, model_kwargs, is_first_iteration=not generation_config.is_assistant)


class _NoOutput(dict[str, Any]):
    """The output of a forward that did not run yet: whatever it is asked for is `None`, or an output like it."""

    def __getattr__(self, name: str) -> Any:
        return _NoOutput() if name.endswith("_outputs") else None


def extend_model_kwargs(
    model: PreTrainedModel, model_kwargs: Mapping[str, Any], new_tokens: int, outputs: Any = None
) -> dict[str, Any]:
    """
    The arguments of the model as plain decoding has them some tokens later: attention mask, positions and token types
    are longer. A model may change others in its own way.

    Args:
        model ([`PreTrainedModel`]): the target. Without `_update_model_kwargs_for_generation` an error says so.
        model_kwargs (`dict`): the arguments of the model that `generate` prepared; they stay as they are.
        new_tokens (`int`): by how many tokens the text is longer.
        outputs ([`~transformers.utils.ModelOutput`], *optional*): of the model's last forward, if one ran.
    """
    update = private_name(model, "_update_model_kwargs_for_generation", "know what a step of plain decoding gets")
    # transformers repeats the types of as many tokens as are new, where a step repeats that of the last one.
    step = 1 if model_kwargs.get("token_type_ids") is not None else new_tokens
    kwargs = dict(model_kwargs)
    # Not every model's own version of this method knows of several tokens.
    more = {"num_new_tokens": step} if step > 1 else {}
    for _ in range(new_tokens // step):
        kwargs = update(_NoOutput() if outputs is None else outputs, kwargs, is_encoder_decoder=False, **more)
    return kwargs


def sample(model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> Any:
    """
    transformers' own decoding without an assistant, greedy or sampling, with the arguments that `generate` prepared.
    It runs where neither trees nor chains can be verified in a call. Without `_sample` an error says so.
    """
    return private_name(model, "_sample", "decode without drafts")(input_ids, **kwargs)


def plain_reason(model: PreTrainedModel, cache: Any = None) -> str | None:
    """
    The reason why only [`sample`] does what plain decoding does, if there is one. A model may have a loop of its own,
    or a library have replaced that of all models, and a cache may keep what its layers would drop. If transformers
    lacks the names, there is none.
    """
    own = getattr(getattr(type(model), "_sample", None), "__globals__", {}).get("__name__", GenerationMixin.__module__)
    if own != GenerationMixin.__module__:
        return "the target has a decoding loop of its own"
    records = any(getattr(layer, "record_past", False) for layer in getattr(cache, "layers", ()))
    return "the cache keeps what its layers would drop (`activate_past_recording`)" if records else None


def default_generation_params() -> dict[str, Any]:
    """
    The values that `generate` fills in for fields that nobody set, such as 20 assistant tokens. If transformers lacks
    this method, the result is empty: a value that was filled in then counts as set by the user.
    """
    method = getattr(GenerationConfig, "_get_default_generation_params", None)
    return {} if method is None else method()


def is_user_defined(cache: Cache) -> bool:
    """
    Whether the user passed this cache to `generate` and may use it afterwards. If transformers does not mark caches,
    none counts as the user's: the cache of a batch then lacks the rows that ended early. Texts do not change.
    """
    return getattr(cache, "_is_user_defined", False)


def makes_own_cache(model: PreTrainedModel) -> bool:
    """
    Whether `generate` leaves it to a model to make its cache. If transformers has no such method, the answer is no.
    """
    method = getattr(model, "_supports_default_dynamic_cache", None)
    return method is not None and not method()


def attention_implementation(config: PreTrainedConfig) -> str | None:
    """
    The attention function of a model, such as "sdpa". `None` if it is not set, and if transformers does not keep it
    under this name.
    """
    return getattr(config, "_attn_implementation", None)


def read_logits_to_keep(model: Any) -> Any:
    """
    Whether the forward of a model takes `logits_to_keep`. transformers' own loop asks an assistant for this before it
    calls the assistant's `generate`, whose error says what is wrong. If transformers lacks the method, nobody asks.
    """
    method = getattr(GenerationMixin, "_supports_logits_to_keep", None)
    return False if method is None else method(model)


def keep_custom_fields(generation_config: GenerationConfig) -> None:
    """
    Makes a generation configuration keep its drafting options when it is saved and loaded: if it counts as made from
    the model's configuration, transformers drops fields that it does not know. If transformers has no such mark, it
    has no reason to drop them.
    """
    generation_config._from_model_config = False
