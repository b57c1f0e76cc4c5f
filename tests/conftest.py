# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Fixtures of several test modules."""

import gc
import logging
import os
import shutil
from pathlib import Path

# Before torch is imported, and for the processes that tests start: models this small gain nothing from threads, and
# processes that fight for the cores lose a great deal.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from transformers.utils import logging as transformers_logging

import hf_falcon
from hf_falcon.core import policy


def pytest_collection_finish(session):
    """What the imports made stays: the collector need not walk over it again and again."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """What tests measure stays with them."""
    os.environ["HF_FALCON_CACHE"] = str(tmp_path_factory.mktemp("costs"))


@pytest.fixture(autouse=True)
def nothing_kept():
    """What one test compiles, no other one runs."""
    yield
    shutil.rmtree(Path(os.environ["HF_FALCON_CACHE"]) / "compiled", ignore_errors=True)


@pytest.fixture(autouse=True)
def hook_on():
    """Whatever a test does to the hook, the next one finds it installed."""
    yield
    hf_falcon.enable()


@pytest.fixture(autouse=True)
def nothing_learnt():
    """What one test's rounds taught does not change how the next one drafts."""
    policy._acceptance_stats.clear()


@pytest.fixture
def warnings_given(caplog):
    """A function that tells what the decoding loop warned of so far in this test; nothing before it counts."""
    transformers_logging.warning_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="hf_falcon")
    return lambda: [
        r.getMessage() for r in caplog.records if r.name in ("hf_falcon.core.decoding", "hf_falcon.sampling")
    ]
