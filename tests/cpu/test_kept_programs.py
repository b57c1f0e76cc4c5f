# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Compiled programs are used by later processes, and by nobody who finds them changed, or writable by others."""

import concurrent.futures
import copy
import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from counting_compiler import drafter_of, generate
from tiny_models import new_target, prompt
from torch import nn
from transformers import AttentionInterface

import hf_falcon
from hf_falcon.cpu import compiling, kept_programs, kept_rounds
from hf_falcon.cpu.compiled_code import BuiltCode
from hf_falcon.cpu.compiled_rounds import compiled, compiled_rounds_of
from hf_falcon.cpu.kept_programs import Shelf, shelf_of
from hf_falcon.cpu.programs import CannotBeBuilt, Program, flattened, kind_of

needs_owner = pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner on this system")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
DESCRIPTION = {"leaves": 0, "inputs": [], "ranges": [], "remainder": ["list"], "has_tuple": False}


class Loaded:
    """A program whose library is not loaded."""

    def __init__(self, file, description):
        self.data, self.description = Path(file).read_bytes(), description


@pytest.fixture
def shelf(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    monkeypatch.setattr(kept_programs, "Program", Loaded)
    shelf = Shelf({"config": ["Llama 1"], "dtype": ["torch.float32"]})

    def write(file):
        file.write_bytes(b"a library")
        return DESCRIPTION

    assert not shelf.exists() and shelf.load("layer") is None
    shelf.save("layer", write)
    return shelf


@pytest.fixture
def warnings(monkeypatch):
    found = []
    for module in (kept_programs, kept_rounds):
        monkeypatch.setattr(module.logger, "warning_once", found.append)
    return found


def test_a_program_is_there_for_the_same_state_only(shelf, warnings):
    assert shelf.exists() and Shelf(shelf.state).load("layer").data == b"a library"
    other = Shelf(shelf.state | {"dtype": ["torch.bfloat16"]})
    assert not other.exists() and other.load("layer") is None and other.differences() == []
    shelf.offer()
    assert shelf.is_offered and not other.is_offered and other.differences() == ["dtype"]
    assert Shelf(shelf.state | {"config": ["Llama 2"]}).differences() == [] and not warnings


def damage_program(folder):
    (file,) = folder.glob("*.pt2")
    file.write_bytes(b"another library")


def damage_description(folder):
    file = folder / "layer.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps({**kept, "value": {**kept["value"], "leaves": 1}}))


def cut_description(folder):
    (folder / "layer.json").write_text('{"sha256": ')


def open_folder(folder):
    folder.chmod(0o777)


def open_parent(folder):
    folder.parent.chmod(0o775)


def open_program(folder):
    next(folder.glob("*.pt2")).chmod(0o666)


def link_program(folder):
    (file,) = folder.glob("*.pt2")
    file.rename(folder / "elsewhere")
    file.symlink_to(folder / "elsewhere")


def remove_program(folder):
    next(folder.glob("*.pt2")).unlink()


@needs_owner
@pytest.mark.parametrize(
    "change",
    [damage_program, damage_description, cut_description, open_folder, open_parent, open_program, link_program]
    + [remove_program],
    ids=lambda change: change.__name__,
)
def test_what_changed_or_others_can_write_is_not_loaded(change, shelf, warnings, monkeypatch):
    change(shelf._folder)
    monkeypatch.setattr(kept_programs, "Program", pytest.fail)
    assert shelf.load("layer") is None
    assert len(warnings) == 1 and "is not used" in warnings[0]
    # What another user owns cannot be deleted.
    assert "`HF_FALCON_CACHE`" in warnings[0] and "tune --compile" in warnings[0]


@needs_owner
def test_what_another_user_owns_is_not_loaded(shelf, warnings, monkeypatch):
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert shelf.load("layer") is None and "another user" in warnings[0]


@needs_owner
def test_where_nothing_can_be_kept_the_program_runs_in_this_process(tmp_path, monkeypatch, warnings):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(kept_programs, "Program", Loaded)
    shelf = Shelf({"config": []})
    assert shelf.save("layer", lambda file: file.write_bytes(b"x") and DESCRIPTION).data == b"x"
    assert "not kept" in warnings[0] and not shelf.exists()


def test_a_program_does_not_get_inputs_of_another_layout():
    program = object.__new__(Program)
    shape = [1, [1, "s0", 0], 4]
    program._inputs = [
        (torch.float32, [4], [1]),
        (torch.float32, shape, [1, 4, 1]),
        (torch.float32, [[3, "s0", 0]], [1]),
    ]
    program._ranges, program.leaves, program._fitted = {"s0": (2, 9)}, 1, None
    good = [torch.zeros(1, 5, 4), torch.zeros(15)]
    assert program.suits([torch.zeros(4)]) and program.fits(good) and program.fits(good)
    assert (
        not program.suits([torch.zeros(4).double()]) and not program.suits([torch.zeros(5)]) and not program.suits([])
    )
    for bad in (
        [torch.zeros(1, 5, 4), torch.zeros(14)],
        [torch.zeros(1, 1, 4), torch.zeros(3)],
        [torch.zeros(1, 5, 4).double(), torch.zeros(15)],
        [torch.zeros(1, 4, 5).transpose(1, 2), torch.zeros(15)],
        [torch.zeros(1, 5, 8)[..., ::2], torch.zeros(15)],
        [torch.zeros(1, 5, 4)],
    ):
        assert not program.fits(bad)
    # Such as a quantised weight, whose values are elsewhere.
    assert not program.suits([torch.zeros(4).as_subclass(Quantised)])


class Quantised(torch.Tensor):
    """As torchao's weights."""


def test_a_target_that_is_not_packed_yet_finds_what_is_for_packed_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    target = new_target("llama")
    with hf_falcon.packed_weights(target):
        kept_rounds.offer_rounds(target)
    assert kept_rounds.offers_packed_rounds(target)
    kept_rounds.offer_rounds(target)
    assert not kept_rounds.offers_packed_rounds(target)


def test_kinds():
    target = new_target("llama")
    first, second = target.model.layers
    assert kind_of(first) == kind_of(second)
    other = copy.deepcopy(second)
    other.self_attn.scaling *= 2
    assert kind_of(other) != kind_of(first)
    assert kind_of(copy.deepcopy(second).bfloat16()) != kind_of(first)


def test_arguments_that_are_no_tensors_are_compared():
    def remainder(*values):
        return flattened(values, [])

    assert remainder(torch.zeros(1), True) == remainder(torch.ones(2), True) != remainder(torch.ones(2), False)
    assert remainder(None) != remainder(torch.zeros(1)) and remainder({"a": 1}) != remainder({"b": 1})
    with pytest.raises(CannotBeBuilt, match="Linear"):
        remainder(nn.Linear(1, 1))


def test_without_a_program_the_function_runs(shelf):
    code = BuiltCode(lambda module, value: module(value), shelf, "linear")
    linear, value = nn.Linear(2, 3), torch.ones(1, 2)
    assert torch.equal(code(linear, value), linear(value)) and not code.load({linear: kind_of(linear)})


def test_a_target_of_which_nothing_is_kept_is_not_looked_up_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    (tmp_path / "compiled").mkdir()
    looked_up = []
    monkeypatch.setattr(kept_rounds, "shelf_of", lambda *args: looked_up.append(args) or shelf_of(*args))
    target = new_target("llama")
    for _ in range(2):
        generate(target, prompt(9), drafter_of(target))
    assert len(looked_up) == 1 and compiled_rounds_of(target) is None


def test_a_folder_that_cannot_be_searched_breaks_no_call(monkeypatch):
    """As in a container whose user is not the owner of the home."""

    class Forbidden:
        def __truediv__(self, name):
            return self

        def is_dir(self):
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(kept_rounds, "cache_folder", Forbidden)
    target = new_target("llama")
    assert generate(target, prompt(9), drafter_of(target)) == generate(target, prompt(9))
    assert not kept_rounds.offers_packed_rounds(target)


def test_kept_code_that_cannot_be_loaded_breaks_no_call(tmp_path, monkeypatch, warnings):
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    (tmp_path / "compiled").mkdir()

    def fails(*args):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(kept_rounds, "shelf_of", fails)
    target = new_target("llama")
    assert generate(target, prompt(9), drafter_of(target)) == generate(target, prompt(9))
    assert len(warnings) == 1 and "by zero" in warnings[0]


# A later process: what runs, and the text.
_LATER = """
import json, sys
import torch
from counting_compiler import drafter_of, generate
from tiny_models import new_target, prompt
from hf_falcon.cpu import compiled_code
from hf_falcon.cpu.compiled_rounds import compiled
ran, stock = [], compiled_code.Program.__call__
compiled_code.Program.__call__ = lambda self, tensors: ran.append(1) or stock(self, tensors)
target = new_target("llama").to(getattr(torch, sys.argv[1]))
drafter = drafter_of(target, 3).to(target.dtype)
text = generate(target, prompt(9), drafter)
print(json.dumps({"ran": len(ran), "text": text, "passes": any(r.passes for r in compiled.values())}))
"""


def run_script(script, *arguments, **environment):
    here = Path(__file__).parents[1]
    path = os.pathsep.join([str(here / "support"), str(here.parent / "src")])
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=1200,
    )


def later(dtype):
    done = run_script(_LATER, dtype)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
@needs_owner
@needs_compiler
def test_a_later_process_runs_them(tmp_path, monkeypatch, recwarn):
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "_takes_less", lambda *args: True)
    target, tokens = new_target("llama"), prompt(9)
    drafter, expected = drafter_of(target, 3), generate(target, tokens)
    assert hf_falcon.compile_rounds(target, (4,), drafter=drafter) == [4]
    assert not [str(each.message) for each in recwarn if "treespec" in str(each.message)]
    assert compiled[target].shelf is not None and drafter in compiled[target].passes
    assert generate(target, tokens, drafter) == expected
    # Other processes, and other targets of this one, run it once it is offered.
    other = new_target("llama", seed=3)
    assert kept_rounds.rounds_for(other) is None and not later("float32")[0]["ran"]
    kept_rounds.offer_rounds(target)
    # A program holds no weights.
    other = new_target("llama", seed=3)
    assert kept_rounds.rounds_for(other).sizes == [4]
    assert generate(other, tokens, drafter_of(other, 3)) == generate(other, tokens)
    # Another dtype has no program.
    target.double()
    assert compiled_rounds_of(target) is None

    found, said = later("float32")
    assert found["ran"] and found["passes"] and found["text"] == expected and "kept on this machine" in said
    found, said = later("float64")
    assert not found["ran"] and "dtype differ" in said
    for file in tmp_path.rglob("layer-*.pt2"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    found, said = later("float32")
    assert not found["ran"] and found["text"] == expected and "is not used" in said
    hf_falcon.uncompile_rounds(other)
    assert kept_rounds.rounds_for(other) is None


def test_threads_take_turns_in_a_program():
    """Torch would wait for the thread that is inside, which may wait for this one."""
    program, inside, most = object.__new__(Program), [], []

    def run(tensors):
        inside.append(1)
        time.sleep(0.02)
        most.append(len(inside))
        inside.pop()
        return [tensors]

    program._run, program._has_tuple, program._lock = run, False, threading.Lock()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(program, range(8))) == list(range(8))
    assert most == [1] * 8


_THREADS = """
import threading
import torch
import hf_falcon
from counting_compiler import drafter_of, generate
from hf_falcon.cpu import compiling, packing
from tiny_models import new_target, prompt
compiling._takes_less = lambda *args: True
# A product that calls Python.
packing.layout_of = lambda *args: packing.OneDnnLayout(*args)
target, tokens = new_target("llama"), prompt(9)
drafter, expected = drafter_of(target, 3), generate(target, tokens)
hf_falcon.pack_weights(target)
assert hf_falcon.compile_rounds(target, (4,)) == [4]
texts = []
def run():
    texts.extend(generate(target, tokens, drafter) for _ in range(20))
threads = [threading.Thread(target=run, daemon=True) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join(300) for thread in threads]
assert texts == 60 * [expected], len(texts)
"""


@pytest.mark.slow
@needs_owner
@needs_compiler
def test_threads_share_the_programs_of_a_packed_target(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    run_script(_THREADS)


def test_code_that_was_replaced_is_other_code(monkeypatch):
    target = new_target("llama")
    module = importlib.import_module(type(target).__module__)
    names = [shelf_of(target).name]
    stock = module.LlamaMLP.forward

    def scaled(factor):
        return lambda self, x: stock(self, x) * factor

    for owner, name, value in (
        (module.LlamaMLP, "forward", lambda self, x: stock(self, x) * 0.5),
        (module.LlamaMLP, "forward", lambda x, self: stock(self, x) * 0.5),
        (module.LlamaMLP, "forward", scaled(0.5)),
        (module.LlamaMLP, "forward", scaled(0.25)),
        (module.LlamaMLP, "forward", lambda self, x, factor=0.5: stock(self, x) * factor),
        (module.LlamaMLP, "forward", lambda self, x, factor=0.25: stock(self, x) * factor),
        (module.LlamaMLP, "forward", functools.partialmethod(scaled(0.125))),
        (module.LlamaMLP, "forward", functools.partialmethod(scaled(0.0625))),
        (module, "rotate_half", functools.lru_cache(lambda x: x)),
        (module, "rotate_half", functools.partial(lambda factor, x: factor * x, 3)),
        (module, "rotate_half", functools.partial(lambda factor, x: factor * x, 4)),
        (module, "apply_rotary_pos_emb", lambda q, k, *args, **kwargs: (q, k)),
        (module, "rotate_half", lambda x: -x),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            names.append(shelf_of(target).name)
    attention = AttentionInterface().get("sdpa")
    AttentionInterface.register("sdpa", lambda *args, **kwargs: attention(*args, **kwargs))
    try:
        names.append(shelf_of(target).name)
    finally:
        AttentionInterface.register("sdpa", attention)
    assert len(set(names)) == len(names) == 15 and shelf_of(target).name == names[0]


@pytest.mark.slow
def test_code_is_the_same_in_another_process():
    script = "from hf_falcon.cpu.kept_programs import shelf_of; from tiny_models import new_target; "
    script += "print(shelf_of(new_target('llama')).name)"
    found = {run_script(script, PYTHONHASHSEED=str(seed)).stdout for seed in (1, 2)}
    assert found == {f"{shelf_of(new_target('llama')).name}\n"}


_FREED = """
import gc, weakref
import hf_falcon
from counting_compiler import generate
from hf_falcon.cpu import compiling
from hf_falcon.cpu.compiled_rounds import compiled
from tiny_models import SAME_EVERY_ROUND, new_drafter, new_target, prompt
compiling._takes_less = lambda *args: True
target, tokens = new_target("llama"), prompt(9)
drafter, plain = new_drafter(target).eval(), generate(target, tokens)
drafter.generation_config.update(**{**SAME_EVERY_ROUND, "num_assistant_tokens": 3})
hf_falcon.compile_rounds(target, (4,), drafter=drafter)
assert drafter in compiled[target].passes

class Ends:
    tokens = 0

    def put(self, value):
        # As another thread may.
        self.tokens += 1
        if self.tokens == 6:
            hf_falcon.uncompile_rounds(target)

    def end(self):
        pass

assert generate(target, tokens, drafter, streamer=Ends()) == plain
hf_falcon.compile_rounds(target, (4,), drafter=drafter)
assert generate(target, tokens, drafter) == plain
models = weakref.ref(target), weakref.ref(drafter)
del target, drafter
gc.collect()
assert [each() for each in models] == [None, None]
"""


@pytest.mark.slow
@needs_owner
@needs_compiler
def test_passes_end_with_a_call_or_with_their_models(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    run_script(_FREED)


def test_states_of_attention_and_of_keys():
    """What `to_dict` leaves out; and a configuration that has no order."""
    target = new_target("llama")
    names = {shelf_of(target).name}
    target.config._attn_implementation = "eager"
    names.add(shelf_of(target).name)
    target.config._experts_implementation = "grouped_mm"
    names.add(shelf_of(target).name)
    target.config.labels = {1: "a", "b": 2}
    names.add(shelf_of(target).name)
    assert len(names) == 4


def test_a_program_that_cannot_be_loaded_counts_as_none(shelf, monkeypatch):
    def program(file, description):
        raise RuntimeError("failed to map segment")

    def write(file):
        file.write_bytes(b"package")
        return {}

    monkeypatch.setattr(kept_programs, "Program", program)
    with pytest.raises(CannotBeBuilt, match="failed to map segment"):
        shelf.save("name", write)


def test_kept_code_is_used_again_after_a_block_of_compiled_rounds(monkeypatch):
    monkeypatch.setattr(compiling, "compile_rounds", lambda target, *_: kept_rounds.decline(target))
    target = new_target()
    for declines in (False, True):
        if declines:
            hf_falcon.uncompile_rounds(target)
        with hf_falcon.compiled_rounds(target):
            pass
        assert kept_rounds.has_declined(target) == declines
