# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Compiled rounds: the text of plain decoding, by compiled code, in rounds only, and nothing left behind."""

import copy
import gc
import itertools
import shutil
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from counting_compiler import Backend, compiled_by, drafter_of, generate, slow, wrong
from quick import one_in
from tiny_models import TARGETS, new_target, prompt, tiny_drafter, tiny_target
from torch import nn
from transformers import AttentionInterface, CompileConfig, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama
from transformers.utils import output_capturing

import hf_falcon
from hf_falcon.core.target_parts import CACHE_NAME
from hf_falcon.core.target_run import TargetRun
from hf_falcon.cpu import compiled_rounds, compiling, packed_layouts
from hf_falcon.cpu.compiled_code import BuiltCode
from hf_falcon.cpu.compiled_rounds import CompiledRounds, compiled, compiled_rounds_of
from hf_falcon.cpu.kept_programs import Shelf
from hf_falcon.cpu.packing import is_packed

SIZES = (1, 4, 8)
# That of the trees of `drafter_of`, for tests which are about something else.
ONE = (8,)
# How many kinds of layers targets have, which share no code. Others have one.
KINDS = {"gemma4": 2 if CACHE_NAME == "past_key_values" else 3, "cohere2": 2, "modernbert": 2}
# Of the quick run, with whether the decoder is compiled as a whole: both ways, and layers of one kind and of two.
QUICK = (("llama", False), ("cohere2", True), ("modernbert", False))


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture(autouse=True)
def kept_if_slower(monkeypatch):
    """Tiny models do not gain; sizes are kept all the same, until a test undoes that."""
    original = compiling._is_faster
    monkeypatch.setattr(compiling, "_is_faster", lambda *arguments: [original(*arguments)] != [])


@pytest.fixture
def target():
    """A target of one's own: what was compiled for it is gone with it."""
    return copy.deepcopy(tiny_target("llama"))


@pytest.mark.parametrize("do_sample", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["greedy", "sampling"])
@pytest.mark.parametrize(
    "name, whole",
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in itertools.product(TARGETS, [False, True])
    ],
)
def test_text_equals_plain(name, whole, do_sample, backend, monkeypatch):
    if whole:
        monkeypatch.setattr(compiled_rounds, "_pays_as_a_whole", lambda *arguments: True)
    target = copy.deepcopy(tiny_target(name))
    drafter = drafter_of(target)
    # All layers of a kind share their code.
    compiled = len(SIZES) * (1 if whole else KINDS.get(name, 1))
    with hf_falcon.compiled_rounds(target, SIZES, compiled_by(backend)) as sizes:
        assert tuple(sizes) == SIZES and backend.compiled == compiled
        for length in (1, 9, 30):
            tokens, before = prompt(length, length), backend.ran
            found = generate(target, tokens, drafter, do_sample=do_sample)
            assert found == generate(target, tokens, do_sample=do_sample)
            assert backend.ran > before
    # Whatever the lengths were.
    assert backend.compiled == compiled and set(backend.rows) == set(SIZES)


@pytest.mark.parametrize("case", ["small", "large", "float32", "no products in bfloat16"])
def test_small_decoders_in_bfloat16_are_compiled_as_a_whole(case, backend, monkeypatch):
    target = copy.deepcopy(tiny_target("cohere2"))
    if case == "large":
        monkeypatch.setattr(compiled_rounds, "_SMALL", 10_000)
    has_products = case != "no products in bfloat16"
    monkeypatch.setattr(compiled_rounds, "has_bfloat16_products", lambda: has_products)
    # With compact weights the LM head would be compiled, too.
    monkeypatch.setattr("hf_falcon.cpu.compact_weights.has_bfloat16_products", lambda: True)
    target.to(torch.float32 if case == "float32" else torch.bfloat16)
    hf_falcon.compile_rounds(target, (4,), compiled_by(backend))
    # By themselves, its layers are of two kinds.
    assert backend.compiled == (1 if case == "small" else 2)


def test_trees_are_filled_up_and_larger_ones_run_as_they_are(target, backend):
    tokens = prompt(9)
    with hf_falcon.compiled_rounds(target, (6,), compiled_by(backend)):
        backend.rows.clear()
        for nodes in (3, 5, 6):
            assert generate(target, tokens, drafter_of(target, nodes)) == generate(target, tokens)
            assert set(backend.rows) == ({6} if nodes < 6 else set())
            backend.rows.clear()
        # A single token is no tree.
        generate(target, tokens, drafter_of(target), max_new_tokens=2)
        assert not backend.rows


@pytest.mark.parametrize("name", ["qwen2-mixed", "mistral-window"])
def test_padding_takes_no_rows_of_a_window(name, backend):
    target = copy.deepcopy(tiny_target(name))
    with hf_falcon.compiled_rounds(target, (8,), compiled_by(backend)):
        for nodes, length in ((3, 9), (5, 30)):
            tokens = prompt(length, length)
            assert generate(target, tokens, drafter_of(target, nodes)) == generate(target, tokens)


def test_the_cache_is_plain_decodings(target, backend):
    tokens, drafter = prompt(9), drafter_of(target)
    caches = DynamicCache(config=target.config), DynamicCache(config=target.config)
    generate(target, tokens, past_key_values=caches[0])
    with hf_falcon.compiled_rounds(target, ONE, compiled_by(backend)):
        generate(target, tokens, drafter, past_key_values=caches[1])
    for expected, found in zip(caches[0].layers, caches[1].layers):
        assert type(found) is type(expected)
        torch.testing.assert_close(found.keys, expected.keys)
        torch.testing.assert_close(found.values, expected.values)


def test_nothing_is_left_behind(target, backend):
    tokens, drafter = prompt(9), drafter_of(target)
    before = [set(vars(module)) for module in target.modules()]
    with hf_falcon.compiled_rounds(target, ONE, compiled_by(backend)):
        generate(target, tokens, drafter)
        assert [set(vars(module)) for module in target.modules()] == before
    ran = backend.ran
    generate(target, tokens, drafter)
    assert backend.ran == ran and compiled_rounds_of(target) is None
    hf_falcon.uncompile_rounds(target)


@pytest.mark.slow
def test_compiled_once(target, backend):
    config = compiled_by(backend)
    for _ in range(2):
        with hf_falcon.compiled_rounds(target, SIZES, config):
            pass
    hf_falcon.compile_rounds(target, SIZES, config)
    assert backend.compiled == len(SIZES)
    hf_falcon.compile_rounds(target, (*SIZES, 12), config)
    # Those of before are still there.
    assert backend.compiled == len(SIZES) + 1


def test_a_target_goes_with_what_was_compiled_for_it(backend):
    target = copy.deepcopy(tiny_target("llama"))
    hf_falcon.compile_rounds(target, (4,), compiled_by(backend))
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_weights(dtype, backend):
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor lacks what oneDNN needs for bfloat16")
    target = copy.deepcopy(tiny_target("llama")).to(dtype)
    drafter, tokens, config = drafter_of(target).to(dtype), prompt(9), compiled_by(backend)
    texts = []
    for _ in range(2):
        with hf_falcon.packed_weights(target, drafter):
            expected = generate(target, tokens, drafter)
            with hf_falcon.compiled_rounds(target, SIZES, config):
                ran = backend.ran
                texts.append(generate(target, tokens, drafter))
                assert backend.ran > ran
        # Packed anew, they are where compiled code looks for them.
        assert not is_packed(target) and backend.compiled == len(SIZES)
    assert texts == [expected, expected]


@pytest.mark.slow
def test_oneDNN_weights(backend, monkeypatch):
    monkeypatch.setattr("hf_falcon.cpu.packed_layouts.blocks_pay", lambda: False)
    test_packed_weights(torch.float32, backend)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="packed weights need oneDNN")
def test_weights_are_told_apart_by_number(tmp_path):
    """Copies, too."""
    first = torch.nn.Linear(8, 16, bias=False).eval()
    second = copy.deepcopy(first)
    second.weight.data.mul_(2.0)
    layouts = [packed_layouts.OneDnnLayout(each.weight) for each in (first, second, first)]
    numbers = [layout.tensors[0] for layout in layouts]
    assert numbers[0] == numbers[2] != numbers[1]
    states = torch.randn(2, 8)
    found = [packed_layouts.product_operator()(states, None, number, 16) for number in numbers]
    with torch.no_grad():
        for product, linear in zip(found, (first, second, first)):
            torch.testing.assert_close(product, linear(states))


@pytest.mark.slow
def test_every_dtype_has_its_rounding(target, backend):
    assert tuple(hf_falcon.compile_rounds(target.double(), SIZES, compiled_by(backend))) == SIZES


@pytest.mark.slow
def test_what_was_not_compiled_for_runs_as_it_is(target, backend):
    tokens, drafter = prompt(9), drafter_of(target)
    hf_falcon.compile_rounds(target, SIZES, compiled_by(backend))
    compiled, ran = backend.compiled, backend.ran
    target.double()
    drafter.double()
    assert generate(target, tokens, drafter) == generate(target, tokens)
    assert (backend.compiled, backend.ran) == (compiled, ran)


def test_hooks_are_called(target, backend):
    tokens, drafter, rows = prompt(9), drafter_of(target), []
    hf_falcon.compile_rounds(target, ONE, compiled_by(backend))
    ran = backend.ran
    handle = target.model.layers[0].register_forward_hook(lambda module, inputs, output: rows.append(len(output[0])))
    assert generate(target, tokens, drafter) == generate(target, tokens)
    assert rows and backend.ran == ran
    handle.remove()
    generate(target, tokens, drafter)
    assert backend.ran > ran


@pytest.mark.parametrize("name, first", one_in(2, ["hidden_states", "attentions"], ["compiled", "outputs"]))
def test_outputs_of_layers(target, backend, name, first):
    """They run uncompiled, and leave hooks of transformers' that stand in nobody's way."""
    target.set_attn_implementation("eager")
    tokens, drafter = prompt(9), drafter_of(target)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, f"output_{name}": True}
    if first == "outputs":
        target.generate(tokens, **options)
    hf_falcon.compile_rounds(target, ONE, compiled_by(backend))
    ran = backend.ran
    found = target.generate(tokens, assistant_model=drafter, **options)[name]
    torch.testing.assert_close(found, target.generate(tokens, **options)[name])
    assert backend.ran == ran
    assert generate(target, tokens, drafter) == generate(target, tokens)
    assert backend.ran > ran


def test_drafters_that_read_layers_have_uncompiled_rounds(target, backend):
    tokens, drafter = prompt(9), tiny_drafter(target, extra="layers")
    hf_falcon.compile_rounds(target, ONE, compiled_by(backend))
    ran = backend.ran
    assert generate(target, tokens, drafter) == generate(target, tokens)
    assert backend.ran == ran
    arguments = target, tokens, target.generation_config, {CACHE_NAME: None}
    assert TargetRun(*arguments).acceleration.sizes == ONE and TargetRun(*arguments, [0]).acceleration.sizes == ()


@pytest.mark.slow
def test_models_that_are_loaded_later_change_nothing(target, backend, request):
    hf_falcon.compile_rounds(target, SIZES, compiled_by(backend))
    ran, drafter = backend.ran, drafter_of(target)
    # A table of transformers that every class of models adds to.
    table = output_capturing._CAN_RECORD_REGISTRY
    table.update(another={})
    request.addfinalizer(lambda: table.pop("another"))
    assert generate(target, prompt(9), drafter) == generate(target, prompt(9))
    assert backend.ran > ran and backend.compiled == len(SIZES)


def test_other_threads_run_what_is_not_compiled(target, backend):
    tokens, found = prompt(9), []
    expected = target(tokens).logits
    hf_falcon.compile_rounds(target, ONE, compiled_by(backend))
    run = compiling._run(target, 20)
    ran = backend.ran
    with compiled_rounds_of(target).round(run.cache, [torch.zeros(1, 1, 4, 24)]):
        other = threading.Thread(target=lambda: found.append(target(tokens).logits))
        other.start()
        other.join()
        # Of this thread a forward with another cache, or with none.
        found.append(target(tokens).logits)
    assert backend.ran == ran and "forward" not in vars(target.model)
    for logits in found:
        torch.testing.assert_close(logits, expected)


def test_threads_share_it(target, backend):
    hf_falcon.compile_rounds(target, ONE, compiled_by(backend))
    texts = {}

    def write(seed):
        texts[seed] = generate(target, prompt(9, seed), drafter_of(target))

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "forward" not in vars(target.model)
    for seed, text in texts.items():
        assert text == generate(target, prompt(9, seed))


def test_batches_run_as_they_are(target, backend):
    tokens, drafter = torch.cat([prompt(9, seed) for seed in range(2)]), drafter_of(target)
    hf_falcon.compile_rounds(target, ONE, compiled_by(backend))
    ran = backend.ran
    assert generate(target, tokens, drafter) == generate(target, tokens)
    assert backend.ran == ran


def test_a_failure_in_a_round_leaves_the_rest(target, backend, monkeypatch):
    tokens, drafter = prompt(9), drafter_of(target)
    hf_falcon.compile_rounds(target, ONE, compiled_by(backend))
    cache, rounds = DynamicCache(config=target.config), compiled_rounds_of(target)
    forward, left = rounds._forward, [3]

    def failing(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise KeyError("something")
        return forward(*args, **kwargs)

    monkeypatch.setitem(rounds._forwards, target.model, failing)
    with pytest.raises(KeyError, match="something"):
        generate(target, tokens, drafter, past_key_values=cache)
    assert "forward" not in vars(target.model) and type(cache.layers[0]).__name__ == "DynamicLayer"
    monkeypatch.undo()
    text = generate(target, tokens)
    assert text[0][: cache.get_seq_length()] == generate(target, tokens, drafter)[0][: cache.get_seq_length()]
    lengths = {layer.keys.shape[-2] for layer in cache.layers}
    assert lengths == {cache.get_seq_length()}


def test_only_what_is_faster_is_used(target, monkeypatch):
    monkeypatch.undo()

    tokens, drafter = prompt(9), drafter_of(target)
    assert hf_falcon.compile_rounds(target, (4, 8), compiled_by(slow)) == []
    assert generate(target, tokens, drafter) == generate(target, tokens)


def test_other_values_are_an_error(target):
    with pytest.raises(RuntimeError, match="rounds of 4 tokens give other values.*without `compile_rounds`"):
        hf_falcon.compile_rounds(target, (4,), compiled_by(wrong))
    assert compiled_rounds_of(target) is None and "forward" not in vars(target.model)


def test_a_compiler_that_fails_is_an_error(target):
    def broken(graph, inputs):
        raise OSError("no C++ compiler")

    with pytest.raises(RuntimeError, match="could not compile rounds of 4 tokens: .*no C\\+\\+ compiler"):
        hf_falcon.compile_rounds(target, (4,), compiled_by(broken))
    assert compiled_rounds_of(target) is None and "forward" not in vars(target.model)
    tokens = prompt(9)
    assert generate(target, tokens, drafter_of(target)) == generate(target, tokens)


@pytest.mark.parametrize("sizes", [(), (0,), (4, True), (2.0,), (5000,)], ids=str)
def test_sizes_that_are_none(target, sizes):
    with pytest.raises(ValueError, match="`sizes` is .*: give some integers"):
        hf_falcon.compile_rounds(target, sizes)


def test_a_layer_with_another_forward(target, backend):
    """As adapters and offloading give it."""
    tokens, drafter, layer = prompt(9), drafter_of(target), target.model.layers[1]
    hf_falcon.compile_rounds(target, ONE, compiled_by(backend))
    ran, original = backend.ran, layer.forward
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs) * 0.9
    assert generate(target, tokens, drafter) == generate(target, tokens)
    assert backend.ran == ran
    with pytest.raises(ValueError, match="its layers have hooks, or forwards of their own"):
        hf_falcon.compile_rounds(target, ONE, compiled_by(backend))


@pytest.mark.parametrize("part", ["layer", "head"])
def test_a_target_with_adapters_runs_uncompiled(target, backend, part):
    """A round could begin with them, and another one after they were switched off."""
    rounds = compiled[target] = CompiledRounds(target, CompileConfig(), Shelf({"config": []}))
    assert rounds.are_exact
    linear = target.model.layers[1].mlp.up_proj if part == "layer" else target.lm_head
    # As PEFT's layers have it.
    linear._active_adapter = ["default"]
    assert not rounds.are_exact and compiled_rounds_of(target) is None
    with pytest.raises(ValueError, match="as from adapters"):
        hf_falcon.compile_rounds(target, (4,), compiled_by(backend))
    assert not backend.compiled


@pytest.mark.parametrize("part", ["mlp", "head"])
def test_layers_that_are_compiled_in_part_run_as_they_are(target, backend, part):
    rounds = compiled[target] = CompiledRounds(target, CompileConfig(), Shelf({"config": []}))
    assert rounds.are_exact
    (target.model.layers[1].mlp if part == "mlp" else target.lm_head).compile(backend="eager")
    assert not rounds.are_exact and compiled_rounds_of(target) is None
    with pytest.raises(ValueError, match="or are compiled already"):
        hf_falcon.compile_rounds(target, (4,), compiled_by(backend))
    assert not backend.compiled


def test_targets_that_cannot_be_compiled(target):
    with pytest.raises(ValueError, match="rounds of LlamaModel cannot be compiled: it has no LM head .*ForCausalLM"):
        hf_falcon.compile_rounds(target.model)
    with pytest.raises(ValueError, match="rounds of LlamaForCausalLM cannot be compiled: it is in training mode"):
        hf_falcon.compile_rounds(target.train())
    target.eval()
    target.forward = torch.compile(target.forward)
    with pytest.raises(ValueError, match="cannot be compiled: the target is compiled by `torch.compile`"):
        hf_falcon.compile_rounds(target)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-neox"])
def test_text_equals_plain_by_the_default_compiler(name, packed):
    target = copy.deepcopy(tiny_target(name))
    drafter = drafter_of(target)
    if packed:
        hf_falcon.pack_weights(target)
    with hf_falcon.compiled_rounds(target, (1, 8)):
        for length in (1, 9, 30):
            assert generate(target, prompt(length), drafter) == generate(target, prompt(length))


def test_layers_that_have_changed_run_uncompiled_until_they_are_compiled():
    """Programs know their layers' tensors, and not their attributes."""
    target = new_target("llama")
    rounds = CompiledRounds(target, CompileConfig(), Shelf({"config": []}))
    assert rounds.are_exact and rounds.bind()
    target.model.layers[0].self_attn.scaling *= 0.5
    assert not rounds.bind()
    target.model.layers[0].self_attn.scaling *= 2
    assert rounds.bind()
    target.model.layers[1].mlp.act_fn = nn.ReLU()
    assert not rounds.bind()
    target = new_target("llama", num_hidden_layers=3)
    rounds = CompiledRounds(target, CompileConfig(), Shelf({"config": []}))
    del target.model.layers[1]
    assert not rounds.are_exact


@pytest.mark.parametrize("what", ["class", "function", "attention", "hook"])
def test_rounds_run_uncompiled_while_a_function_is_replaced(monkeypatch, what):
    """As libraries of kernels replace functions of all models."""
    target = new_target("llama")
    rounds = CompiledRounds(target, CompileConfig(), Shelf({"config": []}))
    assert rounds.are_exact
    if what == "class":
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, rows: self.down_proj(self.up_proj(rows)))
    elif what == "function":
        monkeypatch.setattr(modeling_llama, "rotate_half", lambda rows: rows)
    elif what == "attention":
        AttentionInterface.register("sdpa", lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs))
    else:
        hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert not rounds.are_exact
    finally:
        monkeypatch.undo()
        AttentionInterface.register("sdpa", sdpa_attention_forward)
        if what == "hook":
            hook.remove()
    assert rounds.are_exact


def test_two_targets_on_one_decoder():
    """The round of one may end while that of the other runs."""
    targets = new_target("llama"), new_target("llama", seed=5)
    targets[1].model = targets[0].model
    rounds = [CompiledRounds(target, CompileConfig()) for target in targets]
    for each in (*rounds, *rounds):
        each._enter()
    for each in (*rounds, *rounds):
        each._leave()
    assert not any("forward" in vars(module) for target in targets for module in target.modules())


def test_another_attribute_is_compiled_for(backend):
    target, tokens = new_target("llama"), prompt(9)
    for _ in range(2):
        hf_falcon.compile_rounds(target, (4,), compiled_by(backend))
    before = backend.compiled
    for layer in target.model.layers:
        layer.self_attn.scaling *= 0.5
    hf_falcon.compile_rounds(target, (4,), compiled_by(backend))
    assert backend.compiled == 2 * before
    assert generate(target, tokens, drafter_of(target)) == generate(target, tokens)


def test_no_weight_stays_when_rounds_are_uncompiled(backend):
    target = new_target("llama")
    hf_falcon.compile_rounds(target, (4,), compiled_by(backend))
    rounds = compiled[target]
    linear = target.model.layers[0].mlp.up_proj
    rounds._weights._weights = {linear: SimpleNamespace(dtype=torch.float32, is_of=lambda weight: True)}
    with rounds._weights.lent():
        assert "lent" in vars(linear)
    code = BuiltCode(lambda *args: None, Shelf({"config": []}), "layer")
    code._bound = {linear: (None, [linear.weight])}
    rounds._compiled[4] = code
    hf_falcon.uncompile_rounds(target)
    assert not rounds._weights._weights and not rounds._weights._lent and not code._bound


def test_a_layer_in_another_ones_place_is_compiled_for(backend):
    target, tokens = new_target("llama"), prompt(9)
    hf_falcon.compile_rounds(target, (4,), compiled_by(backend))
    target.model.layers[0] = copy.deepcopy(target.model.layers[0])
    assert compiled_rounds_of(target) is None
    assert hf_falcon.compile_rounds(target, (4,), compiled_by(backend)) == [4]
    assert generate(target, tokens, drafter_of(target)) == generate(target, tokens)


def test_hooks_of_other_threads_stay_while_rounds_are_compiled(target):
    seen = []
    handle = target.model.register_forward_hook(lambda *_: seen.append(1))
    with compiled_rounds._without_hooks(target.model):
        target(prompt(3))
        handle.remove()
    assert seen == [1] and not target.model._forward_hooks
