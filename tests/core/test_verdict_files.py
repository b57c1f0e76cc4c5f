# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Targets that take trees are remembered across processes, as long as nothing that the probe tries has changed."""

import types

import pytest
import torch
from tiny_models import new_target, prompt, tiny_tokenizer
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_falcon import LookupDrafter, cost_files, verdict_files
from hf_falcon.commands.generate import Reply
from hf_falcon.core import probe
from hf_falcon.core.probe import CHAINS, TREES
from hf_falcon.verdicts import verdict_of_prompt


@pytest.fixture
def tried(monkeypatch, tmp_path):
    """The targets that the probe tries, in a process that has found nothing yet."""
    found, stock = [], probe._try_ways

    def watched(model, *args):
        found.append(model)
        return stock(model, *args)

    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    monkeypatch.setattr(probe, "_try_ways", watched)
    monkeypatch.setattr(verdict_files, "_FEWEST_WEIGHTS", 0)
    return found


def way(target, mask=None):
    """As in a new process."""
    probe._verdicts.clear()
    return verdict_of_prompt(target, prompt(9), mask).way


def test_a_target_is_tried_once_on_a_machine(tried):
    assert [way(new_target("llama")), way(new_target("llama"))] == [TREES, TREES] and len(tried) == 1
    # Other kinds of arguments, another dtype, another configuration.
    assert way(new_target("llama"), torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1]])) == TREES and len(tried) == 2
    assert way(new_target("llama").to(torch.bfloat16)) == TREES and len(tried) == 3
    assert way(new_target("llama", num_hidden_layers=1)) == TREES and len(tried) == 4
    assert way(new_target("llama")) == TREES and len(tried) == 4


def test_small_targets_and_those_that_take_chains_are_tried_in_each_process(tried, monkeypatch):
    assert [way(new_target("bloom")) for _ in range(2)] == [CHAINS, CHAINS] and len(tried) == 2
    monkeypatch.setattr(verdict_files, "_FEWEST_WEIGHTS", 10**9)
    assert [way(new_target("llama")) for _ in range(2)] == [TREES, TREES] and len(tried) == 4
    assert not (cost_files.cache_folder() / "targets").exists()


def add_hook(target):
    target.model.layers[0].register_forward_pre_hook(lambda *_: None)


def replace_forward(target):
    stock = target.model.forward
    target.model.forward = lambda *args, **kwargs: stock(*args, **kwargs)


def replace_preparation(target):
    kind = type(target)
    target.prepare_inputs_for_generation = types.MethodType(kind.prepare_inputs_for_generation, target)


def make_own_class(target):
    target.__class__ = type("Own", (type(target),), {"__module__": "user.models"})


def replace_inner_forward(target):
    replace_forward(types.SimpleNamespace(model=target.model.layers[0].self_attn))


def compile_in_place(target):
    target.model.layers[1].mlp.compile(backend="eager")


@pytest.mark.parametrize(
    "change",
    [
        add_hook,
        replace_forward,
        replace_inner_forward,
        replace_preparation,
        make_own_class,
        compile_in_place,
    ],
)
def test_a_target_that_was_changed_is_tried(tried, change):
    way(new_target("llama"))
    for _ in range(2):
        target = new_target("llama")
        change(target)
        way(target)
    assert len(tried) == 3


def test_hooks_of_hf_falcon_change_nothing_that_is_tried(tried):
    """Such as the hook of a streamed reply, which counts forwards."""
    for _ in range(2):
        probe._verdicts.clear()
        reply = Reply(new_target("llama"), LookupDrafter(), tiny_tokenizer(), lambda text: None)
        reply.run({"input_ids": prompt(9)}, {"max_new_tokens": 4, "do_sample": False})
        assert reply.tokens == 4
    assert len(tried) == 1


def without_mask(module, query, key, value, attention_mask, **kwargs):
    return sdpa_attention_forward(module, query, key, value, None, **kwargs)


def test_functions_that_are_replaced_for_all_models_are_tried(tried, monkeypatch):
    """As libraries do that compress keys and values: a tree would be read without its mask."""
    way(new_target("llama"))
    attention = type(new_target("llama").model.layers[0].self_attn)
    stock = attention.forward
    with monkeypatch.context() as changed:
        changed.setattr(attention, "forward", lambda *args, **kwargs: stock(*args, **kwargs))
        assert way(new_target("llama")) == TREES and len(tried) == 2
    AttentionInterface.register("sdpa", without_mask)
    try:
        assert way(new_target("llama")) != TREES and len(tried) == 3
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
    assert way(new_target("llama")) == TREES and len(tried) == 3


def test_a_configuration_that_is_no_json(tried):
    target = new_target("llama")
    target.config.compute_dtype = torch.float16
    assert way(target) == TREES and len(tried) == 1
    assert way(target) == TREES and len(tried) == 1
    target.config.names = {1: "one", "two": 2}
    assert way(target) == TREES and len(tried) == 2
    target.config.names = object()
    assert [way(target) for _ in range(2)] == [TREES, TREES] and len(tried) == 4


def test_nothing_can_be_written(tried, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path / "file"))
    assert [way(new_target("llama")) for _ in range(2)] == [TREES, TREES] and len(tried) == 2
