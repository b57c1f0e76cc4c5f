# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The cards of the drafters that ship: valid, complete, and true to the files beside them."""

import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, ModelCardData
from safetensors import safe_open

from hf_falcon.commands import main as entry
from hf_falcon.commands.architectures import ARCHITECTURES
from hf_falcon.commands.models import DRAFTER_NAME, TARGET_NAME
from hf_falcon.drafters.files import digests

ROOT = Path(__file__).parents[2]
FOLDERS = [pytest.param(file.parent, id=file.parent.name) for file in sorted(ROOT.glob("hub_cards/*/README.md"))]
# License and target; of the others they are SmolLM2's.
OTHERS = {
    "falcon-draft-gemma-3-270m": ("gemma", "google/gemma-3-270m"),
    "falcon-draft-qwen2.5-coder-1.5b-instruct": ("apache-2.0", "Qwen/Qwen2.5-Coder-1.5B-Instruct"),
}
# What is stored beside the weights and not trained.
BUFFERS = {"draft_vocab_ids", "feature_mean", "feature_std"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_card_is_valid_and_complete(folder):
    card = ModelCard.load(folder / "README.md")
    data = card.data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert (data.license, data.base_model) == OTHERS.get(folder.name, ("apache-2.0", TARGET_NAME))
    assert data.base_model_relation == "adapter"
    assert {"speculative-decoding", "assisted-generation"} <= set(data.tags)
    assert data.datasets == ["anon8231489123/ShareGPT_Vicuna_unfiltered"]
    # The Hub's own tools read it, `model-index` included, and write the same metadata.
    again = ModelCard(f"---\n{data.to_yaml()}\n---\n{card.text}").data
    assert again.to_dict() == data.to_dict() and isinstance(again, ModelCardData)
    assert (folder.name == DRAFTER_NAME) == bool(data.eval_results)


def test_card_of_the_shipped_drafter_tells_all():
    card = ModelCard.load(ROOT / "hub_cards" / DRAFTER_NAME / "README.md")
    sections = re.findall(r"^## (.*)$", card.text, re.MULTILINE)
    assert sections == ["Use", "Training", "Acceptance", "Speed", "Limits", "License and citation"]
    found = {(each.dataset_name, each.metric_type) for each in card.data.eval_results}
    assert found == {(data, metric) for data in ("MT-bench", "HumanEval", "GSM8K") for metric in ("tau", "alpha")}
    # Each table stands after the command that gives it.
    for section in re.split(r"^## ", card.text, flags=re.MULTILINE)[1:]:
        parts = section.split("\n| --- ")
        assert all("```bash\nhf-falcon " in part for part in parts[:-1])
    # The page of benchmarks has the same measurements of speed.
    page = (ROOT / "docs/benchmarks.md").read_text()
    speeds = [line for line in card.text.splitlines() if re.match(r"\| \w+: falcon ", line)]
    assert len(speeds) == 2 and all(f"\n{line}\n" in page for line in speeds)


@pytest.mark.parametrize("folder", FOLDERS)
def test_sizes_are_those_of_the_weights(folder):
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}
    weights = sum(
        shape[0] * (shape[1] if len(shape) > 1 else 1) for name, shape in shapes.items() if name not in BUFFERS
    )
    text = " ".join((folder / "README.md").read_text().split())
    assert f"{weights / 1e6:.1f} million weights, {round(file.stat().st_size / 1e6)} MB" in text


@pytest.mark.parametrize("folder", FOLDERS)
def test_weights_are_those_of_the_config(folder):
    kinds = {kind.config_class.model_type: kind for kind in ARCHITECTURES.values()}
    text = (folder / "config.json").read_text()
    kind = kinds[re.search(r'"model_type": "(\w+)"', text).group(1)]
    config = kind.config_class.from_pretrained(folder)
    # So that a damaged or changed file is refused.
    assert config.weights_sha256 == digests(folder)
    assert config.target_name_or_path == OTHERS.get(folder.name, ("", TARGET_NAME))[1]


def test_info_says_what_the_card_says(capsys):
    assert entry.main(["info", str(ROOT / "hub_cards" / DRAFTER_NAME)]) == 0
    printed = capsys.readouterr().out
    assert "(MT-bench)" in printed and "apache-2.0" in printed and TARGET_NAME in printed
