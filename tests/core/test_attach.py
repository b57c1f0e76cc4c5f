# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""An attached drafter: calls that it drafts for, calls that run as without it, and what it is attached to."""

import concurrent.futures
import copy
import gc
import importlib.util
import io
import logging
import re
import threading
import time
import types
import weakref

import pytest
import torch
from tiny_models import new_drafter, new_target, prompt, tiny_drafter, tiny_target, tiny_tokenizer
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    TextStreamer,
    pipeline,
)
from transformers.utils import logging as transformers_logging
from utilities import edit, load_model

import hf_falcon
from hf_falcon import FalconDraftModel, attaching
from hf_falcon.core import hook
from hf_falcon.learning.learner import learner_of

SAMPLED = {"do_sample": True, "top_k": 0}
DICT = {"return_dict_in_generate": True}


@pytest.fixture
def drafted(monkeypatch):
    """The targets and the options of the calls that a drafter decoded."""
    found: list[tuple] = []
    run = FalconDraftModel.assisted_decoding

    def assisted_decoding(self, target, *args, **kwargs):
        output = run(self, target, *args, **kwargs)
        found.append((target, self))
        return output

    monkeypatch.setattr(FalconDraftModel, "assisted_decoding", assisted_decoding)
    return found


@pytest.fixture
def target():
    """Tests share it: nothing stays attached to it."""
    yield tiny_target("llama")
    hf_falcon.detach(tiny_target("llama"))


def generate(target, seed=0, ids=None, **kwargs):
    torch.manual_seed(seed)
    arguments = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, **kwargs}
    return target.generate(prompt(9) if ids is None else ids, **arguments)


@pytest.mark.parametrize("settings", [{}, SAMPLED, {**SAMPLED, "num_return_sequences": 3}], ids=str)
@pytest.mark.parametrize("way", ["ids", "dict"])
def test_calls_draft_without_an_argument(settings, way, target, drafted):
    returned = {**DICT, "output_scores": True} if way == "dict" and "num_return_sequences" not in settings else {}
    expected = generate(target, **settings, **returned)
    hf_falcon.attach(target, tiny_drafter(target))
    assert drafted == []
    found = generate(target, **settings, **returned)
    assert drafted == [(target, tiny_drafter(target))]
    if returned:
        assert found.draft_statistics.drafted_tokens > 0
        assert torch.stack(found.scores).allclose(torch.stack(expected.scores), atol=1e-4)
        found, expected = found.sequences, expected.sequences
    assert found.tolist() == expected.tolist()
    # Until it is detached.
    hf_falcon.detach(target)
    hf_falcon.detach(target)
    assert generate(target, **settings).tolist() == expected.tolist() and len(drafted) == 1


def other_assistant(target):
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1})).eval()


def two_steps(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
    """A decoding method of the user's own."""
    return torch.cat((input_ids, input_ids[:, :2]), dim=1)


# Calls that transformers itself decodes, or refuses, in another way than plainly, or in which a drafter has no place.
AS_WITHOUT = {
    "none": {"assistant_model": None},
    "assistant": lambda target: {"assistant_model": other_assistant(target)},
    "sampled assistant": lambda target: {"assistant_model": other_assistant(target), **SAMPLED},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1},
    "own method": {"custom_generate": two_steps},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 3, **SAMPLED},
    "beams of a configuration": {"generation_config": GenerationConfig(num_beams=2, max_new_tokens=9)},
    "no cache": {"use_cache": False},
    "unset cache": {"use_cache": None},
    "no cache, by configuration": {"generation_config": GenerationConfig(use_cache=False, max_new_tokens=9)},
    "other schedule": {"num_assistant_tokens_schedule": "heuristic_transient"},
    "of an assistant": {"is_assistant": True, **DICT},
    "contrastive": {"penalty_alpha": 0.6},
    "dola": {"dola_layers": "low"},
    "constraints": {"force_words_ids": [[3]], "num_beams": 2},
    "tokenizer": {"assistant_tokenizer": tiny_tokenizer()},
    "no draft tokens": {"num_assistant_tokens": 0},
    "a threshold out of range": {"assistant_confidence_threshold": 1.5},
    "a schedule of another kind": {"num_assistant_tokens_schedule": "weekly"},
    "paged": {"cache_implementation": "paged", "streamer": TextStreamer(tiny_tokenizer())},
}


def outcome(target, settings):
    """The tokens of a call, or its error."""
    settings = settings(target) if callable(settings) else settings
    try:
        output = generate(target, **settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return output.tolist() if isinstance(output, torch.Tensor) else (output.sequences.tolist(), type(output))


@pytest.mark.parametrize("name", AS_WITHOUT)
def test_calls_that_run_as_without_a_drafter(name, target, drafted):
    settings = AS_WITHOUT[name]
    expected = outcome(target, settings)
    hf_falcon.attach(target, tiny_drafter(target))
    assert outcome(target, settings) == expected
    assert drafted == []


def test_an_explicit_drafter_wins(target, drafted):
    hf_falcon.attach(target, tiny_drafter(target))
    other = new_drafter(target)
    generate(target, assistant_model=other)
    # Also where the position says which argument it is.
    settings = GenerationConfig(do_sample=False, max_new_tokens=4, pad_token_id=0)
    target.generate(prompt(9), settings, None, None, None, None, None)
    assert drafted == [(target, other)]
    # The last one that was attached counts.
    hf_falcon.attach(target, other)
    generate(target)
    assert drafted[1:] == [(target, other)]


def test_options_of_a_call(target, monkeypatch):
    seen = []
    run = FalconDraftModel.assisted_decoding

    def assisted_decoding(self, target, *args, generation_config, **kwargs):
        seen.append(hf_falcon.DraftOptions.from_generation_config(self.generation_config, generation_config))
        return run(self, target, *args, generation_config=generation_config, **kwargs)

    monkeypatch.setattr(FalconDraftModel, "assisted_decoding", assisted_decoding)
    hf_falcon.attach(target, tiny_drafter(target, prompt_lookup_num_tokens=5))
    generate(target, draft_width=2, num_assistant_tokens=3)
    # Not transformers' own prompt lookup, which refuses 0.
    generate(target, prompt_lookup_num_tokens=0)
    assert [(each.draft_width, each.num_assistant_tokens) for each in seen] == [(2, 3), (6, 12)]
    assert [each.prompt_lookup_num_tokens for each in seen] == [5, 0]
    with pytest.raises(ValueError, match="num_draft_pases"):
        generate(target, num_draft_pases=2)


def test_training_mode(drafted):
    """Dropout draws, and gradient checkpointing leaves the cache empty."""
    target = new_target("llama", attention_dropout=0.5)
    hf_falcon.attach(target, tiny_drafter(target))
    target.train()
    first = generate(target)
    hf_falcon.detach(target)
    assert generate(target).tolist() == first.tolist() and drafted == []


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_router_that_adds_noise_in_training_mode_is_decoded_plainly(noise, drafted):
    target = new_target("llama")
    target.model.layers[1].mlp.router_jitter_noise = noise
    hf_falcon.attach(target, tiny_drafter(target))
    target.train()
    generate(target)
    assert bool(drafted) is (noise == 0.0)


def test_a_head_whose_weights_are_elsewhere_is_not_drafted_for():
    """As DeepSpeed leaves it outside a forward (ZeRO-3)."""
    target = new_target("llama")
    drafter, finder = tiny_drafter(target), attaching.AttachedDrafters()
    assert finder.takes(target, drafter, {}, {})
    target.lm_head.weight = torch.nn.Parameter(torch.empty(0))
    assert not finder.takes(target, drafter, {}, {})


def test_a_target_without_a_layer_that_the_drafter_reads(drafted, caplog):
    transformers_logging.warning_once.cache_clear()
    target = new_target("llama")
    drafter = tiny_drafter(target, extra="layers")
    refusal = r"`feature_layers` is \[1, 0\], but LlamaForCausalLM has 1"
    with pytest.raises(ValueError, match=refusal):
        hf_falcon.attach(new_target("llama", num_hidden_layers=1), drafter)
    hf_falcon.attach(target, drafter)
    target.model.layers, target.config.num_hidden_layers = target.model.layers[:1], 1
    with caplog.at_level(logging.WARNING, logger="hf_falcon"):
        for _ in range(2):
            assert generate(target).tolist() == generate(target, assistant_model=None).tolist()
    [warning] = [each.getMessage() for each in caplog.records]
    assert re.match(f"The attached drafter is not used, plain decoding runs: {refusal}", warning)
    assert drafted == []


def test_pipeline(target, drafted):
    write = pipeline("text-generation", model=target, tokenizer=tiny_tokenizer())

    def texts():
        torch.manual_seed(0)
        # Configurations of pipelines have all defaults filled in.
        return [write("abcdef", max_new_tokens=12, do_sample=do_sample) for do_sample in (False, True)]

    expected = texts()
    hf_falcon.attach(target, tiny_drafter(target))
    assert texts() == expected
    assert len(drafted) == 2


def test_threads(target, drafted):
    prompts = [prompt(length, seed=length) for length in (3, 12, 20, 31)]
    expected = [generate(target, ids=ids).tolist() for ids in prompts]
    hf_falcon.attach(target, tiny_drafter(target))
    found: dict[int, list] = {}

    def work(i):
        found[i] = [target.generate(prompts[i], max_new_tokens=24, pad_token_id=0).tolist() for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [tokens] * 3 for i, tokens in enumerate(expected)}
    assert len(drafted) == 12


def test_nothing_is_attached_to_a_copy(target, drafted):
    hf_falcon.attach(target, tiny_drafter(target))
    file = io.BytesIO()
    torch.save(target, file)
    copies = [copy.deepcopy(target), copy.copy(target), load_model(io.BytesIO(file.getvalue()))]
    # The file has no part of the drafter.
    assert b"hf_falcon" not in file.getvalue()
    for each in copies:
        assert generate(each).tolist() == generate(target, assistant_model=None).tolist()
    assert drafted == []


def test_target_and_drafter_are_freed():
    target = new_target("llama")
    drafter = new_drafter(target)
    hf_falcon.attach(target, drafter)
    generate(target)
    ends = [weakref.ref(target), weakref.ref(drafter)]
    del target, drafter
    gc.collect()
    assert [end() for end in ends] == [None, None]


def test_disabled(target, drafted):
    hf_falcon.attach(target, tiny_drafter(target))
    hf_falcon.disable()
    expected = generate(target)
    assert drafted == []
    hf_falcon.enable()
    assert generate(target).tolist() == expected.tolist()
    assert len(drafted) == 1


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_by_name(kind, tmp_path, target, drafted):
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    target.save_pretrained(tmp_path / "target")
    hf_falcon.attach(target, kind(tmp_path / "drafter"))
    assert generate(target).tolist() == generate(target, assistant_model=None).tolist()
    [(_, drafter)] = drafted
    assert (drafter.dtype, drafter.device, drafter.training) == (target.dtype, target.device, False)
    # Errors come at once, and leave the drafter that is attached.
    edit(tmp_path / "target" / "config.json", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ValueError, match="target` is .*, which is no drafter of a known method"):
        hf_falcon.attach(target, kind(tmp_path / "target"))
    with pytest.raises(OSError, match="missing"):
        hf_falcon.attach(target, kind(tmp_path / "missing"))
    generate(target)
    assert drafted[-1] == (target, drafter)


def test_what_cannot_be_attached(target):
    drafter = tiny_drafter(target)
    with pytest.raises(ValueError, match="The drafter's `hidden_size` is 32, but the target has 48"):
        hf_falcon.attach(new_target("llama", hidden_size=48), drafter)
    with pytest.raises(TypeError, match="`drafter` is a LlamaForCausalLM, not a drafter of hf_falcon"):
        hf_falcon.attach(target, other_assistant(target))
    for wrapper in (torch.nn.DataParallel(target), LlamaModel(target.config), None):
        with pytest.raises(TypeError, match=f"`target` is a {type(wrapper).__name__}: give the transformers model"):
            hf_falcon.attach(wrapper, drafter)
        with pytest.raises(TypeError, match=f"`target` is a {type(wrapper).__name__}: give the transformers model"):
            hf_falcon.detach(wrapper)


def test_all_copies_of_the_hook_share_what_is_attached(target, drafted, monkeypatch):
    """Code from the Hub brings a copy of the hook, which may be the copy that wraps `generate`."""
    hf_falcon.disable()
    monkeypatch.setattr(GenerationMixin, "_falcon_hook_is_disabled", False)
    spec = importlib.util.spec_from_file_location("hf_falcon.core.copy_of_the_hook", hook.__file__)
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    other.install()
    hf_falcon.enable()
    assert GenerationMixin.generate.__globals__ is vars(other)
    hf_falcon.attach(target, tiny_drafter(target))
    generate(target)
    assert len(drafted) == 1
    assert other._finders is hook._finders


def test_threads_load_a_drafter_by_name_once(tmp_path, monkeypatch):
    target, loaded = new_target("llama"), []
    tiny_drafter(target).save_pretrained(tmp_path)

    def load(name, *args):
        loaded.append(name)
        # As long as another thread needs to come here.
        time.sleep(0.05)
        return hf_falcon.AutoDrafter.from_pretrained(name, *args)

    monkeypatch.setattr(attaching, "AutoDrafter", types.SimpleNamespace(from_pretrained=load))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: generate(target, assistant_model=str(tmp_path)).tolist(), range(4)))
    assert loaded == [str(tmp_path)] and found == 4 * [generate(target).tolist()]


def test_a_drafter_that_is_attached_again_ends_its_learning():
    target = new_target("llama")
    drafter = new_drafter(target)
    hf_falcon.attach(target, drafter, learn=True)
    assert learner_of(drafter).is_of(target)
    hf_falcon.attach(target, drafter)
    assert learner_of(drafter) is None


def test_a_learning_that_is_refused_ends_no_other(tmp_path):
    target, other = new_target("llama"), new_target("llama", seed=1)
    drafter, foreign = new_drafter(target), new_drafter(other, seed=2)
    hf_falcon.attach(target, drafter, learn=tmp_path / "a")
    with pytest.raises(ValueError, match="a` was begun with another drafter"):
        hf_falcon.attach(other, foreign, learn=tmp_path / "a")
    assert learner_of(drafter).watches(target)
    before = learner_of(drafter)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="nothing can be written"):
        hf_falcon.attach(target, drafter, learn=tmp_path / "file" / "below")
    assert learner_of(drafter) is before and before.watches(target)
    hf_falcon.detach(target)


def test_a_folder_that_is_refused_leaves_the_learning_of_before(tmp_path):
    target = new_target("llama")
    drafter, other = new_drafter(target), new_drafter(target, seed=2)
    hf_falcon.attach(target, other, learn=tmp_path / "b")
    hf_falcon.attach(target, drafter, learn=tmp_path / "a")
    with pytest.raises(ValueError, match="b` was begun with another drafter"):
        hf_falcon.attach(target, drafter, learn=tmp_path / "b")
    assert learner_of(drafter).options.folder == tmp_path / "a" and learner_of(drafter).watches(target)
    hf_falcon.detach(target)
