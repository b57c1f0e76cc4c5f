# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon doctor`: its report, its exit status, and where templates, references and temperatures come from."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from eagle3_models import new_eagle3
from tiny_models import new_drafter, new_target, tiny_drafter, tiny_target, tiny_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast
from utilities import edit

from hf_falcon.bench.acceptance import Acceptance
from hf_falcon.bench.diagnosis import Diagnosis, Finding
from hf_falcon.commands import doctor
from hf_falcon.commands import main as entry
from hf_falcon.commands.models import encode
from hf_falcon.training.token_file import chat_template_sha256

CPU = torch.device("cpu")
TEMPLATE = "{% for m in messages %}b{{ m.content }}c{% endfor %}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a tiny target with a chat template, of drafters for it, and a file of prompts."""
    folder = tmp_path_factory.mktemp("saved")
    target, tokenizer = tiny_target(), tiny_tokenizer()
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    options = {"num_assistant_tokens": 3, "num_draft_passes": 2}
    tiny_drafter(target, **options).save_pretrained(folder / "drafter")
    # As published checkpoints, which record no weights.
    eagle3 = new_eagle3(target)
    eagle3.config.target_fingerprint = None
    eagle3.save_pretrained(folder / "eagle3")
    (folder / "prompts.jsonl").write_text('{"turns": ["abcdefgh"]}\n{"turns": ["hgfedcba"]}\n')
    return folder


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch):
    monkeypatch.setattr(doctor, "PROMPTS", {"chat": ["xyz.xyz"], "code": ["1.2.3.4"]})
    monkeypatch.delenv("HF_FALCON_DEBUG", raising=False)


def words(saved, drafter="drafter", *more):
    models = ["--target", str(saved / "target"), "--drafter", str(saved / drafter)]
    return ["doctor", *models, "--dtype", "float32", "--device", "cpu", "--max_new_tokens", "12", *more]


def test_the_report(saved, capsys):
    """A random drafter has no cause but its training."""
    assert entry.main(words(saved)) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^chat +1 +\d+ +1\.\d\d ", printed, re.MULTILINE) and re.search(
        r"^all +2 ", printed, re.MULTILINE
    )
    assert re.search(r"^first choice right +\d+%", printed, re.MULTILINE)
    assert "No cause was found: " in printed and "Train the drafter longer, on more data" in " ".join(printed.split())


@pytest.mark.parametrize("drafter", ["drafter", "eagle3"])
def test_the_result_as_json(saved, capsys, drafter):
    assert entry.main(words(saved, drafter, "--data", str(saved / "prompts.jsonl"), "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["target", "drafter", "dtype", "max_new_tokens", "acceptance", "data", "first_choice_accuracy_by_depth"]
    assert list(found) == [*names, "findings", "notes"]
    assert found["acceptance"]["prompts"] == 2 and list(found["data"]) == ["prompts"] and found["dtype"] == "float32"
    assert ("does not record the weights" in " ".join(found["notes"])) == (drafter == "eagle3")


def test_another_target_is_an_exit_status(saved, capsys, tmp_path):
    new_drafter(tiny_target("qwen2")).save_pretrained(tmp_path / "qwen2")
    assert entry.main(words(saved, tmp_path / "qwen2")) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "Cause found: 1. The drafter cannot draft for this target. Evidence: The drafter's `target_model_type`"
        in printed
    )
    assert entry.main(words(saved, tmp_path / "qwen2", "--json")) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["acceptance"] is None and found["findings"][0]["cause"] == "target"


def test_other_weights_and_another_template(saved, capsys, tmp_path):
    """As a drafter's folder records them. The remedy is a command that parses."""
    tiny_drafter(tiny_target()).save_pretrained(tmp_path / "drafter")
    edit(tmp_path / "drafter" / "config.json", target_fingerprint="0123")
    (tmp_path / "drafter" / "provenance.json").write_text('{"data": {"chat_template_sha256": "4567"}}')
    assert entry.main(words(saved, tmp_path / "drafter", "--json")) == 0
    found = {each["cause"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    command = f"hf-falcon adapt --drafter {tmp_path / 'drafter'} --target {saved / 'target'} --data dialogues.json"
    assert "fingerprint 0123" in found["weights"]["evidence"] and command in found["weights"]["remedy"]
    assert "Its sha256 is not the one" in found["chat_template"]["evidence"]
    assert entry.main([*command.split()[1:], "--output_dir", str(tmp_path / "adapted")]) == 1
    assert "`data` is 'dialogues.json', and there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more, message",
    [
        (["--limit", "0"], "`limit` is 0; give 1 or more."),
        (["--max_new_tokens", "0"], "`max_new_tokens` is 0; give 1 or more."),
        (["--temperature", "0"], "`temperature` is 0.0; give a number above 0"),
        (["--chat_template", "none.jinja"], "`chat_template` is 'none.jinja', which is not a file"),
    ],
)
def test_wrong_arguments(capsys, more, message):
    assert entry.main(["doctor", *more]) == 1
    assert message in capsys.readouterr().err


def test_a_template_that_is_no_text(tmp_path):
    (tmp_path / "given.jinja").write_bytes(b"{{ \xff }}")
    with pytest.raises(ValueError, match="`chat_template` is '.*given.jinja', no text in UTF-8 .*: give a Jinja"):
        doctor.other_templates(tiny_tokenizer(), None, str(tmp_path / "given.jinja"))


def tokenizer_of(template: str | None, *tokens: str) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(["<unk>", *tokens])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<unk>")))
    tokenizer.chat_template = template
    return tokenizer


def test_templates_that_are_suspected(tmp_path, saved):
    chatml = doctor.KNOWN_TEMPLATES["ChatML"][1]
    # The tokenizer has the token of ChatML, and no template, or another one.
    for own in (None, TEMPLATE):
        found = doctor.other_templates(tokenizer_of(own, "<|im_start|>"), None, None)
        name = "the ChatML template, whose token <|im_start|> the tokenizer has"
        assert found == {name: chatml, **({} if own is None else {"no template, the text alone": None})}
    found = doctor.other_templates(tokenizer_of(chatml, "<|im_start|>"), None, None)
    assert found == {"no template, the text alone": None}
    # A file, and the target that the drafter names, if it is on this machine.
    (tmp_path / "mine.jinja").write_text("{{ mine }}")
    found = doctor.other_templates(tokenizer_of(None), str(saved / "target"), str(tmp_path / "mine.jinja"))
    assert found == {"the template in mine.jinja": "{{ mine }}", f"the template of {saved / 'target'}": TEMPLATE}
    assert doctor.other_templates(tokenizer_of(TEMPLATE), str(saved / "target"), None).keys() == {
        "no template, the text alone"
    }
    assert doctor.other_templates(tokenizer_of(None), str(tmp_path / "nowhere"), None) == {}


@pytest.mark.parametrize("name", doctor.KNOWN_TEMPLATES)
def test_known_templates_render(name):
    marker, template = doctor.KNOWN_TEMPLATES[name]
    tokenizer = tokenizer_of(template)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi."}], tokenize=False)
    assert text.count(marker) == 2 and "user" in text and "Hi." in text


def test_templates_that_are_tried(tmp_path):
    drafter = SimpleNamespace(config=SimpleNamespace(target_name_or_path=None))
    tokenizer = tiny_tokenizer()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, unk_token=",", chat_template=TEMPLATE)
    given = tmp_path / "given.jinja"
    given.write_text("{% for m in messages %}d{{ m.content }}{% endfor %}")

    def tried(provenance):
        return doctor.templates_to_try(tokenizer, drafter, provenance, str(given), ["abc"], CPU)

    # Nothing is recorded: the given one, and the text alone, which nothing suggests.
    (first, second), is_other = tried({})
    assert not is_other and [first.is_suspected, second.is_suspected] == [True, False]
    texts = [tokenizer.decode(each.prompts[0]["input_ids"][0]) for each in (first, second)]
    assert texts == ["dabc", "abc"]
    assert torch.equal(
        doctor.encode_with(tokenizer, "abc", TEMPLATE, CPU)["input_ids"], encode(tokenizer, "abc", CPU)["input_ids"]
    )
    # The tokenizer's own was recorded: nothing but the user suggests another.
    [only], is_other = tried({"data": {"chat_template_sha256": chat_template_sha256(TEMPLATE)}})
    assert not is_other and only.is_suspected and "given" in only.name
    # Another was recorded, which is or is not among those that can be tried.
    for digest, expected in ((chat_template_sha256(given.read_text()), "given"), (None, "text alone")):
        [only], is_other = tried({"data": {"chat_template_sha256": digest}})
        assert is_other and only.is_suspected and expected in only.name
    both, is_other = tried({"data": {"chat_template_sha256": "0"}})
    assert is_other and len(both) == 2


def test_the_reference_of_a_folder(tmp_path):
    assert doctor.reference_of(tmp_path) is None
    card = "---\nmodel-index:\n- name: x\n  results:\n"
    for name, tau in (("A", 1.4), ("B", 1.3)):
        metrics = f"    metrics: [{{type: tau, value: {tau}}}]\n"
        card += f"  - task: {{type: t}}\n    dataset: {{name: {name}, type: a}}\n{metrics}"
    (tmp_path / "README.md").write_text(f"{card}---\n")
    found = doctor.reference_of(tmp_path)
    assert found.tau == 1.3 and found.is_lower_bound
    (tmp_path / "trainer_state.json").write_text('{"log_history": [{"final_tau": 1.6, "final_alpha": 0.5}]}')
    found = doctor.reference_of(tmp_path)
    assert found.tau == 1.6 and not found.is_lower_bound
    (tmp_path / "adapt.json").write_text('{"before": {"final_tau": 1.0}}')
    assert doctor.reference_of(tmp_path).tau == 1.6
    (tmp_path / "adapt.json").write_text('{"before": {"final_tau": 1.0}, "after": {"final_tau": 1.9}}')
    assert doctor.reference_of(tmp_path).tau == 1.9


def test_provenance_that_is_not_there(tmp_path):
    assert doctor.provenance_of(str(tmp_path)) == {}
    for text in ("{", "[]", '{"data": null}'):
        (tmp_path / "provenance.json").write_text(text)
        assert doctor.provenance_of(str(tmp_path)) == {}


@pytest.mark.parametrize(
    "config, given, expected",
    [
        ({}, None, None),
        ({"temperature": 0.6}, None, None),
        ({"do_sample": True, "temperature": 0.6}, None, 0.6),
        ({"do_sample": True}, None, 1.0),
        ({"do_sample": True, "temperature": 0.6}, 1.2, 1.2),
        ({}, 0.7, 0.7),
    ],
)
def test_the_temperature(config, given, expected):
    target = SimpleNamespace(generation_config=GenerationConfig(**config))
    assert doctor.sampling_temperature(target, given) == expected


def test_findings_in_the_report():
    acceptance = {"chat": Acceptance([(10, 15)], 25, 40, [10, 5], [])}
    findings = [
        Finding("layers", "Wrong layers.", "50% are right.", "Load it again.", 0.5),
        Finding("cost", "It does not pay.", "It is slow.", "Tune.", 0.0),
    ]
    text = doctor.report(Diagnosis(findings, ["Not compared."], acceptance, [0.6, 0.4]))
    assert "Cause found:\n\n1. Wrong layers. That costs about 0.50 accepted draft tokens a round." in text
    assert "   Evidence: 50% are right.\n   Remedy: Load it again.\n\n2. It does not pay.\n" in text
    assert text.endswith("Note: Not compared.") and "all" not in text.partition("By depth")[0]
    assert re.search(r"^draft token accepted +100% +50%$", text, re.MULTILINE)
    # Speed is no cause of low acceptance.
    text = doctor.report(Diagnosis(findings[1:], [], acceptance, [0.6, 0.4]))
    assert "No cause was found: 100% of the rounds accept a draft token of depth 1, and 60% of" in text


def test_built_in_prompts_are_no_evaluation_prompts(monkeypatch):
    """No eight words in a row of them are in the demo's prompts or in the data sets, where these are there."""
    monkeypatch.undo()
    from hf_falcon.commands import demo, tune

    texts = [text for each in doctor.PROMPTS.values() for text in each]
    assert len(texts) == len(set(texts)) >= 6 and list(doctor.PROMPTS) == ["chat", "code", "maths", "summary"]
    assert not set(texts) & {*demo.PROMPTS.values(), *tune._PROMPTS}


@pytest.mark.parametrize(
    "dtype, modes", [("bfloat16", ["as it is", "inside row_invariant"]), ("float32", ["as it is"])]
)
def test_exactness(saved, capsys, dtype, modes):
    words = ["doctor", "--target", str(saved / "target"), "--exactness", "--dtype", dtype, "--device", "cpu"]
    status = entry.main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["target", "dtype", *modes]
    for name in modes:
        assert [(each["rows"], each["is_tree"]) for each in found[name]] == [
            (rows, is_tree) for is_tree in (False, True) for rows in (1, 2, 4, 8, 16, 24)
        ]
        assert "model.layers.1.mlp.down_proj" in found[name][0]["modules"]
        assert "Linear (32, 48)" in found[name][0]["alone"]
    differs = [any(each["first"] or each["logits"] or any(each["alone"].values()) for each in found[m]) for m in modes]
    assert status == int(all(differs)) and (dtype == "float32" or not differs[-1])
    assert entry.main(words) == status
    printed = capsys.readouterr().out
    assert "first module that differs" in printed and all(f"\n{name}\n" in printed for name in modes)


@pytest.mark.parametrize("name, table", [("gemma3", {}), ("opt", {"max_position_embeddings": 48})])
def test_exactness_of_other_targets(tmp_path, capsys, name, table):
    """Norms of single heads get one more dimension, and a table of positions ends soon."""
    new_target(name, **table).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    words = ["doctor", "--target", str(tmp_path), "--exactness", "--dtype", "float32", "--device", "cpu", "--json"]
    assert entry.main(words) in (0, 1)
    assert json.loads(capsys.readouterr().out)["as it is"][-1]["rows"] == 24


def test_exactness_needs_trees(tmp_path, capsys):
    new_target("bloom").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert entry.main(["doctor", "--target", str(tmp_path), "--exactness", "--device", "cpu"]) == 1
    assert "`target` is a BloomForCausalLM, of which no trees are compared: " in capsys.readouterr().err
