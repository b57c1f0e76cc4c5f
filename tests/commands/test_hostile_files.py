# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Commands on a stranger's drafter: cards, reports and names are refused in words, and none acts on the terminal."""

import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import tiny_drafter, tiny_target
from utilities import edit, peak_memory, start_peak

from hf_falcon.commands import doctor
from hf_falcon.commands import main as entry
from hf_falcon.commands.card import read_card, tau_of


@pytest.fixture
def folder(tmp_path):
    tiny_drafter(tiny_target("llama")).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def card(metadata: str) -> bytes:
    return f"---\n{metadata}\n---\n# A drafter\n".encode()


# Each level has nine of the level before; as values, and merged into objects.
LAUGHS = "\n".join(["a0: &a0 x"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)])
MERGED = "\n".join(
    ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 9)]
)


@pytest.mark.parametrize(
    "content",
    [
        card(f"{LAUGHS}\nlicense: *a11"),
        card(f"{MERGED}\nlicense: *a8"),
        card("license: &a [*a]"),
        card("license: " + "[" * 50_000),
        card("license: " + "{a: " * 50_000),
        card("license: " + "x" * 10_000_000),
        card("a: 1\n" * 100_000),
        card("license: !!python/object/apply:os.system ['true']"),
        card("license: !!timestamp x"),
        card("- a\n- b"),
        card("text"),
        card("model-index: 5"),
        card("model-index:\n- name: x\n  results: [5]"),
        card("? [a]\n: b"),
        b"\xff\xfe",
        b"\0" * 5_000_000,
    ],
    ids=lambda content: repr(content[4:24]),
)
def test_cards_are_refused(folder, capsys, content):
    (folder / "README.md").write_bytes(content)
    before, start = start_peak(), time.monotonic()
    assert entry.main(["info", str(folder)]) == 1
    assert "`README.md` in" in capsys.readouterr().err
    # Another command goes on without it.
    assert doctor.reference_of(folder) is None
    assert time.monotonic() - start < 30 and peak_memory() - before < 2**28


RESULTS = """model-index:
- name: x
  results:
  - task: {type: text-generation}
    dataset: {type: a, name: "a\\e[2Jb"}
    metrics: [{type: tau, value: VALUE}]"""


@pytest.mark.parametrize("value", ["[1]", "high", ".nan", "{a: 1}", "true"])
def test_a_tau_that_is_no_number_is_none(folder, value):
    (folder / "README.md").write_bytes(card(RESULTS.replace("VALUE", value)))
    assert tau_of(read_card(folder / "README.md")) == {} and doctor.reference_of(folder) is None


def test_nothing_of_a_card_acts_on_the_terminal(folder, capsys):
    (folder / "README.md").write_bytes(card(f'license: "\\e]0;x\\a"\n{RESULTS.replace("VALUE", "1.5")}'))
    assert entry.main(["info", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert r"1.5 (a\x1b[2Jb)" in printed and printed.replace("\n", "").isprintable()
    assert doctor.reference_of(folder).tau == 1.5


@given(st.text(max_size=60) | st.text("-:[]{}&*!|>'\" \n#?,<abc01", max_size=60))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_card_is_read_or_refused(tmp_path, metadata):
    file = tmp_path / "README.md"
    file.write_bytes(f"---\n{metadata}\n---\n".encode())
    try:
        assert isinstance(tau_of(read_card(file)), dict)
    except ValueError as error:
        assert "`README.md`" in str(error)


@pytest.mark.parametrize("field", ["target_name_or_path", "target_model_type", "target_fingerprint"])
def test_names_in_a_configuration_are_printable(folder, capsys, field):
    edit(folder / "config.json", **{field: "\x1b[2J\u202eevil"})
    assert entry.main(["info", str(folder)]) == 1
    error = capsys.readouterr().err
    assert f"`{field}` is" in error and error.strip().isprintable()


def test_an_error_does_not_act_on_the_terminal(folder, capsys):
    """Whatever a library's message has of a file."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), "\x1b[2J\x07": torch.ones(1)}, file)
    edit(folder / "config.json", weights_sha256=None, hidden_act="\x1b[2J")
    assert entry.main(["info", str(folder)]) == 1
    assert capsys.readouterr().err.strip().isprintable()
    assert entry.main(["info", f"{folder}\x1b[2J"]) == 1
    assert capsys.readouterr().err.strip().isprintable()


@pytest.mark.parametrize(
    "content", ["[", "[]", "5", '{"after": 5}', '{"after": {"final_tau": "x"}}', "[" * 100_000, '{"after": [1]}']
)
@pytest.mark.parametrize("name", ["adapt.json", "trainer_state.json", "provenance.json"])
def test_reports_of_a_drafter_are_read_or_left_out(folder, name, content):
    (folder / name).write_text(content)
    assert doctor.reference_of(folder) is None
    assert doctor.provenance_of(str(folder)) == {}


def test_the_drafters_own_template_is_not_rendered(folder):
    """The target that a drafter names may be the drafter's own folder: a template there is a stranger's program."""
    for inside in (str(folder), f"{folder}/.", str(folder / "target"), f"{folder.parent}/drafter/../drafter"):
        assert doctor._is_inside(inside, str(folder))
    for outside in (str(folder.parent), str(folder.parent / "drafter-2"), "user/target"):
        assert not doctor._is_inside(outside, str(folder))
    assert doctor._is_inside("user/drafter", "user/drafter")
