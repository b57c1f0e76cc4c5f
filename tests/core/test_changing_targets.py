# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Targets whose weights change between calls, as in reinforcement learning: no copy of a weight stays behind."""

import copy

import pytest
import torch
from counting_compiler import Backend, compiled_by, drafter_of
from quick import one_in, quick
from tiny_models import new_drafter, new_target, prompt, tiny_drafter

import hf_falcon
from hf_falcon import CausalLMDrafter
from hf_falcon.core.probe import probe
from hf_falcon.cpu import compiling

NEW_TOKENS = 16


def generate(target, drafter=None, rows=1, **settings):
    torch.manual_seed(3)
    ids = torch.cat([prompt(9, seed=row) for row in range(rows)])
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, **settings}
    settings["attention_mask"] = torch.ones_like(ids)
    if drafter is not None:
        settings |= {"num_assistant_tokens_schedule": "constant", "return_dict_in_generate": True}
    with torch.no_grad():
        found = target.generate(ids, assistant_model=drafter, **settings)
    assert drafter is None or found.draft_statistics is not None
    return (found if drafter is None else found.sequences).tolist()


def step(target) -> None:
    """A large step of an optimizer, in place."""
    optimizer = torch.optim.SGD(target.parameters(), lr=0.5)
    ids = prompt(20, seed=7)
    target(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def load(target) -> None:
    weights = target.state_dict()
    target.load_state_dict({name: value + torch.randn_like(value) * 0.1 for name, value in weights.items()})


def replace_data(target) -> None:
    for parameter in target.parameters():
        parameter.data = parameter.data + torch.randn_like(parameter) * 0.1


def add_in_data(target) -> None:
    """The version of a tensor does not show it."""
    for parameter in target.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)


def replace_parameters(target) -> None:
    for module in target.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, torch.nn.Parameter(parameter.detach() + torch.randn_like(parameter) * 0.1))


CHANGES = [step, load, replace_data, add_in_data, replace_parameters]
NAMES = {change.__name__: change for change in CHANGES}
KINDS = ["falcon", "draft vocabulary", "lookup", "draft model"]
SETTINGS = [{}, {"do_sample": True, "top_k": 0}, {"rows": 3, "do_sample": True}]


@pytest.mark.parametrize("kind, change, settings", one_in(4, KINDS, NAMES, SETTINGS))
def test_texts_follow_the_weights(kind, change, settings):
    target = new_target("llama")
    drafter = {
        "falcon": lambda: tiny_drafter(target),
        "draft vocabulary": lambda: new_drafter(target, draft_vocab_size=20),
        "lookup": hf_falcon.LookupDrafter,
        "draft model": lambda: CausalLMDrafter(new_target("llama")),
    }[kind]()
    texts = []
    for _ in range(3):
        expected = generate(target, **settings)
        assert generate(target, drafter, **settings) == expected
        texts.append(expected)
        NAMES[change](target)
    assert texts[0] != texts[1] != texts[2]


@pytest.mark.parametrize("change", CHANGES)
def test_the_head_of_a_draft_vocabulary_is_the_targets(change):
    """Its rows are kept from call to call, as long as they are the target's."""
    target = new_target("llama")
    drafter = new_drafter(target, draft_vocab_size=20)
    ids = drafter.draft_vocab_ids
    generate(target, drafter)
    for _ in range(2):
        change(target)
        head = drafter.make_head(target)
        assert torch.equal(head.linear.weight, target.get_output_embeddings().weight[ids])


@pytest.mark.parametrize("change", quick((step, add_in_data), CHANGES))
@pytest.mark.parametrize("with_drafter", quick([True], [True, False]))
def test_compiled_rounds(change, with_drafter, monkeypatch):
    # Tiny models do not gain.
    original = compiling._is_faster
    monkeypatch.setattr(compiling, "_is_faster", lambda *arguments: [original(*arguments)] != [])
    target = new_target("llama")
    # Trees of eight tokens, with their roots.
    drafter, backend = drafter_of(target), Backend()
    hf_falcon.compile_rounds(target, (8,), compiled_by(backend), drafter=drafter if with_drafter else None)
    ran = backend.ran
    assert generate(target, drafter) == generate(target) and backend.ran > ran and 8 in backend.rows
    for _ in range(2):
        change(target)
        assert generate(target, drafter) == generate(target)


@pytest.mark.parametrize("change", CHANGES)
def test_row_invariant(change):
    """In bfloat16: in float32 it changes nothing."""
    target = new_target("llama").to(torch.bfloat16)
    drafter = copy.deepcopy(tiny_drafter(target)).to(torch.bfloat16)
    with hf_falcon.row_invariant(target):
        for _ in range(3):
            assert generate(target, drafter) == generate(target)
            change(target)


def test_packed_weights_take_no_step_and_a_new_pack_has_the_new_ones():
    target = new_target("llama")
    drafter = copy.deepcopy(tiny_drafter(target))
    for _ in range(3):
        with hf_falcon.packed_weights(target):
            packed = generate(target)
            assert generate(target, drafter) == packed
        assert generate(target) == packed
        step(target)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("given", ["attached", "argument"])
def test_in_training_mode(given, rows):
    """As trl generates its rollouts: without dropout, training mode changes no text."""
    target = new_target("llama")
    drafter = tiny_drafter(target)
    if given == "attached":
        hf_falcon.attach(target, drafter)
    target.train()
    for _ in range(2):
        expected = generate(target, rows=rows, do_sample=True)
        if given == "argument":
            assert generate(target, drafter, rows=rows, do_sample=True) == expected
        else:
            torch.manual_seed(3)
            ids = torch.cat([prompt(9, seed=row) for row in range(rows)])
            settings = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "pad_token_id": 0}
            with torch.no_grad():
                found = target.generate(
                    ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **settings
                )
            assert found.sequences.tolist() == expected
            assert found.draft_statistics is not None
        step(target)
    assert target.training
    hf_falcon.detach(target)


@pytest.mark.parametrize("case", ["dropout", "attention dropout", "gradient checkpointing"])
def test_an_attached_drafter_rests_where_training_mode_draws(case):
    changes = {"attention dropout": {"attention_dropout": 0.5}}.get(case, {})
    target = new_target("gpt2", resid_pdrop=0.5) if case == "dropout" else new_target("llama", **changes)
    hf_falcon.attach(target, tiny_drafter(target) if case != "dropout" else "lookup")
    target.train()
    if case == "gradient checkpointing":
        getattr(target, "activation_checkpointing_enable", target.gradient_checkpointing_enable)()
    torch.manual_seed(3)
    ids, settings = prompt(9), {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    found = target.generate(ids, **settings)
    torch.manual_seed(3)
    expected = target.generate(ids, assistant_model=None, **settings)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert getattr(found, "draft_statistics", None) is None


def test_a_step_alone_needs_no_new_probe(monkeypatch):
    """What a target takes is not a matter of its weights' values."""
    target = new_target("llama")
    drafter, tried = tiny_drafter(target), []
    original = probe.__globals__["_try_ways"]
    monkeypatch.setitem(probe.__globals__, "_try_ways", lambda *arguments: tried.append(1) or original(*arguments))
    for _ in range(3):
        generate(target, drafter)
        step(target)
    assert len(tried) == 1


class Gate(torch.nn.Module):
    def forward(self, states):
        return states * torch.sigmoid(states)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("change", ["a scripted activation", "a traced MLP"])
def test_scripted_parts(change, monkeypatch):
    """Their parameters and modules are no dicts. What was found for them once holds for later calls."""
    target = new_target("llama")
    drafter = new_drafter(target)
    generate(target, drafter)
    mlp = target.model.layers[0].mlp
    if change == "a traced MLP":
        target.model.layers[0].mlp = torch.jit.trace(mlp, torch.zeros(1, 3, target.config.hidden_size))
    else:
        mlp.act_fn = torch.jit.script(Gate())
    tried, original = [], probe.__globals__["_try_ways"]
    monkeypatch.setitem(probe.__globals__, "_try_ways", lambda *arguments: tried.append(1) or original(*arguments))
    for rows in (1, 2, 1, 2):
        assert generate(target, drafter, rows) == generate(target, rows=rows)
    assert len(tried) == 2
