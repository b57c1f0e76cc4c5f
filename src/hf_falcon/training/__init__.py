# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Preparing data and training a drafter. Nothing that decodes imports from here."""
