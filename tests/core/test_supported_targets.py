# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Targets that are quantised, spread over devices, compiled, tied, padded: drafted for, or a reason why not."""

import copy
from dataclasses import dataclass

import pytest
import torch
from quick import quick
from tiny_models import VOCAB, new_drafter, new_target, prompt, tiny_drafter, tiny_target
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.models.llama import modeling_llama

import hf_falcon

NEW_TOKENS = 24
PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


def check(target, drafts=True, drafter=None):
    """First with the drafter: where layers are compiled, they are compiled for a tree before any plain step."""
    drafter = drafter or tiny_drafter(tiny_target("llama"))
    for do_sample in (False, True):
        outputs = []
        for assistant in ({"assistant_model": drafter}, {}):
            torch.manual_seed(0)
            kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": do_sample, "return_dict_in_generate": True}
            outputs.append(target.generate(prompt(9), **kwargs, **assistant))
        found, expected = outputs
        assert found.sequences.tolist() == expected.sequences.tolist()
        assert (found.draft_statistics is not None) == drafts
        assert not drafts or found.draft_statistics.drafted_tokens > 0


@pytest.mark.filterwarnings("ignore:.*deprecated.*")
def test_dynamic_int8(warnings_given):
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(tiny_target("llama")), {torch.nn.Linear})
    check(quantised, drafts=False)
    assert "another result beside other rows" in warnings_given()[0]
    expected = quantised.generate(prompt(9), max_new_tokens=NEW_TOKENS, do_sample=False)
    hf_falcon.attach(quantised)
    assert quantised.generate(prompt(9), max_new_tokens=NEW_TOKENS, do_sample=False).tolist() == expected.tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    saved = tmp_path_factory.mktemp("target")
    tiny_target("llama").save_pretrained(saved)
    return saved


@pytest.mark.parametrize(
    "on_disk, drafts",
    [((), True), (("model.layers.1",), True), (("lm_head",), True), (("model.embed_tokens",), False), (PARTS, False)],
    ids=str,
)
def test_offloaded(on_disk, drafts, folder, tmp_path, warnings_given):
    places = {part: "disk" if part in on_disk else "cpu" for part in PARTS}
    target = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path)
    assert target.lm_head.weight.is_meta == ("lm_head" in on_disk)
    check(target, drafts)
    assert drafts or "embedding is offloaded" in warnings_given()[0]
    # As before: nothing that was fetched stays.
    assert target.lm_head.weight.is_meta == ("lm_head" in on_disk)


def test_offloaded_head_drafts_alike(folder, tmp_path):
    """The head that is fetched is the head."""
    places = {part: "disk" if part == "lm_head" else "cpu" for part in PARTS}
    drafter = tiny_drafter(tiny_target("llama"))
    found = []
    for target in (
        tiny_target("llama"),
        AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path),
    ):
        output = target.generate(
            prompt(9), assistant_model=drafter, max_new_tokens=40, do_sample=False, return_dict_in_generate=True
        )
        found.append(output.draft_statistics.accepted_by_depth)
    assert found[0] == found[1]


@pytest.mark.parametrize("what", quick(("module", "layers"), ["forward", "module", "decoder", "layers"]))
def test_compiled(what, warnings_given):
    target = copy.deepcopy(tiny_target("llama"))
    if what == "forward":
        target.forward = torch.compile(target.forward, backend="eager")
    else:
        for module in {"module": [target], "decoder": [target.model], "layers": target.model.layers}[what]:
            module.compile(backend="eager")
    check(target, drafts=what == "layers")
    assert what == "layers" or "torch.compile" in warnings_given()[0]


@pytest.mark.parametrize("part", quick(("mlp",), ["self_attn", "mlp"]))
def test_compiled_in_part_after_a_call(part):
    """Code of the user's may not meet what rounds make of linear layers: `torch.compile` fails in it."""
    target = new_target("llama")
    check(target)
    for layer in target.model.layers:
        getattr(layer, part).compile(backend="eager")
    check(target)


class _ScaledTogether(torch.nn.Module):
    """A layer that is quantised dynamically: the scale of its input depends on all tokens of a forward."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, rows):
        scale = rows.abs().max() / 7
        return self.linear((rows / scale).round() * scale)


def test_a_layer_in_the_middle_that_is_quantised_after_a_call(warnings_given):
    target = new_target("llama", num_hidden_layers=3)
    check(target)
    mlp = target.model.layers[1].mlp
    mlp.up_proj = _ScaledTogether(mlp.up_proj)
    check(target, drafts=False)
    assert "one by one" in warnings_given()[-1]


def test_a_forward_of_a_class_that_is_replaced_after_a_call(monkeypatch):
    target = new_target("llama")
    check(target)
    forward = modeling_llama.LlamaMLP.forward

    def steered(self, rows):
        found = forward(self, rows)
        found[:, -1] += 1
        return found

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", steered)
    check(target, drafts=False)


@pytest.mark.slow
def test_compiled_by_inductor():
    target = copy.deepcopy(tiny_target("llama"))
    for layer in target.model.layers:
        layer.compile(dynamic=True)
    check(target)


@pytest.mark.parametrize("tied", [False, True])
def test_padded_vocabulary(tied):
    """Rows of the head that stand for no token, as many models have for the sake of their shapes."""
    config = copy.deepcopy(tiny_target("llama").config)
    config.tie_word_embeddings = tied
    torch.manual_seed(3)
    target = LlamaForCausalLM(config).eval()
    target.resize_token_embeddings(VOCAB + 5, pad_to_multiple_of=16)
    assert target.config.vocab_size == 80
    assert (target.lm_head.weight is target.get_input_embeddings().weight) == tied
    check(target, drafter=tiny_drafter(target))


@pytest.mark.parametrize("layers", [[], [0], [0, 2]])
def test_layers_that_share_keys_and_values(layers):
    """Gemma 4's compute only the last token of a prompt."""
    target = new_target("gemma4", num_kv_shared_layers=1)
    check(target, drafter=new_drafter(target, feature_layers=layers))


def test_a_target_that_returns_more_than_others(warnings_given):
    """As targets that write speech, which have a decoding loop of their own."""

    @dataclass
    class WithSpeech(GenerateDecoderOnlyOutput):
        audio: torch.Tensor | None = None

    class Speaks(LlamaForCausalLM):
        def _sample(self, *args, **kwargs):
            return WithSpeech(**super()._sample(*args, **kwargs), audio=torch.ones(3))

    target = new_target("llama")
    drafter = tiny_drafter(target)
    target.__class__ = Speaks
    found = [
        target.generate(prompt(9), **each, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
        for each in ({}, {"assistant_model": drafter})
    ]
    assert [type(each) for each in found] == [WithSpeech] * 2 and warnings_given()
    assert found[0].sequences.tolist() == found[1].sequences.tolist() and found[1].audio.sum() == 3
