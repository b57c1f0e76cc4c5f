# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Hostile values, pickles that run code, and files with random changes."""

import json
import random
import struct

import pytest

HUGE = 10**9

VALUES = [None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31, 2**63, 10**30, -HUGE, HUGE, 0.5, -0.0, 1e308, "", "x", "0"]
VALUES += ["../../x", "os.system", "\0", "a" * 5000, [], [0], [[0]], [[0], [0, 0]], {}, {"a": {}}, [None]]
VALUES += [float("nan"), float("inf"), {"__float__": "NaN"}, "float99", "bfloat16", "eager", "user/repo"]
NAMES = ["_name_or_path", "_attn_implementation", "__dict__", "auto_map", "architectures", "id2label", "num_labels"]
NAMES += ["torch_dtype", "quantization_config", "transformers_weights", "to_dict", "model_type", "problem_type"]
NAMES += ["use_return_dict", "rope_scaling", "sub_configs", "base_model_tp_plan", "keys_to_ignore_at_inference"]


class Bomb:
    """Unpickling it runs code."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was run",)


def fuzzed_json(rng: random.Random, text: str) -> bytes:
    """The same JSON with some fields changed, added or removed, or no JSON at all."""
    kind = rng.random()
    if kind < 0.1:
        return rng.choice([b"", b"[]", b"5", b"null", b'"x"', b"{", b"\xff\xfe", b"[" * 100_000, b"{}", b'{"a": NaN}'])
    if kind < 0.3:
        data = bytearray(text.encode())
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(data))
            data[place : place + rng.randint(0, 3)] = bytes(
                rng.choices(b'0123456789-.,:"[]{}eEtfn \\', k=rng.randint(0, 3))
            )
        return bytes(data)
    fields = json.loads(text)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        name = rng.choice([*fields, *NAMES])
        if rng.random() < 0.15:
            fields.pop(name, None)
        else:
            fields[name] = rng.choice(VALUES)
    return json.dumps(fields).encode()


def fuzzed_weights(rng: random.Random, whole: bytes) -> bytes:
    """A safetensors file with bytes, its header's length or its header changed, or cut."""
    data, size = bytearray(whole), struct.unpack("<Q", whole[:8])[0]
    kind = rng.randrange(5)
    if kind == 0:
        return bytes(data[: rng.randrange(len(data))])
    if kind == 1:
        data[:8] = struct.pack("<Q", rng.choice([0, 1, size - 1, size + 1, 2**31, 2**63, rng.randrange(2**64)]))
    elif kind == 2:
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 3:
        for _ in range(rng.randint(1, 4)):
            data[8 + rng.randrange(size)] = rng.choice(b'0123456789-,:"[]{}F')
    else:
        header, values = safetensors_header(whole)
        tensor = rng.choice([name for name in header if name != "__metadata__"])
        part = rng.choice(["dtype", "shape", "data_offsets"])
        header[tensor][part] = rng.choice(
            ["I64", "BOOL", "F4", "C64", "F8_E4M3", 5, [], [HUGE, HUGE], [-1], [0, 2**62], [0]]
        )
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + values
    return bytes(data)


def safetensors_header(whole: bytes) -> tuple[dict, bytes]:
    """The header of a safetensors file, and the bytes behind it."""
    size = struct.unpack("<Q", whole[:8])[0]
    return json.loads(whole[8 : 8 + size]), whole[8 + size :]
