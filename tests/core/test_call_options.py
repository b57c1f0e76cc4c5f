# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The hook passes the drafting options of a `generate` call on, and takes a drafter by its name."""

import gc
import threading
import weakref

import pytest
import torch
from tiny_models import prompt, tiny_drafter, tiny_target
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin, LlamaConfig, LlamaForCausalLM

import hf_falcon
from hf_falcon import DraftOptions, FalconDraftModel, private_names
from hf_falcon.core import hook
from hf_falcon.core.draft_options import set_by_call

# The values that transformers fills in when a call leaves these fields out.
DEFAULTS = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}
# Values that differ from the defaults of `DraftOptions` and of the tiny drafters.
OPTIONS = {
    **DEFAULTS,
    "num_draft_passes": 2,
    "draft_top_k": 3,
    "draft_width": 2,
    "draft_tree": "static",
    "prompt_lookup_num_tokens": 7,
    "context_bonuses": [0.5, 1.0],
    "verification": "speculative",
    "draft_calibration": [0.5],
}


@pytest.fixture
def seen(monkeypatch):
    """The options that each decoding loop got, with the thread that ran it."""
    found: list[tuple[int, DraftOptions]] = []
    run = FalconDraftModel.assisted_decoding

    def assisted_decoding(self, target, *args, generation_config, **kwargs):
        options = DraftOptions.from_generation_config(self.generation_config, generation_config)
        found.append((threading.get_ident(), options))
        return run(self, target, *args, generation_config=generation_config, **kwargs)

    monkeypatch.setattr(FalconDraftModel, "assisted_decoding", assisted_decoding)
    return found


def generate(target, **kwargs):
    return target.generate(prompt(9), **{"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0, **kwargs})


def drafter_with_other_options(target):
    """A drafter none of whose own options is transformers' default."""
    drafter = tiny_drafter(target)
    drafter.generation_config.update(
        num_assistant_tokens=6, num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.1
    )
    return drafter


@pytest.mark.parametrize("name", DEFAULTS)
def test_values_that_equal_the_defaults_of_transformers_count(name, seen):
    target = tiny_target("llama")
    drafter = drafter_with_other_options(target)
    own = DraftOptions.from_generation_config(drafter.generation_config)
    generate(target, assistant_model=drafter)
    generate(target, assistant_model=drafter, **{name: DEFAULTS[name]})
    settings = GenerationConfig(do_sample=False, max_new_tokens=4, pad_token_id=0, **{name: DEFAULTS[name]})
    target.generate(prompt(9), generation_config=settings, assistant_model=drafter)
    left_out, argument, configuration = [options for _, options in seen]
    assert left_out == own
    assert getattr(own, name) != DEFAULTS[name] == getattr(argument, name) == getattr(configuration, name)


@pytest.mark.parametrize("do_sample", [False, True])
def test_all_options_are_arguments_of_generate(do_sample, seen):
    target = tiny_target("llama")
    assert set(OPTIONS) == set(FalconDraftModel.draft_option_names)
    generate(target, assistant_model=tiny_drafter(target), do_sample=do_sample, **OPTIONS)
    assert seen[0][1] == DraftOptions(**OPTIONS)


def test_an_argument_wins_over_the_configurations_and_none_unsets_it(seen, monkeypatch):
    target = tiny_target("llama")
    drafter = drafter_with_other_options(target)
    monkeypatch.setattr(target.generation_config, "num_assistant_tokens", 5)
    settings = GenerationConfig(do_sample=False, max_new_tokens=4, pad_token_id=0, num_assistant_tokens=7)
    for call in ({}, {"generation_config": settings}, {"generation_config": settings, "num_assistant_tokens": 9}):
        target.generate(prompt(9), assistant_model=drafter, **call)
    assert [options.num_assistant_tokens for _, options in seen] == [5, 7, 9]
    target.generate(prompt(9), assistant_model=drafter, generation_config=settings, num_assistant_tokens=None)
    assert seen[-1][1].num_assistant_tokens == 6
    # The user's configuration stays as it was.
    assert settings.num_assistant_tokens == 7
    assert not hasattr(settings, "_falcon_call_settings")


def test_a_configuration_with_all_defaults_filled_in_sets_none_of_them(seen):
    """The pipelines of transformers 5.17 prepare a configuration before they call `generate`."""
    target = tiny_target("llama")
    drafter = drafter_with_other_options(target)
    filled = GenerationConfig()
    filled.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    filled.max_new_tokens, filled.pad_token_id, filled.draft_width = 4, 0, 3
    target.generate(prompt(9), assistant_model=drafter, generation_config=filled)
    own = DraftOptions.from_generation_config(drafter.generation_config)
    assert seen[0][1].num_assistant_tokens == own.num_assistant_tokens
    assert seen[0][1].draft_width == 3


def test_invalid_options_and_typos_are_named():
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    with pytest.raises(ValueError, match="`draft_tree` is 'statik'"):
        generate(target, assistant_model=drafter, draft_tree="statik")
    with pytest.raises(ValueError, match="num_draft_pases"):
        generate(target, assistant_model=drafter, num_draft_pases=2)


def test_without_a_drafter_drafting_options_are_refused_as_ever():
    target = tiny_target("llama")
    assistant = LlamaForCausalLM(LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1})).eval()
    for given in ({}, {"assistant_model": assistant}):
        with pytest.raises(ValueError, match="draft_tree"):
            generate(target, draft_tree="static", **given)


def test_positional_arguments(seen):
    target = tiny_target("llama")
    drafter, settings = tiny_drafter(target), GenerationConfig(do_sample=False, max_new_tokens=4, pad_token_id=0)
    target.generate(prompt(9), settings, None, None, None, None, drafter, draft_width=2)
    assert seen[0][1].draft_width == 2
    with pytest.raises(TypeError, match="assistant_model"):
        target.generate(prompt(9), settings, None, None, None, None, drafter, assistant_model=drafter)


def test_threads_and_nested_calls_keep_their_own_options(seen):
    target = tiny_target("llama")
    drafter, other = tiny_drafter(target), tiny_target("llama")
    nested: list[int] = []

    class CallsGenerate:
        """A processor that generates with other options inside the first call."""

        def __call__(self, input_ids, scores):
            if not nested:
                nested.append(1)
                generate(other, assistant_model=drafter, num_draft_passes=1)
                generate(other, prompt_lookup_num_tokens=2)
            return scores

    threads = []
    found: dict[int, int] = {}

    def work(width: int) -> None:
        generate(target, assistant_model=drafter, draft_width=width)
        found[threading.get_ident()] = width

    for width in (2, 3, 4):
        threads.append(threading.Thread(target=work, args=(width,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    by_thread: dict[int, set[int]] = {}
    for thread_id, options in seen:
        by_thread.setdefault(thread_id, set()).add(options.draft_width)
    assert sorted(width for widths in by_thread.values() for width in widths) == [2, 3, 4]
    seen.clear()
    generate(target, assistant_model=drafter, num_draft_passes=3, logits_processor=[CallsGenerate()])
    generate(target, assistant_model=drafter)
    assert [options.num_draft_passes for _, options in seen] == [3, 1, 4]


def test_settings_of_a_configuration_from_elsewhere():
    config = GenerationConfig(num_assistant_tokens=20, draft_width=3)
    assert set_by_call(config, "num_assistant_tokens") is None
    assert set_by_call(config, "draft_width") == 3
    assert set_by_call(None, "draft_width") is None


# A drafter by name.


@pytest.fixture
def folder(tmp_path):
    tiny_drafter(tiny_target("llama")).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_drafter_by_name(kind, folder, monkeypatch):
    target = tiny_target("llama")
    loaded = []
    load = FalconDraftModel.from_pretrained.__func__

    def from_pretrained(cls, *args, **kwargs):
        loaded.append(args)
        return load(cls, *args, **kwargs)

    monkeypatch.setattr(FalconDraftModel, "from_pretrained", classmethod(from_pretrained))
    expected = generate(target).tolist()
    for _ in range(2):
        output = generate(target, assistant_model=kind(folder), draft_width=2, return_dict_in_generate=True)
        assert output.sequences.tolist() == expected
        assert output.draft_statistics.rounds > 0
    assert len(loaded) == 1
    # A drafter that was saved again is loaded again.
    tiny_drafter(target).save_pretrained(folder)
    generate(target, assistant_model=kind(folder))
    assert len(loaded) == 2


def test_drafter_by_name_gets_dtype_and_device_of_the_target_and_is_freed_with_it(folder, monkeypatch):
    target = LlamaForCausalLM(tiny_target("llama").config).eval().to(torch.bfloat16)
    found, drafters = [], weakref.WeakSet()

    def assisted_decoding(self, target, input_ids, **kwargs):
        found.append((self.dtype, self.device, self.training, self.norm.weight.is_inference()))
        drafters.add(self)
        return input_ids

    monkeypatch.setattr(FalconDraftModel, "assisted_decoding", assisted_decoding)
    with torch.inference_mode():
        for _ in range(2):
            generate(target, assistant_model=str(folder))
    assert found == [(torch.bfloat16, target.device, False, False)] * 2
    assert len(drafters) == 1
    reference = weakref.ref(target)
    del target
    gc.collect()
    assert reference() is None
    assert not drafters


def test_names_of_other_models(tmp_path):
    """A language model drafts; what is not there is transformers' own error."""
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    expected = generate(target)
    assert generate(target, assistant_model=str(tmp_path / "target")).tolist() == expected.tolist()
    with pytest.raises(OSError, match="not there"):
        generate(target, assistant_model=str(tmp_path / "not there"))


def test_causal_lm_points_to_the_class_of_a_drafter(folder):
    with pytest.raises(TypeError, match=r"`FalconDraftModel\.from_pretrained`"):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(TypeError, match=r"`FalconDraftModel\.from_pretrained`"):
        AutoModelForCausalLM.from_config(tiny_drafter(tiny_target("llama")).config)


# Names that a version of transformers lacks.


def test_without_assisted_decoding_the_error_names_it(monkeypatch):
    target = tiny_target("llama")
    monkeypatch.delattr(GenerationMixin, "_assisted_decoding")
    hf_falcon.enable()
    with pytest.raises(RuntimeError, match="has no `_assisted_decoding`.* install a newer hf_falcon"):
        generate(target, assistant_model=tiny_drafter(target))
    assert generate(target).shape == (1, 13)


def test_names_without_a_substitute_give_one_clear_error(monkeypatch):
    target = tiny_target("llama")
    for name, call in (("_prefill", hook.prefill), ("_sample", hook.sample)):
        monkeypatch.delattr(GenerationMixin, name)
        with pytest.raises(RuntimeError, match=f"has no `{name}`"):
            call(target, prompt(3), **({"generation_config": None, "model_kwargs": {}} if name == "_prefill" else {}))


def test_names_with_a_substitute(monkeypatch):
    monkeypatch.delattr(GenerationConfig, "_get_default_generation_params")
    assert hook.default_generation_params() == {}
    assert hook.call_settings(None) is None
    assert int(private_names.pad_token(GenerationConfig(pad_token_id=3))) == 3
    assert private_names.pad_token(GenerationConfig()) is None
    assert hook.is_user_defined(object()) is False
    assert hook.makes_own_cache(object()) is False
    assert hook.attention_implementation(object()) is None
    assert private_names.takes_static_cache(object()) is False
    private_names.leave_past_recording(object())
    assert not private_names.replace_sdpa(None, print)
    assert not private_names.replace_sdpa(print, print)
