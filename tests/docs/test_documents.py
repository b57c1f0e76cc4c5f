# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""README, pages and cards: commands parse, code runs, links resolve, tables and messages agree with the code."""

import argparse
import ast
import copy
import dataclasses
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
from eagle3_models import new_eagle3, write_original
from tiny_models import prompt, tiny_drafter, tiny_target, tiny_tokenizer
from utilities import edit

import hf_falcon
from hf_falcon import FalconDraftModel
from hf_falcon.commands import main as entry
from hf_falcon.commands import models, serving, train
from hf_falcon.commands.run_arguments import CommandParser, parse_run

ROOT = Path(__file__).parents[2]
PAGES = sorted(f"docs/{file.name}" for file in ROOT.glob("docs/*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *PAGES]
DOCUMENTS += sorted(f"examples/{file.name}" for file in ROOT.glob("examples/*.md"))
DOCUMENTS += sorted(file.relative_to(ROOT).as_posix() for file in ROOT.glob("hub_cards/*/README.md"))
CARD = f"hub_cards/{models.DRAFTER_NAME}/README.md"


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
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self, *args, **kwargs):
        found = vars(parse(self, *args, **kwargs))
        for kind in self.dataclass_types:
            kind(**{field.name: found[field.name] for field in dataclasses.fields(kind) if field.init})
        raise Parsed

    def parse_the_run(*args, **kwargs):
        parse_run(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(CommandParser, "parse_args", parse_args)
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
    elif program == "npm":
        # The package that the example asks for.
        assert arguments[-1] in (ROOT / "examples" / "llama_cpp.py").read_text()
    elif program.startswith("."):
        assert (ROOT / program).is_file()
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


def headings(file: Path) -> set[str]:
    """The anchors of a document, as GitHub and mkdocs make them."""
    lines = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_resolve(document):
    """To files of the project and to headings; a page of the site links only to other pages."""
    file = ROOT / document
    for link in re.findall(r"\]\(([^)\s]+)\)", file.read_text()):
        # GitHub's own pages, relative to a README.
        if link.startswith(("http", "../../actions/")):
            continue
        path, _, anchor = link.partition("#")
        linked = (file.parent / path).resolve() if path else file
        assert linked.exists(), link
        assert not anchor or anchor in headings(linked), link
        assert document not in PAGES or linked.is_relative_to(ROOT / "docs"), link


def test_the_site_builds(tmp_path):
    """Strictly: a page without a place in the navigation is an error, too."""
    pytest.importorskip("mkdocs", reason="comes with the extra `docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    # Links of files at the top of the repository lead to pages of the site.
    assert 'href="../cpu/#compile-once-a-machine"' in (tmp_path / "site" / "changelog" / "index.html").read_text()
    assert {f"docs/{file.parent.name}.md" for file in tmp_path.glob("site/*/index.html")} >= {
        page for page in PAGES if page != "docs/index.md"
    }


def test_readme_is_short_and_leads_to_every_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    left_out = {"docs/index.md", "docs/contributing.md", "docs/changelog.md"}
    assert all(f"]({page})" in text for page in PAGES if page not in left_out)
    assert "make demo" in text and "make test" in text


# Words of the project's style guide that a reader stumbles over.
UNWANTED = r"\b(those of|texts? (that )?parts?|was killed|drafter (that )?rests?|some values of each weight tell)\b"


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md", "hub_cards/model_card.md.jinja"])
def test_prose_is_plain(document):
    # Messages and names in code are checked where they are defined.
    text = " ".join(re.sub(r"`+[^`\n]+`+", "", (ROOT / document).read_text()).split())
    assert [match.group() for match in re.finditer(rf".{{0,40}}{UNWANTED}", text)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_paragraph_stands_twice(document):
    # A wrong edit once doubled half of a card. Commands and tables may repeat.
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    paragraphs = [" ".join(each.split()) for each in text.split("\n\n")]
    long = [each for each in paragraphs if len(each) > 200 and not each.startswith("|")]
    assert sorted(each[:80] for each in long if long.count(each) > 1) == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a tiny target with a tokenizer for chats, and of its drafter."""
    folder = tmp_path_factory.mktemp("saved")
    target = tiny_target("llama")
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    (folder / "target" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tiny_drafter(target).save_pretrained(folder / "drafter")
    write_original(new_eagle3(target), folder / "eagle3")
    return folder


def run(document: str, saved: Path, namespace: dict, dtype: str = "bfloat16") -> None:
    """Runs a document's blocks of Python in order, with tiny models in place of its models, and fewer tokens."""
    names = {
        models.TARGET_NAME: saved / "target",
        f"hf-falcon/{models.DRAFTER_NAME}": saved / "drafter",
        "user/my-drafter": saved / "drafter",
        "user/eagle3-drafter": saved / "eagle3",
        "Qwen/Qwen3-0.6B": saved / "target",
        "name-or-folder": saved / "drafter",
    }
    for block in blocks(document, "python"):
        for name, folder in names.items():
            block = block.replace(f'"{name}"', repr(str(folder)))
        block = block.replace("max_new_tokens=128", "max_new_tokens=16").replace('"bfloat16"', f'"{dtype}"')
        # The stand-in reads two hidden states.
        block = block.replace("[2, 16, 29]", "[1, 2]")
        assert not re.search(r'"[\w-]+/[\w.-]+"', block), "a name that nothing stands in for"
        exec(compile(block, document, "exec"), namespace)


@pytest.mark.parametrize("document", ["README.md", "docs/usage.md", CARD])
def test_python_runs(document, saved, capsys):
    if not (ROOT / document).is_file():
        pytest.skip("the drafters come with a clone only")
    namespace: dict = {}
    run(document, saved, namespace)
    if document != CARD:
        statistics = namespace["output"].draft_statistics
        assert statistics.drafted_tokens > 0 and str(statistics) in capsys.readouterr().out


@pytest.mark.parametrize("document", ["docs/cpu.md", "docs/sharing.md"])
def test_python_runs_after_the_readme(document, saved, monkeypatch):
    """Code for a target, a drafter and inputs that are there already; compiling takes no time."""
    namespace: dict = {}
    # Not every processor packs weights in bfloat16.
    run("README.md", saved, namespace, "float32")
    config = transformers.CompileConfig(backend="eager", mode=None)
    compile_rounds = functools.partial(hf_falcon.compile_rounds, sizes=(4,), compile_config=config)
    monkeypatch.setattr(hf_falcon, "compile_rounds", compile_rounds)
    run(document, saved, namespace)
    hf_falcon.uncompile_rounds(namespace["target"])


def test_python_of_the_page_on_learning(saved, tmp_path, monkeypatch):
    namespace: dict = {}
    run("README.md", saved, namespace, "float32")
    monkeypatch.chdir(tmp_path)
    run("docs/learning.md", saved, namespace, "float32")
    assert (tmp_path / "learnt" / "learning.json").is_file()
    # The call inside `paused` is not counted.
    assert namespace["learner"].statistics.calls == 1


def test_python_of_the_drafters_page(saved):
    """A drafter of an own class drafts, and the output is plain decoding's."""
    namespace: dict = {}
    run("README.md", saved, namespace, "float32")
    run("docs/drafters.md", saved, namespace, "float32")
    output = namespace["output"]
    expected = namespace["target"].generate(**namespace["inputs"], max_new_tokens=16)
    assert output.sequences.tolist() == expected.tolist() and output.draft_statistics.rounds > 0
    (toy,) = [block for block in blocks("docs/drafters.md", "python") if "class BigramDrafter" in block]
    assert len(toy.splitlines()) <= 60


def test_python_of_the_page_of_exactness(saved):
    """In 16 bits both ways give the same tokens."""
    namespace: dict = {}
    run("README.md", saved, namespace, "bfloat16")
    run("docs/exactness.md", saved, namespace, "bfloat16")
    assert namespace["assisted"].tolist() == namespace["plain"].tolist()


def test_every_page_with_python_is_run():
    run_elsewhere = {
        "README.md",
        "docs/exactness.md",
        "docs/usage.md",
        "docs/cpu.md",
        "docs/sharing.md",
        "docs/drafters.md",
        CARD,
    }
    run_elsewhere.add("docs/learning.md")
    # Code that computes numbers, and is checked by hand; code with a class of the bench; code with a target of 1 GB.
    names_only = {"examples/train_llama_8b.md", "hub_cards/medusa-like-smollm2-135m-instruct/README.md"}
    names_only |= {"hub_cards/falcon-draft-gemma-3-270m/README.md"}
    names_only |= {"hub_cards/falcon-draft-qwen2.5-coder-1.5b-instruct/README.md"}
    assert {document for document in DOCUMENTS if blocks(document, "python")} <= run_elsewhere | names_only


def test_options_in_the_text_are_there(capsys):
    """Also the options that stand outside of commands."""
    known = "".join(file.read_text() for folder in ("examples", "docs") for file in (ROOT / folder).glob("*.py"))
    known += (ROOT / "tests/support/fuzz.py").read_text()
    for name in entry.COMMANDS:
        with pytest.raises(SystemExit):
            entry.main([name, "--help"])
        known += capsys.readouterr().out
    elsewhere = {"--index-url", "--no-deps", "--num_processes", "--nproc_per_node"}
    text = "".join((ROOT / document).read_text() for document in ["README.md", *PAGES])
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - elsewhere
    assert len(named) > 30 and named <= set(re.findall(r"--\w[\w-]*", known))


def cells(document: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its head."""
    section = re.split(rf"^#+ {re.escape(heading)}\n", (ROOT / document).read_text(), flags=re.MULTILINE)[1]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    return [line.strip("| ").split(" | ") for line in table.group().splitlines()[2:]]


def test_every_file_of_the_core_and_beside_it_is_explained():
    of_a_round = {name for _, files, _ in cells("docs/how-it-works.md", "One round") for name in files.split(", ")}
    text = (ROOT / "docs/how-it-works.md").read_text()
    named = set(re.findall(r"^\| `(\w+\.py)` \|", text, re.MULTILINE)) | {name.strip("`") for name in of_a_round}
    files = [*ROOT.glob("src/hf_falcon/core/*.py"), *ROOT.glob("src/hf_falcon/*.py")]
    assert named == {file.name for file in files if not file.name.startswith("__")}


def test_every_step_of_a_round_is_where_the_page_says():
    steps = {
        "candidate_generator": ("propose", "update"),
        "target_run": ("score", "accept"),
        "verification": ("verify",),
    }
    text = (ROOT / "docs/how-it-works.md").read_text()
    for name, functions in steps.items():
        source = (ROOT / f"src/hf_falcon/core/{name}.py").read_text()
        for function in functions:
            assert f"`{function}`" in text and re.search(rf"^ *def {function}\(", source, re.MULTILINE), function


def test_the_page_has_every_statistic():
    named = re.findall(r"`(\w+)`", " ".join(first for first, *_ in cells("docs/reference.md", "Statistics")))
    fields = [field.name for field in dataclasses.fields(hf_falcon.DraftStatistics)]
    properties = [name for name, member in vars(hf_falcon.DraftStatistics).items() if isinstance(member, property)]
    assert sorted(named) == sorted(fields + properties)


def test_readme_counts_the_decoders_of_the_compatibility_page():
    rows = dict(re.findall(r"^\| (\w[\w ]*) \| (\d+) \| \d+ ", (ROOT / "tests/COMPATIBILITY.md").read_text(), re.M))
    text = " ".join((ROOT / "README.md").read_text().split())
    expected = "{trees} verify trees, {chains} chains, {plain} are decoded plainly".format(**rows)
    assert expected in text and f"{rows['not tried']} could not be tried" in text
    assert rows["refused"] == "0"


def test_chart_has_the_numbers_of_its_page(monkeypatch):
    pytest.importorskip("matplotlib", reason="comes with the extra `dev`")
    monkeypatch.syspath_prepend(ROOT / "docs")
    import draw_speedups

    page = (ROOT / "docs/benchmarks.md").read_text()
    drawn = re.findall(r">(\d\.\d\d)</text>", (ROOT / "docs/images/speedup.svg").read_text())
    expected = [
        f"{value:.2f}" for method, *_ in draw_speedups.METHODS for value in draw_speedups.speedups(page, method)
    ]
    assert drawn == expected
    alt = re.search(r"!\[(.*)\]\(docs/images/speedup.svg\)", (ROOT / "README.md").read_text()).group(1)
    assert re.findall(r"\d\.\d\d", alt) == expected[3::4]


def test_drafters_of_the_readme_are_the_cards():
    """Acceptance lengths are the cards' tau, and one; sizes are the cards' sizes."""
    rows = cells("README.md", "Drafters")
    assert len(rows) == len(list(ROOT.glob("hub_cards/*/README.md")))
    for drafter, length, size, speedup in rows:
        card = (ROOT / re.search(r"\((.*)\)", drafter).group(1)).read_text()
        assert size in " ".join(card.split())
        page = (ROOT / "docs/benchmarks.md").read_text()
        for value in re.findall(r"\d\.\d\d", length):
            assert re.search(rf"\b{float(value) - 1:.2f}\b", card + page), value
        assert all(f" {value} |" in page for value in re.findall(r"\d\.\d\d", speedup))


# What goes wrong, and the text that a user sees then, in the order of the table of docs/troubleshooting.md.


def of_another_architecture(saved, tmp_path, warnings_given):
    target = tiny_target("openai-gpt")
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


def as_a_language_model(saved, tmp_path, warnings_given):
    transformers.AutoModelForCausalLM.from_pretrained(saved / "drafter")


def with_a_file_of_another(saved, tmp_path, warnings_given):
    shutil.copy(tmp_path / "drafter" / "model.safetensors", tmp_path / "drafter" / "model.fp16.safetensors")
    FalconDraftModel.from_pretrained(tmp_path / "drafter", variant="fp16")


def alone(saved, tmp_path, warnings_given):
    tiny_drafter(tiny_target("llama")).generate(prompt(5))


def attached_to_a_wrapper(saved, tmp_path, warnings_given):
    target = tiny_target("llama")
    hf_falcon.attach(torch.nn.DataParallel(target), tiny_drafter(target))


def attached_another_model(saved, tmp_path, warnings_given):
    hf_falcon.attach(tiny_target("llama"), tiny_target("qwen2"))


def served_without_the_extra(saved, tmp_path, warnings_given):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "find_spec", lambda name: None)
        serving.check_packages()


def served_by_another_version(saved, tmp_path, warnings_given):
    serving.serving_name("server", "name_of_no_version")


MISTAKES = [of_another_architecture, of_other_weights, of_another_width, with_another_config, with_damaged_weights]
MISTAKES += [without_trust, without_the_demo_target, with_an_adapter, without_a_compiler]
MISTAKES += [training_packed, as_a_language_model, with_a_file_of_another, alone]
MISTAKES += [attached_to_a_wrapper, attached_another_model, served_without_the_extra, served_by_another_version]


def messages() -> list[str]:
    """The first column of the table of docs/troubleshooting.md."""
    return [first.strip("` ") for first, _ in cells("docs/troubleshooting.md", "Troubleshooting")]


def test_every_message_is_provoked():
    assert len(messages()) == len(MISTAKES)


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[mistake.__name__ for mistake in MISTAKES])
def test_message(number, saved, tmp_path, warnings_given, monkeypatch):
    shutil.copytree(saved / "drafter", tmp_path / "drafter")
    monkeypatch.setattr(models, "TARGET_PACKAGE", "a_package_that_is_not_there")
    monkeypatch.setattr(hf_falcon.drafters.files, "is_peft_available", lambda: True)
    try:
        seen = MISTAKES[number](saved, tmp_path, warnings_given)
    except Exception as error:
        seen = str(error)
    pattern = ".*".join(re.escape(part) for part in messages()[number].split("..."))
    assert re.search(pattern, seen, re.DOTALL), seen
