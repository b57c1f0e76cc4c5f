# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The commands of `hf-falcon`, one module each."""
