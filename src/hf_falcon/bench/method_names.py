# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The names of the methods that `hf-falcon bench` compares, for its `--help`; methods.py has the methods."""

from __future__ import annotations

FALCON = "falcon"
METHOD_NAMES = (
    "plain",
    "plain_compiled",
    "prompt_lookup",
    "prompt_lookup_8",
    "lookup",
    "lookahead",
    "early_exit",
    "draft_model",
    "assisted",
    "eagle_like",
    "medusa_like",
    "falcon_chain",
    "falcon_static",
    "falcon_dynamic",
    "falcon_no_decision",
    "falcon_no_cost_model",
    "falcon_no_lookup",
    "falcon",
    "instant",
    "falcon_classifier",
    "falcon_speculative",
    "falcon_multi_root",
    "plain_packed",
    "plain_packed_compiled",
    "falcon_packed",
    "falcon_compiled",
    "falcon_packed_compiled",
)
