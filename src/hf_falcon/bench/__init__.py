# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Measures ways to decode against each other on the same target, prompts and machine."""
