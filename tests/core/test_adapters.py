# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Targets with layers as PEFT wraps them."""

import torch
import torch.nn.functional as F
from tiny_models import new_target, prompt, random_tokens, tiny_drafter
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hf_falcon.core.draft_session import embed
from hf_falcon.core.target_parts import is_quantised


class Mixing(nn.Module):
    """
    A layer around another one, whose added part looks at all tokens of a forward: right for one token at a time, and
    wrong in a tree. It is 0 before training.
    """

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.base_layer, self._active_adapter, self._disable_adapters = layer, ["default"], False
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, input: Tensor) -> Tensor:
        return self.base_layer(input) + self.scale * input.mean(dim=1, keepdim=True).sum(dim=-1, keepdim=True)


class Scaled(nn.Module):
    """As `target_parameters` of PEFT: the weight is computed in each forward, from what the layer has."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.base_layer, self._active_adapter, self._disable_adapters = layer, ["default"], False

    def forward(self, input: Tensor) -> Tensor:
        parametrize.register_parametrization(self.base_layer, "weight", Double())
        try:
            return self.base_layer(input)
        finally:
            parametrize.remove_parametrizations(self.base_layer, "weight", leave_parametrized=False)


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


def wrapped(kind: type[nn.Module]):
    target = new_target()
    attention = target.model.layers[1].self_attn
    attention.v_proj = kind(attention.v_proj)
    return target


def texts(target, **settings):
    return target.generate(prompt(9), do_sample=False, max_new_tokens=16, **settings).tolist()


def test_a_layer_around_another_one_has_no_weight_of_its_own():
    assert not is_quantised(Mixing(nn.Linear(4, 4)))


def test_an_adapter_is_tried_again_after_a_step():
    """Before training it changes nothing, and trees are right."""
    target = wrapped(Mixing)
    drafter = tiny_drafter(target)
    assert texts(target, assistant_model=drafter) == texts(target)
    with torch.no_grad():
        target.model.layers[1].self_attn.v_proj.scale.add_(0.5)
    assert texts(target, assistant_model=drafter) == texts(target)
    found = target.generate(prompt(9), assistant_model=drafter, max_new_tokens=4, return_dict_in_generate=True)
    assert found.draft_statistics is None


def test_a_weight_that_is_computed_in_the_forward():
    target = wrapped(Scaled)
    ids = random_tokens(3, 9)
    settings = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    expected = target.generate(ids, **settings)
    assert target.generate(ids, assistant_model=tiny_drafter(target), **settings).tolist() == expected.tolist()


def test_an_embeddings_hooks_are_for_the_targets_own_rows():
    """As those of PEFT's `adapter_names`, which has a name for each row."""
    embedding = nn.Embedding(8, 4)
    embedding.register_forward_pre_hook(lambda *_: 1 / 0)
    tokens = torch.tensor([[1, 2]])
    assert torch.equal(embed(embedding, tokens, torch.device("cpu")), F.embedding(tokens, embedding.weight))
