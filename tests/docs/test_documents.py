# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The documents: their commands are commands, their code runs, and their messages are what users see."""

import argparse
import ast
import copy
import dataclasses
import itertools
import json
import re
import shlex
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import prompt, tiny_drafter, tiny_target, tiny_tokenizer
from utilities import edit

import hf_falcon
from hf_falcon import FalconDraftModel
from hf_falcon.commands import main as entry
from hf_falcon.commands import models, train
from hf_falcon.commands.run_arguments import parse_run

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(f"examples/{file.name}" for file in ROOT.glob("examples/*.md"))]
DOCUMENTS += sorted(file.relative_to(ROOT).as_posix() for file in ROOT.glob("hub_cards/*/README.md"))


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a language, indentation of the fence taken off."""
    text = (ROOT / document).read_text()
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for _, block in found]


def commands(block: str) -> list[list[str]]:
    """The commands of a block of shell, as words; variables that are set in it are filled in."""
    block = block.replace("\\\n", "")
    for name, value in re.findall(r'^(\w+)="(.*?)"$', block, re.MULTILINE | re.DOTALL):
        block = block.replace(f"${name}", " ".join(value.split()))
        block = block.replace(f'{name}="{value}"', "")
    lines = (shlex.split(line, comments=True) for line in block.splitlines())
    return [words for words in lines if words and words[0] not in ("for", "done")]


ALL_COMMANDS = [
    pytest.param(words, id=" ".join([Path(document).parent.name or document, *words])[:70])
    for document in DOCUMENTS
    for block in blocks(document, "bash")
    for words in commands(block)
]


class Parsed(Exception):
    """The command line is one; nothing else is to happen."""


@pytest.fixture
def parse_only(monkeypatch):
    """Commands parse and check their arguments, and stop there."""
    parser_class, parse = transformers.HfArgumentParser, argparse.ArgumentParser.parse_args

    def parse_args(self, *args, **kwargs):
        found = vars(parse(self, *args, **kwargs))
        for kind in self.dataclass_types:
            kind(**{field.name: found[field.name] for field in dataclasses.fields(kind) if field.init})
        raise Parsed

    def parse_args_into_dataclasses(self, args):
        return parse_args(self, args)

    def parse_the_run(*args, **kwargs):
        parse_run(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(parser_class, "parse_args", parse_args)
    monkeypatch.setattr(parser_class, "parse_args_into_dataclasses", parse_args_into_dataclasses)
    monkeypatch.setattr(train, "parse_run", parse_the_run)
    # Files that a command names lie where it is given.
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("words", ALL_COMMANDS)
def test_command(words, parse_only):
    # Variables of the environment come first.
    words = list(itertools.dropwhile(re.compile(r"[A-Z_]+=").match, words))
    while words[0] in ("accelerate", "torchrun", "python") and "hf_falcon" in words:
        words = ["hf-falcon", *words[words.index("hf_falcon") + 1 :]]
    program, *arguments = words
    if program == "hf-falcon":
        with pytest.raises(Parsed):
            entry.main(arguments)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for word in arguments:
            name, assigned, _ = word.partition("=")
            assert re.search(rf"^{name} \?=" if assigned else rf"^{name}:", makefile, re.MULTILINE), word
    elif program == "python" and arguments[0].endswith(".py"):
        source = (ROOT / arguments[0]).read_text()
        assert all(f'"{word}"' in source for word in arguments if word.startswith("--"))
    elif program in ("python", "pip", "source", "bash"):
        # A path of the project that is named is there; `.venv` is made by make.
        paths = [word for word in arguments if "/" in word and not word.startswith((".venv", "http"))]
        assert all((ROOT / path).exists() for path in paths)
    else:
        raise AssertionError(f"what is `{program}`?")


def test_there_are_commands_to_check():
    named = {parameter.values[0][1] for parameter in ALL_COMMANDS if parameter.values[0][0] == "hf-falcon"}
    assert (
        {"chat", "generate", "info", "push", "prepare", "train", "evaluate", "bench"} <= named <= set(entry.COMMANDS)
    )


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_names_what_is_there(document):
    for block in blocks(document, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hf_falcon":
                assert hasattr(hf_falcon, node.attr), node.attr
            elif isinstance(node, ast.ImportFrom):
                module = __import__(node.module, fromlist=["x"])
                assert all(hasattr(module, name.name) for name in node.names), node.module


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    """To files of the project, and to headings of the document."""
    text = (ROOT / document).read_text()
    headings = {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)
    }
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("#"):
            assert link[1:] in headings, link
        elif not link.startswith("http"):
            assert (ROOT / document).parent.joinpath(link).exists(), link


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a tiny target with a tokenizer for chats, and of its drafter."""
    folder = tmp_path_factory.mktemp("saved")
    target = tiny_target("llama")
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    (folder / "target" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tiny_drafter(target).save_pretrained(folder / "drafter")
    return folder


@pytest.mark.parametrize("document", ["README.md", f"hub_cards/{models.DRAFTER_NAME}/README.md"])
def test_python_runs(document, saved, capsys):
    """One block after the other, as pasted, with tiny models in place of those that it names."""
    if not (ROOT / document).is_file():
        pytest.skip("the drafters come with a clone only")
    names = {
        models.TARGET_NAME: saved / "target",
        f"hub_cards/{models.DRAFTER_NAME}": saved / "drafter",
        f"hf-falcon/{models.DRAFTER_NAME}": saved / "drafter",
        "user/my-drafter": saved / "drafter",
    }
    namespace: dict = {}
    for block in blocks(document, "python"):
        for name, folder in names.items():
            block = block.replace(f'"{name}"', repr(str(folder)))
        assert not re.search(r'"[\w-]+/[\w.-]+"', block), "a name that nothing stands in for"
        exec(compile(block, document, "exec"), namespace)
    if document == "README.md":
        statistics = namespace["output"].draft_statistics
        assert statistics.drafted_tokens > 0 and str(statistics.tau) in capsys.readouterr().out.splitlines()


def test_options_in_the_text_are_there(capsys):
    """Those that stand outside of commands, too."""
    known = "".join(file.read_text() for file in ROOT.glob("examples/*.py"))
    for name in entry.COMMANDS:
        with pytest.raises(SystemExit):
            entry.main([name, "--help"])
        known += capsys.readouterr().out
    elsewhere = {"--index-url", "--no-deps", "--num_processes", "--nproc_per_node"}
    named = set(re.findall(r"--\w[\w-]*", (ROOT / "README.md").read_text())) - elsewhere
    assert len(named) > 20 and named <= set(re.findall(r"--\w[\w-]*", known))


# What goes wrong, and the text that a user sees then, in the order of the README's table.


def of_another_architecture(saved, tmp_path, warnings_given):
    target = tiny_target("bart")
    target.generate(prompt(5), assistant_model=tiny_drafter(tiny_target("llama")), max_new_tokens=2)
    return warnings_given()[-1]


def of_other_weights(saved, tmp_path, warnings_given):
    drafter = FalconDraftModel.from_pretrained(saved / "drafter")
    drafter.config.target_fingerprint = "0"
    drafter.config.target_name_or_path = "user/target"
    tiny_target("llama").generate(prompt(5), assistant_model=drafter, max_new_tokens=2, pad_token_id=0)
    return warnings_given()[-1]


def of_another_width(saved, tmp_path, warnings_given):
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=48, num_hidden_layers=1, num_attention_heads=4)
    target = transformers.LlamaForCausalLM(config).eval()
    target.generate(prompt(5), assistant_model=tiny_drafter(tiny_target("llama")), max_new_tokens=2, pad_token_id=0)


def with_another_config(saved, tmp_path, warnings_given):
    edit(tmp_path / "drafter" / "config.json", num_hidden_layers=3)
    FalconDraftModel.from_pretrained(tmp_path / "drafter")


def with_damaged_weights(saved, tmp_path, warnings_given):
    file = tmp_path / "drafter" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    FalconDraftModel.from_pretrained(tmp_path / "drafter")


def without_trust(saved, tmp_path, warnings_given):
    edit(tmp_path / "drafter" / "config.json", model_type="of_no_package")
    transformers.AutoModel.from_pretrained(tmp_path / "drafter", trust_remote_code=False)


def of_a_newer_format(saved, tmp_path, warnings_given):
    edit(tmp_path / "drafter" / "config.json", draft_format=2)
    FalconDraftModel.from_pretrained(tmp_path / "drafter")


def without_the_demo_target(saved, tmp_path, warnings_given):
    models.packaged_target()


def with_an_adapter(saved, tmp_path, warnings_given):
    (tmp_path / "drafter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "x"}))
    FalconDraftModel.from_pretrained(tmp_path / "drafter")


def training_packed(saved, tmp_path, warnings_given):
    linear = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
    with hf_falcon.packed_weights(linear):
        linear(torch.ones(1, 4, requires_grad=True))


def without_a_compiler(saved, tmp_path, warnings_given):
    def missing(graph, inputs):
        raise OSError("no g++")

    target = copy.deepcopy(tiny_target("llama"))
    hf_falcon.compile_rounds(target, (4,), transformers.CompileConfig(backend=missing, mode=None))


def alone(saved, tmp_path, warnings_given):
    tiny_drafter(tiny_target("llama")).generate(prompt(5))


MISTAKES = [of_another_architecture, of_other_weights, of_another_width, with_another_config, with_damaged_weights]
MISTAKES += [without_trust, of_a_newer_format, without_the_demo_target, with_an_adapter, without_a_compiler]
MISTAKES += [training_packed, alone]


def messages() -> list[str]:
    """The first column of the README's table."""
    section = (ROOT / "README.md").read_text().partition("\n## When something goes wrong\n")[2].partition("\n## ")[0]
    return [first.strip("` ") for first in re.findall(r"^\| (`.*?`+) \| ", section, re.MULTILINE)]


def test_every_message_is_provoked():
    assert len(messages()) == len(MISTAKES)


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[mistake.__name__ for mistake in MISTAKES])
def test_message(number, saved, tmp_path, warnings_given, monkeypatch):
    shutil.copytree(saved / "drafter", tmp_path / "drafter")
    monkeypatch.setattr(models, "TARGET_PACKAGE", "a_package_that_is_not_there")
    monkeypatch.setattr(hf_falcon.core.checkpoint_files, "is_peft_available", lambda: True)
    try:
        seen = MISTAKES[number](saved, tmp_path, warnings_given)
    except Exception as error:
        seen = str(error)
    pattern = ".*".join(re.escape(part) for part in messages()[number].split("..."))
    assert re.search(pattern, seen, re.DOTALL), seen
