# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Made-up traces, a drafter in the manner of Medusa, and a fixture of the command's arguments."""

import pytest
import torch
from tiny_models import SAME_EVERY_ROUND, tiny_drafter, tiny_target, tiny_tokenizer

from hf_falcon.bench.medusa import MedusaLikeConfig, MedusaLikeModel
from hf_falcon.bench.scaled import Shape
from hf_falcon.bench.traces import Trace

# Larger than the tiny target in every way.
SHAPE = Shape(96, 160, 5, 12, 4, 32)


def trace(
    method="plain", data="a", prompt=0, tokens=(1, 2, 3, 4), seconds=(2.0,), statistics=None, **changes
) -> Trace:
    values = {"turn": 0, "gap": None, "peak_memory_mb": 10.0, **changes}
    return Trace(method, data, prompt, tokens=list(tokens), seconds=list(seconds), statistics=statistics, **values)


def drafted(rounds, accepted, new, by_depth, target=1.0, drafter=0.5, other=0.25):
    time = {"target": target, "drafter": drafter, "other": other}
    found = {"rounds": rounds, "accepted_tokens": accepted, "new_tokens": new, "accepted_by_depth": by_depth}
    return {**found, "time": time}


def medusa_like(target, block_size=3, **fields):
    torch.manual_seed(0)
    sizes = {"block_size": block_size, "num_lstm_layers": 0, **fields}
    drafter = MedusaLikeModel(MedusaLikeConfig.from_target(target, **sizes)).eval()
    for name, value in {**SAME_EVERY_ROUND, "num_draft_passes": 1}.items():
        setattr(drafter.generation_config, name, value)
    return drafter


@pytest.fixture
def arguments(tmp_path):
    """A target with a tokenizer, its drafter and prompts, on the disk."""
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    tiny_drafter(target, block_size=1, num_lstm_layers=0).save_pretrained(tmp_path / "drafter")
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["abc", "de"]}\n{"turns": ["fgh"]}\n')
    given = {"data": "prompts.jsonl", "target": "target", "drafter": "drafter", "output": "out"}
    words = [word for name, value in given.items() for word in (f"--{name}", str(tmp_path / value))]
    return [*words, *"--dtype float32 --device cpu --max-new-tokens 8 --methods falcon,draft_model".split()]
