# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Pipelines are wrapped in whatever order modules are searched and imported, and take drafting options."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_drafter, tiny_target, tiny_tokenizer
from transformers import pipeline

import hf_falcon
from hf_falcon import DraftOptions, FalconDraftModel

SOURCE = Path(hf_falcon.__file__).parent.parent


def test_a_search_for_the_module_does_not_use_up_the_import_hook():
    code = (
        "import importlib.util, pathlib, sys, transformers, hf_falcon; name = 'transformers.pipelines.base'; "
        "path = [str(pathlib.Path(transformers.__file__).parent / 'pipelines')]; "
        # A search that imports no parent package, and one that does.
        "found = [each.find_spec(name, path) for each in list(sys.meta_path)]; assert any(found); "
        "assert name not in sys.modules; assert importlib.util.find_spec(name) is not None; "
        "from transformers.pipelines import base; assert hasattr(base.load_assistant_model, '_is_falcon_hook'); "
        "assert not any(type(each).__module__ == 'hf_falcon.pipelines' for each in sys.meta_path)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env={"PYTHONPATH": str(SOURCE)})


@pytest.mark.parametrize("where", ["call", "construction"])
def test_a_pipeline_takes_drafting_options(where, monkeypatch):
    found: list[DraftOptions] = []
    run = FalconDraftModel.assisted_decoding

    def assisted_decoding(self, target, *args, generation_config, **kwargs):
        found.append(DraftOptions.from_generation_config(self.generation_config, generation_config))
        return run(self, target, *args, generation_config=generation_config, **kwargs)

    monkeypatch.setattr(FalconDraftModel, "assisted_decoding", assisted_decoding)
    options = {"verification": "speculative", "draft_tree": "static", "num_draft_passes": 2, "draft_top_k": 3}
    target = tiny_target("llama")
    made = pipeline(
        "text-generation",
        model=target,
        tokenizer=tiny_tokenizer(),
        assistant_model=tiny_drafter(target),
        device="cpu",
        **(options if where == "construction" else {}),
    )
    made("abcdefgh", max_new_tokens=6, **(options if where == "call" else {"num_assistant_tokens": 20}))
    assert {name: getattr(found[0], name) for name in options} == options
    own = DraftOptions.from_generation_config(made.assistant_model.generation_config)
    assert found[0].num_assistant_tokens == (own.num_assistant_tokens if where == "call" else 20)
