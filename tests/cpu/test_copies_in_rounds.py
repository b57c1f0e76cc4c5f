# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A copy of a model, or a file of it, that is made while a round runs is as one that is made between two calls."""

import copy
import io
from contextlib import ExitStack

import pytest
import torch
from counting_compiler import Backend, compiled_by, drafter_of, generate
from quick import one_in
from tiny_models import new_target, prompt

import hf_falcon
from hf_falcon.cpu import compiling
from hf_falcon.cpu.skinny_gemm import SkinnyLinear, skinny_gemm_pays

WAYS = {
    "copied": copy.deepcopy,
    "copied twice": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "pickled": lambda model: torch.load(file_of(model), weights_only=False),
}


def file_of(model) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def classes(model) -> list[str]:
    return [f"{type(module).__module__}.{type(module).__name__}" for module in model.modules()]


@pytest.mark.parametrize(("way", "kind"), one_in(2, WAYS, ["as it is", "packed", "compiled", "packed and compiled"]))
def test_copies_are_ordinary(kind, way, monkeypatch):
    original = compiling._is_faster
    monkeypatch.setattr(compiling, "_is_faster", lambda *arguments: [original(*arguments)] != [])
    # Not one of other tests: transformers may have left a hook in it that no file can hold.
    target = new_target("llama")
    drafter, expected = drafter_of(target), generate(target, prompt(9))
    before, copies = classes(target), []
    with ExitStack() as stack:
        if "packed" in kind:
            stack.enter_context(hf_falcon.packed_weights(target, drafter))
        if "compiled" in kind:
            stack.enter_context(hf_falcon.compiled_rounds(target, (8,), compiled_by(Backend())))

        def hook(module, inputs, output):
            is_round = SkinnyLinear in map(type, target.modules()) or "forward" in vars(target.model)
            if not copies and (is_round or kind == "packed"):
                # A file cannot hold a function of a test.
                handle.remove()
                copies.append((WAYS[way](target), WAYS[way](drafter)))

        handle = target.register_forward_hook(hook)
        assert generate(target, prompt(9), drafter) == expected
    if kind == "as it is" and not skinny_gemm_pays():
        pytest.skip("layers keep their class here")
    ((found, of_drafter),) = copies
    assert classes(found) == before and classes(of_drafter) == classes(drafter)
    for model in (found, of_drafter):
        assert not any(vars(module).get("lent") for module in model.modules())
    decoder = found.model
    assert vars(decoder).get("forward", decoder.forward) == type(decoder).forward.__get__(decoder)
    assert all(torch.equal(mine, yours) for mine, yours in zip(found.parameters(), target.parameters(), strict=True))
    # It decodes, with a drafter too, and the original goes on.
    for model, its_drafter in ((found, of_drafter), (target, drafter)):
        assert generate(model, prompt(9)) == expected and generate(model, prompt(9), its_drafter) == expected
    assert classes(target) == before
