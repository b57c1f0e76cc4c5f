# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Of core and cpu, only `core/hook.py` uses private names of transformers."""

import ast
from pathlib import Path

import hf_falcon

PACKAGE = Path(hf_falcon.__file__).parent
# Private names of torch and accelerate, which the hook does not collect.
OTHER_LIBRARIES = {
    "_C",
    "_aoti",
    "_buffers",
    "_compiled_call_impl",
    "_dynamo",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_has_any_global_hook",
    "_hf_hook",
    "_inductor",
    "_init_amx",
    "_is_amx_tile_supported",
    "_is_avx512_bf16_supported",
    "_is_mkldnn_bf16_supported",
    "_linear_pointwise",
    "_make_wrapper_subclass",
    "_parameters",
    "_reorder_linear_weight",
    "_schema",
    "_torchdynamo_orig_callable",
    "_version",
}
# Methods of Python's own named tuples, public in spite of their names.
PUBLIC = {"_asdict"}


def private_names(files: list[Path]) -> tuple[dict[str, set[str]], set[str]]:
    """Private names that are read from objects, with the files that read them, and names that the files define."""
    used: dict[str, set[str]] = {}
    defined: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = None
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute):
                name = node.attr
                if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    defined.add(name)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("getattr", "hasattr", "setattr"):
                name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            if isinstance(name, str) and name.startswith("_") and not name.endswith("__"):
                used.setdefault(name, set()).add(file.name)
    return used, defined


def test_private_names_of_transformers_are_in_one_file():
    files = [file for folder in ("core", "cpu") for file in (PACKAGE / folder).glob("*.py")]
    used, defined = private_names(files)
    elsewhere = {
        name: files - {"hook.py"}
        for name, files in used.items()
        if name not in defined | OTHER_LIBRARIES | PUBLIC and files != {"hook.py"}
    }
    assert not elsewhere
    # The test would see them.
    assert {"_is_user_defined", "_from_model_config"} <= used.keys()
