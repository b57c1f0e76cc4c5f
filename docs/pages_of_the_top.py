# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
A hook of mkdocs: the pages that are files at the top of the repository. On GitHub their links lead to `docs/`; here
they stand beside those pages.
"""

import re
from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The text of the file that a page includes (`--8<-- "CHANGELOG.md"`), or the page's own."""
    included = re.fullmatch(r'--8<-- "(\w+\.md)"\s*', markdown)
    if included is None:
        return markdown
    return Path(__file__).parents[1].joinpath(included[1]).read_text(encoding="utf-8").replace("](docs/", "](")
