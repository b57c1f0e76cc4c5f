# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`python -m hf_falcon` is `hf-falcon`."""

import sys

from hf_falcon.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
