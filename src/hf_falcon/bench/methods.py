# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The decoding methods of a benchmark, each as the arguments that it gives to `generate`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from ..core.draft_options import DraftOptions
from ..core.drafter import DraftModel
from ..core.policy import acceptance_stats_of
from ..drafters.language_model import CausalLMDrafter
from ..drafters.lookup_drafter import LookupDrafter
from ..drafters.vocabularies import tokenizer_of
from .decision import DecisionModel
from .lookahead import LookaheadDrafter
from .method_names import FALCON

# A drafter that is made for the target when the benchmark starts.
INSTANT = "instant"
_CLASSIFIER = "falcon_classifier"
# Good fixed sizes of trees: on two cores, and on devices where 32 nodes cost as much as one.
_FIXED_SIZES = {
    "cpu": {"num_assistant_tokens": 8, "num_draft_passes": 3},
    "cuda": {"num_assistant_tokens": 32, "num_draft_passes": 5},
}
# Of lookahead decoding: on a GPU those of llama.cpp's example, elsewhere a quarter of the nodes.
_LOOKAHEAD_SIZES = {
    "cpu": {"window": 5, "ngram": 4, "guesses": 5},
    "cuda": {"window": 15, "ngram": 5, "guesses": 15},
}


@dataclass
class Models:
    """
    The models that methods decode with.

    Args:
        target ([`PreTrainedModel`]): the target.
        drafters (`dict[str, DraftModel]`): its drafters by name: "falcon" for all methods `falcon...`, "instant",
            "eagle_like" and "medusa_like" for those methods, and any other name for a method of that name.
        draft_model ([`PreTrainedModel`], *optional*): a smaller language model.
        longest_context (`int`, *optional*): tokens of the longest dialogue, answers included.
        absent (`dict[str, str]`, *optional*): drafters that are missing, by name, each with the reason.
        decision ([`DecisionModel`], *optional*): decides in "falcon_classifier" whether a draft pass runs.
    """

    target: PreTrainedModel
    drafters: dict[str, DraftModel]
    draft_model: PreTrainedModel | None = None
    longest_context: int | None = None
    absent: dict[str, str] = field(default_factory=dict)
    decision: DecisionModel | None = None
    draft_drafter: CausalLMDrafter | None = field(default=None, init=False)


class NotAvailable(ValueError):
    """A method cannot run here; the message says why and what it needs."""


def _plain_compiled(models: Models) -> dict[str, Any]:
    if models.target.device.type != "cuda":
        return _without_drafts(models)
    # There transformers compiles by itself. One length for all prompts: a longer cache would be compiled again, inside
    # a timed run.
    return {"cache_implementation": "static", "max_cache_len": models.longest_context}


def _without_drafts(models: Models) -> dict[str, Any]:
    """Our loop with plain steps alone, so that these run compiled."""
    drafter = LookupDrafter()
    drafter.generation_config.prompt_lookup_num_tokens = 0
    return _compiled(models, drafter)


def _compiled(models: Models, drafter: DraftModel | None = None) -> dict[str, Any]:
    device = models.target.device.type
    if device not in ("cpu", "cuda"):
        raise NotAvailable(f"rounds are compiled for CPUs and CUDA, and this is {device}")
    return _drafter(models) if drafter is None else {"assistant_model": drafter}


def _lookahead(models: Models) -> dict[str, Any]:
    sizes = _LOOKAHEAD_SIZES["cuda" if models.target.device.type == "cuda" else "cpu"]
    return {"assistant_model": LookaheadDrafter(**sizes)}


def _drafter(models: Models, name: str = FALCON, **options: Any) -> dict[str, Any]:
    if name not in models.drafters:
        raise NotAvailable(models.absent.get(name, f"no drafter is given as `{name}`"))
    drafter = models.drafters[name]
    return {"assistant_model": _with_options(drafter, **options) if options else drafter}


def _fixed_tree(models: Models, name: str = FALCON, **options: Any) -> dict[str, Any]:
    """A tree of one size in every round, without prompt lookup. The size depends on the device."""
    sizes = _FIXED_SIZES["cuda" if models.target.device.type == "cuda" else "cpu"]
    fixed = {"num_assistant_tokens_schedule": "constant", "prompt_lookup_num_tokens": 0}
    return _drafter(models, name, **{**fixed, **sizes, **options})


def _eagle_like(models: Models) -> dict[str, Any]:
    name = "eagle_like" if "eagle_like" in models.drafters else FALCON
    if name not in models.drafters:
        return _drafter(models)
    config = models.drafters[name].config
    # Only Falcon drafters can have LSTM layers.
    lstm_layers = getattr(config, "num_lstm_layers", 0)
    if config.block_size != 1 or lstm_layers != 0:
        raise NotAvailable(
            f"the drafter has `block_size` {config.block_size} and {lstm_layers} LSTM layers: give one with 1 and "
            "none as `eagle_like`"
        )
    return _fixed_tree(models, name, draft_tree="static")


def _early_exit(models: Models) -> dict[str, Any]:
    layers = models.target.config.get_text_config(decoder=True).num_hidden_layers
    return {"assistant_early_exit": max(1, 2 * layers // 3)}


def _draft_model(models: Models) -> dict[str, Any]:
    if models.draft_model is None:
        raise NotAvailable("no smaller language model is given as `draft_model`")
    if models.draft_drafter is None:
        # Made once: it remembers what was accepted.
        models.draft_drafter = CausalLMDrafter(models.draft_model)
    try:
        models.draft_drafter.check_target(models.target)
    except ValueError as error:
        raise NotAvailable(str(error)) from error
    return {"assistant_model": models.draft_drafter}


def _assisted(models: Models) -> dict[str, Any]:
    """transformers' own decoding with a smaller language model; with other tokens, its universal one."""
    if models.draft_model is None:
        raise NotAvailable("no smaller language model is given as `draft_model`")
    sizes = {each.config.get_text_config(decoder=True).vocab_size for each in (models.target, models.draft_model)}
    names = {}
    if len(sizes) > 1:
        tokenizers = [tokenizer_of(each) for each in (models.target, models.draft_model)]
        if any(isinstance(each, str) for each in tokenizers):
            raise NotAvailable("the draft model has other tokens than the target, and no tokenizer was found for one")
        names = dict(zip(("tokenizer", "assistant_tokenizer"), tokenizers))
    return {"assistant_model": models.draft_model, **names}


def _classifier(models: Models) -> dict[str, Any]:
    if models.decision is None:
        raise NotAvailable("no decision model is given: examples/decision_model.py fits one, for `--decision`")
    # A copy of the drafter, so that its acceptance statistics are its own.
    return _drafter(models, num_assistant_tokens_schedule="heuristic")


METHODS: dict[str, Callable[[Models], dict[str, Any]]] = {
    "plain": lambda models: {},
    "plain_compiled": _plain_compiled,
    "prompt_lookup": lambda models: {"prompt_lookup_num_tokens": 3},
    "prompt_lookup_8": lambda models: {"prompt_lookup_num_tokens": 8},
    # Ours, without a drafter's network.
    "lookup": lambda models: {"assistant_model": LookupDrafter()},
    "lookahead": _lookahead,
    "early_exit": _early_exit,
    # A smaller language model: our loop, and transformers' own.
    "draft_model": _draft_model,
    "assisted": _assisted,
    "eagle_like": _eagle_like,
    "medusa_like": partial(_fixed_tree, name="medusa_like", draft_tree="static", num_draft_passes=1),
    # Parts of our method, added one by one: a chain, the paper's static tree, a tree of the most probable nodes, ...
    "falcon_chain": partial(_fixed_tree, draft_top_k=1, num_assistant_tokens=4, num_draft_passes=4),
    "falcon_static": partial(_fixed_tree, draft_tree="static"),
    "falcon_dynamic": _fixed_tree,
    "falcon_no_decision": partial(_fixed_tree, assistant_confidence_threshold=0.0),
    # ... and our method without one of its parts.
    "falcon_no_cost_model": partial(_fixed_tree, prompt_lookup_num_tokens=DraftOptions.prompt_lookup_num_tokens),
    "falcon_no_lookup": partial(_drafter, prompt_lookup_num_tokens=0),
    "falcon": _drafter,
    INSTANT: partial(_drafter, name=INSTANT),
    # A fitted decision model decides whether another pass runs, in place of the drafter's probabilities.
    _CLASSIFIER: _classifier,
    # For sampling: candidates that are drawn, and several roots (improved MCSD, biased). Greedy: as the methods above.
    "falcon_speculative": partial(_fixed_tree, draft_tree="static", verification="speculative"),
    "falcon_multi_root": partial(_fixed_tree, verification="multi_root"),
    "plain_packed": lambda models: {},
    "plain_packed_compiled": _without_drafts,
    "falcon_packed": _drafter,
    "falcon_compiled": _compiled,
    "falcon_packed_compiled": _compiled,
}
# Methods with packed weights, and methods with compiled rounds.
PACKED = ("plain_packed", "plain_packed_compiled", "falcon_packed", "falcon_packed_compiled")
COMPILED = ("plain_compiled", "plain_packed_compiled", "falcon_compiled", "falcon_packed_compiled")
# Methods whose samples differ from plain decoding's under the same seed.
OTHER_SAMPLES = (
    "prompt_lookup",
    "prompt_lookup_8",
    "early_exit",
    "assisted",
    "falcon_speculative",
    "falcon_multi_root",
)


def resolve(names: list[str], models: Models) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """
    The arguments of each method.

    Args:
        names (`list[str]`): names of `METHODS` or of drafters in `models`; `name@8` is the method with 8 nodes a tree.
        models ([`Models`]): the models that the methods decode with.

    Returns:
        The arguments of each method that can run, by name, and the reason for each method that cannot.

    Raises:
        `ValueError`: for an unknown method, and for a node budget that is not a number of at least 1.
    """
    methods = METHODS | {
        name: partial(_drafter, name=name) for name in (*models.drafters, *models.absent) if name not in METHODS
    }
    found, absent = {}, {}
    for name in names:
        base, at, budget = name.partition("@")
        if base not in methods:
            raise ValueError(f"`methods` has {name!r}: choose from {', '.join(methods)}.")
        try:
            arguments = methods[base](models)
        except NotAvailable as error:
            absent[name] = str(error)
            continue
        if at:
            drafter = arguments.get("assistant_model")
            if not isinstance(drafter, DraftModel):
                raise ValueError(f"`methods` has {name!r}, but `{base}` has no trees: leave out {at + budget!r}.")
            if isinstance(drafter, LookaheadDrafter):
                raise ValueError(
                    f"`methods` has {name!r}, but the trees of `{base}` have the sizes of its window and its n-grams: "
                    f"leave out {at + budget!r}."
                )
            if not budget.isdecimal() or int(budget) < 1:
                raise ValueError(f"`methods` has {name!r}: give a number of nodes after the @, as in `{base}@8`.")
            arguments["assistant_model"] = _with_options(drafter, num_assistant_tokens=int(budget))
        if base == _CLASSIFIER and models.decision is not None:
            acceptance_stats_of(arguments["assistant_model"], models.target).continuation = models.decision
        found[name] = arguments
    return found, absent


def _with_options(drafter: DraftModel, **options: Any) -> DraftModel:
    """A drafter with the same weights and other drafting options."""
    other = copy.copy(drafter)
    other.generation_config = copy.deepcopy(drafter.generation_config)
    for name, value in options.items():
        setattr(other.generation_config, name, value)
    return other
