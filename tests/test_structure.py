# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The package's structure: no import circle, a core that needs nothing else, private names of others in one file."""

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import prompt, tiny_drafter, tiny_target
from transformers import AutoModel

import hf_falcon
from hf_falcon.bench.medusa import MedusaLikeModel

PACKAGE = Path(hf_falcon.__file__).parent
CORE = PACKAGE / "core"
SHIPPED = PACKAGE.parents[1] / "hub_cards"
FILES = sorted(PACKAGE.rglob("*.py"))

CORE_FILES_AT_MOST, CORE_LINES_AT_MOST = 20, 6800
USE_PRIVATE_NAMES = {CORE / "hook.py", PACKAGE / "private_names.py"}
# Private names of transformers, and what replaces an attention function of all models.
PRIVATE_NAMES = ["_assisted_decoding", "_validate_generation_mode", "_prefill", "_sample"]
PRIVATE_NAMES += ["_get_default_generation_params", "_from_model_config", "_pad_token_tensor", "_is_user_defined"]
PRIVATE_NAMES += ["_supports_default_dynamic_cache", "_prefix_allowed_tokens_fn", "record_past", "AttentionInterface"]
PRIVATE_NAMES += ["_update_model_kwargs_for_generation"]


@functools.cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in FILES}


def imported_names(file: Path) -> set[str]:
    """All that a file imports, absolute and with the names of `from` imports, wherever in the file the import is."""
    package = module_name(file).split(".")
    if file.name != "__init__.py":
        package.pop()
    found = set()
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def imported_modules(file: Path) -> set[str]:
    """Modules of this package that a file imports itself; a package counts where one of its own names is imported."""
    found, names = set(), imported_names(file) & MODULES.keys()
    for name in names:
        submodules = {other for other in names if other.startswith(f"{name}.")}
        if MODULES[name].name != "__init__.py" or not submodules:
            found.add(name)
    return found


def import_circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which imports, by way of others, all of its group."""
    reached = {name: set(others) for name, others in imports.items()}
    for between in reached:
        for name in reached:
            if between in reached[name]:
                reached[name] |= reached[between]
    groups = {
        frozenset(other for other in reached if other in reached[name] and name in reached[other]) for name in reached
    }
    return sorted(sorted(group) for group in groups if group)


def test_no_import_circle():
    imports = {name: imported_modules(file) for name, file in MODULES.items()}
    assert "hf_falcon.core.tree" in imports["hf_falcon.core.candidate_generator"]
    assert import_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == [["b", "c"], ["d"]]
    assert import_circles(imports) == []


def test_the_core_is_flat_and_small():
    files = [path for path in CORE.rglob("*") if "__pycache__" not in path.parts]
    assert all(path.parent == CORE and path.suffix == ".py" for path in files)
    assert len(files) <= CORE_FILES_AT_MOST
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= CORE_LINES_AT_MOST
    # With one, transformers would have to copy a package.
    assert "__init__.py" not in [path.name for path in files]


@pytest.mark.parametrize("file", sorted(CORE.glob("*.py")), ids=lambda file: file.stem)
def test_the_core_imports_only_its_own_files(file):
    """transformers copies the files of `from .x import y`, misses `from . import x`, and fails on `from ..`."""
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and node.module and "." not in node.module, ast.unparse(node)
            assert (CORE / f"{node.module}.py").exists(), ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            assert not node.module.startswith("hf_falcon"), ast.unparse(node)
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("hf_falcon") for alias in node.names), ast.unparse(node)


# What runs the rounds of any drafter, by the protocol of interfaces.py.
LOOP = ("candidate_generator", "costs", "decoding", "policy", "target_run", "tree", "verification")
OF_DRAFTERS = ("core/drafter.py", "core/draft_session.py", "core/modeling_falcon_draft.py", "drafters/*.py")


def defined_classes(*patterns: str) -> set[str]:
    files = [file for pattern in patterns for file in PACKAGE.glob(pattern)]
    return {node.name for file in files for node in nodes(file) if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("name", LOOP)
def test_the_loop_knows_no_drafter(name):
    """It neither imports the class of a drafter, of a head or of a session, nor asks whether an object is of one."""
    file = CORE / f"{name}.py"
    imported = imported_names(file)
    assert not [each for each in imported if each.startswith("hf_falcon.drafters")]
    # A function for masks is in the file of the network.
    assert imported.isdisjoint({"hf_falcon.core.drafter"})
    classes = defined_classes(*OF_DRAFTERS)
    assert {"FalconDraftModel", "Eagle3DraftModel", "BlockSession", "TargetHead"} <= classes
    assert classes.isdisjoint(identifiers(file))
    asked = [node for node in nodes(file) if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"]
    subjects = {ast.unparse(node.args[0]) for node in asked}
    assert not [subject for subject in subjects if re.search("drafter|session|head|acceleration", subject)]


def identifiers(file: Path) -> set[str]:
    """Names, attributes, imported names and strings of the code, without docstrings and comments."""
    found = set()
    for node in nodes(file):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # As in `getattr(cache, "_is_user_defined", False)`.
            found.add(node.value)
    return found


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_private_names_of_transformers_are_in_one_file(name):
    assert {file for file in FILES if name in identifiers(file)} <= USE_PRIVATE_NAMES


def test_sdpa_of_transformers_comes_by_way_of_one_file():
    module = "transformers.integrations.sdpa_attention"
    assert {file for file in FILES if module in imported_names(file)} <= {PACKAGE / "private_names.py"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a tiny target, and that of its drafter."""
    folder = tmp_path_factory.mktemp("saved")
    target = tiny_target()
    target.save_pretrained(folder / "target")
    tiny_drafter(target).save_pretrained(folder / "drafter")
    return folder


def test_a_saved_drafter_has_the_core_only(saved):
    code = {path.relative_to(saved / "drafter").as_posix() for path in (saved / "drafter").rglob("*.py")}
    core = {path.name for path in CORE.glob("*.py")}
    assert code - {"custom_generate/generate.py"} <= core
    # All that the folder listing shows is needed there.
    assert core - {"custom_generate.py"} <= code


# A namespace for each library that was registered.
LOADS = """
import sys, torch, transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
sys.modules["hf_falcon"] = None
folder, ids = sys.argv[1], eval(sys.argv[2])
target = AutoModelForCausalLM.from_pretrained(f"{folder}/target")
plain = target.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)
namespaces = lambda: {name.split("::")[0] for name in torch._C._dispatch_get_all_op_names()}
before = namespaces()
AutoConfig.from_pretrained(f"{folder}/drafter", trust_remote_code=True)
assert namespaces() == before, namespaces() - before
drafter = AutoModel.from_pretrained(f"{folder}/drafter", trust_remote_code=True)
found = target.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12, assistant_model=drafter)
assert found.tolist() == plain.tolist()
assert namespaces() == before, namespaces() - before
"""


def test_custom_code_registers_no_torch_library(saved, tmp_path):
    environment = {"PATH": os.environ["PATH"], "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_FALCON_CACHE": str(tmp_path / "costs")}
    words = [sys.executable, "-c", LOADS, str(saved), str(prompt(9)[0].tolist())]
    result = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.parametrize("folder", sorted(file.parent for file in SHIPPED.glob("*/config.json")), ids=lambda f: f.name)
def test_shipped_drafters_load(folder):
    model_class = MedusaLikeModel if folder.name.startswith("medusa") else hf_falcon.FalconDraftModel
    drafter = model_class.from_pretrained(folder)
    kinds = {"gemma": "gemma3_text", "qwen": "qwen2"}
    expected = next((kind for name, kind in kinds.items() if name in folder.name), "llama")
    assert drafter.config.target_model_type == expected
    if model_class is hf_falcon.FalconDraftModel:
        auto = AutoModel.from_pretrained(folder)
        assert type(auto) is model_class
        assert all(tensor.equal(auto.state_dict()[name]) for name, tensor in drafter.state_dict().items())
