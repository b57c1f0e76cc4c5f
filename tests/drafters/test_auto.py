# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Drafters of any method by name: in `AutoDrafter`, `generate`, pipelines and `attach`; from a folder or the Hub."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from eagle3_models import REFERENCES, new_eagle3, write_original
from hub_server import TOKEN, HubServer, Repository, running_hub
from tiny_models import prompt, tiny_drafter, tiny_target, tiny_tokenizer
from transformers import LlamaForCausalLM, pipeline
from utilities import edit

import hf_falcon
from hf_falcon import AutoDrafter, DraftModel, FalconDraftModel, LookupDrafter
from hf_falcon.drafters.auto import drafter_class, is_drafter
from hf_falcon.drafters.eagle3 import Eagle3DraftModel

PACKAGES = str(Path(hf_falcon.__file__).parents[1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a target with its tokenizer, and of its drafters."""
    folder = tmp_path_factory.mktemp("saved")
    target = tiny_target("llama")
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    tiny_drafter(target).save_pretrained(folder / "falcon")
    drafter = new_eagle3(target, draft_vocab_size=40)
    drafter.save_pretrained(folder / "eagle3")
    write_original(drafter, folder / "original")
    write_original(drafter, folder / "binary", binary=True)
    return folder


EAGLE3 = ("eagle3", "original", "binary")
KINDS = {"falcon": FalconDraftModel, **dict.fromkeys(EAGLE3, Eagle3DraftModel)}


@pytest.fixture
def drafted(monkeypatch):
    """The drafters whose decoding loop ran."""
    found, run = [], DraftModel.assisted_decoding

    def assisted_decoding(self, *args, **kwargs):
        found.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(DraftModel, "assisted_decoding", assisted_decoding)
    return found


def generate(target, drafter=None, **settings):
    torch.manual_seed(3)
    settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, **settings}
    return target.generate(prompt(9), assistant_model=drafter, **settings).tolist()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("as_path", [True, False])
def test_a_folder(saved, name, as_path):
    folder = saved / name if as_path else str(saved / name)
    drafter = AutoDrafter.from_pretrained(folder, dtype="bfloat16")
    assert type(drafter) is KINDS[name] is drafter_class(str(folder))
    assert not drafter.training and drafter.dtype == torch.bfloat16 and drafter.name_or_path == str(folder)
    drafter = AutoDrafter.from_pretrained(folder)
    assert drafter.dtype == torch.float32
    target = tiny_target()
    assert generate(target, drafter) == generate(target)


def test_a_path_is_a_folder_whatever_its_name_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_drafter(tiny_target()).save_pretrained("lookup")
    assert type(AutoDrafter.from_pretrained(Path("lookup"))) is FalconDraftModel
    assert type(AutoDrafter.from_pretrained("lookup")) is LookupDrafter


def test_it_is_not_constructed():
    with pytest.raises(TypeError, match=r"call `AutoDrafter.from_pretrained\(name\)`"):
        AutoDrafter()


@pytest.mark.parametrize("name", KINDS)
def test_generate_takes_a_name(saved, drafted, name):
    """The drafter is loaded once, in the target's dtype, and again after its folder was saved again."""
    target = LlamaForCausalLM.from_pretrained(saved / "target")
    folder = str(saved / name)
    for settings in ({}, {"do_sample": True, "top_k": 0}):
        assert generate(target, folder, **settings) == generate(target, **settings)
    assert len(drafted) == 2 and drafted[0] is drafted[1]
    assert type(drafted[0]) is KINDS[name] and drafted[0].dtype == target.dtype and not drafted[0].training
    os.utime(saved / name / "config.json", (1, 1))
    generate(target.bfloat16(), folder)
    assert drafted[-1] is not drafted[0] and drafted[-1].dtype == torch.bfloat16


def test_a_drafter_by_name_stays_loaded_while_texts_are_looked_up(saved, drafted):
    target = LlamaForCausalLM.from_pretrained(saved / "target")
    for name in (saved / "falcon", "lookup", saved / "falcon", "lookup"):
        generate(target, name)
    assert type(drafted[0]) is FalconDraftModel and type(drafted[1]) is LookupDrafter
    assert drafted[2] is drafted[0] and drafted[3] is drafted[1]


@pytest.mark.parametrize("call", [generate, hf_falcon.attach])
def test_names_of_no_drafter_are_refused(saved, tmp_path, call):
    """With the error that says what was found."""
    shutil.copytree(saved / "target", tmp_path, dirs_exist_ok=True)
    edit(tmp_path / "config.json", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification'\], which is no drafter of a known method"):
        call(tiny_target(), str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(OSError, match=r"has no `config.json`"):
        call(tiny_target(), str(tmp_path))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("given", ["name", "object"])
def test_pipelines(saved, drafted, name, given):
    texts = []
    drafter = str(saved / name) if given == "name" else AutoDrafter.from_pretrained(saved / name)
    for assistant in (None, drafter):
        write = pipeline("text-generation", model=str(saved / "target"), assistant_model=assistant, device="cpu")
        torch.manual_seed(0)
        texts.append(write("abcdefghabcd", max_new_tokens=16))
    assert texts[0] == texts[1] and [type(each) for each in drafted] == [KINDS[name]]


@pytest.mark.parametrize("name", KINDS)
def test_attach(saved, drafted, name):
    target = LlamaForCausalLM.from_pretrained(saved / "target")
    expected = generate(target)
    hf_falcon.attach(target, saved / name)
    assert target.generate(prompt(9), max_new_tokens=16, do_sample=False, pad_token_id=0).tolist() == expected
    assert [type(each) for each in drafted] == [KINDS[name]]
    hf_falcon.detach(target)


def test_attach_checks_the_target(saved):
    drafter = AutoDrafter.from_pretrained(REFERENCES / "eagle3_llama")
    with pytest.raises(ValueError, match="`vocab_size` is 48, but the target has 64"):
        hf_falcon.attach(LlamaForCausalLM.from_pretrained(saved / "target"), drafter)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"model_type": "falcon_draft"}, "FalconDraftModel"),
        ({"speculators_model_type": "eagle3"}, "Eagle3DraftModel"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "Eagle3DraftModel"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "Eagle3DraftModel"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": 8}, "Eagle3DraftModel"),
        ({"speculators_model_type": "eagle"}, None),
        ({"speculators_model_type": ["eagle3"]}, None),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "CausalLMDrafter"),
        ({"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2"}, "CausalLMDrafter"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "gpt2"}, None),
        ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, None),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, None),
        ({"model_type": "llama"}, None),
        ({"architectures": "Eagle3", "model_type": "gpt2"}, None),
        ({"architectures": [None, 5]}, None),
        ({"model_type": ["falcon_draft"]}, None),
    ],
    ids=str,
)
def test_methods(tmp_path, fields, expected):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert is_drafter(fields) is (expected is not None)
    if expected is not None:
        assert drafter_class(str(tmp_path)).__name__ == expected
    else:
        with pytest.raises(ValueError, match="is no drafter of a known method: Falcon, EAGLE-3"):
            AutoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]}, "P-EAGLE: .*`mask_hidden`"),
        ({"architectures": ["PEagleSpeculator"], "model_type": "llama"}, "P-EAGLE: "),
        ({"speculators_model_type": "dflash2"}, "DFlash 2: .*convolutions"),
        ({"speculators_model_type": "xpress", "architectures": ["XPressSpeculator"]}, "XPress: "),
        ({"architectures": ["DominoDraftModel"], "model_type": "qwen3"}, "Domino: a recurrent projector"),
        ({"speculators_model_type": "mtp"}, "multi-token prediction by a layer"),
    ],
    ids=str,
)
def test_methods_that_are_refused_by_name(tmp_path, fields, missing):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert not is_drafter(fields)
    with pytest.raises(ValueError, match=f"no drafter of a known method: .*not read, {missing}.* another method"):
        AutoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["5", '"x"', "[]", "{", "", "null"])
def test_configurations_that_are_no_objects(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((OSError, ValueError), match="config.json"):
        AutoDrafter.from_pretrained(tmp_path)


def test_what_is_not_there(tmp_path):
    with pytest.raises(OSError, match="has no `config.json`"):
        AutoDrafter.from_pretrained(tmp_path)
    with pytest.raises(OSError, match="is no folder that is there"):
        AutoDrafter.from_pretrained(tmp_path / "none")


@pytest.mark.parametrize("kind", ["falcon", "eagle3"])
def test_weights_that_were_not_downloaded(saved, tmp_path, kind):
    """A command that only describes a drafter leaves its configuration in the Hub's cache."""
    repository, commit = tmp_path / "models--user--drafter", "0" * 40
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    shutil.copy(saved / kind / "config.json", snapshot)
    with pytest.raises(OSError, match="`model.safetensors` of `user/drafter` is not in the Hub's cache"):
        AutoDrafter.from_pretrained("user/drafter", cache_dir=tmp_path, local_files_only=True)


def test_arguments_are_the_methods_own(saved):
    found = AutoDrafter.from_pretrained(saved / "eagle3", layer_ids=[1, 2], local_files_only=True)
    assert found.config.feature_layers == [0, 1]
    assert AutoDrafter.from_pretrained(saved / "falcon", low_cpu_mem_usage=True, local_files_only=True)
    for name in KINDS:
        with pytest.raises(TypeError, match="nothing_known"):
            AutoDrafter.from_pretrained(saved / name, nothing_known=1)


def test_a_subfolder(saved, tmp_path):
    shutil.copytree(saved / "original", tmp_path / "drafter")
    assert type(AutoDrafter.from_pretrained(tmp_path, subfolder="drafter")) is Eagle3DraftModel


def test_a_saved_drafter_can_be_changed_and_pushed(saved, tmp_path):
    """A foreign drafter that is saved has no code with it: it needs the package."""
    drafter = AutoDrafter.from_pretrained(saved / "original")
    drafter.generation_config.num_assistant_tokens = 7
    drafter.save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    assert AutoDrafter.from_pretrained(tmp_path).generation_config.num_assistant_tokens == 7
    edit(tmp_path / "config.json", speculators_model_type="other")
    with pytest.raises(ValueError, match="'other', which is no drafter"):
        AutoDrafter.from_pretrained(tmp_path)


FROM_HUB = """
import sys, torch, hf_falcon
from transformers import AutoModelForCausalLM
folder, ids = sys.argv[1], torch.tensor([eval(sys.argv[2])])
drafter = hf_falcon.AutoDrafter.from_pretrained(f"{folder}/original")
first = drafter.push_to_hub("tester/eagle3", commit_message="first").oid
drafter.fc.weight.data += 1.0
drafter.push_to_hub("tester/eagle3", commit_message="second")
found = hf_falcon.AutoDrafter.from_pretrained("tester/eagle3", revision=first)
assert torch.equal(found.fc.weight + 1.0, drafter.fc.weight) and found.name_or_path == "tester/eagle3"
newest = hf_falcon.AutoDrafter.from_pretrained("tester/eagle3")
assert torch.equal(newest.fc.weight, drafter.fc.weight)
target = AutoModelForCausalLM.from_pretrained(f"{folder}/target")
settings = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
output = target.generate(ids, assistant_model="tester/eagle3", **settings)
assert output.sequences.tolist() == target.generate(ids, **settings).sequences.tolist()
assert output.draft_statistics.rounds > 0
for name, part in (("tester/none", "tester/none"), ("no/such/name", "no valid name of a repository")):
    try:
        hf_falcon.AutoDrafter.from_pretrained(name)
    except OSError as error:
        assert part in str(error), error
    else:
        raise AssertionError(name)
"""


def run_with(hub: HubServer, folder: Path, code: str, *words: str) -> None:
    """Runs code in a fresh process that knows this Hub, in a folder of its own."""
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(folder), "PATH": os.environ["PATH"]}
    environment |= {"PYTHONPATH": PACKAGES, "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *words]
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]


def test_from_the_hub(saved, tmp_path):
    with running_hub() as hub:
        run_with(hub, tmp_path, FROM_HUB, str(saved), str(prompt(12)[0].tolist()))
    assert "generation_config.json" in hub.repositories["tester/eagle3"].files()


OF_ONE_COMMIT = """
from hf_falcon import AutoDrafter, FalconDraftModel

for name, kind in (("falcon", FalconDraftModel), ("falcon-by-auto", AutoDrafter), ("eagle3", AutoDrafter)):
    drafter = kind.from_pretrained(f"tester/{name}")
    assert drafter.generation_config.num_assistant_tokens == 3, (name, drafter.generation_config)
    assert bool((drafter.norm.weight == 3).all()), (name, drafter.norm.weight)
"""


def test_a_repository_that_changes_meanwhile(saved, tmp_path):
    """Options and weights are of the commit whose configuration was read, also without digests."""
    with running_hub() as hub:
        for kind, names in (("falcon", ["falcon", "falcon-by-auto"]), ("eagle3", ["eagle3"])):
            states = []
            for value in (3, 4):
                folder = tmp_path / f"{kind}{value}"
                drafter = AutoDrafter.from_pretrained(saved / kind)
                # Not by `torch.nn.init`, which does nothing while transformers loads a model in another thread.
                drafter.norm.weight.data.fill_(value)
                drafter.generation_config.num_assistant_tokens = value
                drafter.save_pretrained(folder)
                edit(folder / "config.json", weights_sha256=None)
                states.append({file.name: file.read_bytes() for file in folder.glob("*.*")})
            for name in names:
                hub.repositories[f"tester/{name}"] = repository = Repository(private=False)
                repository.commit("main", states[0], "before")
                hub.moves[f"tester/{name}", "config.json"] = repository.commit("next", states[1], "after")
        run_with(hub, tmp_path, OF_ONE_COMMIT)
        assert not hub.moves
