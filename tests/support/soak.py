# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Random calls of `generate`, each compared with plain decoding; every one follows from its seed alone.

`python tests/support/soak.py 17 18` runs the calls of these seeds and says what they are.
"""

import functools
import gc
import math
import random
import sys
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from oracle import use_oracle
from tiny_models import TARGETS, VOCAB, hooks_of, tiny_target, tiny_tokenizer
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from hf_falcon import FalconDraftConfig, FalconDraftModel

MODELS = ("llama", "mistral-window", "gemma2", "qwen2-mixed", "gemma4", "gpt2", "gpt-neox", "opt", "phi3-window")
assert set(MODELS) <= set(TARGETS)
_DRAFTERS: tuple[dict[str, Any], ...] = (
    {"block_size": 1, "num_lstm_layers": 0},
    {"block_size": 2, "num_lstm_layers": 1},
    {"block_size": 3, "num_lstm_layers": 0, "conditioning_size": 8},
)
_PROCESSORS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [9, 11]]},
    {"suppress_tokens": [3, 4, 30, 31]},
    {"sequence_bias": {(30,): 4.0, (12, 13): 3.0}},
    {"min_new_tokens": 6},
)
_WARPERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"top_k": 5, "temperature": 1.3},
    {"top_p": 0.8, "top_k": 0},
    {"min_p": 0.05},
    {"typical_p": 0.9},
)
# Whether several sequences a prompt reach the decoding loop; else transformers refuses them.
_SEVERAL_SEQUENCES = hasattr(GenerationMixin._validate_generation_mode, "_is_falcon_hook")


class Call(NamedTuple):
    """What is generated."""

    model: str
    drafter: int
    options: dict[str, Any]
    lengths: list[int]
    settings: dict[str, Any]
    stop_strings: list[str] | None
    streams: bool
    cache: str
    knows_truth: bool
    breaks_off: tuple[str, int] | None


def random_call(seed: int) -> Call:
    """The call of a seed."""
    draws = random.Random(seed)
    batch = draws.choice((1, 1, 1, 2, 3, 4))
    settings: dict[str, Any] = {"max_new_tokens": draws.randint(1, 18), "do_sample": draws.random() < 0.5}
    if settings["do_sample"]:
        settings |= draws.choice(_WARPERS)
        if _SEVERAL_SEQUENCES and draws.random() < 0.25:
            settings["num_return_sequences"] = draws.choice((2, 3))
    for processor in draws.sample(_PROCESSORS, draws.choice((0, 0, 1, 2))):
        settings |= processor
    if draws.random() < 0.4:
        settings["eos_token_id"] = draws.sample(range(1, VOCAB), draws.randint(1, 8))
    if draws.random() < 0.4:
        settings |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    cache = draws.choice(("none", "none", "none", "new", "second turn"))
    # transformers 5.17 runs in chunks what the cache already holds, too.
    if draws.random() < 0.1 and cache != "second turn":
        settings["prefill_chunk_size"] = draws.randint(1, 6)
    tree = draws.choice(("dynamic", "dynamic", "static", [[0], [1], [0, 0], [1, 2], [0, 0, 1]]))
    options = {
        "draft_tree": tree,
        "num_assistant_tokens": draws.choice((1, 3, 8, 20)),
        "num_draft_passes": draws.randint(1, 4),
        "num_assistant_tokens_schedule": draws.choice(("constant", "heuristic")),
        "prompt_lookup_num_tokens": draws.choice((0, 7)),
        "assistant_confidence_threshold": 0.0,
    }
    single = batch == 1 and settings.get("num_return_sequences", 1) == 1
    return Call(
        model=draws.choice(MODELS),
        drafter=draws.randrange(len(_DRAFTERS)),
        options=options,
        lengths=[draws.choice((1, 2, 5, 9, 20)) for _ in range(batch)],
        settings=settings,
        stop_strings=["".join(draws.choices("abcdefgh", k=2)), "ij"] if draws.random() < 0.15 else None,
        streams=single and draws.random() < 0.3,
        # Padding within a text is plain decoding's own matter.
        cache=cache if single else "none",
        knows_truth=single and cache != "second turn" and draws.random() < 0.5,
        breaks_off=(draws.choice(tuple(_BREAKS)), draws.randint(1, 8)) if draws.random() < 0.3 else None,
    )


class _BrokenOff(Exception):
    """What a user's own code raises."""


class _Counts:
    """Raises at a call of a number."""

    def __init__(self, calls: int, error: type[BaseException]):
        self.calls, self.error = calls, error

    def count(self) -> None:
        self.calls -= 1
        if self.calls == 0:
            raise self.error("broken off")


class _Processor(_Counts, LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count()
        return scores


class _Criterion(_Counts, StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.count()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class _Layer(_Counts):
    def __call__(self, *args: Any) -> None:
        self.count()


# Where a call breaks off, and how.
_BREAKS = {
    "processor": _BrokenOff,
    "criterion": KeyboardInterrupt,
    "target": torch.OutOfMemoryError,
    "drafter": torch.OutOfMemoryError,
}


class Tape(BaseStreamer):
    """Remembers what it is given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.given.append(value.tolist())

    def end(self) -> None:
        self.given.append("end")


@functools.cache
def _drafter(model: str, number: int) -> FalconDraftModel:
    torch.manual_seed(number)
    sizes = {"num_hidden_layers": 1, "intermediate_size": 48, "initializer_range": 0.2}
    return FalconDraftModel(FalconDraftConfig.from_target(tiny_target(model), **sizes, **_DRAFTERS[number])).eval()


def _prompts(lengths: list[int], seed: int) -> dict[str, torch.Tensor]:
    longest = max(lengths)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest)[None] >= longest - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def _arguments(call: Call, seed: int) -> dict[str, Any]:
    """Arguments of `generate`, made anew: it keeps some of them."""
    given: dict[str, Any] = {**call.settings, "pad_token_id": 0, **_prompts(call.lengths, seed)}
    if call.stop_strings:
        given |= {"stop_strings": call.stop_strings, "tokenizer": tiny_tokenizer()}
    if call.cache != "none":
        given["past_key_values"] = DynamicCache(config=tiny_target(call.model).config)
    if call.streams:
        given["streamer"] = Tape()
    return given


def _generate(call: Call, seed: int, **more: Any) -> tuple[Any, dict[str, Any]]:
    """The output, and the arguments, of the last turn of a call."""
    target, given = tiny_target(call.model), _arguments(call, seed)
    torch.manual_seed(seed)
    output = target.generate(**given, **more)
    if call.cache == "second turn":
        sequence = output["sequences"] if isinstance(output, dict) else output
        longer = torch.cat((sequence, _prompts([4], seed + 1)["input_ids"]), dim=1)
        given |= {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
        given.pop("streamer", None)
        output = target.generate(**given, **more)
    return output, given


def _break_off(call: Call, seed: int, drafter: FalconDraftModel) -> None:
    """The call, but something in it fails; what the caller holds must be as good as before."""
    assert call.breaks_off is not None
    target, (where, count) = tiny_target(call.model), call.breaks_off
    given, error = _arguments(call, seed), _BREAKS[where]
    handle: Any = nullcontext()
    if where == "processor":
        given["logits_processor"] = [_Processor(count, error)]
    elif where == "criterion":
        given["stopping_criteria"] = [_Criterion(count, error)]
    else:
        # In the midst of a forward: layers before it have run.
        broken = drafter.norm if where == "drafter" else _last_layer(target)
        handle = broken.register_forward_pre_hook(_Layer(count, error))
    with handle:
        try:
            torch.manual_seed(seed)
            target.generate(**given, assistant_model=drafter)
        except error as found:
            assert "broken off" in str(found)
    cache = given.get("past_key_values")
    # A prompt that was not run to its end leaves what it leaves in plain decoding.
    chunks = math.ceil(max(call.lengths) / call.settings.get("prefill_chunk_size", 20))
    if cache is None or cache.get_seq_length() == 0 or (where == "target" and count <= chunks):
        return
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    assert {layer.get_seq_length() for layer in cache.layers} == {cache.get_seq_length()}
    assert {type(layer).__module__ for layer in cache.layers} == {"transformers.cache_utils"}
    # All that is in it is the beginning of the greedy text, so that the text goes on from it.
    if not call.settings["do_sample"] and call.stop_strings is None:
        whole = target.generate(**_arguments(call._replace(cache="none", streams=False), seed))
        whole = whole["sequences"] if isinstance(whole, dict) else whole
        ids = whole[:, : cache.get_seq_length() + 1]
        if ids.shape[1] < whole.shape[1]:
            rest = whole.shape[1] - ids.shape[1]
            # Processors count from the prompt on; the model alone is asked.
            fresh = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=rest, do_sample=False)
            found = target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=rest, do_sample=False, past_key_values=cache
            )
            assert found.tolist() == fresh.tolist()


def _last_layer(target: PreTrainedModel) -> torch.nn.Module:
    lists = [each for each in target.modules() if isinstance(each, torch.nn.ModuleList)]
    return max(lists, key=len)[-1]


def run(seed: int) -> None:
    """
    Runs the call of a seed.

    Raises:
        `AssertionError`: where it is not plain decoding's, naming the seed and the call.
    """
    call = random_call(seed)
    try:
        _run(call, seed)
    except Exception as error:
        raise AssertionError(f"seed {seed} fails: python tests/support/soak.py {seed}\n{call}") from error


def _run(call: Call, seed: int) -> None:
    drafter = _drafter(call.model, call.drafter)
    drafter.generation_config = GenerationConfig(**call.options)
    if call.breaks_off:
        _break_off(call, seed, drafter)
    expected, theirs = _generate(call, seed)
    state = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        if call.knows_truth:
            truth = expected["sequences"] if isinstance(expected, dict) else expected
            use_oracle(patch, truth, accuracy=0.8, scattered=True, seed=seed)
        found, ours = _generate(call, seed, assistant_model=drafter)
    if isinstance(expected, dict):
        assert found.sequences.tolist() == expected.sequences.tolist()
        for field in ("scores", "logits"):
            assert len(found[field]) == len(expected[field])
            torch.testing.assert_close(torch.cat(found[field]), torch.cat(expected[field]), atol=1e-3, rtol=1e-3)
        assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    else:
        assert found.tolist() == expected.tolist()
    if "streamer" in ours:
        assert ours["streamer"].given == theirs["streamer"].given
    if "past_key_values" in ours:
        assert ours["past_key_values"].get_seq_length() == theirs["past_key_values"].get_seq_length()
    # As many draws as plain decoding: what is sampled next is the same, too.
    assert len(call.lengths) > 1 or torch.equal(torch.get_rng_state(), state)


def make_all() -> None:
    """Makes all models, so that what is held later is held for longer than a call."""
    for model in MODELS:
        for number in range(len(_DRAFTERS)):
            _drafter(model, number)


def held() -> tuple[int, int]:
    """Tensors that are alive, and hooks on models."""
    gc.collect()
    models = [tiny_target(model) for model in MODELS]
    models += [_drafter(model, number) for model in MODELS for number in range(len(_DRAFTERS))]
    hooks = sum(map(hooks_of, models))
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()), hooks


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(argument, random_call(int(argument)), flush=True)
        run(int(argument))
