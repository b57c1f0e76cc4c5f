# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Pipelines with a drafter write what they write without one."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import new_target, tiny_drafter, tiny_target, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, TextStreamer, pipeline
from transformers.pipelines import base

import hf_falcon
from hf_falcon import CausalLMDrafter, DraftOptions, FalconDraftModel

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
TEXT = "abcdefghabcd"
CHAT = [{"role": "system", "content": "brief"}, {"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a target with its tokenizer, and of its drafter, which has none."""
    folder = tmp_path_factory.mktemp("saved")
    target = tiny_target("llama")
    target.save_pretrained(folder / "target")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "target")
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    tiny_drafter(target).save_pretrained(folder / "drafter")
    return folder


@pytest.fixture
def rounds(monkeypatch):
    """Calls of the drafter's decoding loop that verified trees."""
    outputs, run = [], FalconDraftModel.assisted_decoding

    def counted(self, target, *args, generation_config, **kwargs):
        generation_config.return_dict_in_generate = True
        output = run(self, target, *args, generation_config=generation_config, **kwargs)
        outputs.append(output.draft_statistics.rounds)
        return output.sequences

    monkeypatch.setattr(FalconDraftModel, "assisted_decoding", counted)
    return outputs


def write(saved, prompt, seed=0, drafter=None, **options):
    """What a pipeline with its defaults, sampling among them, makes of a prompt; and the pipeline."""
    made = pipeline("text-generation", model=str(saved / "target"), assistant_model=drafter, device="cpu")
    torch.manual_seed(seed)
    return made(prompt, max_new_tokens=24, **options), made


@pytest.mark.parametrize("kind", ["name", "object"])
@pytest.mark.parametrize("given", [TEXT, CHAT], ids=["text", "chat"])
@pytest.mark.parametrize("options", [{}, {"do_sample": False}, {"temperature": 1.3, "top_k": 9}], ids=str)
def test_a_pipeline_writes_the_same(saved, rounds, kind, given, options):
    drafter = str(saved / "drafter") if kind == "name" else tiny_drafter(tiny_target("llama"))
    plain, _ = write(saved, given, **options)
    assert not rounds
    found, made = write(saved, given, drafter=drafter, **options)
    assert found == plain
    assert len(rounds) == 1 and rounds[0] > 0
    assert made.assistant_model.is_falcon_drafter and made.assistant_tokenizer is None
    assert made.assistant_model.training is False


def test_defaults_sample(saved):
    first, second = (write(saved, TEXT, seed)[0] for seed in (0, 1))
    assert first != second


def test_a_streamer_gets_the_same(saved, rounds, capsys):
    texts = []
    for drafter in (None, str(saved / "drafter")):
        streamer = TextStreamer(tiny_tokenizer(), skip_prompt=True, skip_special_tokens=True)
        found, _ = write(saved, CHAT, drafter=drafter, streamer=streamer, return_full_text=False)
        texts.append(capsys.readouterr().out)
        assert texts[-1].strip() == found[0]["generated_text"]
    assert texts[0] == texts[1] and len(rounds) == 1


def test_a_drafter_takes_the_dtype_of_the_target(saved):
    made = pipeline(
        "text-generation", model=str(saved / "target"), assistant_model=str(saved / "drafter"), dtype="bfloat16"
    )
    assert made.assistant_model.dtype == made.model.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["name", "object"])
def test_special_tokens_may_differ(saved, rounds, kind):
    """Many set a padding token where a target has none; a drafter reads no special token."""
    target = LlamaForCausalLM.from_pretrained(saved / "target")
    target.config.pad_token_id = 5
    drafter = str(saved / "drafter") if kind == "name" else tiny_drafter(tiny_target("llama"))
    options = {"model": target, "tokenizer": tiny_tokenizer(), "device": "cpu"}
    texts = []
    for assistant in (None, drafter):
        torch.manual_seed(0)
        made = pipeline("text-generation", assistant_model=assistant, **options)
        texts.append(made(TEXT, max_new_tokens=24))
    assert texts[0] == texts[1] and len(rounds) == 1


def test_other_assistants_are_left_alone(saved, rounds):
    target = tiny_target("llama")
    torch.manual_seed(5)
    small = LlamaForCausalLM(LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1})).eval()
    _, made = write(saved, TEXT, drafter=small)
    assert type(made.assistant_model) is LlamaForCausalLM and not rounds
    other = LlamaForCausalLM(LlamaConfig(**{**target.config.to_dict(), "pad_token_id": 5}))
    with pytest.raises(ValueError, match="assistant tokenizer"):
        write(saved, TEXT, drafter=other)


def test_a_disabled_drafter_leaves_names_to_transformers(saved):
    plain, _ = write(saved, TEXT, do_sample=False)
    hf_falcon.disable()
    found, made = write(saved, TEXT, drafter=str(saved / "target"), do_sample=False)
    assert type(made.assistant_model) is LlamaForCausalLM and found == plain


@pytest.mark.parametrize("kind", [str, Path])
def test_a_language_model_without_safetensors_is_left_to_transformers(saved, tmp_path, kind):
    target = tiny_target("llama")
    target.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(target.state_dict(), tmp_path / "pytorch_model.bin")
    tiny_tokenizer().save_pretrained(tmp_path)
    plain, _ = write(saved, TEXT, do_sample=False)
    found, made = write(saved, TEXT, drafter=kind(tmp_path), do_sample=False)
    assert type(made.assistant_model) is LlamaForCausalLM and found == plain


def test_a_language_model_of_another_size_gets_its_tokenizer(saved, tmp_path):
    new_target("llama", vocab_size=72).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    plain, _ = write(saved, TEXT, do_sample=False)
    found, made = write(saved, TEXT, drafter=str(tmp_path), do_sample=False)
    assert type(made.assistant_model) is CausalLMDrafter and found == plain
    assert made.assistant_tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    # One that the drafter was given counts more.
    drafter = CausalLMDrafter(made.assistant_model.model, tiny_tokenizer())
    found, made = write(saved, TEXT, drafter=drafter, do_sample=False)
    assert made.assistant_tokenizer is drafter.tokenizer and found == plain


@pytest.mark.parametrize("first", ["hf_falcon", "pipelines"])
def test_it_does_not_matter_what_is_imported_first(monkeypatch, first):
    stock = base.load_assistant_model.__wrapped__
    assert not hasattr(stock, "_is_falcon_hook")
    if first == "hf_falcon":
        monkeypatch.delitem(sys.modules, base.__name__)
        # An import sets it, too.
        monkeypatch.setattr(transformers.pipelines, "base", base)
        hf_falcon.install_in_pipelines()
        hf_falcon.install_in_pipelines()
        module = importlib.import_module(base.__name__)
        assert module is not base
    else:
        monkeypatch.setattr(base, "load_assistant_model", stock)
        hf_falcon.install_in_pipelines()
        hf_falcon.install_in_pipelines()
        module = base
    found = module.load_assistant_model
    assert hasattr(found, "_is_falcon_hook") and not hasattr(found.__wrapped__, "_is_falcon_hook")
    assert all(type(finder).__module__ != "hf_falcon.pipelines" for finder in sys.meta_path)


@pytest.mark.parametrize("where", ["call", "construction"])
def test_a_pipeline_takes_drafting_options(where, monkeypatch):
    found: list[DraftOptions] = []
    run = FalconDraftModel.assisted_decoding

    def assisted_decoding(self, target, *args, generation_config, **kwargs):
        found.append(DraftOptions.from_generation_config(self.generation_config, generation_config))
        return run(self, target, *args, generation_config=generation_config, **kwargs)

    monkeypatch.setattr(FalconDraftModel, "assisted_decoding", assisted_decoding)
    options = {"verification": "speculative", "draft_tree": "static", "num_draft_passes": 2, "draft_top_k": 3}
    target = tiny_target("llama")
    made = pipeline(
        "text-generation",
        model=target,
        tokenizer=tiny_tokenizer(),
        assistant_model=tiny_drafter(target),
        device="cpu",
        **(options if where == "construction" else {}),
    )
    made("abcdefgh", max_new_tokens=6, **(options if where == "call" else {"num_assistant_tokens": 20}))
    assert {name: getattr(found[0], name) for name in options} == options
    own = DraftOptions.from_generation_config(made.assistant_model.generation_config)
    assert found[0].num_assistant_tokens == (own.num_assistant_tokens if where == "call" else 20)
