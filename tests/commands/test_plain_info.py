# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What `hf-falcon info` says without torch is what the classes that load drafters say."""

import copy
import json
import shutil
from pathlib import Path

import pytest
from eagle3_models import REFERENCES

import hf_falcon
from hf_falcon.commands.checked_info import opened
from hf_falcon.commands.checkpoint_listing import CheckpointListing
from hf_falcon.commands.plain_info import plain_description

SHIPPED = Path(hf_falcon.__file__).parents[2] / "hub_cards"
FOLDERS = sorted([*SHIPPED.glob("falcon-*"), *(file.parent for file in REFERENCES.glob("*/config.json"))])
# The head of this one cannot be read.
READ = [folder for folder in FOLDERS if folder.name != "dspark_rnn"]
VALUES = [None, True, False, -1, 0, 1, 2, 7, 1.0, 0.5, -2.5, 2**40, "", "silu", "x\x1b", "self", [], [1], [1, 1], {}]
VALUES += [{"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 0.0}, "float32", "default", ["x"]]
ADDED = ["self", "quantization_config", "auto_map", "save_pretrained", "layer_types", "rope_scaling", "eagle_config"]
ADDED += [
    "dflash_config",
    "norm_before_fc",
    "fc_norm",
    "torch_dtype",
    "target_fingerprint",
    "rope_theta",
    "num_labels",
]


def plain(folder):
    listing = CheckpointListing(str(folder))
    return plain_description(listing.fields(), listing.headers())


def checked(folder):
    return opened(str(folder), None)[1](CheckpointListing(str(folder)).headers)


@pytest.mark.parametrize("folder", READ, ids=lambda folder: folder.name)
def test_published_layouts_are_described_alike(folder):
    found = plain(folder)
    assert found == checked(folder) and list(found) == list(checked(folder))


def test_another_model_is_left_to_the_checks():
    for fields in ({}, [], 5, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}):
        assert plain_description(fields, {}) is None
    assert plain(REFERENCES / "dspark_rnn") is None and plain_description({"model_type": "falcon_draft"}, {}) is None


def changed(fields):
    """Variants of a configuration: each field, also of the nested objects, with each of the values, and without."""
    places = [()] + [(name,) for name, value in fields.items() if isinstance(value, dict)]
    places += [
        (outer, inner) for (outer,) in places[1:] for inner, value in fields[outer].items() if isinstance(value, dict)
    ]
    for place in places:
        for name in [*_at(fields, place), *ADDED]:
            for value in VALUES:
                other = copy.deepcopy(fields)
                _at(other, place)[name] = copy.deepcopy(value)
                yield other
            other = copy.deepcopy(fields)
            _at(other, place).pop(name, None)
            yield other


def _at(fields, place):
    for name in place:
        fields = fields[name]
    return fields


CHANGED = ["falcon-draft-smollm2-135m-instruct", "dflash", "dflash_original", "dspark", "eagle3_llama3_rope"]
CHANGED += ["eagle3_original", "eagle3_qwen3"]


@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHANGED)
def test_what_the_checks_refuse_is_left_to_them(name, step, tmp_path):
    """Every description without them is theirs."""
    source = next(folder for folder in FOLDERS if folder.name == name)
    folder = tmp_path / "drafter"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("README.md"))
    headers, described, left = CheckpointListing(str(folder)).headers(), 0, 0
    for fields in list(changed(json.loads((source / "config.json").read_text())))[::step]:
        found = plain_description(fields, headers)
        if found is None:
            left += 1
            continue
        (folder / "config.json").write_text(json.dumps(fields))
        expected = checked(folder)
        if found["method"] == "Falcon":
            # Of the files, which may have other sizes than this configuration says.
            del found["parameters"], expected["parameters"]
        assert json.dumps(found) == json.dumps(expected), fields
        described += 1
    assert described > 3 and left > 3
