# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Every decoder of transformers: drafted for, or plain decoding and a reason; never another text."""

import re

import pytest
import transformers
from compatibility import CHAINS, DECODERS, MULTIMODAL, PLAIN, TREES, UNTRIED, classify
from compatibility_page import TABLE, TARGETS, page, with_lists
from image_inputs import WITH_IMAGES, classify_with_image

# One of each kind of attention, of positions, of experts, of what cannot follow a tree.
KNOWN = {
    "cohere2": TREES,
    "deepseek_v3": TREES,
    "falcon": TREES,
    "gemma4_text": TREES,
    "gpt_bigcode": TREES,
    "gpt_neox": TREES,
    "gpt_oss": TREES,
    "mixtral": TREES,
    "mllama": TREES,
    "opt": TREES,
    "paligemma": TREES,
    "phi": TREES,
    "phi3": TREES,
    "qwen2_vl": TREES,
    "qwen3_moe": TREES,
    "bart": CHAINS,
    "bloom": CHAINS,
    # In transformers 5.17 GIT computes several tokens otherwise than one by one.
    "git": PLAIN if transformers.__version__.startswith("5.17.") else CHAINS,
    "gpt_neo": CHAINS,
    "lfm2": CHAINS,
    "qwen3_5_text": CHAINS,
    "jamba": PLAIN,
    "llama4_text": CHAINS,
    "mamba": PLAIN,
}


@pytest.mark.parametrize("model_type", KNOWN)
def test_some_of_them(model_type):
    assert classify(model_type).result == KNOWN[model_type]


def test_windows_of_another_kind_take_no_chains():
    """Behind such a window several tokens see padding that a single one does not, which no short text shows."""
    if "unlimited_ocr" not in MULTIMODAL:
        pytest.skip("transformers has it since 5.18")
    row = classify("unlimited_ocr")
    assert row.result == PLAIN and "reference_sliding_attention" in row.remark


def test_the_documents_list_the_table():
    document = TARGETS.read_text(encoding="utf-8")
    assert with_lists(document, TABLE.read_text(encoding="utf-8")) == document


@pytest.mark.slow
def test_all_of_them():
    """None fails or writes another text, and the page says what becomes of each."""
    rows = [classify(model_type) for model_type in (*DECODERS, *MULTIMODAL)]
    images = [classify_with_image(model_type) for model_type in WITH_IMAGES]
    assert all(row.remark for row in (*rows, *images) if row.result != TREES)
    of_text = [row.result for row in rows if row.model_type in DECODERS]
    assert of_text.count(TREES) + of_text.count(CHAINS) >= 165
    # Else the page says little.
    assert sum(row.result == UNTRIED for row in rows) < 0.2 * len(rows)
    kept = TABLE.read_text(encoding="utf-8")
    (version,) = re.findall(r"decoder of transformers (\S+), tried", kept)
    if version == transformers.__version__:
        assert page(rows, images) == kept, "run `make compatibility`"
