# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Drafters of other methods, read as they lie on the Hub. The core runs without them; they do not travel with a Falcon
drafter.
"""
