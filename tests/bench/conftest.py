# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Fixtures of the benchmark's tests."""

import pytest
from bench_runs import arguments  # noqa: F401
from tiny_models import tiny_drafter, tiny_target

from hf_falcon.bench import methods


@pytest.fixture
def models():
    target = tiny_target("llama")
    return methods.Models(target, {"falcon": tiny_drafter(target, block_size=1, num_lstm_layers=0)})
