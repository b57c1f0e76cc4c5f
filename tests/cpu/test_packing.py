# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Packed weights: the same text with and without a drafter, and nothing left of it afterwards."""

import copy
import threading
import weakref

import pytest
import torch
from drafting_cases import NEW_TOKENS, SAMPLERS, options_of, sampled_cases
from quick import one_in
from tiny_models import TARGETS, prompt, tiny_drafter, tiny_target
from torch import nn
from transformers import AutoModelForCausalLM

import hf_falcon
from hf_falcon.checkpoint_files import was_trained_for, weights_fingerprint
from hf_falcon.core.draft_session import TargetHead
from hf_falcon.cpu.packed_layouts import BlockLayout, OneDnnLayout, PackedWeight, blocks_pay, layout_of
from hf_falcon.cpu.packing import PackedLinear, is_packed

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="packed weights need oneDNN")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(params=DTYPES)
def dtype(request) -> torch.dtype:
    if request.param == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this processor")
    return DTYPES[request.param]


def fresh(name: str = "llama", dtype: torch.dtype = torch.float32, tied: bool = False):
    """A target of the test's own; the cached ones are shared, and training freezes its target."""
    target = copy.deepcopy(tiny_target(name)).to(dtype).requires_grad_(True)
    if tied:
        target.config.tie_word_embeddings = True
        target.tie_weights()
        assert target.lm_head.weight is target.model.embed_tokens.weight
    return target


def snapshot(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal_states(state, expected) -> bool:
    return list(state) == list(expected) and all(
        value.layout == torch.strided and value.dtype == expected[name].dtype and torch.equal(value, expected[name])
        for name, value in state.items()
    )


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", [(32, 48), (7, 33), (16, 64), (576, 192)], ids=str)
def test_products_are_those_of_the_ordinary_layer(shape, bias, dtype):
    torch.manual_seed(0)
    packed = nn.Sequential(nn.Linear(*shape, bias=bias, dtype=dtype)).eval()
    ordinary = copy.deepcopy(packed)
    hf_falcon.pack_weights(packed)
    assert is_laid_out(packed[0])
    with torch.no_grad():
        for rows in [*range(1, 33), 200]:
            states = torch.randn(1, rows, shape[0]).to(dtype)
            result, expected = packed(states), ordinary(states)
            if dtype == torch.bfloat16:
                assert torch.equal(result, expected), rows
            else:
                torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        for states in (torch.randn(shape[0]), torch.randn(2, 3, 4, shape[0]), torch.randn(shape[0], 5).t()):
            result, expected = packed(states.to(dtype)), ordinary(states.to(dtype))
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        assert packed(torch.empty(1, 0, shape[0], dtype=dtype)).shape == (1, 0, shape[1])


def test_a_packed_weight_is_read_like_any_other_and_cannot_be_changed(dtype):
    packed = nn.Sequential(nn.Linear(7, 33, dtype=dtype)).eval()
    ordinary = copy.deepcopy(packed[0].weight.detach())
    hf_falcon.pack_weights(packed)
    weight, rows = packed[0].weight, torch.randn(2, 7).to(dtype)
    assert isinstance(weight, nn.Parameter) and weight.requires_grad
    assert torch.equal(weight[[3, 1]], ordinary[[3, 1]])
    assert torch.equal(weight.float(), ordinary.float())
    assert torch.equal(nn.functional.linear(rows, weight), nn.functional.linear(rows, ordinary))
    assert repr(weight) == f"PackedWeight({ordinary!r})"
    changes = weight.zero_, lambda: weight.mul_(2), lambda: weight.copy_(ordinary), lambda: merge(weight)
    for change in changes:
        with torch.no_grad(), pytest.raises(RuntimeError, match="unpack_weights"):
            change()
    assert torch.equal(weight.to_dense(), ordinary)


def merge(weight):
    """As adapters that are merged set it."""
    weight.data = weight.data + 1


def test_who_freezes_a_packed_layer_freezes_it_for_good():
    """As PEFT does where it adds an adapter."""
    layers = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)).eval()
    hf_falcon.pack_weights(layers)
    layers[0].requires_grad_(False)
    hf_falcon.unpack_weights(layers)
    assert [layer.weight.requires_grad for layer in layers] == [False, True]


def test_float32_without_mkl_is_laid_out_by_onednn(monkeypatch):
    weight = torch.randn(48, 32)
    assert isinstance(layout_of(weight), BlockLayout) is blocks_pay()
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    layout, rows = layout_of(weight), torch.randn(3, 32)
    assert isinstance(layout, OneDnnLayout)
    torch.testing.assert_close(layout.product(rows, None), rows @ weight.T)
    assert torch.equal(layout.to_dense(), weight)


def check_assisted_equals_plain(name: str, do_sample: bool, count: int) -> None:
    """Of the same packed weights: in fp32 they round otherwise than ordinary ones."""
    target = fresh(name)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": do_sample}
    if do_sample:
        settings |= SAMPLERS[list(SAMPLERS)[len(name) % len(SAMPLERS)]]
    for seed, case in enumerate(sampled_cases(f"{name} {do_sample} packed", count)):
        options = (case.block_size, case.num_lstm_layers, case.extra)
        drafter = copy.deepcopy(tiny_drafter(target, *options, **options_of(case)))
        with hf_falcon.packed_weights(target, drafter):
            assert is_packed(target) and is_packed(drafter)
            torch.manual_seed(seed)
            expected = target.generate(prompt(case.prompt_length), **settings)
            torch.manual_seed(seed)
            output = target.generate(prompt(case.prompt_length), assistant_model=drafter, **settings)
        assert output.tolist() == expected.tolist(), (name, case)


@pytest.mark.parametrize("name, do_sample", one_in(2, TARGETS, [False, True]))
def test_assisted_equals_plain(name, do_sample):
    check_assisted_equals_plain(name, do_sample, 1)


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("name", TARGETS)
def test_assisted_equals_plain_for_all(name, do_sample):
    check_assisted_equals_plain(name, do_sample, 12)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_what_is_undone_is_what_was(tied, dtype):
    target = fresh(dtype=dtype, tied=tied)
    target.lm_head.weight.requires_grad_(False)
    target.model.layers[0].mlp.up_proj.weight.grad = torch.ones(48, 32, dtype=dtype)
    state, modules = snapshot(target), {name: type(module) for name, module in target.named_modules()}
    parameters = [(name, parameter, parameter.requires_grad) for name, parameter in target.named_parameters()]
    attributes = {name: set(vars(module)) for name, module in target.named_modules()}
    with hf_falcon.packed_weights(target):
        assert isinstance(target.lm_head, PackedLinear)
    assert equal_states(target.state_dict(), state)
    assert {name: type(module) for name, module in target.named_modules()} == modules
    assert {name: set(vars(module)) for name, module in target.named_modules()} == attributes
    for (name, parameter), (old_name, old, required) in zip(target.named_parameters(), parameters, strict=True):
        assert name == old_name and parameter is old and parameter.requires_grad == required
    assert (target.lm_head.weight is target.model.embed_tokens.weight) == tied
    assert target.model.layers[0].mlp.up_proj.weight.grad.sum() == 48 * 32
    # It can be trained again, also when it was packed in inference mode.
    with torch.inference_mode():
        hf_falcon.pack_weights(target)
        target(prompt(3))
        hf_falcon.unpack_weights(target)
    target(prompt(3), labels=prompt(3)).loss.backward()
    assert target.model.layers[1].mlp.up_proj.weight.grad is not None


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_a_packed_model_is_saved_and_copied_as_an_ordinary_one(tied, dtype, tmp_path):
    target = fresh(dtype=dtype, tied=tied)
    state, fingerprint = snapshot(target), weights_fingerprint(target)
    shapes = [(name, each.shape, each.dtype, each.device) for name, each in target.named_parameters()]
    target.save_pretrained(tmp_path / "ordinary")
    hf_falcon.pack_weights(target)
    assert equal_states(target.state_dict(), state)
    assert [(name, each.shape, each.dtype, each.device) for name, each in target.named_parameters()] == shapes
    assert weights_fingerprint(target) == weights_fingerprint(target) == fingerprint
    # What was read for it is kept, and the dense weight is not.
    assert vars(target.model.layers[0].self_attn.q_proj.weight)["some_values"].untyped_storage().nbytes() < 100
    target.save_pretrained(tmp_path / "packed")
    saved = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("ordinary", "packed")]
    assert saved[0] == saved[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=dtype)
    for other in (copy.deepcopy(target), loaded):
        assert not is_packed(other)
        assert equal_states(other.state_dict(), state)
        assert (other.lm_head.weight is other.model.embed_tokens.weight) == tied
        assert all(each.requires_grad for each in other.parameters())
    assert is_packed(target)


def test_no_weight_is_there_twice():
    target = fresh()
    linears = {name: module for name, module in target.named_modules() if isinstance(module, nn.Linear)}
    storages = {name: weakref.ref(module.weight.untyped_storage()) for name, module in linears.items()}
    hf_falcon.pack_weights(target)
    assert len(storages) == 15
    assert all(storage() is None for storage in storages.values())
    # Only what an embedding needs.
    target = fresh(tied=True)
    hf_falcon.pack_weights(target)
    kept = [
        name for name, module in target.named_modules() if isinstance(module, nn.Linear) and not is_laid_out(module)
    ]
    assert kept == ["lm_head"]
    assert isinstance(target.lm_head, PackedLinear)
    assert target.lm_head.weight is target.get_input_embeddings().weight


def is_laid_out(module: nn.Linear) -> bool:
    return isinstance(module.weight, PackedWeight)


def test_weights_that_share_their_memory_still_do():
    """Tied by their values and not as one parameter; and two layers with one weight."""
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abcd"}).eval()
    model["b"].weight.data = model["a"].weight.data
    model["d"].weight = model["c"].weight
    with hf_falcon.packed_weights(model):
        assert not any(map(is_laid_out, model.values())) and is_packed(model)
    assert model["a"].weight.data_ptr() == model["b"].weight.data_ptr()
    assert model["c"].weight is model["d"].weight


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_new_values_unpack(tied):
    target, other = fresh(tied=tied), fresh("mistral", tied=tied)
    hf_falcon.pack_weights(target)
    assert target.to(torch.float64).dtype == torch.float64
    assert not is_packed(target)
    target = target.float()
    hf_falcon.pack_weights(target)
    target.load_state_dict(other.state_dict())
    assert not is_packed(target)
    assert equal_states(target.state_dict(), other.state_dict())
    with hf_falcon.packed_weights(target):
        target.to(torch.bfloat16)
    assert {each.dtype for each in target.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("what", ["tied", "assigned"])
def test_another_weight_unpacks(what):
    target, expected = fresh(), fresh()
    hf_falcon.pack_weights(target)
    for each in (target, expected):
        if what == "tied":
            each.config.tie_word_embeddings = True
            each.tie_weights()
        else:
            each.lm_head.weight = nn.Parameter(each.get_input_embeddings().weight.detach().clone())
    assert type(target.lm_head) is nn.Linear
    assert (target.lm_head.weight is target.get_input_embeddings().weight) == (what == "tied")
    hf_falcon.unpack_weights(target)
    assert equal_states(target.state_dict(), expected.state_dict())


def test_contexts_nest():
    target, drafter = fresh(), copy.deepcopy(tiny_drafter(tiny_target("llama")))
    with hf_falcon.packed_weights(target):
        with hf_falcon.packed_weights(target, drafter):
            assert is_packed(target) and is_packed(drafter)
        assert is_packed(target) and not is_packed(drafter)
        hf_falcon.pack_weights(target)
    assert not is_packed(target)
    with pytest.raises(KeyError), hf_falcon.packed_weights(target):
        raise KeyError
    assert not is_packed(target)
    # The second cannot be packed: the first is not left so.
    with pytest.raises(ValueError, match="training mode"), hf_falcon.packed_weights(target, drafter.train()):
        pass
    assert not is_packed(target)


def test_hooks_and_references_go_on():
    target = fresh()
    layer, seen = target.model.layers[0].mlp.up_proj, []
    layer.register_forward_hook(lambda module, inputs, output: seen.append(module))
    with hf_falcon.packed_weights(target):
        target.generate(prompt(3), max_new_tokens=2)
    assert seen == [layer, layer] and target.model.layers[0].mlp.up_proj is layer


def test_threads_share_a_packed_target():
    target = fresh()
    drafter = tiny_drafter(target)
    outputs = {}
    with hf_falcon.packed_weights(target):
        expected = {seed: target.generate(prompt(5, seed), do_sample=False, max_new_tokens=20) for seed in range(4)}

        def generate(seed: int) -> None:
            outputs[seed] = target.generate(
                prompt(5, seed), do_sample=False, assistant_model=drafter, max_new_tokens=20
            )

        threads = [threading.Thread(target=generate, args=(seed,)) for seed in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {seed: output.tolist() for seed, output in outputs.items()} == {s: o.tolist() for s, o in expected.items()}


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_a_drafter_borrows_a_packed_head(tied):
    target = fresh(tied=tied)
    drafter = tiny_drafter(target)
    features = torch.randn(1, 3, 32)
    expected = TargetHead(drafter, target).logits(features)
    with hf_falcon.packed_weights(target):
        assert torch.equal(TargetHead(drafter, target).logits(features), expected)


def test_a_packed_target_is_recognised():
    target = fresh()
    drafter = copy.deepcopy(tiny_drafter(target))
    drafter.config.target_fingerprint = weights_fingerprint(target)
    with hf_falcon.packed_weights(target):
        assert was_trained_for(drafter, target)
        drafter.config.target_fingerprint = "another"
        assert not was_trained_for(drafter, target)


def test_gradients_are_refused():
    target = fresh()
    with pytest.raises(ValueError, match="LlamaForCausalLM is in training mode.*eval"):
        hf_falcon.pack_weights(target.train())
    hf_falcon.pack_weights(target.eval())
    with pytest.raises(RuntimeError, match="no_grad.*unpack_weights"):
        target(prompt(3))
    with torch.no_grad():
        target(prompt(3))


def test_other_dtypes_go_through_the_ordinary_product():
    target = fresh()
    tokens = prompt(6)
    with torch.no_grad(), hf_falcon.packed_weights(target):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.isfinite(target(tokens).logits).all()
        with pytest.raises(RuntimeError, match="dtype"):
            target.lm_head(torch.zeros(1, 32, dtype=torch.float64))


def test_what_cannot_be_packed_says_why(monkeypatch):
    def refuses(model, error, words):
        with pytest.raises(error, match=words):
            hf_falcon.pack_weights(model)
        assert not is_packed(model)

    refuses(
        fresh(dtype=torch.float16), ValueError, r"q_proj.weight` is torch.float16.*torch.float32 or torch.bfloat16"
    )
    mixed = fresh()
    mixed.lm_head.double()
    refuses(mixed, ValueError, r"`lm_head.weight` is torch.float64")
    refuses(fresh().to("meta"), ValueError, r"weights on \['meta'\].*CPU")
    refuses(nn.Embedding(3, 4).eval(), ValueError, "Embedding has no ordinary linear layer")
    quantised = fresh()
    quantised.is_quantized = True
    refuses(quantised, ValueError, "LlamaForCausalLM is quantised")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    refuses(fresh(), RuntimeError, "need oneDNN")


def test_only_plain_linear_layers_are_packed():
    class Doubling(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = nn.ModuleDict({"sub": Doubling(4, 4), "own": nn.Linear(4, 4), "plain": nn.Linear(4, 4)}).eval()
    model["own"].forward = lambda input: input
    model["parametrised"] = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)).eval()
    hf_falcon.pack_weights(model)
    assert [name for name, module in model.items() if isinstance(module, PackedLinear)] == ["plain"]
