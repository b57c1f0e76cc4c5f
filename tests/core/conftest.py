# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Fixtures of the core's tests."""

import pytest
from tiny_models import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()
