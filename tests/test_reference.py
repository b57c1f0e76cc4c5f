# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The API reference: docstrings of all public names, and the lists of docs/reference.md."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import hf_falcon

PAGE = (Path(__file__).parents[1] / "docs" / "reference.md").read_text()
# "As [`PreTrainedModel.save_pretrained`], ...", "See [`...`]": arguments that are not told are those of that one.
INHERITED = re.compile(r"^\s*(As|See) \[`", re.MULTILINE)


def public_functions(cls):
    """Names and functions of a class's own public methods and properties."""
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function


def documented():
    """Every public name, and every public method of the public classes."""
    for name in hf_falcon.__all__:
        public = getattr(hf_falcon, name)
        yield name, public
        if inspect.isclass(public):
            yield from ((f"{name}.{method}", function) for method, function in public_functions(public))


def signature(public) -> inspect.Signature:
    if getattr(public, "_is_protocol", False):
        # Nobody constructs a protocol.
        return inspect.Signature()
    if inspect.isclass(public) and issubclass(public, tuple):
        return inspect.signature(public)
    return inspect.signature(public.__init__ if inspect.isclass(public) else public)


def entry(doc: str, name: str) -> str | None:
    """What a docstring says of an argument: ``name (`type`): ...``, alone or among others, or the name in its text."""
    listed = re.search(rf"^\s*(?:\w+, )*{name}(?:, \w+)*(?: \(.*\))?:.*$", doc, re.MULTILINE)
    found = listed or re.search(f"`{name}`", doc)
    return found and found.group()


@pytest.mark.parametrize("public", [pytest.param(public, id=name) for name, public in documented()])
def test_docstring(public):
    doc = public.__doc__
    assert doc, "no docstring"
    if INHERITED.search(doc):
        return
    parameters = [parameter for parameter in signature(public).parameters if parameter not in ("self", "cls")]
    missing = [parameter for parameter in parameters if entry(doc, parameter) is None]
    assert not missing, f"says nothing of {missing}"
    nothing = str(signature(public).return_annotation) in ("None", "NoReturn", "Iterator[None]")
    if not inspect.isclass(public) and parameters and not nothing:
        # A docstring of one line says what it gives.
        assert "Returns:" in doc or "\n" not in doc, "does not say what it returns"


@pytest.mark.parametrize("public", [hf_falcon.FalconDraftConfig, hf_falcon.DraftOptions])
def test_defaults_are_as_documented(public):
    for name, parameter in signature(public).parameters.items():
        if name in ("self", "kwargs"):
            continue
        said = entry(public.__doc__, name)
        default = parameter.default
        if default is None:
            # Filled in later; the text may say with what.
            assert "*optional*" in said, name
        else:
            stated = re.search(r"defaults to (.*?)\):$", said).group(1).strip("`")
            newest = stated == "the newest that this code knows"
            assert newest or ast.literal_eval(stated) == default, name


def section(title: str) -> str:
    """A section of the page."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The cells of a section's tables, without the heads."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [
        line.strip("| ").split(" | ") for line in lines if not line.startswith(("| ---", "| name |", "| option |"))
    ]


def test_the_page_has_every_option_and_public_name():
    listed = rows("Drafting options") + rows("Public names")
    named = re.findall(r"`(\w+)", " ".join(first for first, *_ in listed))
    options = [field.name for field in dataclasses.fields(hf_falcon.DraftOptions)]
    assert sorted(named) == sorted([*hf_falcon.__all__, *options])


def test_the_page_has_the_defaults_of_every_option():
    found = {first.strip("`"): second for first, second, *_ in rows("Drafting options")}
    for field in dataclasses.fields(hf_falcon.DraftOptions):
        default = f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
        assert found[field.name].strip("`") == default, field.name
