# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The drafter that docs/drafters.md shows: it counts which token followed which."""

import re
from pathlib import Path
from typing import Any

from tiny_models import SAME_EVERY_ROUND
from transformers import PreTrainedModel

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"
(CODE,) = (
    block
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if "class BigramDrafter" in block
)
_names: dict[str, Any] = {"__name__": __name__}
exec(compile(CODE, str(PAGE), "exec"), _names)
BigramConfig, BigramDrafter = _names["BigramConfig"], _names["BigramDrafter"]


def toy_drafter(target: PreTrainedModel, **options: Any) -> Any:
    """The page's drafter for `target`, with drafting options; it drafts the same tree every round."""
    drafter = BigramDrafter(BigramConfig(vocab_size=target.config.get_text_config(decoder=True).vocab_size)).eval()
    for name, value in {**SAME_EVERY_ROUND, "assistant_confidence_threshold": 0.0, **options}.items():
        setattr(drafter.generation_config, name, value)
    return drafter
