# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Fixtures of the tests of the training."""

from training_runs import no_plot, target, workplace  # noqa: F401
