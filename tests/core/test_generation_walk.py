# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Every field of `GenerationConfig` and every argument of `generate`: what it does with a drafter, one row for each.

A field that transformers has and this table does not know fails the test, so that none is ignored in silence.
"""

import asyncio
import functools
import inspect
import random
import string
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from oracle import use_oracle
from quick import quick
from tiny_models import ROPE_PHI3, ROPE_SCALED, VOCAB, prompt, tiny_drafter, tiny_target, tiny_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AsyncTextIteratorStreamer,
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
)

import hf_falcon
from hf_falcon import CausalLMDrafter, DraftModel, DraftOptions, LookupDrafter
from hf_falcon.core.target_parts import CACHE_NAME
from hf_falcon.core.target_run import TargetRun

NEW_TOKENS = 24
PROMPT = 9
SAMPLED = {"do_sample": True, "top_k": 0}
DICT = {"return_dict_in_generate": True}


class Row(NamedTuple):
    """What `generate` does, given `settings` beside the drafter; a function gives those that need a model."""

    settings: dict[str, Any] | Callable[[], dict[str, Any]] = {}
    # Whether tokens or scores are others without it.
    matters: bool = True
    target: str = "llama"
    # Part of the one warning, or of the error.
    message: str | None = None


@functools.cache
def _tokens() -> list[int]:
    return _generate(tiny_target("llama"), {}).tolist()[0][PROMPT:]


def _met() -> int:
    """A token that plain decoding comes to after some steps."""
    return next(token for place, token in enumerate(_tokens()) if place > 4 and token not in _tokens()[:place])


def _unmet() -> int:
    return next(token for token in range(VOCAB) if token not in _tokens())


def _embeds() -> torch.Tensor:
    return tiny_target("llama").get_input_embeddings()(prompt(PROMPT)).detach()


def _static_cache():
    return StaticCache(config=tiny_target("llama").config, max_cache_len=64)


def _filled_cache(length: int) -> DynamicCache:
    """A cache with the first tokens of the prompt."""
    cache = DynamicCache()
    with torch.no_grad():
        tiny_target("llama")(prompt(PROMPT)[:, :length], **{CACHE_NAME: cache})
    return cache


def _healing_tokenizer():
    """Token 7 is `h`, and 15, 23, ... are `hx`, `hxx`, ...: healing prefers what begins with the prompt's end."""
    vocabulary = {chr(ord("a") + i % 8) + "x" * (i // 8): i for i in range(VOCAB)}
    made = Tokenizer(WordLevel({**vocabulary, "!": VOCAB, "?": VOCAB + 1}, unk_token="a"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="!", bos_token="?")


class Favour(LogitsProcessor):
    """Keeps state across calls: each token is favoured once in three calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + 4.0 * (torch.arange(VOCAB) % 3 == self.calls % 3)


class StopAtLength(StoppingCriteria):
    """A criterion that answers for each row."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 20)


def two_steps(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
    """A decoding method of the user's own."""
    return torch.cat((input_ids, input_ids[:, :2]), dim=1)


# Assisted: plain decoding's tokens, scores and shapes, with the drafter at work.
ASSISTED: dict[str, Row | list[Row]] = {
    # Lengths and ends.
    "max_length": Row({"max_length": 17, "max_new_tokens": None}),
    "max_new_tokens": Row({"max_new_tokens": 7}),
    "min_length": Row(lambda: {"min_length": 25, "eos_token_id": _met()}),
    "min_new_tokens": Row(lambda: {"min_new_tokens": 20, "eos_token_id": _met()}),
    "max_time": Row({"max_time": 1000.0}, matters=False),
    "stop_strings": Row(
        lambda: {"stop_strings": tiny_tokenizer().decode(_tokens()[5:7]), "tokenizer": tiny_tokenizer()}
    ),
    "eos_token_id": Row(lambda: {"eos_token_id": [_unmet(), _met()]}),
    "pad_token_id": Row({"pad_token_id": 5}, matters=False),
    "bos_token_id": Row({"bos_token_id": 3, "inputs": None}),
    "stopping_criteria": Row(lambda: {"stopping_criteria": [StopAtLength()]}),
    # What is chosen.
    "do_sample": Row(SAMPLED),
    "temperature": Row({**SAMPLED, "temperature": 0.7}),
    "top_k": Row({"do_sample": True, "top_k": 3}),
    "top_p": Row({**SAMPLED, "top_p": 0.5}),
    "min_p": Row({**SAMPLED, "min_p": 0.2}),
    "top_h": Row({**SAMPLED, "top_h": 0.4}),
    "typical_p": Row({**SAMPLED, "typical_p": 0.4}),
    "epsilon_cutoff": Row({**SAMPLED, "epsilon_cutoff": 0.1}),
    "eta_cutoff": Row({**SAMPLED, "eta_cutoff": 0.3}),
    "repetition_penalty": Row({"repetition_penalty": 1.5}),
    "encoder_repetition_penalty": Row({"encoder_repetition_penalty": 3.0}),
    "no_repeat_ngram_size": Row({"no_repeat_ngram_size": 1}),
    "encoder_no_repeat_ngram_size": Row({"encoder_no_repeat_ngram_size": 1}),
    "bad_words_ids": Row({"bad_words_ids": [[i] for i in range(1, 30)] + [[40, 41], [48, 48]]}),
    "forced_bos_token_id": Row({"forced_bos_token_id": 6, "inputs": prompt(1)}),
    "forced_eos_token_id": Row({"forced_eos_token_id": 60}),
    "suppress_tokens": Row({"suppress_tokens": list(range(20, 50))}),
    "begin_suppress_tokens": Row(lambda: {"begin_suppress_tokens": _tokens()[:1]}),
    "sequence_bias": Row({"sequence_bias": {(30,): 5.0, (30, 31): 9.0}}),
    "exponential_decay_length_penalty": Row(
        lambda: {"exponential_decay_length_penalty": (5, 1.4), "eos_token_id": _unmet()}
    ),
    "remove_invalid_values": Row({"remove_invalid_values": True, "sequence_bias": {(30, 31): float("inf")}}, False),
    "renormalize_logits": Row({**SAMPLED, "temperature": 0.8, "renormalize_logits": True}),
    "guidance_scale": Row({"guidance_scale": 1.5}),
    "negative_prompt_ids": Row({"guidance_scale": 1.5, "negative_prompt_ids": prompt(4, seed=1)}),
    "negative_prompt_attention_mask": Row(
        {
            "guidance_scale": 1.5,
            "negative_prompt_ids": prompt(4, seed=1),
            "negative_prompt_attention_mask": torch.tensor([[0, 1, 1, 1]]),
        }
    ),
    "watermarking_config": [
        Row({"watermarking_config": WatermarkingConfig(bias=5.0)}),
        Row({"watermarking_config": WatermarkingConfig(bias=5.0, seeding_scheme="selfhash", context_width=2)}),
        Row(
            {
                **SAMPLED,
                "watermarking_config": SynthIDTextWatermarkingConfig(
                    ngram_len=3, keys=[3, 5, 7], context_history_size=8
                ),
            }
        ),
    ],
    "prefix_allowed_tokens_fn": Row(
        {"prefix_allowed_tokens_fn": lambda row, ids: [i for i in range(VOCAB) if i % 4 == int(ids[-1]) % 4]}
    ),
    "logits_processor": Row(lambda: {"logits_processor": [Favour()]}),
    "token_healing": Row(
        lambda: {"token_healing": True, "tokenizer": _healing_tokenizer(), "inputs": torch.tensor([[54, 46, 57, 7]])}
    ),
    # What comes back.
    "return_dict_in_generate": Row(DICT, matters=False),
    "output_scores": Row({"output_scores": True}, matters=False),
    "output_logits": Row({"output_logits": True}, matters=False),
    "output_hidden_states": [
        Row({"output_hidden_states": True}, matters=False, target=name)
        for name in ("llama", "mistral-window", "gemma2", "gpt2", "llama-dynamic", *ROPE_PHI3)
    ],
    # Eager attention gives weights, others give empty tuples.
    "output_attentions": [Row({"output_attentions": True}, matters=False, target=name) for name in ("gemma2", "llama")]
    + [Row(lambda: {"output_attentions": True, CACHE_NAME: DynamicCache()}, matters=False, target="gemma2")],
    "streamer": Row(lambda: {"streamer": TextStreamer(tiny_tokenizer())}, matters=False),
    # The prompt.
    "inputs": Row({"inputs": prompt(5, seed=2)}),
    "input_ids": Row({"inputs": None, "input_ids": prompt(5, seed=2)}),
    "attention_mask": Row({"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])}),
    "position_ids": [
        Row({"position_ids": torch.arange(7, 7 + PROMPT)[None] * 3}),
        Row({"position_ids": torch.arange(7, 7 + PROMPT)[None] * 3}, target="gemma2"),
        Row({"position_ids": torch.arange(7, 7 + PROMPT)[None]}, target="llama-dynamic"),
    ],
    "token_type_ids": Row({"token_type_ids": torch.arange(PROMPT)[None] % 3}, target="gpt2"),
    "inputs_embeds": [
        Row(lambda: {"inputs": None, "inputs_embeds": _embeds()}),
        Row(lambda: {"inputs_embeds": _embeds().flip(1)}),
        Row(
            lambda: {
                "inputs": None,
                "inputs_embeds": _embeds(),
                "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]]),
                "output_hidden_states": True,
            }
        ),
    ],
    CACHE_NAME: [
        Row(lambda: {CACHE_NAME: _filled_cache(6)}, matters=False),
        Row(lambda: {CACHE_NAME: _static_cache(), "disable_compile": True}, matters=False),
        Row(lambda: {CACHE_NAME: _filled_cache(6), "inputs_embeds": _embeds(), "inputs": None}, matters=False),
        Row(
            lambda: {
                CACHE_NAME: _filled_cache(5),
                "inputs": prompt(4, seed=4),
                "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]]),
            }
        ),
    ],
    "prefill_chunk_size": Row({"prefill_chunk_size": 4}, matters=False),
    "logits_to_keep": Row({"logits_to_keep": 3}, matters=False),
    "use_cache": Row({"use_cache": True}, matters=False),
    "cache_implementation": [
        Row({"cache_implementation": "dynamic"}, matters=False),
        Row({"cache_implementation": "static", "disable_compile": True}, matters=False),
    ],
    # How it is drafted.
    "assistant_model": Row(matters=False),
    "generation_config": Row({"generation_config": GenerationConfig(max_new_tokens=8), "max_new_tokens": ...}),
    "num_assistant_tokens": Row({"num_assistant_tokens": 3}, matters=False),
    "num_assistant_tokens_schedule": Row({"num_assistant_tokens_schedule": "heuristic"}, matters=False),
    "assistant_confidence_threshold": Row({"assistant_confidence_threshold": 0.9}, matters=False),
    "prompt_lookup_num_tokens": Row({"prompt_lookup_num_tokens": 5}, matters=False),
    "is_assistant": Row({"is_assistant": True, "assistant_confidence_threshold": 0.2, "output_scores": True, **DICT}),
}
# Without effect in plain decoding either.
WITHOUT_EFFECT: dict[str, Any] = {
    "cache_config": {"backend": "quanto"},
    "max_cache_len": 64,
    "decoder_start_token_id": 3,
    "early_stopping": True,
    "length_penalty": 2.0,
    "diversity_penalty": 0.5,
    "num_beam_groups": 2,
    "low_memory": True,
    "disable_compile": True,
    "continuous_batching_config": {"block_size": 16},
    "trust_remote_code": False,
    "_from_model_config": True,
    "transformers_version": "5.17.0",
}
# Of other ways of assisted decoding: one warning says that they have no effect.
OF_OTHER_WAYS: dict[str, Any] = {
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "max_matching_ngram_size": 3,
    "speculation_type": "dflash",
    "use_mtp": True,
    "compile_config": CompileConfig(),
}
# Plain decoding runs; `None`: it is transformers that warns.
PLAIN: dict[str, Row] = {
    "attention_mask": Row(
        lambda: {
            CACHE_NAME: _filled_cache(9),
            "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]]),
        },
        message="(1, 9), for 9 tokens in the cache",
    ),
    "num_beams": Row({"num_beams": 3}),
}
# The same error with a drafter and without one, or transformers' own for every assistant.
REFUSED: dict[str, Row] = {
    "use_cache": Row({"use_cache": False}, message="use_cache=True"),
    "penalty_alpha": Row({"penalty_alpha": 0.6, "top_k": 4}, message="trust_remote_code"),
    "dola_layers": Row({"dola_layers": "low"}, message="`dola_layers` is 'low'"),
    "constraints": Row({"constraints": [object()], "num_beams": 2}, message="trust_remote_code"),
    "force_words_ids": Row({"force_words_ids": [[3]], "num_beams": 2}, message="trust_remote_code"),
    "cache_implementation": Row({"cache_implementation": "paged"}, message="assistant_model"),
    "num_assistant_tokens_schedule": Row(
        {"num_assistant_tokens_schedule": "heuristic_transient"}, message="set it to one of 'heuristic', 'constant'"
    ),
    "assistant_tokenizer": Row(
        lambda: {"assistant_tokenizer": tiny_tokenizer(), "tokenizer": tiny_tokenizer()}, message="assistant_tokenizer"
    ),
}
# Tests below, and of batches.
ELSEWHERE = {"custom_generate", "synced_gpus", "kwargs", "num_return_sequences"}


def rows(table: dict[str, Any]) -> list[Any]:
    """`(field, row)` for each; `...` as a setting leaves out what `_generate` gives otherwise."""
    listed = [
        (field, row) for field, given in table.items() for row in (given if isinstance(given, list) else [given])
    ]
    return [pytest.param(*each, id=f"{place}-{each[0]}") for place, each in enumerate(listed)]


def _generate(target, settings, seed=0, **more):
    torch.manual_seed(seed)
    arguments = {"inputs": prompt(PROMPT), "do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    arguments |= {**settings, **more}
    return target.generate(**{name: value for name, value in arguments.items() if value is not ...})


def _settings(row: Row) -> dict[str, Any]:
    """Made anew for every call: some hold state."""
    return row.settings() if callable(row.settings) else dict(row.settings)


def _fresh(name: str):
    """Dynamic frequencies outlive a `generate` call."""
    if name in ROPE_SCALED:
        return ROPE_SCALED[name]()
    return tiny_target(name)


def _equal(found: Any, expected: Any) -> bool:
    """Whether nested tuples of tensors have the same shapes, and values up to rounding."""
    if isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(_equal, found, expected))
    if expected is None:
        return found is None
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.allclose(found, expected, atol=2e-4, rtol=1e-3, equal_nan=True)


def check_output(output: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert output.tolist() == expected.tolist()
        return
    assert set(output) - {"draft_statistics"} == set(expected)
    assert output.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert name not in expected or _equal(output[name], expected[name]), name
    if CACHE_NAME in expected:
        assert output[CACHE_NAME].get_seq_length() == expected[CACHE_NAME].get_seq_length()


# Greedy tokens without scores are verified at once, others one by one; drafts that are right, and some that are not.
WAYS = {
    "ids": ({}, {"accuracy": 1.0}),
    "dict": ({**DICT, "output_scores": True, "output_logits": True}, {"accuracy": 0.7, "scattered": True}),
}


@pytest.mark.parametrize("way", quick(["dict"], WAYS))
@pytest.mark.parametrize("field, row", rows(ASSISTED))
def test_assisted(field, row, way, monkeypatch, warnings_given):
    returned, draft = WAYS[way]
    expected = _generate(_fresh(row.target), {**_settings(row), **returned})
    target = _fresh(row.target)
    truth = expected if isinstance(expected, torch.Tensor) else expected.sequences
    if "inputs_embeds" in _settings(row) and _settings(row).get("inputs", ...) is None:
        # The oracle counts from the first position of the context.
        truth = torch.cat((prompt(PROMPT), truth), dim=1)
    made = use_oracle(monkeypatch, truth, **draft)
    drafter = tiny_drafter(target, num_draft_passes=2)
    output = _generate(target, {**_settings(row), **returned}, assistant_model=drafter)
    check_output(output, expected)
    assert warnings_given() == []
    assert len(made) == 1
    # With a schedule the machine's speed decides whether anything is drafted.
    is_constant = _settings(row).get("num_assistant_tokens_schedule", "constant") == "constant"
    if way == "dict" and is_constant and output.draft_statistics.new_tokens > 4:
        assert output.draft_statistics.accepted_tokens > 0


@functools.cache
def _instant_drafter(name: str) -> DraftModel:
    texts = ["".join(random.Random(n).choices(string.ascii_letters, k=3 * n)) for n in range(1, 12)]
    target = _fresh(name)
    return hf_falcon.instant_drafter(target, tiny_tokenizer(), prompts=texts, max_new_tokens=24, progress=False)


def _drafter_for_any(kind: str, name: str, truth: torch.Tensor) -> DraftModel:
    """A drafter that needs no training, for the target of this name; "lookup" and "draft model" know the texts."""
    if kind == "instant":
        return _instant_drafter(name)
    if kind == "draft model":
        return CausalLMDrafter(_fresh(name))
    drafter = LookupDrafter(memory=10_000)
    for text in truth.tolist():
        drafter.add(text)
    return drafter


def _rows_and_kinds() -> list[Any]:
    """Each row with each drafter that needs no training; the quick run takes one drafter a row, in turns."""
    found = []
    for place, each in enumerate(rows(ASSISTED)):
        # Instant drafters are for targets of Llama's kind.
        kinds = ["lookup", "draft model", *(["instant"] if each.values[1].target == "llama" else [])]
        for kind in kinds:
            marks = [] if kind == kinds[place % len(kinds)] else [pytest.mark.slow]
            found.append(pytest.param(*each.values, kind, marks=marks, id=f"{each.id}-{kind}"))
    return found


@pytest.mark.parametrize("way", quick(["dict"], WAYS))
@pytest.mark.parametrize("field, row, kind", _rows_and_kinds())
def test_assisted_by_drafters_for_any_target(field, row, kind, way, warnings_given):
    returned, _ = WAYS[way]
    expected = _generate(_fresh(row.target), {**_settings(row), **returned})
    drafter = _drafter_for_any(
        kind, row.target, expected if isinstance(expected, torch.Tensor) else expected.sequences
    )
    settings = {"num_assistant_tokens_schedule": "constant", **_settings(row), **returned}
    output = _generate(_fresh(row.target), settings, assistant_model=drafter)
    check_output(output, expected)
    assert warnings_given() == []
    found = getattr(output, "draft_statistics", None)
    if found is not None and settings["num_assistant_tokens_schedule"] == "constant" and found.new_tokens > 9:
        assert kind == "instant" or found.accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("field, row", [each for each in rows(ASSISTED) if each.values[1].matters])
def test_rows_matter(field, row):
    """Equality says nothing of a setting without effect."""
    settings = {**_settings(row), **DICT, "output_scores": True}
    default = {"inputs": prompt(PROMPT), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    found = _generate(_fresh(row.target), settings)
    settings = {**_settings(row), **DICT, "output_scores": True, field: default.get(field, ...)}
    if settings.get("inputs", ...) is None:
        settings["inputs"] = default["inputs"]
    without = _generate(_fresh(row.target), settings)
    same_tokens = found.sequences.tolist() == without.sequences.tolist()
    assert not (same_tokens and _equal(found.scores, without.scores))


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_without_effect(field, warnings_given):
    target = tiny_target("llama")
    output = _generate(target, {field: WITHOUT_EFFECT[field]}, assistant_model=tiny_drafter(target), **DICT)
    assert output.sequences.tolist() == _generate(target, {field: WITHOUT_EFFECT[field]}).tolist()
    assert output.sequences.tolist() == _generate(target, {}).tolist()
    assert output.draft_statistics is not None
    assert warnings_given() == []


@pytest.mark.parametrize("field", OF_OTHER_WAYS)
def test_of_other_ways(field, warnings_given):
    target = tiny_target("llama")
    for _ in range(2):
        settings = {field: OF_OTHER_WAYS[field]}
        output = _generate(target, settings, assistant_model=tiny_drafter(target), **DICT)
        assert output.sequences.tolist() == _generate(target, {}).tolist()
        assert output.draft_statistics is not None
    assert warnings_given() == [f"`{field}`: no effect with a Falcon drafter."]


@pytest.mark.parametrize("field, row", rows(PLAIN))
def test_plain(field, row, warnings_given):
    target = tiny_target(row.target)
    expected = _generate(target, _settings(row))
    for _ in range(2):
        assert _generate(target, _settings(row), assistant_model=tiny_drafter(target)).tolist() == expected.tolist()
    if row.message is not None:
        assert len(warnings_given()) == 1
        assert row.message in warnings_given()[0]


@pytest.mark.parametrize("field, row", rows(REFUSED))
def test_refused(field, row):
    target = tiny_target(row.target)
    with pytest.raises((ValueError, NotImplementedError), match=row.message):
        _generate(target, _settings(row), assistant_model=tiny_drafter(target))


def every_row() -> list[Any]:
    """The rows of all tables; one in eight for the quick run."""
    others = {field: Row({field: value}) for field, value in {**WITHOUT_EFFECT, **OF_OTHER_WAYS}.items()}
    found = [each.values for table in (ASSISTED, others, PLAIN, REFUSED) for each in rows(table)]
    # Continuous batching takes long to start; see the tests of attached drafters.
    found = [values for values in found if values[1].message != "assistant_model"]
    return [
        pytest.param(*values, id=f"{place}-{values[0]}", marks=[pytest.mark.slow] if place % 8 else [])
        for place, values in enumerate(found)
    ]


@pytest.mark.parametrize("way", quick(["dict"], WAYS))
@pytest.mark.parametrize("drafter", ["falcon", "lookup"])
@pytest.mark.parametrize("field, row", every_row())
def test_an_attached_drafter_changes_no_call(field, row, drafter, way):
    """Neither what a call gives, nor its error."""

    def outcome(target):
        try:
            return _generate(target, {**_settings(row), **WAYS[way][0]})
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    expected, target = outcome(_fresh(row.target)), _fresh(row.target)
    hf_falcon.attach(target, drafter if drafter == "lookup" else tiny_drafter(target, num_draft_passes=2))
    try:
        found = outcome(target)
    finally:
        hf_falcon.detach(target)
    if isinstance(expected, str):
        assert found == expected
    else:
        assert not isinstance(found, str), found
        check_output(found, expected)


@pytest.mark.parametrize("name", ["use_model_defaults", "return_legacy_cache", "draft_widths"])
def test_arguments_unknown_to_transformers(name):
    """The options of drafting are arguments of `generate`, and no other name is."""
    target = tiny_target("llama")
    with pytest.raises(ValueError, match=name):
        _generate(target, {name: 3}, assistant_model=tiny_drafter(target))


def test_own_decoding_method():
    """transformers hands no assistant to a decoding method of the user's own."""
    target, settings = tiny_target("llama"), {"custom_generate": two_steps}
    output = _generate(target, settings, assistant_model=tiny_drafter(target))
    assert output.tolist() == _generate(target, settings).tolist()
    assert output.shape[1] == PROMPT + 2


def test_synced_gpus(tmp_path, warnings_given):
    """One process of its own; what counts is that every process runs as many forwards as the others."""
    target, settings = tiny_target("llama"), {"synced_gpus": True}
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        output = _generate(target, settings, assistant_model=tiny_drafter(target))
        assert output.tolist() == _generate(target, settings).tolist()
    finally:
        torch.distributed.destroy_process_group()
    assert len(warnings_given()) == 1
    assert "`synced_gpus` is set" in warnings_given()[0]


def test_every_field_has_a_row():
    table = {*ASSISTED, *WITHOUT_EFFECT, *OF_OTHER_WAYS, *PLAIN, *REFUSED, *ELSEWHERE}
    assert set(GenerationConfig().to_dict()) - table == set()
    assert set(inspect.signature(GenerationMixin.generate).parameters) - {"self"} - table == set()


def _options_used(monkeypatch, settings: dict[str, Any], **of_the_drafter: Any) -> DraftOptions:
    target = tiny_target("llama")
    made = use_oracle(monkeypatch, _generate(target, {}))
    _generate(target, settings, assistant_model=tiny_drafter(target, **of_the_drafter))
    return made[-1].options


def test_a_call_sets_options_of_drafting(monkeypatch):
    found = _options_used(
        monkeypatch,
        {
            "num_assistant_tokens": 3,
            "num_assistant_tokens_schedule": "heuristic",
            "assistant_confidence_threshold": 0.9,
            "prompt_lookup_num_tokens": 5,
        },
        draft_width=2,
    )
    assert (found.num_assistant_tokens, found.num_assistant_tokens_schedule) == (3, "heuristic")
    assert (found.assistant_confidence_threshold, found.prompt_lookup_num_tokens) == (0.9, 5)
    # What only the drafter says stays.
    assert found.draft_width == 2
    # All of them in a configuration, also values that equal the defaults of transformers.
    given = GenerationConfig(draft_width=4, num_draft_passes=1, num_assistant_tokens=20, max_new_tokens=NEW_TOKENS)
    found = _options_used(monkeypatch, {"generation_config": given, "max_new_tokens": ...}, num_assistant_tokens=7)
    assert (found.draft_width, found.num_draft_passes, found.num_assistant_tokens) == (4, 1, 20)


def test_embeddings_are_drafted_from_like_tokens(monkeypatch):
    """The drafter reads the prompt's embeddings where it has no tokens, and so drafts the same trees."""
    target, score = tiny_target("llama"), TargetRun.score
    drafted: list[list[list[int]]] = []

    def record(self, trees, texts):
        drafted[-1].append(trees[0].token_ids.tolist())
        return score(self, trees, texts)

    calls = ({}, {"inputs": None, "inputs_embeds": _embeds()})
    for settings in calls:
        # The probe scores trees, too: once.
        _generate(target, settings, assistant_model=tiny_drafter(target))
    monkeypatch.setattr(TargetRun, "score", record)
    for settings in calls:
        drafted.append([])
        _generate(target, settings, assistant_model=tiny_drafter(target))
    assert drafted[0] == drafted[1]
    assert len(drafted[0]) > 5


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("draft", ["random", "oracle"])
def test_chat_of_many_turns_in_one_cache(name, draft, monkeypatch):
    """The user's own cache goes from turn to turn, by turns with and without the drafter; nothing is run twice."""
    target = tiny_target(name)
    cache = DynamicCache(config=target.config)
    sequence = prompt(PROMPT)
    for turn in range(5):
        mask = torch.ones_like(sequence)
        expected = _generate(target, {"inputs": sequence, "attention_mask": mask}, max_new_tokens=10)
        if draft == "oracle":
            use_oracle(monkeypatch, expected)
        assistant = {} if turn == 2 else {"assistant_model": tiny_drafter(target)}
        settings = {"inputs": sequence, "attention_mask": mask, CACHE_NAME: cache, **assistant, **DICT}
        output = _generate(target, settings, max_new_tokens=10)
        assert output.sequences.tolist() == expected.tolist()
        assert output[CACHE_NAME] is cache
        assert cache.get_seq_length() == expected.shape[1] - 1
        sequence = torch.cat((expected, prompt(4, seed=turn)), dim=1)


def _streamed(target, streamer, **arguments) -> str:
    """What an iterator gives while another thread generates."""
    thread = threading.Thread(target=_generate, args=(target, {"streamer": streamer}), kwargs=arguments)
    thread.start()
    text = "".join(streamer)
    thread.join()
    return text


async def _streamed_async(target, **arguments) -> str:
    streamer = AsyncTextIteratorStreamer(tiny_tokenizer(), timeout=60)
    thread = threading.Thread(target=_generate, args=(target, {"streamer": streamer}), kwargs=arguments)
    thread.start()
    text = "".join([part async for part in streamer])
    thread.join()
    return text


def test_streamers(capsys):
    target = tiny_target("llama")
    assistant = {"assistant_model": tiny_drafter(target)}
    expected = "".join(tiny_tokenizer().decode(_generate(target, {})[0]))
    for arguments in ({}, assistant):
        assert _streamed(target, TextIteratorStreamer(tiny_tokenizer(), timeout=60), **arguments) == expected
        assert asyncio.run(_streamed_async(target, **arguments)) == expected
        _generate(target, {"streamer": TextStreamer(tiny_tokenizer())}, **arguments)
        assert capsys.readouterr().out == expected + "\n"


def test_the_documents_name_what_is_not_assisted():
    text = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    for title, fields in {"Plain decoding": PLAIN, "Refused": REFUSED, "No effect": OF_OTHER_WAYS}.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {title} "))
        for field in fields:
            assert f"`{field}" in row, (title, field)
