# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Fixtures of the tests of the commands."""

from bench_runs import arguments  # noqa: F401
from training_runs import no_plot, target, workplace  # noqa: F401
