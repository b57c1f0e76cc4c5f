# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""JSON files of strangers: a value within limits, or a ValueError that names the file."""

import json
import os
import re
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from utilities import peak_memory, start_peak

from hf_falcon.json_files import read_json


@pytest.fixture
def file(tmp_path):
    return tmp_path / "some.json"


def refused(file, data: bytes, found: str, **limits) -> None:
    file.write_bytes(data)
    with pytest.raises(ValueError, match=rf"`some\.json` in .* cannot be read \(.*{found}.*\): download it again"):
        read_json(file, **limits)


@pytest.mark.parametrize(
    "data, found",
    [
        (b"", "Expecting value"),
        (b'{"a": 1', "delimiter"),
        (b"\xff\xfe", "utf-8"),
        (b'{"a": NaN}', "`a` is nan"),
        (b'{"a": [{"b": -Infinity}]}', "`b` is -inf"),
        (b'{"a": 1e999}', "`a` is inf"),
        (b'{"a": 36893488147419103232}', "`a` is 36893488147419103232"),
        (b'{"a": 1, "b": ' + b"9" * 4300 + b"}", "`b` is 9999"),
        (b"[" + b"1" * 5000 + b"]", "an integer of 5,000 digits"),
        (b'{"a": "\\ud800"}', "surrogates not allowed"),
        (b'{"\\ud800": 1}', "surrogates not allowed"),
        (b'{"\\u001b[31m": NaN}', re.escape(r"`\x1b[31m` is nan")),
        (b"[" * 100_000, "more than 32 levels"),
        (b"[" * 100_000 + b"]" * 100_000, "more than 32 levels"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "`a` has more than 32 levels"),
    ],
)
def test_what_is_refused(file, data, found):
    refused(file, data, found)


def test_limits_are_the_callers(file):
    file.write_bytes(b"[[1]]")
    assert read_json(file, max_bytes=5, max_depth=2) == [[1]]
    refused(file, b"[[1]]", "more than 4 bytes", max_bytes=4)
    refused(file, b"[[1]]", "more than 1 levels", max_depth=1)
    assert read_json(str(file)) == [[1]]


def test_what_is_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing.json")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "endless", "."):
        with pytest.raises(ValueError, match="no regular file"):
            read_json(tmp_path / name)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 2**24,
        b'{"":' * 2**22,
        pytest.param(b"[" + b"[]," * (5 * 2**20) + b"[]]", marks=pytest.mark.slow),
        b'["' + b"\\" * 2**23,
        b"1" * 2**24,
    ],
)
def test_the_largest_files_take_bounded_time_and_memory(file, data):
    file.write_bytes(data)
    before, start = start_peak(), time.monotonic()
    try:
        read_json(file)
    except ValueError as error:
        assert len(str(error)) < 1000
    assert time.monotonic() - start < 60 and peak_memory() - before < 2**30


def test_a_process_without_pythons_limit_of_digits(file):
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        refused(file, b"9" * 2**23, "an integer of 8,388,608 digits")
    finally:
        sys.set_int_max_str_digits(before)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES, st.integers(0, 40), st.binary(max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_a_value_or_a_value_error(tmp_path_factory, value, depth, noise, data):
    """Whatever is read can be written and read again."""
    for _ in range(depth):
        value = [value]
    whole = json.dumps(value).encode()
    place = data.draw(st.integers(0, len(whole)))
    file = tmp_path_factory.getbasetemp() / "some.json"
    file.write_bytes(whole[:place] + noise + whole[place:])
    try:
        found = read_json(file)
    except ValueError as error:
        assert "`some.json`" in str(error)
    else:
        file.write_text(json.dumps(found, ensure_ascii=False, allow_nan=False), encoding="utf-8")
        assert read_json(file) == found
