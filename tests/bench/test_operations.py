# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The count of operations and synchronisations that the benchmark reports."""

import simulated_device
import torch
from tiny_models import new_drafter, new_target, prompt

from hf_falcon.bench import report
from hf_falcon.bench.operations import OperationCounter, RoundOperations, count_round

TREE = {"num_assistant_tokens": 8, "num_draft_passes": 3, "num_assistant_tokens_schedule": "constant"}


def test_a_plain_step_and_a_round_on_a_cpu():
    target = new_target("llama")
    drafter = new_drafter(target, block_size=1, num_lstm_layers=0)
    settings = {"max_new_tokens": 16, "do_sample": False}
    plain = count_round(target, lambda: target.generate(prompt(9), **settings), with_forward=True)
    bare = count_round(target, lambda: target.generate(prompt(9), **settings))
    ours = count_round(target, lambda: target.generate(prompt(9), **settings, assistant_model=drafter, **TREE))
    # Some 96 operations a layer, of which there are two.
    assert plain.operations > 150 > bare.operations
    assert ours.operations > 300 and ours.synchronisations is plain.synchronisations is None
    assert count_round(target, lambda: target.generate(prompt(9), max_new_tokens=1)) is None


def test_a_round_on_a_device():
    target = new_target("llama")
    drafter = simulated_device.move(new_drafter(target, block_size=1, num_lstm_layers=0))
    simulated_device.move(target)
    with simulated_device.device():
        ids = simulated_device.on_device(prompt(9))
        settings = {"max_new_tokens": 16, "do_sample": False, "assistant_model": drafter, **TREE}
        found = count_round(target, lambda: target.generate(ids, **settings))
    assert found.operations > 300 and found.synchronisations == 2


def test_what_waits():
    with simulated_device.device():
        ours, host = simulated_device.on_device(torch.ones(3)), torch.ones(3)
        with OperationCounter(ours.device) as counter:
            host + 1, ours + 1, host.to(ours.device, non_blocking=True)
            assert (counter.operations, counter.synchronisations) == (2, 0)
            for number, wait in enumerate(
                (
                    lambda: ours.to("cpu"),
                    lambda: ours.nonzero(),
                    lambda: ours[ours > 0],
                    lambda: host.to(ours.device),
                    lambda: host.copy_(ours),
                ),
                start=1,
            ):
                wait()
                assert counter.synchronisations == number


def test_the_report_says_both_numbers():
    row = {"operations": 604.0, "operations_share": 0.208, "synchronisations": 2.0}
    assert report.operations(row).endswith("604 operations: 21 % of a plain step's, and waits for the device 2 times.")
    assert report.operations({**row, "synchronisations": None}).endswith("21 % of a plain step's.")
    assert RoundOperations(604.0, None).synchronisations is None
