# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Quantised targets: drafted for, or a reason why not; their heads, and what is said of a quantised copy.

Most layers here are written for these tests and work as the layers of the libraries do. The libraries themselves are
tested where they are installed.
"""

import copy
import gc
import logging

import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from tiny_models import new_drafter, new_target, prompt, random_tokens, tiny_drafter, tiny_target
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

import hf_falcon
from hf_falcon.checkpoint_files import embedding_fingerprint, name_target, weights_fingerprint
from hf_falcon.core import draft_session
from hf_falcon.core.draft_session import TargetHead
from hf_falcon.cpu import skinny_gemm

NEW_TOKENS = 20


class Int8Weight(torch.Tensor):
    """A weight of codes and scales that is a tensor, and supports only `linear`: torchao's, Quanto's."""

    @staticmethod
    def __new__(cls, codes, scales):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)

    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self):
        return ["codes", "scales"], None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            rows, weight, bias = args
            return F.linear(rows, weight.codes.to(rows.dtype) * weight.scales, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scales)
        raise NotImplementedError(operator)


def with_tensor(linear):
    scales = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
    linear.weight = nn.Parameter(Int8Weight((linear.weight / scales).round().to(torch.int8), scales), False)
    return linear


class PackedLinear(nn.Module):
    """A layer whose codes have another shape than its weight: GGUF's, bitsandbytes' in 4 bits."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.scale = linear.weight.detach().abs().max() / 7
        codes = (linear.weight.detach() / self.scale).round().to(torch.int8) + 8
        self.weight = nn.Parameter((codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8), requires_grad=False)

    def dense(self):
        codes = torch.stack((self.weight // 16, self.weight % 16), dim=-1).flatten(1).to(torch.int8) - 8
        return codes * self.scale

    def forward(self, rows):
        return F.linear(rows, self.dense().to(rows.dtype), self.bias)


class OneScale(PackedLinear):
    """All rows of a forward share a scale."""

    def forward(self, rows):
        scale = rows.abs().max() / 127
        return super().forward((rows / scale).round() * scale)


class OwnScales(PackedLinear):
    """Each row has a scale."""

    def forward(self, rows):
        scale = rows.abs().amax(dim=-1, keepdim=True).clamp_min(1e-9) / 127
        return super().forward((rows / scale).round() * scale)


class Float8(PackedLinear):
    """Inputs of 8 bits with an exponent, and a scale for each row."""

    def forward(self, rows):
        scale = rows.abs().amax(dim=-1, keepdim=True) / 448
        return super().forward((rows / scale).to(torch.float8_e4m3fn).to(rows.dtype) * scale)


class SharedOutliers(OwnScales):
    """Columns with a large value in any row are not quantised: LLM.int8."""

    def forward(self, rows):
        outliers = rows.abs().amax(dim=tuple(range(rows.dim() - 1))) > 6
        return super().forward(rows * ~outliers) + F.linear(rows * outliers, self.dense().to(rows.dtype))


class FewRowsRounded(OwnScales):
    """Up to eight rows run another kernel than more."""

    def forward(self, rows):
        return super().forward(rows) if rows[..., 0].numel() <= 8 else PackedLinear.forward(self, rows)


def quantised(make, target=None, head=False):
    """A copy of a target whose linear layers, or also its head, are made by `make`."""
    target = copy.deepcopy(target or tiny_target())
    for name, module in list(target.named_modules()):
        if type(module) is nn.Linear and (head or name != "lm_head"):
            target.set_submodule(name, make(module))
    return target


def check(target, reason=None, warnings_given=None, rows=1, drafter=None):
    """A call gives plain decoding's tokens. It drafts, unless there is a `reason` not to."""
    drafter = drafter or tiny_drafter(tiny_target())
    for do_sample in (False, True):
        outputs = []
        for assistant in ({}, {"assistant_model": drafter}):
            torch.manual_seed(0)
            kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": do_sample, "return_dict_in_generate": True}
            outputs.append(target.generate(random_tokens(rows, 9), **kwargs, **assistant))
        assert outputs[1].sequences.tolist() == outputs[0].sequences.tolist()
        assert (outputs[1].draft_statistics is not None) == (reason is None)
    assert reason is None or reason in warnings_given()[0]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("make", [with_tensor, PackedLinear])
def test_quantised_weights_are_drafted_for(make, rows):
    check(quantised(make, head=True), rows=rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [OneScale, SharedOutliers, FewRowsRounded])
def test_layers_that_mix_rows_decode_plainly(make, dtype, warnings_given):
    check(quantised(make).to(dtype), f"({make.__name__}) give a row another result beside other rows", warnings_given)


class StaticScale(PackedLinear):
    """A scale that was measured once."""

    step = 0.0283

    def forward(self, rows):
        return super().forward((rows / self.step).round().clamp(-128, 127) * self.step)


class CoarseStaticScale(StaticScale):
    step = 0.707


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [OwnScales, Float8, StaticScale, CoarseStaticScale])
def test_layers_that_round_their_inputs_decode_plainly(make, dtype, warnings_given):
    check(quantised(make).to(dtype), f"({make.__name__}) round their inputs", warnings_given)


class FakeQuantised(nn.Linear):
    """Its weight is an ordinary one, as in training for a quantisation."""

    def forward(self, rows):
        scale = rows.abs().amax(dim=-1, keepdim=True).clamp_min(1e-9) / 127
        return super().forward((rows / scale).round() * scale)


class Ordinary(nn.Linear):
    """A layer of one's own that does not take all values."""

    def forward(self, rows):
        assert rows.abs().max() < 1000
        return super().forward(rows)


def with_class(kind):
    def made(linear):
        linear.__class__ = kind
        return linear

    return made


def test_layers_with_ordinary_weights_that_round_their_inputs(warnings_given):
    check(quantised(with_class(FakeQuantised)), "(FakeQuantised) round their inputs", warnings_given)
    check(quantised(with_class(Ordinary)))


def test_one_mixing_layer_is_found(warnings_given):
    target = quantised(PackedLinear)
    target.model.layers[1].mlp.down_proj = OneScale(tiny_target().model.layers[1].mlp.down_proj)
    check(target, "(OneScale)", warnings_given)


@pytest.mark.parametrize("make", [with_tensor, PackedLinear])
@pytest.mark.parametrize("draft_vocab_size", [None, 24])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_quantised_head_is_borrowed_dense(make, draft_vocab_size, has_bias):
    target = copy.deepcopy(tiny_target())
    if has_bias:
        target.lm_head.bias = nn.Parameter(torch.randn(64))
    target = quantised(make, target, head=True)
    drafter = new_drafter(target, draft_vocab_size=draft_vocab_size)
    head, features = TargetHead(drafter, target), torch.randn(5, 32)
    expected = target.lm_head(features[None])[0]
    expected = expected if draft_vocab_size is None else expected[:, drafter.draft_vocab_ids]
    torch.testing.assert_close(head.logits(features), expected)
    assert type(head.linear.weight) is nn.Parameter and head.linear.weight.dtype == torch.float32
    # Once for all calls, and for as long as the target lives.
    calls = []
    target.lm_head.register_forward_hook(lambda *arguments: calls.append(1))
    assert torch.equal(TargetHead(drafter, target).linear.weight, head.linear.weight) and not calls
    count = len(draft_session._dequantised)
    del head, target
    gc.collect()
    assert len(draft_session._dequantised) == count - 1


def test_a_quantised_head_of_another_width_is_refused():
    wide = quantised(PackedLinear, new_target(hidden_size=64), head=True)
    with pytest.raises(ValueError, match="`hidden_size` is 32, but the target has 64"):
        tiny_drafter(tiny_target()).check_target(wide)


@pytest.mark.parametrize("make", [with_tensor, PackedLinear])
def test_a_quantised_copy_is_recognised(make, caplog):
    original, other = tiny_target(), new_target(seed=9)
    drafter = new_drafter(original)
    drafter.config.target_name_or_path = "user/target"

    def warning(target, drafter=drafter):
        caplog.clear()
        logging.getLogger("hf_falcon.core.decoding").warning_once.cache_clear()
        with caplog.at_level(logging.WARNING, logger="hf_falcon.core.decoding"):
            target.generate(prompt(6), assistant_model=drafter, max_new_tokens=4)
        return " ".join(record.getMessage() for record in caplog.records)

    assert warning(original) == ""
    assert warning(quantised(make)).startswith("The target is a quantised copy of user/target")
    assert "exact all the same; fewer" in warning(quantised(make))
    for different in (other, quantised(make, other)):
        assert warning(different).startswith("The target's weights are not those of user/target")
    # A drafter that was trained for the quantised copy, and one from before embeddings were compared.
    name_target(drafter, quantised(make))
    assert warning(quantised(make)) == ""
    old = new_drafter(original)
    old.config.target_embedding_fingerprint = None
    assert "is quantised, so its weights cannot be compared" in warning(quantised(make), old)


def test_fingerprints_of_quantised_weights():
    """They depend on the codes. The embedding has the fingerprint of the original, in both dtypes."""
    original, other = tiny_target(), new_target(seed=9)
    for make in (with_tensor, PackedLinear):
        found = [weights_fingerprint(quantised(make, target)) for target in (original, original, other)]
        assert found[0] == found[1] != found[2] and found[0] != weights_fingerprint(original)
    embeddings = [
        embedding_fingerprint(t) for t in (original, copy.deepcopy(original).bfloat16(), quantised(PackedLinear))
    ]
    assert len(set(embeddings)) == 1 and embeddings[0] != embedding_fingerprint(other)
    assert embedding_fingerprint(copy.deepcopy(original).half()) is None


@pytest.mark.parametrize("make", [with_tensor, PackedLinear])
def test_faster_products_leave_quantised_layers_alone(make):
    target = quantised(make)
    assert {type(layer) for layer in skinny_gemm.linears_of(target)} <= {nn.Linear}
    assert all(layer is target.lm_head for layer in skinny_gemm.linears_of(target))
    layers = {name: (type(m), type(m.weight)) for name, m in target.named_modules() if hasattr(m, "in_features")}
    expected = target.generate(prompt(9), max_new_tokens=NEW_TOKENS, do_sample=False)
    with hf_falcon.packed_weights(target):
        for name, module in target.named_modules():
            if name in layers and name != "lm_head":
                assert (type(module), type(module.weight)) == layers[name]
        found = target.generate(
            prompt(9), assistant_model=tiny_drafter(tiny_target()), max_new_tokens=NEW_TOKENS, do_sample=False
        )
    assert found.tolist() == expected.tolist()


# The libraries.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    saved = tmp_path_factory.mktemp("target")
    new_target(hidden_size=64, intermediate_size=128).save_pretrained(saved)
    return saved


@pytest.fixture(scope="module")
def drafter(folder):
    return new_drafter(AutoModelForCausalLM.from_pretrained(folder))


def load(folder, config, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype).eval()


def torchao_config(name, *arguments, **options):
    quantization = pytest.importorskip("torchao.quantization", reason="an optional package")
    return TorchAoConfig(getattr(quantization, name)(*arguments, **options))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bits", [8, 4])
def test_torchao_weights(bits, rows, folder, drafter, tmp_path):
    """Also from a saved folder, which loads as any other."""
    int4 = {"weight_dtype": torch.int4}
    config = torchao_config("Int8WeightOnlyConfig") if bits == 8 else torchao_config("IntxWeightOnlyConfig", **int4)
    target = load(folder, config)
    target.save_pretrained(tmp_path)
    for found in (target, AutoModelForCausalLM.from_pretrained(tmp_path).eval()):
        check(found, rows=rows, drafter=drafter)


@pytest.mark.parametrize("name", ["Int8DynamicActivationInt8WeightConfig", "Int8DynamicActivationIntxWeightConfig"])
def test_torchao_inputs(name, folder, drafter, warnings_given):
    check(load(folder, torchao_config(name)), "round their inputs", warnings_given, drafter=drafter)


def test_torchao_one_scale(folder, drafter, warnings_given):
    granularity = pytest.importorskip("torchao.quantization", reason="an optional package").PerTensor()
    config = torchao_config("Int8DynamicActivationInt8WeightConfig", granularity=granularity)
    check(load(folder, config), "another result beside other rows", warnings_given, drafter=drafter)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quanto(weights, rows, folder, drafter):
    pytest.importorskip("optimum.quanto", reason="an optional package")
    check(load(folder, QuantoConfig(weights=weights)), rows=rows, drafter=drafter)


@pytest.mark.parametrize("rows", [1, 3])
def test_bitsandbytes_4_bits(rows, folder, drafter):
    """On some processors it computes in bfloat16; this target has no near-ties there."""
    pytest.importorskip("bitsandbytes", reason="an optional package")
    check(load(folder, BitsAndBytesConfig(load_in_4bit=True)), rows=rows, drafter=drafter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitsandbytes_8_bits(dtype, folder, drafter, warnings_given):
    pytest.importorskip("bitsandbytes", reason="an optional package")
    target = load(folder, BitsAndBytesConfig(load_in_8bit=True), dtype)
    check(target, "another result beside other rows", warnings_given, drafter=drafter)


@pytest.mark.parametrize("rounds", [False, True])
def test_gguf(rounds, monkeypatch, warnings_given):
    """
    GGUF left packed, with the layers of transformers and a product in place of its kernels, which need a GPU. They
    multiply up to eight rows by another kernel than more: drafted for unless that one rounds its inputs.
    """
    layers = pytest.importorskip("transformers.integrations.gguf.utils", reason="from transformers 5.23 on")
    kind = GGMLQuantizationType.Q8_0

    def packed(weight):
        return nn.Parameter(torch.from_numpy(quantize(weight.detach().numpy(), kind)), requires_grad=False)

    def make(linear):
        made = layers.GgufLinear(linear.in_features, linear.out_features, int(kind))
        made.weight = packed(linear.weight)
        return made

    def product(weight, rows, kind, size):
        if rounds:
            scale = rows.abs().amax(dim=-1, keepdim=True).clamp_min(1e-9) / 127
            rows = (rows / scale).round() * scale
        return rows @ layers.dequantize_blocks(weight, kind, size, rows.shape[1], rows.dtype).T

    monkeypatch.setattr(layers, "mul_mat_vec", product)
    target = quantised(make, new_target(intermediate_size=64), head=True)
    embedding = layers.GgufEmbedding(64, 32, int(kind))
    embedding.weight = packed(target.get_input_embeddings().weight)
    target.set_input_embeddings(embedding)
    check(target, "another result beside other rows" if rounds else None, warnings_given)
    if not rounds:
        check(target, rows=3)
        assert "cannot be compared" in warnings_given()[0]


@pytest.mark.parametrize("rows", [1, 3])
def test_hqq(rows, folder, drafter):
    hqq = pytest.importorskip("hqq.core.quantize", reason="an optional package")
    config = hqq.BaseQuantizeConfig(nbits=4, group_size=64)

    def make(linear):
        return hqq.HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")

    check(quantised(make, AutoModelForCausalLM.from_pretrained(folder).eval()), rows=rows, drafter=drafter)
