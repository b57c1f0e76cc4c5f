# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Hypothesis strategies for files and requests of strangers: valid ones, with one or more places changed."""

import copy
import json
import re
import struct

from hostile import NAMES, VALUES
from hypothesis import strategies as st

# Of any depth, no number, not finished, too long, not text, or read by a terminal as a command.
PIECES = [b"[" * 100_000, b'{"a":' * 2000, b"9" * 5000, b"1e999", b"NaN", b"-Infinity", b"\0", b"\xff\xfe", b"\x1b[2J"]
PIECES += ["\u202e".encode(), b"\\ud800", b'"', b"]", b"}", b"{", b",", b":", b"\n", b"\\", b"null", b"\xef\xbb\xbf"]
PIECES += [b"&a [*a, *a]", b"!!python/object:os.system", b"../../", b"%2e%2e/", b"\r\n\r\n", b"a" * 100_000]
NUMBERS = [0, 1, -1, 2**15, 2**16, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63), 2**64, 10**9, 10**400]

values = st.one_of(
    st.sampled_from(VALUES), st.sampled_from(NUMBERS), st.integers(), st.floats(), st.text(max_size=8), st.none()
)


def places(value, path=()):
    """The paths of all values inside a JSON value."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*path, key))


@st.composite
def changed(draw, value):
    """A JSON value with one to three of its parts replaced, dropped, nested, repeated or added."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        path = draw(st.sampled_from(list(places(value))))
        if not path:
            continue
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        key = path[-1]
        kind = draw(st.sampled_from(["replace", "replace", "drop", "nest", "repeat", "add", "swap"]))
        if kind == "replace":
            parent[key] = draw(values)
        elif kind == "drop":
            del parent[key]
        elif kind == "nest":
            for _ in range(draw(st.sampled_from([1, 2, 40]))):
                parent[key] = draw(st.just([parent[key]]) | st.just({"a": parent[key]}))
        elif kind == "repeat":
            parent[key] = [parent[key]] * draw(st.sampled_from([0, 2, 30]))
        elif kind == "add" and isinstance(parent, dict):
            parent[draw(st.sampled_from(NAMES) | st.text(max_size=5))] = draw(values)
        elif kind == "swap":
            other = value
            for step in draw(st.sampled_from(list(places(value)))):
                other = other[step]
            parent[key] = copy.deepcopy(other)
    return value


@st.composite
def damaged(draw, data):
    """Bytes that are cut, or have bytes, numbers or pieces replaced or inserted."""
    for _ in range(draw(st.sampled_from([1, 1, 2, 4]))):
        place = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["cut", "flip", "insert", "number", "drop"]))
        if kind == "cut":
            data = data[:place]
        elif kind == "flip":
            data = data[:place] + draw(st.binary(min_size=1, max_size=4)) + data[place + 1 :]
        elif kind == "insert":
            data = data[:place] + draw(st.sampled_from(PIECES)) + data[place:]
        elif kind == "drop":
            data = data[:place] + data[place + draw(st.integers(1, 64)) :]
        else:
            numbers = [match.span() for match in re.finditer(rb"\d+", data[:100_000])]
            if numbers:
                start, end = draw(st.sampled_from(numbers))
                data = data[:start] + draw(st.sampled_from(PIECES[2:6]) | values.map(as_bytes)) + data[end:]
    return data


def as_bytes(value) -> bytes:
    try:
        return json.dumps(value).encode()
    # An integer of too many digits, or half a surrogate pair.
    except ValueError:
        return b"0"


@st.composite
def json_bytes(draw, value):
    """JSON with changed values, with damaged text, or with both."""
    kind = draw(st.sampled_from(["values", "values", "values", "text", "both", "as it is"]))
    if kind in ("values", "both"):
        value = draw(changed(value))
    data = as_bytes(value)
    return draw(damaged(data)) if kind in ("text", "both") else data


def split_safetensors(data: bytes) -> tuple[dict, bytes]:
    """The header and the tensors of a safetensors file."""
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join_safetensors(header: bytes, tensors: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + tensors


_DTYPES = ["I64", "BOOL", "F4", "C64", "F8_E4M3", "F16", "BF16", "F32", "U16", "I32", "F64", 5, None, ""]
_SHAPES = [[], [0], [1], [-1], [10**9, 10**9], [0, 2**62], [2**64], [2, 2], 5, [1.5], ["a"]]
_FORMATS = {"I64": "<q", "I32": "<i", "U16": "<H", "F32": "<f"}
_EXTREMES = {"<f": [float("nan"), float("inf"), -1.0, -0.5, 1e38]}


@st.composite
def safetensors_bytes(draw, data):
    """A safetensors file with another header, other values, or damaged bytes."""
    header, tensors = split_safetensors(data)
    names = [name for name in header if name != "__metadata__"]
    kind = draw(
        st.sampled_from(["value", "value", "field", "field", "header", "length", "bytes", "names", "as it is"])
    )
    if kind == "bytes":
        return draw(damaged(data))
    if kind == "length":
        length = draw(st.sampled_from([0, 1, 2**20 + 1, 2**31, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1))
        return struct.pack("<Q", length) + data[8:]
    if kind == "header":
        return join_safetensors(draw(json_bytes(header)), tensors)
    if kind == "names":
        for _ in range(draw(st.sampled_from([1, 1, 50]))):
            header[draw(st.text(max_size=5))] = draw(st.just(header[names[0]]) | values)
    name = draw(st.sampled_from(names))
    field = header[name]
    if kind == "field":
        part = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        field[part] = draw(st.sampled_from(_DTYPES if part == "dtype" else _SHAPES) | values)
    elif kind == "value":
        form = _FORMATS.get(field["dtype"], "<f")
        begin, end = field["data_offsets"]
        size = struct.calcsize(form)
        place = begin + size * draw(st.integers(0, max(0, (end - begin) // size - 1)))
        bits = 8 * size
        whole = [0, 1, 2 ** (bits - 1) - 1, *([2**bits - 1] if form.isupper() else [-1, -(2 ** (bits - 1))])]
        number = draw(st.sampled_from(_EXTREMES.get(form, whole)))
        tensors = tensors[:place] + struct.pack(form, number)[: max(0, end - place)] + tensors[place + size :]
    return join_safetensors(as_bytes(header), tensors)
