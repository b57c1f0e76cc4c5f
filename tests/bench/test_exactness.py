# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`exactness` finds the module whose values depend on the number of tokens, and no other."""

import pytest
from tiny_models import new_target, prompt

from hf_falcon.bench.exactness import exactness


def with_fault(name: str):
    """A target in float64, in which nothing else differs visibly; one module adds a little where rows run together."""
    target = new_target("llama").double()

    def forward(module, inputs, output):
        first, *others = output if isinstance(output, tuple) else (output,)
        changed = first + 0.5 if first.shape[1] > 4 else first
        return (changed, *others) if others else changed

    target.get_submodule(name).register_forward_hook(forward)
    return target


@pytest.fixture(autouse=True)
def values_are_rounded(monkeypatch):
    """Float64 differs by its last bits, which are not what is tested."""
    share = "hf_falcon.bench.exactness._share"
    monkeypatch.setattr(share, lambda one, other: float((one.float() != other.float()).float().mean() > 0.01))


@pytest.mark.parametrize("is_tree", [False, True])
def test_nothing_differs(is_tree):
    found = exactness(new_target("llama").double(), prompt(12), (1, 2, 7), is_tree)
    assert [each.rows for each in found] == [1, 2, 7] and all(each.is_exact for each in found)


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize(
    "name, kind",
    [
        ("model.layers.1.mlp.up_proj", "Linear (48, 32)"),
        ("model.layers.0.input_layernorm", "LlamaRMSNorm (32,)"),
        ("model.layers.1.self_attn", None),
    ],
)
def test_the_module_is_named(name, kind, is_tree):
    few, many = exactness(with_fault(name), prompt(12), (4, 7), is_tree)
    assert few.is_exact and not many.is_exact
    assert many.first == name and many.logits > 0
    assert [each for each, share in many.alone.items() if share] == ([] if kind is None else [kind])


def test_the_tree_passes_others_by():
    """Half of a tree is on other paths, whose values are not compared."""
    target = new_target("llama").double()
    seen = []
    target.model.register_forward_pre_hook(
        lambda module, inputs, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    exactness(target, prompt(12), (7,))
    assert seen[-1].flatten().tolist() == [12, 13, 13, 14, 14, 15, 15]
