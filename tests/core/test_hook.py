# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The hook: what it catches, what it leaves alone, and the candidate generator in transformers' own loop."""

import functools
import importlib
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from quick import one_in
from tiny_models import TARGETS, hooks_of, new_target, prompt, tiny_drafter, tiny_target
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM

import hf_falcon
from hf_falcon import CausalLMDrafter, FalconCandidateGenerator, FalconGenerateOutput, attaching

PACKAGE = Path(hf_falcon.__file__).parent
ASSISTANTS = ("language model", "prompt lookup")


def generate(target, ids, **kwargs):
    return target.generate(ids, **{"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, **kwargs})


def is_hooked() -> bool:
    return hasattr(GenerationMixin._assisted_decoding, "_is_falcon_hook")


def has_statistics(output) -> bool:
    return getattr(output, "draft_statistics", None) is not None


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("assistant", ASSISTANTS)
def test_other_assistants_are_left_alone(assistant, do_sample):
    target, ids = tiny_target("llama"), prompt(12)
    if assistant == "language model":
        torch.manual_seed(5)
        config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1})
        kwargs = {"assistant_model": LlamaForCausalLM(config).eval()}
    else:
        kwargs = {"prompt_lookup_num_tokens": 3}

    def run():
        torch.manual_seed(0)
        return generate(target, ids, do_sample=do_sample, return_dict_in_generate=True, **kwargs)

    assert is_hooked()
    hooked = run()
    hf_falcon.disable()
    assert not is_hooked()
    stock = run()
    assert hooked.sequences.tolist() == stock.sequences.tolist()
    assert type(hooked) is type(stock)
    if not do_sample:
        assert stock.sequences.tolist() == generate(target, ids).tolist()


def test_disable_and_enable():
    target, ids = tiny_target("llama"), prompt(12)
    drafter, stock = tiny_drafter(target), GenerationMixin._assisted_decoding.__wrapped__
    hf_falcon.disable()
    hf_falcon.disable()
    assert GenerationMixin._assisted_decoding is stock
    # Making a drafter does not bring the hook back.
    type(drafter)(drafter.config)
    assert GenerationMixin._assisted_decoding is stock
    with pytest.raises(TypeError, match=r"hf_falcon\.enable\(\)"):
        generate(target, ids, assistant_model=drafter)
    hf_falcon.enable()
    hf_falcon.enable()
    assert GenerationMixin._assisted_decoding.__wrapped__ is stock
    output = generate(target, ids, assistant_model=drafter, return_dict_in_generate=True)
    assert has_statistics(output)
    assert output.sequences.tolist() == generate(target, ids).tolist()


def test_disable_beneath_another_wrapper(monkeypatch):
    """A wrapper that is put over ours copies its attributes, as `functools.wraps` does. It stays, and ours is off."""
    target, ids, calls = new_target("llama"), prompt(12), []
    hf_falcon.attach(target, tiny_drafter(target))
    ours = GenerationMixin.generate

    @functools.wraps(ours)
    def timed(*args, **kwargs):
        calls.append(1)
        return ours(*args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", timed)
    assert has_statistics(generate(target, ids, return_dict_in_generate=True))
    hf_falcon.disable()
    assert GenerationMixin.generate is timed
    assert not has_statistics(generate(target, ids, return_dict_in_generate=True))
    hf_falcon.enable()
    assert GenerationMixin.generate is timed
    assert has_statistics(generate(target, ids, return_dict_in_generate=True))
    assert len(calls) == 3


@pytest.fixture
def second_copy(tmp_path, monkeypatch):
    """The files of the core under another name, as code from the Hub is loaded."""
    name = "copy_of_the_core"
    folder = tmp_path / name
    folder.mkdir()
    for file in (PACKAGE / "core").glob("*.py"):
        shutil.copy(file, folder)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda module: importlib.import_module(f"{name}.{module}")
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[module]


@pytest.mark.parametrize("first", ["package", "copy"])
def test_two_copies_of_the_code_wrap_once(first, second_copy, monkeypatch):
    target, ids = tiny_target("llama"), prompt(12)
    ours, stock = tiny_drafter(target), GenerationMixin._assisted_decoding.__wrapped__
    if first == "copy":
        hf_falcon.disable()
        monkeypatch.setattr(GenerationMixin, "_falcon_hook_is_disabled", False)
    model_class = second_copy("drafter").FalconDraftModel
    config = second_copy("configuration_falcon_draft").FalconDraftConfig(**ours.config.to_diff_dict())
    theirs = model_class(config).eval()
    hf_falcon.enable()
    assert GenerationMixin._assisted_decoding.__wrapped__ is stock
    assert not isinstance(theirs, type(ours))
    expected = generate(target, ids).tolist()
    for drafter, output_class in (
        (ours, FalconGenerateOutput),
        (theirs, second_copy("draft_statistics").FalconGenerateOutput),
    ):
        output = generate(target, ids, assistant_model=drafter, return_dict_in_generate=True)
        assert output.sequences.tolist() == expected
        assert type(output) is output_class
        assert has_statistics(output)
    # Either copy takes the one hook off.
    second_copy("hook").disable()
    assert GenerationMixin._assisted_decoding is stock


def test_copies_share_what_is_disabled_and_how_names_load(second_copy, monkeypatch):
    target, ids, names = tiny_target("llama"), prompt(12), []
    stock, theirs = GenerationMixin._assisted_decoding.__wrapped__, second_copy("hook")
    theirs.disable()
    hf_falcon.FalconDraftModel(tiny_drafter(target).config)
    assert GenerationMixin._assisted_decoding is stock
    # The copy from the Hub wraps; the loader is the package's.
    theirs.enable()
    assert GenerationMixin._assisted_decoding.__globals__ is vars(theirs)
    assert theirs._finders is hf_falcon.core.hook._finders
    drafter = tiny_drafter(target)
    loader = SimpleNamespace(from_pretrained=lambda name, *args: names.append(name) or drafter)
    monkeypatch.setattr(attaching, "AutoDrafter", loader)
    output = generate(target, ids, assistant_model="user/drafter", return_dict_in_generate=True)
    assert has_statistics(output) and names == ["user/drafter"]
    monkeypatch.setattr(theirs, "_finders", [])
    with pytest.raises(ValueError, match="pip install hf-falcon"):
        generate(tiny_target("llama"), ids, assistant_model="user/drafter")
    theirs.disable()
    hf_falcon.enable()
    assert GenerationMixin._assisted_decoding.__wrapped__ is stock


@pytest.mark.parametrize("kind", ["lookup", "language model"])
def test_beam_search_takes_any_drafter(kind):
    """transformers warns that the drafter has no effect."""
    target, ids = tiny_target("llama"), prompt(12)
    drafter = "lookup" if kind == "lookup" else CausalLMDrafter(new_target("llama", vocab_size=48))
    expected = generate(target, ids, num_beams=2)
    assert generate(target, ids, assistant_model=drafter, num_beams=2).tolist() == expected.tolist()


def test_a_tokenizer_that_a_drafter_does_not_read_is_refused():
    with pytest.raises(ValueError, match="`assistant_tokenizer`: a LookupDrafter reads none, so leave it out"):
        generate(tiny_target("llama"), prompt(12), assistant_model="lookup", assistant_tokenizer=object)


def test_threads_share_target_and_drafter():
    target = tiny_target("mistral-window")
    drafter = tiny_drafter(target)
    prompts = [prompt(length, seed=length) for length in (3, 12, 20, 31)]
    expected = [generate(target, ids).tolist() for ids in prompts]
    found: dict[int, list] = {}

    def work(i: int) -> None:
        found[i] = [generate(target, prompts[i], assistant_model=drafter).tolist() for _ in range(4)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [tokens] * 4 for i, tokens in enumerate(expected)}
    assert hooks_of(target) == 0


@pytest.mark.parametrize("name, block_size", one_in(3, TARGETS, [1, 2, 3]))
def test_candidate_generator_in_the_stock_loop(name, block_size, monkeypatch):
    """`get_candidates` gives a chain; transformers verifies it with its own loop."""
    target, ids = tiny_target(name), prompt(12)
    expected = generate(target, ids)
    drafter = tiny_drafter(target, block_size=block_size)
    hf_falcon.disable()
    offered: list[list[int]] = []
    with FalconCandidateGenerator(drafter, target) as generator:
        inner = generator.get_candidates

        def get_candidates(input_ids, *args, **kwargs):
            candidates, logits = inner(input_ids, *args, **kwargs)
            assert candidates[:, : input_ids.shape[1]].tolist() == input_ids.tolist()
            offered.append(candidates[0, input_ids.shape[1] :].tolist())
            return candidates, logits

        monkeypatch.setattr(generator, "get_candidates", get_candidates)
        monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", lambda *args, **kwargs: generator)
        # Only so that transformers takes its assisted loop.
        output = generate(target, ids, prompt_lookup_num_tokens=2)
    assert output.tolist() == expected.tolist()
    # Before the prompt has run there are no features; after that there is always something to propose.
    assert offered[0] == []
    assert all(offered[1:])
    assert len(offered) > 1
    assert hooks_of(target) == 0
