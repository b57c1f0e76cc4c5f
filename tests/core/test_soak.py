# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Many random calls, one after the other: each is plain decoding's, and none leaves anything behind."""

import itertools

import pytest
import soak
from utilities import peak_memory, start_peak

_WARM_UP = 0.3
# Bytes; what an allocator keeps is none of ours, a tensor of every call would be.
_GROWTH_AT_MOST = 64 * 2**20


@pytest.mark.parametrize("calls", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_random_calls(calls):
    soak.make_all()
    # transformers' own, where another test asked for attentions.
    hooks = soak.held()[1]
    seeds = iter(range(calls))
    for seed in itertools.islice(seeds, int(_WARM_UP * calls)):
        soak.run(seed)
    before, peak = soak.held(), start_peak()
    for seed in seeds:
        soak.run(seed)
    after = soak.held()
    assert after[1] == before[1] == hooks
    # Some more: what is learnt of targets and drafters that were not met before.
    assert after[0] <= before[0] + 20
    assert peak_memory() <= peak + _GROWTH_AT_MOST
