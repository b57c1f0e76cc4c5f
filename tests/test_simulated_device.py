# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The simulated accelerator keeps the rules of a device, and counts: what is tested on it depends on that."""

import pytest
import torch
from quick import quick
from simulated_device import device, move, on_device, on_host, rounding_by_shape
from tiny_models import new_drafter, new_target, prompt

import hf_falcon


def test_it_computes_as_the_cpu_does():
    ours, other = torch.randn(3, 4), torch.randn(4, 5)
    with device():
        found = (on_device(ours) @ on_device(other)).softmax(dim=-1)
        assert found.device.type == "sim" and on_host(found).equal((ours @ other).softmax(dim=-1))


@pytest.mark.parametrize("place", ["cpu", "sim:1"])
def test_tensors_of_two_devices_do_not_mix(place):
    with device():
        here = on_device(torch.ones(3))
        there = torch.ones(3) if place == "cpu" else on_device(torch.ones(3), place)
        with pytest.raises(RuntimeError, match="same device.*sim:0"):
            here + there
        # Scalars and indices of the host are allowed.
        assert on_host(here * torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0]
        assert on_host(here[torch.tensor([0, 2])]).tolist() == [1.0, 1.0]


ASKS = {
    "item": lambda tensor: tensor[0].item(),
    "tolist": lambda tensor: tensor.tolist(),
    "bool": lambda tensor: bool(tensor[0] > 0),
    "int": lambda tensor: int(tensor[0]),
    "nonzero": lambda tensor: tensor.nonzero(),
    "mask": lambda tensor: tensor[tensor > 0],
    "cpu": lambda tensor: tensor.cpu(),
    "to": lambda tensor: tensor.to("cpu"),
    "copy": lambda tensor: torch.empty(3).copy_(tensor),
    "equal": lambda tensor: tensor.equal(tensor),
    "made of a list": lambda tensor: torch.tensor([1, 2], device="sim:0"),
    "blocking copy": lambda tensor: torch.ones(3).to("sim:0"),
}


@pytest.mark.parametrize("ask", ASKS)
def test_synchronisations_are_counted(ask):
    with device() as counts:
        ASKS[ask](on_device(torch.ones(3)))
    assert counts.syncs.total() == 1


def test_launches_are_counted():
    module = move(torch.nn.Linear(3, 3))
    with device() as counts:
        ours = on_device(torch.ones(2, 3))
        torch.ones(3) + 1
        assert counts.launches == 0
        ours + 1
        torch.arange(3, device="sim:0")
        torch.ones(3).to("sim:0", non_blocking=True)
        assert counts.launches == 3 and counts.syncs.total() == 0
        with counts.leave_out(module):
            module(ours)
        assert counts.launches == 3
        module(ours)
        assert counts.launches > 3


def test_products_round_by_the_number_of_rows():
    rows, weight = torch.randn(12, 4).bfloat16(), torch.randn(4, 5).bfloat16()
    with device(), rounding_by_shape():
        few, many = (on_host(on_device(rows[:count]) @ on_device(weight)) for count in (2, 12))
        again = on_host(on_device(rows[[0, 1, *[5] * 10]]) @ on_device(weight))
    assert not few.equal(many[:2]) and again[:2].equal(many[:2])
    torch.testing.assert_close(few, many[:2], rtol=0.1, atol=0.01)


@pytest.mark.parametrize("name", quick(["gemma3"], ["llama", "gemma3"]))
def test_row_invariant_where_kernels_are_chosen_by_shape(name):
    target = new_target(name).bfloat16()
    drafter = new_drafter(target).bfloat16()
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}

    def logits():
        found = []
        for each in (None, drafter):
            output = target.generate(on_device(prompt(9)), assistant_model=each, output_logits=True, **settings)
            found.append([on_host(row) for row in output.logits])
        assert output.draft_statistics.drafted_tokens > 20
        return zip(*found)

    move(target), move(drafter)
    with device(), rounding_by_shape():
        outside = [torch.equal(*pair) for pair in logits()]
        with hf_falcon.row_invariant(target):
            inside = [torch.equal(*pair) for pair in logits()]
    assert len(inside) == 20 and all(inside)
    # After the prompt's own forward, whose logits are the same for both.
    assert outside[0] and not all(outside)
