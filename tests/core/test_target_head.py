# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The rows of a draft vocabulary are copied from the target's head once, and again when the head has changed."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from tiny_models import new_drafter, new_target, prompt

import hf_falcon
from hf_falcon.core import draft_session
from hf_falcon.core.draft_session import TargetHead


def pair(**fields):
    target = new_target("llama", tie_word_embeddings=False, **fields)
    drafter = new_drafter(target, draft_vocab_size=20).eval()
    drafter.set_draft_vocabulary(torch.arange(1, 41, 2))
    return target, drafter


def linear_of(target, drafter):
    """The layer of a new call, which must have the target's rows."""
    linear = drafter.make_head(target).linear
    weight = draft_session.head_parameters(target)[0]
    assert torch.equal(linear.weight, weight[drafter.draft_vocab_ids].to(linear.weight))
    return linear


class Head(torch.nn.Module):
    """A head of one's own, which has a weight and no bias."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, states):
        return torch.nn.functional.linear(states, self.weight)


def test_a_head_without_a_bias():
    target, drafter = pair()
    target.lm_head = Head(target.lm_head.weight)
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    expected = target.generate(prompt(9), **options)
    assert target.generate(prompt(9), assistant_model=drafter, **options).tolist() == expected.tolist()
    linear_of(target, drafter)


def test_calls_share_one_copy(monkeypatch):
    target, drafter = pair()
    copies = []
    make = TargetHead._make_linear
    monkeypatch.setattr(TargetHead, "_make_linear", lambda self: copies.append(self) or make(self))
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    expected = target.generate(prompt(9), **options)
    for _ in range(3):
        assert target.generate(prompt(9), **options, assistant_model=drafter).tolist() == expected.tolist()
    assert len(copies) == 1
    first = linear_of(target, drafter)
    assert linear_of(target, drafter) is first
    # Others have their own.
    other = copy.deepcopy(drafter)
    assert linear_of(target, other) is not first and linear_of(copy.deepcopy(target), drafter) is not first
    assert linear_of(target, drafter) is first


def step_of_an_optimizer(target, drafter):
    with torch.no_grad():
        target.lm_head.weight.add_(1.0)


def merged_adapter(target, drafter):
    # The version stays the same.
    target.lm_head.weight.data += 1.0


def another_weight(target, drafter):
    target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.detach() + 1.0)


def the_same_memory(target, drafter):
    target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.detach())


def another_size(target, drafter):
    target.lm_head = torch.nn.Linear(32, 64, bias=True)


def another_vocabulary(target, drafter):
    drafter.set_draft_vocabulary(torch.arange(20))


def another_dtype_of_the_drafter(target, drafter):
    drafter.to(torch.bfloat16)


CHANGES = [step_of_an_optimizer, merged_adapter, another_weight, the_same_memory, another_size, another_vocabulary]
CHANGES += [another_dtype_of_the_drafter]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    target, drafter = pair()
    first = linear_of(target, drafter)
    change(target, drafter)
    second = linear_of(target, drafter)
    assert second is not first and linear_of(target, drafter) is second


@pytest.mark.parametrize("is_drafter_first", [False, True])
def test_it_is_freed_with_either_model(is_drafter_first):
    target, drafter = pair()
    kept = weakref.ref(linear_of(target, drafter))
    assert kept() is not None
    if is_drafter_first:
        del drafter
    else:
        del target
    gc.collect()
    assert kept() is None


def test_what_inference_mode_made_can_be_trained_with():
    target, drafter = pair()
    with torch.inference_mode():
        first = linear_of(target, drafter)
    features = torch.randn(3, 32, requires_grad=True)
    head = drafter.make_head(target)
    head.logits(features).sum().backward()
    assert head.linear is first and features.grad is not None
    # Its changes show in no version.
    with torch.inference_mode():
        target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight + 1.0, requires_grad=False)
        second = linear_of(target, drafter)
        target.lm_head.weight.mul_(2.0)
        assert linear_of(target, drafter) is not second


def test_threads_copy_once():
    target, drafter = pair()
    found = []
    threads = [threading.Thread(target=lambda: found.append(drafter.make_head(target).linear)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1


def test_heads_of_other_tokens_and_of_whole_vocabularies_are_not_kept():
    target, drafter = pair()
    first = linear_of(target, drafter)
    other = drafter.make_head(target).for_tokens(torch.tensor([0, 2, 4]))
    assert other.linear.weight.shape == (3, 32) and linear_of(target, drafter) is first
    whole = new_drafter(target)
    assert whole.make_head(target).linear.weight.data_ptr() == target.lm_head.weight.data_ptr()
    assert target not in draft_session._heads or whole not in draft_session._heads[target]


def test_packing_and_offloading():
    target, drafter = pair()
    first = linear_of(target, drafter)
    with hf_falcon.packed_weights(target):
        packed = linear_of(target, drafter)
        assert packed is not first and linear_of(target, drafter) is packed
    assert linear_of(target, drafter) is not packed
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
    assert target.lm_head.weight.is_meta
    assert linear_of(target, drafter) is not linear_of(target, drafter)
