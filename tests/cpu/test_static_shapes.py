# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Compiled rounds and passes as an accelerator captures them: one graph, one shape, one address of the cache, for any
length of the text. The graphs here are replayed as CUDA graphs are: their outputs live until the next replay.
"""

import copy

import pytest
import torch
from counting_compiler import Backend, compiled_by, drafter_of, generate
from quick import quick
from tiny_models import prompt, tiny_target
from transformers import DynamicCache

import hf_falcon
from hf_falcon.cpu import backend as cpu_backend
from hf_falcon.cpu import compiled_passes, compiled_rounds, compiling
from hf_falcon.cpu.compiled_rounds import compiled_passes_of

SIZES = (1, 4, 8)
ROUNDS = 200


class CapturingBackend(Backend):
    """
    A compiler whose code overwrites the outputs of its last run in every run, as captured graphs do, and notes where
    the tensors are that it writes to.
    """

    def __init__(self):
        super().__init__()
        self.addresses: set[int] = set()
        self.shapes: set[tuple[int, ...]] = set()

    def __call__(self, graph, inputs):
        run = super().__call__(graph, inputs)
        returned = []

        def replay(*arguments):
            for tensor in returned:
                tensor.fill_(torch.nan)
            self.addresses |= {each.data_ptr() for each in _caches(arguments)}
            self.shapes |= {tuple(each.shape) for each in _caches(arguments)}
            outputs = run(*arguments)
            held = {each.untyped_storage().data_ptr() for each in arguments if torch.is_tensor(each)}
            # Outputs may be inputs: the cache is both.
            returned[:] = [
                each
                for each in outputs
                if torch.is_tensor(each) and each.is_floating_point() and each.untyped_storage().data_ptr() not in held
            ]
            return outputs

        return replay


def _caches(arguments):
    return [each for each in arguments if torch.is_tensor(each) and each.dim() == 4 and each.shape[1] > 1]


@pytest.fixture
def captures(monkeypatch):
    """Code runs on this CPU as on an accelerator that captures graphs."""
    for module in (cpu_backend, compiled_passes, compiled_rounds, compiling):
        monkeypatch.setattr(module, "captures_graphs", lambda device: True)


@pytest.fixture(autouse=True)
def kept_if_slower(monkeypatch):
    """Tiny models do not gain from it; compiled code is kept all the same."""
    for name in ("_is_faster", "_are_faster"):
        original = getattr(compiling, name)
        monkeypatch.setattr(compiling, name, lambda *arguments, run=original: [run(*arguments)] != [])


@pytest.mark.parametrize("kind", quick(["captured"], ["dynamic", "whole", "static", "captured"]))
def test_nothing_is_compiled_in_many_rounds_of_changing_lengths(kind, request, monkeypatch):
    """The forwards of all rounds run compiled, by the code of before: no break of the graph, no other version."""
    # Each of the two layers runs by itself, except as a part of the whole decoder.
    backend, runs = Backend(), 2
    if kind == "whole":
        monkeypatch.setattr(compiled_rounds, "_pays_as_a_whole", lambda *arguments: True)
        runs = 1
    if kind == "captured":
        request.getfixturevalue("captures")
        backend, runs = CapturingBackend(), 1
    target, settings = copy.deepcopy(tiny_target("llama")), {}
    drafter = drafter_of(target)
    if kind == "static":
        settings["cache_implementation"] = "static"
    with hf_falcon.compiled_rounds(target, SIZES, compiled_by(backend), drafter=drafter):
        compiled, rounds = backend.compiled, 0
        for length in (3, 30, 90):
            backend.rows.clear()
            if kind == "captured":
                backend.addresses.clear(), backend.shapes.clear()
            tokens, options = prompt(length, length), {"max_new_tokens": 80, **settings}
            expected = generate(target, tokens, **options)
            output = target.generate(
                tokens, assistant_model=drafter, do_sample=False, return_dict_in_generate=True, **options
            )
            assert output.sequences.tolist() == expected
            trees = [size for size in backend.rows if size in SIZES]
            assert len(trees) >= runs * output.draft_statistics.rounds
            rounds += output.draft_statistics.rounds
            if kind == "captured":
                # Keys and values of two layers of the target, and of one of the drafter.
                assert len(backend.addresses) == 6
                assert len({shape[2] for shape in backend.shapes}) <= 2
        assert rounds >= ROUNDS and backend.compiled == compiled


@pytest.mark.parametrize(
    "name, do_sample",
    [("qwen2-mixed", True)]
    + [
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("llama", False), ("llama", True), ("qwen2-mixed", False))
    ],
)
def test_captured_rounds_equal_plain_decoding(name, do_sample, captures):
    backend = CapturingBackend()
    target = copy.deepcopy(tiny_target(name))
    drafter = drafter_of(target)
    with hf_falcon.compiled_rounds(target, SIZES, compiled_by(backend), drafter=drafter):
        assert compiled_passes_of(drafter, target) is not None
        for length in (1, 30):
            tokens, ran = prompt(length, length), backend.ran
            for options in ({}, {"num_assistant_tokens_schedule": "heuristic"}, {"repetition_penalty": 1.2}):
                found = generate(target, tokens, drafter, do_sample=do_sample, **options)
                options.pop("num_assistant_tokens_schedule", None)
                assert found == generate(target, tokens, do_sample=do_sample, **options)
            assert backend.ran > ran


def test_a_text_longer_than_the_slots(captures, monkeypatch):
    """Buffers grow where the text does; the code stays the same."""
    monkeypatch.setattr("hf_falcon.core.caches.STATIC_SLOTS", 16)
    backend, target = CapturingBackend(), copy.deepcopy(tiny_target("llama"))
    drafter, tokens = drafter_of(target), prompt(9)
    with hf_falcon.compiled_rounds(target, SIZES, compiled_by(backend), drafter=drafter):
        compiled = backend.compiled
        found = generate(target, tokens, drafter, max_new_tokens=150)
        assert found == generate(target, tokens, max_new_tokens=150)
        assert backend.compiled == compiled and len({shape[2] for shape in backend.shapes}) > 2


def test_the_cache_is_given_back(captures):
    backend, target = CapturingBackend(), copy.deepcopy(tiny_target("llama"))
    tokens, caches = prompt(9), [DynamicCache(config=target.config) for _ in range(2)]
    generate(target, tokens, past_key_values=caches[0])
    with hf_falcon.compiled_rounds(target, SIZES, compiled_by(backend)):
        generate(target, tokens, drafter_of(target), past_key_values=caches[1])
    for expected, found in zip(caches[0].layers, caches[1].layers):
        torch.testing.assert_close(found.keys, expected.keys)
        torch.testing.assert_close(found.values, expected.values)
