# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""In `row_invariant`, the logits of assisted decoding in 16 bits are those of plain decoding, to the bit."""

import copy
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from counting_compiler import Backend, compiled_by
from quick import one_in
from tiny_models import new_target, prompt, random_tokens, tiny_drafter
from transformers import AttentionInterface, FalconConfig, FalconForCausalLM

import hf_falcon
from hf_falcon.bench.exactness import exactness
from hf_falcon.core.target_parts import CACHE_NAME
from hf_falcon.cpu import compiling, row_invariant
from hf_falcon.cpu.backend import CpuBackend
from hf_falcon.cpu.compact_weights import own_forward
from hf_falcon.cpu.packed_layouts import has_bfloat16_products
from hf_falcon.cpu.packing import PackedLinear
from hf_falcon.cpu.row_invariant import RowInvariantForward, alike_rows, row_invariant_sdpa
from hf_falcon.cpu.uncompiled_sums import leave_sums_uncompiled
from hf_falcon.private_names import sdpa_attention_forward

NAMES = ["llama", "qwen2", "qwen3-window", "mistral-window", "phi3", "gemma3", "gemma4", "olmo2", "cohere2"]
# Inner sizes above 1,024, where oneDNN adds a single row up in another order.
LARGE = {"intermediate_size": 1536}


def low(name: str, dtype: torch.dtype = torch.bfloat16, **changes):
    return new_target(name, **changes).to(dtype)


def generate(target, ids, drafter=None, **settings):
    torch.manual_seed(0)
    settings = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, **settings}
    return target.generate(
        ids, assistant_model=drafter, return_dict_in_generate=True, output_logits=ids.shape[0] == 1, **settings
    )


def differing(one, other) -> list[bool]:
    """For each token, whether its logits differ."""
    assert one.sequences.tolist() == other.sequences.tolist()
    return [not torch.equal(*pair) for pair in zip(one.logits, other.logits, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_equal(name, dtype):
    target, ids = low(name, dtype, **LARGE), prompt(70)
    drafter = tiny_drafter(new_target(name, **LARGE)).to(dtype)
    with hf_falcon.row_invariant(target):
        plain, found = generate(target, ids), generate(target, ids, drafter)
    assert found.draft_statistics.drafted_tokens > 24
    assert not any(differing(plain, found))


def test_without_it_logits_differ():
    """What these tests compare is not equal by itself."""
    target, ids = low("llama", **LARGE), prompt(70)
    drafter = tiny_drafter(target)
    plain, found = generate(target, ids), generate(target, ids, drafter)
    assert any(not torch.equal(*pair) for pair in zip(plain.logits, found.logits))


@pytest.mark.parametrize(
    "settings",
    [{"do_sample": True}, {"repetition_penalty": 1.3}, {"cache_implementation": "static"}],
    ids=["sampled", "processed", "static"],
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_modes(name, settings):
    target, ids = low(name, **LARGE), prompt(40)
    with hf_falcon.row_invariant(target):
        plain, found = generate(target, ids, **settings), generate(target, ids, tiny_drafter(target), **settings)
    assert found.draft_statistics is not None and not any(differing(plain, found))


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window"])
def test_padding(name):
    target, ids = low(name, **LARGE), prompt(40)
    mask = torch.ones_like(ids)
    mask[:, :5], ids[:, :5] = 0, 0
    with hf_falcon.row_invariant(target):
        plain, found = (generate(target, ids, each, attention_mask=mask) for each in (None, tiny_drafter(target)))
    assert found.draft_statistics is not None and not any(differing(plain, found))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_batches(name):
    """Of a batch, the tokens: the prompts' own forward is that of the batch for both."""
    target, ids = low(name, **LARGE), random_tokens(3, 40)
    mask = torch.ones_like(ids)
    mask[0, :9], ids[0, :9] = 0, 0
    with hf_falcon.row_invariant(target):
        plain, found = (generate(target, ids, each, attention_mask=mask) for each in (None, tiny_drafter(target)))
    assert found.draft_statistics is not None and found.sequences.tolist() == plain.sequences.tolist()


@pytest.mark.parametrize("packs_first", [False, True])
def test_packed_weights(packs_first):
    if not has_bfloat16_products():
        pytest.skip("this processor packs no bfloat16")
    target, ids = low("llama", **LARGE), prompt(70)
    contexts = [hf_falcon.row_invariant(target), hf_falcon.packed_weights(target)]
    with ExitStack() as stack:
        for context in reversed(contexts) if packs_first else contexts:
            stack.enter_context(context)
        assert all(type(layer.mlp.down_proj) is PackedLinear for layer in target.model.layers)
        plain, found = generate(target, ids), generate(target, ids, tiny_drafter(target))
        duplicate = copy.deepcopy(target)
    assert not any(differing(plain, found))
    assert all(type(module) is type(mine) for module, mine in zip(duplicate.modules(), target.modules()))
    assert not any("forward" in vars(module) for module in (*duplicate.modules(), *target.modules()))


@pytest.fixture
def kept_if_slower(monkeypatch):
    """Tiny models do not gain; compiled sizes are kept all the same."""
    monkeypatch.setattr(compiling, "_takes_less", lambda *arguments: True)


@pytest.mark.parametrize(("name", "dtype"), one_in(2, ["gemma3", "llama"], [torch.float16, torch.bfloat16]))
def test_rounds_that_are_compiled_inside(name, dtype, kept_if_slower, monkeypatch):
    # As on processors where each product fills up rows.
    monkeypatch.setattr(row_invariant, "alike_rows", lambda *product: alike_rows(*product)[1:])
    target, ids, sizes = low(name, dtype, **LARGE), prompt(20), (1, 4, 13)
    backend = Backend()
    with hf_falcon.row_invariant(target), hf_falcon.compiled_rounds(target, sizes, compiled_by(backend)) as used:
        assert tuple(used) == sizes
        # Layers share their code, with the forwards that fill up rows, too.
        assert backend.compiled <= 2 * len(sizes)
        plain, ran = generate(target, ids), backend.ran
        found = generate(target, ids, tiny_drafter(target))
        assert backend.ran > ran
    assert not any(differing(plain, found))


def test_rounds_that_are_compiled_outside_do_not_run_inside(kept_if_slower):
    target, ids = low("llama", **LARGE), prompt(20)
    with hf_falcon.compiled_rounds(target, (1, 4, 13), compiled_by(Backend())):
        with hf_falcon.row_invariant(target):
            plain, found = generate(target, ids), generate(target, ids, tiny_drafter(target))
            assert CpuBackend().for_target(target, False, False).compiled is None
        assert CpuBackend().for_target(target, False, False).compiled is not None
    assert not any(differing(plain, found))


def test_rounds_that_are_compiled_inside_do_not_run_outside(kept_if_slower):
    target = low("llama", **LARGE)
    with hf_falcon.row_invariant(target):
        hf_falcon.compile_rounds(target, (4,), compiled_by(Backend()))
        assert CpuBackend().for_target(target, False, False).compiled is not None
    assert CpuBackend().for_target(target, False, False).compiled is None
    hf_falcon.uncompile_rounds(target)


def test_code_that_rounds_differently_does_not_run_inside(kept_if_slower):
    def other(graph, inputs):
        def run(*arguments):
            return tuple(each * 1.01 if torch.is_tensor(each) else each for each in graph.forward(*arguments))

        return run

    target = low("llama", **LARGE)
    with hf_falcon.compiled_rounds(target, (4,), compiled_by(other)) as used:
        assert used == [4]
    with hf_falcon.row_invariant(target), hf_falcon.compiled_rounds(target, (4,), compiled_by(other)) as used:
        assert used == []


def test_sums_of_compiled_code_are_torchs_own():
    graph = torch.fx.symbolic_trace(Mean()).graph
    for node in graph.nodes:
        # As the compiler's graph has it.
        if node.op == "call_method":
            node.op, node.target = "call_function", torch.ops.aten.mean.dim
    leave_sums_uncompiled(graph)
    assert not any(node.target is torch.ops.aten.mean.dim for node in graph.nodes)
    states = torch.randn(1, 3, 576)
    states[..., 7] = 3000
    assert torch.equal(torch.fx.GraphModule(torch.nn.Module(), graph)(states), Mean()(states))


class Mean(torch.nn.Module):
    def forward(self, states):
        return states.mean([-1], True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_default_compiler_rounds_as_plain_decoding(name, packed, kept_if_slower):
    target, ids = low(name, **LARGE), prompt(70)
    if packed and not has_bfloat16_products():
        pytest.skip("this processor packs no bfloat16")
    contexts = [hf_falcon.packed_weights(target)] if packed else []
    contexts += [hf_falcon.row_invariant(target), hf_falcon.compiled_rounds(target, (1, 8, 16))]
    with ExitStack() as stack:
        *_, used = [stack.enter_context(context) for context in contexts]
        assert used == [1, 8, 16]
        plain, found = generate(target, ids), generate(target, ids, tiny_drafter(target))
    assert not any(differing(plain, found))


def test_attention_does_not_depend_on_other_rows():
    torch.manual_seed(0)
    target = low("llama")
    module = target.model.layers[0].self_attn
    query = torch.randn(1, 32, 9, 64).bfloat16()
    key, value = torch.randn(2, 1, 16, 309, 64).bfloat16()
    # Node 5 sees 300 slots, and of the tree itself alone.
    mask = torch.full((1, 1, 9, 309), torch.finfo(torch.bfloat16).min).bfloat16()
    mask[..., :300] = 0
    mask[0, 0, range(9), range(300, 309)] = 0
    seen = [*range(300), 305]
    arguments = query[:, :, 5:6], key[:, :, seen], value[:, :, seen], None
    for attention, is_equal in ((row_invariant_sdpa, True), (sdpa_attention_forward, False)):
        with hf_falcon.row_invariant(target):
            together, _ = attention(module, query, key, value, mask)
            alone, weights = attention(module, *arguments)
        assert weights is None and alone.shape == (1, 1, 32, 64) and alone.is_contiguous()
        # With AVX2 torch's own happens to be equal here.
        if is_equal or torch.backends.cpu.get_cpu_capability() != "AVX2":
            assert torch.equal(alone, together[:, 5:6]) == is_equal
        torch.testing.assert_close(alone, together[:, 5:6], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("is_tree", [False, True])
def test_every_module_is_exact(is_tree):
    target, ids = low("llama", **LARGE), prompt(70)
    outside = exactness(target, ids, (1, 3, 8, 17), is_tree)
    with hf_falcon.row_invariant(target):
        inside = exactness(target, ids, (1, 3, 8, 17), is_tree)
    assert all(each.is_exact for each in inside)
    assert outside[0].is_exact and not all(each.is_exact for each in outside)


@pytest.fixture
def in_step(monkeypatch) -> None:
    """Layers run as in a round."""
    monkeypatch.setattr(row_invariant._here, "is_step", True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(1536, 32), (32, 64), (2048, 1), (576, 576), (33, 1536), (257, 512), (31, 64)])
@torch.no_grad()
def test_rows_do_not_depend_on_their_number(sizes, dtype, in_step):
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(*sizes).to(dtype), torch.randn(1, 300, sizes[0]).to(dtype)
    forward = RowInvariantForward(layer, alike_rows(*sizes, dtype))
    expected = forward(rows)
    for count in (1, 2, 3, 5, 40, 100):
        found = torch.cat([forward(part) for part in rows.split(count, dim=1)], dim=1)
        assert found.shape == (1, 300, sizes[1]) and torch.equal(found, expected)


class Products(torch.nn.Linear):
    """Keeps the number of rows of each product."""

    def forward(self, input):
        vars(self).setdefault("rows", []).append(input.numel() // self.in_features)
        return super().forward(input)


@pytest.mark.parametrize(
    ("rows", "products"),
    [(range(4, 9), {3: [4], 4: [4], 8: [8], 9: [8, 4], 16: [8, 8]}), (range(1, 2), {1: [1], 3: [1, 1, 1]})],
    ids=["few", "one"],
)
@torch.no_grad()
def test_few_rows_are_filled_up_and_many_parted(rows, products, in_step):
    layer = Products(6, 5)
    forward = RowInvariantForward(layer, rows)
    for count, expected in products.items():
        states = torch.randn(1, count, 6)
        found = forward(states)
        assert vars(layer).pop("rows") == expected
        torch.testing.assert_close(found, layer(states))
        del vars(layer)["rows"]


@torch.no_grad()
def test_only_prompts_are_not_parted(monkeypatch):
    monkeypatch.setattr(row_invariant, "alike_rows", lambda *args: range(2, 5))
    target = low("llama")
    layer = target.model.layers[0].mlp.up_proj
    layer.__class__ = Products
    with hf_falcon.row_invariant(target):
        cache = target(random_tokens(3, 3)).past_key_values
        assert vars(layer).pop("rows") == [9]
        # A round of two tokens of each row, and a step of plain decoding.
        target(random_tokens(3, 2), **{CACHE_NAME: cache})
        assert vars(layer).pop("rows") == [4, 2]
        target(random_tokens(9, 1))
        assert vars(layer).pop("rows") == [4, 4, 2]
        assert not row_invariant._here.is_step
        with pytest.raises(IndexError):
            target(torch.tensor([[10**6]]))
        assert not row_invariant._here.is_step


@torch.no_grad()
def test_odd_layers(in_step):
    """What a layer of no weights, and an input of another width, gives outside."""
    target = low("llama")
    target.empty, target.none = torch.nn.Linear(4, 0), torch.nn.Linear(0, 4)
    with hf_falcon.row_invariant(target):
        assert not any("forward" in vars(layer) for layer in (target.empty, target.none))
    with pytest.raises(RuntimeError, match="shapes"):
        RowInvariantForward(torch.nn.Linear(8, 4), range(2, 3))(torch.randn(1, 4))


def test_an_attention_of_its_own_is_refused():
    target = FalconForCausalLM(
        FalconConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).bfloat16()
    with pytest.raises(ValueError, match="FalconAttention calls torch's attention itself"):
        with hf_falcon.row_invariant(target):
            pass
    assert not row_invariant.is_row_invariant(target)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_transformers_prompt_lookup(name, in_parts):
    """Its rounds are no rounds of ours. The first may hold the prompt, which is not what plain decoding runs."""
    target, ids = low(name, **LARGE), prompt(20)
    rows = []
    target.register_forward_pre_hook(lambda _, args, named: rows.append(named["input_ids"].shape[1]), with_kwargs=True)
    with hf_falcon.row_invariant(target):
        plain = generate(target, ids, max_new_tokens=120)
        found = generate(target, ids, max_new_tokens=120, prompt_lookup_num_tokens=40)
    assert max(rows) > 32
    assert not any(differing(plain, found))


@pytest.mark.parametrize(
    ("alike", "rows"),
    [
        ([range(1, 257)], range(1, 257)),
        ([range(1, 2), range(2, 33), range(33, 257)], range(2, 33)),
        ([range(1, 9), range(9, 257)], range(10, 257)),
        # Of none there are enough.
        ([range(each, each + 9) for each in range(1, 257, 9)], range(28, 37)),
        ([range(each, each + 1) for each in range(1, 257)], range(1, 2)),
    ],
)
def test_the_smallest_numbers_of_rows_suffice(alike, rows, monkeypatch):
    class_of = {size: number for number, sizes in enumerate(alike) for size in sizes}

    def linear(part, weight):
        return torch.full((part.shape[0], 1), float(class_of[part.shape[0]]))

    monkeypatch.setattr(row_invariant.F, "linear", linear)
    assert alike_rows.__wrapped__(6, 5, torch.float16) == rows


@pytest.fixture
def in_parts(monkeypatch) -> Iterator[None]:
    """More than a few rows are added up in another order, as with AMX."""

    def linear(input, weight, bias=None):
        product = stock(input, weight, bias)
        is_large = input.dtype == torch.bfloat16 and input.numel() // input.shape[-1] > 32
        return product * 1.01 if is_large else product

    stock = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    alike_rows.cache_clear()
    yield
    alike_rows.cache_clear()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_large_trees_and_batches(name, in_parts):
    target, ids = low(name, **LARGE), random_tokens(3, 40)
    drafter = tiny_drafter(target)
    settings = {"num_assistant_tokens": 60, "assistant_confidence_threshold": 0.0}
    with hf_falcon.row_invariant(target):
        for prompts in (ids[:1], ids):
            plain = generate(target, prompts)
            found = generate(target, prompts, drafter, **settings)
            assert found.draft_statistics.drafted_tokens > 100
            assert found.sequences.tolist() == plain.sequences.tolist()


def test_copies_are_ordinary():
    target, ids = low("llama", **LARGE), prompt(70)
    expected = generate(target, ids)
    with hf_falcon.row_invariant(target):
        found = copy.deepcopy(target)
        assert generate(found, ids).sequences.equal(expected.sequences)
        assert not any(differing(generate(found, ids), expected))
        layer = found.model.layers[0].mlp.down_proj
        assert layer.forward == type(layer).forward.__get__(layer)


def test_is_undone():
    target, ids = low("llama", **LARGE), prompt(70)
    before = generate(target, ids)
    with pytest.raises(KeyboardInterrupt), hf_falcon.row_invariant(target):
        with hf_falcon.row_invariant(target):
            assert AttentionInterface()["sdpa"] is row_invariant_sdpa
        assert AttentionInterface()["sdpa"] is row_invariant_sdpa
        raise KeyboardInterrupt
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward
    assert not any("forward" in vars(module) for module in target.modules())
    assert not any(differing(before, generate(target, ids)))


def test_other_targets_and_threads():
    """Other targets run as before; several threads may use one target."""
    target, other, ids = low("llama", **LARGE), low("qwen2"), prompt(70)
    expected, found = generate(other, ids), []
    with hf_falcon.row_invariant(target):
        plain = generate(target, ids)
        assert not any(differing(expected, generate(other, ids)))
        drafters = [None, tiny_drafter(target), None]
        threads = [
            threading.Thread(target=lambda each=each: found.append(generate(target, ids, each))) for each in drafters
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 3 and not any(any(differing(plain, each)) for each in found)


def test_float32_is_unchanged():
    target, ids = new_target("llama"), prompt(9)
    expected = generate(target, ids)
    with hf_falcon.row_invariant(target):
        assert AttentionInterface()["sdpa"] is sdpa_attention_forward
        assert not any(differing(expected, generate(target, ids)))


def test_targets_that_it_does_not_know():
    with (
        pytest.raises(ValueError, match="'eager' attention.*attn_implementation"),
        hf_falcon.row_invariant(low("gemma2")),
    ):
        pass
    with (
        pytest.raises(ValueError, match="'meta', which has no float64"),
        hf_falcon.row_invariant(low("llama").to("meta")),
    ):
        pass


def test_an_attention_of_another_library_stays():
    def own(*args, **kwargs):
        return sdpa_attention_forward(*args, **kwargs)

    target = low("llama")
    AttentionInterface.register("sdpa", own)
    try:
        with pytest.raises(ValueError, match="Another library"), hf_falcon.row_invariant(target):
            pass
        assert AttentionInterface()["sdpa"] is own
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
    with hf_falcon.row_invariant(target):
        pass


def test_calls_in_inference_mode_and_outside_take_turns():
    target, drafter = low("llama", **LARGE), tiny_drafter(new_target("llama", **LARGE)).to(torch.bfloat16)
    with hf_falcon.row_invariant(target):
        with torch.inference_mode():
            generate(target, prompt(70), drafter)
        plain, found = generate(target, prompt(40)), generate(target, prompt(40), drafter)
    assert not any(differing(plain, found))


def test_a_step_with_gradients():
    target, ids = low("llama", **LARGE), prompt(20)
    with hf_falcon.row_invariant(target):
        with torch.no_grad():
            cache = target(ids[:, :-1]).past_key_values
        logits = target(ids[:, -1:], past_key_values=cache).logits
        target(ids[:, -1:], past_key_values=target(ids[:, :-1]).past_key_values)
        logits.float().sum().backward()
    assert target.model.layers[0].self_attn.k_proj.weight.grad.isfinite().all()


def test_what_cannot_be_entered_leaves_nothing(monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    target = low("llama")
    with monkeypatch.context() as patch:
        patch.setattr(row_invariant, "alike_rows", interrupted)
        with pytest.raises(KeyboardInterrupt), hf_falcon.row_invariant(target):
            pass
    assert not row_invariant.is_row_invariant(target)
    assert AttentionInterface().get("sdpa") is sdpa_attention_forward


@pytest.mark.parametrize("first_out", [0, 1])
def test_targets_that_share_modules(first_out, monkeypatch):
    """The modules of both are as inside until both have left, in either order; a part taken out is as it was, too."""
    monkeypatch.setattr(row_invariant, "alike_rows", lambda *args: range(2, 33))
    target = low("llama", **LARGE)
    other = low("llama", **LARGE)
    other.model = target.model
    part = target.model.layers[0].mlp.gate_proj
    contexts = [hf_falcon.row_invariant(each) for each in (target, other)]
    for context in contexts:
        context.__enter__()
    inside = {module: vars(module).get("forward") for module in target.model.modules()}
    contexts.pop(first_out).__exit__(None, None, None)
    assert inside[part] is not None
    assert {module: vars(module).get("forward") for module in target.model.modules()} == inside
    assert row_invariant.is_row_invariant((other, target)[first_out])
    target.model.layers[0].mlp.gate_proj = torch.nn.Linear(part.in_features, part.out_features)
    contexts.pop().__exit__(None, None, None)
    assert not any("forward" in vars(module) for module in (*target.modules(), *other.modules(), part))
    assert not row_invariant._modules and not row_invariant._targets


def test_no_rows_stay_no_rows():
    linear = torch.nn.Linear(8, 4)
    assert RowInvariantForward(linear, range(2, 33))(torch.empty(3, 0, 8)).shape == (3, 0, 4)


def test_a_copy_takes_what_an_ordinary_model_takes(monkeypatch):
    # On some processors no product has to be filled up.
    monkeypatch.setattr(row_invariant, "alike_rows", lambda *args: range(2, 33))
    target = low("llama", **LARGE)
    with hf_falcon.row_invariant(target):
        other = copy.deepcopy(target)
        assert own_forward(target.lm_head) is not None and own_forward(other.lm_head) is None
    with hf_falcon.row_invariant(other):
        assert isinstance(vars(other.lm_head)["forward"], RowInvariantForward)
    # Not every processor packs weights in bfloat16.
    hf_falcon.pack_weights(other.float())
    assert isinstance(other.lm_head, PackedLinear) and "forward" not in vars(other.lm_head)
    hf_falcon.compile_rounds(other, (4,), compiled_by(Backend()))
    hf_falcon.unpack_weights(other)
    # A forward of another layer is none of its own.
    vars(other.lm_head)["forward"] = torch.nn.Linear.forward.__get__(target.lm_head)
    assert own_forward(other.lm_head) is not None


def test_threads_that_have_ended_keep_no_memory(monkeypatch):
    monkeypatch.setattr(row_invariant, "_wide", {})
    numbers = iter(range(100))
    monkeypatch.setattr(row_invariant.threading, "get_ident", lambda: next(numbers))
    with torch.no_grad():
        for _ in range(40):
            assert row_invariant._in_float64(torch.ones(3), "keys").tolist() == [1.0] * 3
    assert len(row_invariant._wide) == 1
