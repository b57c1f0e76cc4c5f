# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon prepare`: the responses that it writes, and a run that survives being killed."""

import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import dialogues_to_prepare
import psutil
import pytest
import torch
from dialogues_to_prepare import EOS, PAD, TEMPLATE, dialogues, make_target, write_data
from safetensors.torch import load
from tiny_models import IS_OLDEST, new_target
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from hf_falcon.commands import prepare as command
from hf_falcon.commands.models import encode
from hf_falcon.training import features as features_module
from hf_falcon.training import prepare as prepare_module
from hf_falcon.training import token_file as token_file_module
from hf_falcon.training.chat_templates import ChatTemplate
from hf_falcon.training.features import kept_features, target_features
from hf_falcon.training.prepare import PrepareArguments, prepare
from hf_falcon.training.provenance import provenance
from hf_falcon.training.token_file import TokenFile
from hf_falcon.training.trainer import DraftSamples, collate


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture
def arguments(tmp_path):
    def make(**options):
        data = options.pop("data", None) or write_data(tmp_path / "data.jsonl", dialogues())
        defaults = {"max_new_tokens": 6, "batch_size": 4, "max_prompt_tokens": 20, "output": str(tmp_path / "out")}
        return PrepareArguments(data=data, **{**defaults, **options})

    return make


def test_preparing_from_a_data_set(arguments, target, unbroken, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    rows = [{"messages": messages} for messages in dialogues()]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "set" / "train_sft.parquet")
    file = prepare(arguments(data=str(tmp_path / "set"), split="train"), *target)
    assert file.metadata["data"] == "set"
    assert file.tokens.tolist() == load(unbroken)["tokens"].tolist()


def test_responses_are_those_of_plain_generate(arguments, target):
    model, tokenizer = target
    prepare(arguments(temperatures=[0.0]), model, tokenizer)
    file = TokenFile.load(arguments().output)
    endings = set()
    for index, messages in enumerate(dialogues()):
        token_ids, prompt_length = file.sample(index)
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        plain = model.generate(prompt, max_new_tokens=6, do_sample=False)[0]
        assert prompt_length == prompt.shape[1]
        assert token_ids.tolist() == plain.tolist()
        assert PAD not in token_ids and (token_ids[prompt_length:] == EOS).sum() == (token_ids[-1] == EOS)
        endings.add(bool(token_ids[-1] == EOS))
    # Both ends of the rule were seen: stopped by EOS, and by the budget.
    assert endings == {True, False}
    assert file.metadata["plan"]["seed"] == 0 and file.metadata["target_fingerprint"]


def test_the_chat_template_is_recorded(arguments, target, tmp_path):
    """In the file, and in the provenance of a drafter that is trained on it, unless files have several."""
    other = tmp_path / "other.jinja"
    other.write_text(TEMPLATE.replace("</s>", ""))
    options = [{}, {"chat_template": str(other), "output": str(tmp_path / "other")}]
    files = [prepare(arguments(limit=2, **each), *target) for each in options]
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in (TEMPLATE, other.read_text())]
    assert [file.metadata["chat_template_sha256"] for file in files] == digests
    assert provenance(target[0], files[0])["data"]["chat_template_sha256"] == digests[0]
    assert "chat_template_sha256" not in provenance(target[0], TokenFile.concatenate(files))["data"]
    assert token_file_module.chat_template_sha256(None) is None


def test_temperature_is_shared_by_a_batch_and_seeds_matter(arguments, target, tmp_path):
    first = prepare(arguments(), *target)
    # 14 dialogues are 4 batches of 4 or less, at 0, 0.7, 0, 1; which one has 2 is drawn.
    counts = [(first.temperatures == torch.tensor(value)).sum().item() for value in (0.0, 0.7, 1.0)]
    assert counts in ([8, 4, 2], [8, 2, 4], [6, 4, 4])
    other = prepare(arguments(seed=1, output=str(tmp_path / "other")), *target)
    assert first.tokens.tolist() != other.tokens.tolist()
    state = torch.get_rng_state()
    again = prepare(arguments(output=str(tmp_path / "again")), *target)
    assert torch.equal(first.tokens, again.tokens) and torch.equal(state, torch.get_rng_state())


@pytest.fixture(scope="module")
def unbroken(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    options = {"max_new_tokens": 6, "batch_size": 4, "max_prompt_tokens": 20, "output": str(folder / "out")}
    prepare(PrepareArguments(data=write_data(folder / "data.jsonl", dialogues()), **options), *target)
    return (folder / "out").read_bytes()


class Killed(BaseException):
    pass


def kill_at(monkeypatch, owner, name, call, after=False):
    """Makes the given call (from 0) of `owner.name` raise, before or after its work, like a kill there."""
    original, calls = getattr(owner, name), [0]

    def wrapped(*args, **kwargs):
        calls[0] += 1
        if calls[0] - 1 == call and not after:
            raise Killed
        result = original(*args, **kwargs)
        if calls[0] - 1 == call:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize(
    ("owner", "name", "call", "after", "batches_left"),
    [
        (prepare_module, "_respond", 0, False, 4),
        (prepare_module, "_respond", 2, True, 2),
        # Calls of `os.replace`: the plan, four batches, the output.
        (token_file_module.os, "replace", 0, False, 4),
        (token_file_module.os, "replace", 2, False, 3),
        (token_file_module.os, "replace", 2, True, 2),
        (token_file_module.os, "replace", 5, False, 0),
        (token_file_module.os, "replace", 5, True, 0),
    ],
)
def test_killed_run_continues_to_the_same_bytes(
    arguments, target, unbroken, tmp_path, monkeypatch, owner, name, call, after, batches_left
):
    broken = arguments()
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, call, after)
        with pytest.raises(Killed):
            prepare(broken, *target)
    assert Path(f"{broken.output}.parts").exists()

    # Another process begins with another random state.
    torch.manual_seed(99)
    generated = []
    respond = prepare_module._respond
    monkeypatch.setattr(prepare_module, "_respond", lambda *args: generated.append(1) or respond(*args))
    prepare(broken, *target)
    assert len(generated) == batches_left
    assert Path(broken.output).read_bytes() == unbroken
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "out"]


@pytest.mark.skipif(IS_OLDEST, reason="this transformers computes all of a prompt")
def test_a_target_that_computes_a_part_of_a_prompt_keeps_no_features(arguments, target):
    """Gemma 4's layers that share keys and values."""
    gemma = new_target("gemma4", num_kv_shared_layers=1)
    with pytest.raises(
        ValueError, match="`keep_features` is True, but some layers of the target compute only the last"
    ):
        prepare(arguments(keep_features=True), gemma, target[1])


@pytest.mark.parametrize("layers", [[], [0]])
def test_kept_features_are_the_targets(arguments, target, unbroken, tmp_path, monkeypatch, layers):
    """A killed run without them resumes with them, and the tokens stay the same."""
    with monkeypatch.context() as patch:
        kill_at(patch, prepare_module, "_respond", 1)
        with pytest.raises(Killed):
            prepare(arguments(), *target)
    options = {"keep_features": True, "feature_layers": layers}
    with monkeypatch.context() as patch:
        kill_at(patch, prepare_module, "_respond", 2)
        with pytest.raises(Killed):
            prepare(arguments(**options), *target)
    file = prepare(arguments(**options), *target)
    assert Path(arguments().output).read_bytes() == unbroken
    monkeypatch.setattr(features_module, "target_features", None)
    kept = kept_features([arguments().output], [file], target[0], layers)
    monkeypatch.undo()
    for index in range(len(file)):
        row = file.sample(index)[0][None]
        expected = target_features(target[0], row, torch.ones_like(row, dtype=torch.bool), layers)[0]
        found = kept.sample(index)
        assert found.shape == expected.shape and not found[-1].any()
        torch.testing.assert_close(found[:-1].float(), expected[:-1], rtol=1e-2, atol=1e-2)
        # A drafter may read fewer layers.
        assert torch.equal(kept.sample(index, []), found[:, : target[0].config.hidden_size])
    with pytest.raises(ValueError, match="`feature_layers` was .*, now .*1"):
        prepare(arguments(**{**options, "feature_layers": [1]}, seed=0, output=str(tmp_path / "out")), *target)


def test_features_kept_that_cannot_be(arguments):
    with pytest.raises(ValueError, match="leave out one of them"):
        arguments(keep_features=True, responses="data")
    with pytest.raises(ValueError, match="it needs `keep_features`"):
        arguments(feature_layers=[1])


def test_continuing_with_other_arguments_is_refused(arguments, target, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        kill_at(patch, prepare_module, "_respond", 2)
        with pytest.raises(Killed):
            prepare(arguments(), *target)
    with pytest.raises(ValueError, match="`max_new_tokens` was 6, now 5; `seed` was 0, now 5.*delete"):
        prepare(arguments(max_new_tokens=5, seed=5), *target)
    other_data = write_data(tmp_path / "other.jsonl", dialogues()[::-1])
    with pytest.raises(ValueError, match="`dialogues_sha256` was"):
        prepare(arguments(data=other_data), *target)
    other_model, tokenizer = make_target()
    torch.nn.init.ones_(other_model.model.embed_tokens.weight)
    with pytest.raises(ValueError, match="`target_fingerprint` was"):
        prepare(arguments(), other_model, tokenizer)
    prepare(arguments(), *target)
    with pytest.raises(ValueError, match="`limit` was None, now 3.*another `output`"):
        prepare(arguments(limit=3), *target)
    # A finished run repeated changes nothing.
    before = os.stat(arguments().output).st_mtime_ns
    assert len(prepare(arguments(), *target)) == 14
    assert os.stat(arguments().output).st_mtime_ns == before


def test_float16_targets_are_told_apart(arguments, target, monkeypatch):
    """Where a run goes on, and not in the file: a copy in another dtype has no such fingerprint."""
    tokenizer = target[1]
    model, other = (make_target()[0].half() for _ in range(2))
    torch.nn.init.ones_(other.model.embed_tokens.weight)
    with monkeypatch.context() as patch:
        kill_at(patch, prepare_module, "_respond", 1)
        with pytest.raises(Killed):
            prepare(arguments(), model, tokenizer)
    with pytest.raises(ValueError, match="out.parts was made .*`target_fingerprint` was"):
        prepare(arguments(), other, tokenizer)
    file = prepare(arguments(), model, tokenizer)
    assert file.metadata["target_fingerprint"] is None and file.metadata["plan"]["target_fingerprint"]
    with pytest.raises(ValueError, match="out was made .*`target_fingerprint` was"):
        prepare(arguments(), other, tokenizer)


def test_a_template_that_writes_the_date_keeps_the_day_of_the_first_call(
    arguments, target, tmp_path, monkeypatch, caplog
):
    def it_is_january(day):
        now = datetime(2026, 1, day, 12)
        for owner, name in ((prepare_module, "date"), (chat_template_utils, "datetime")):
            kind = type(name, (datetime,), {"today": lambda: now.date(), "now": lambda: now})
            monkeypatch.setattr(owner, name, kind, raising=False)

    (tmp_path / "dated.jinja").write_text("{{ strftime_now('w%d') }} " + TEMPLATE)
    options = {"chat_template": str(tmp_path / "dated.jinja")}
    it_is_january(10)
    with monkeypatch.context() as patch:
        kill_at(patch, prepare_module, "_respond", 2)
        with pytest.raises(Killed):
            prepare(arguments(**options), *target)
    it_is_january(11)
    file = prepare(arguments(**options), *target)
    assert file.metadata["plan"]["day"] == "2026-01-10"
    assert all(prompt.startswith("w10 <|user|>") for prompt, _ in samples_of(file, target))
    prepare(arguments(**options), *target)
    assert f"{arguments().output} is complete already." in caplog.messages
    # A new file has the new day, and without a date there is none.
    other = prepare(arguments(**options, limit=1, output=str(tmp_path / "other")), *target)
    assert samples_of(other, target)[0][0].startswith("w11 <|user|>")
    assert "day" not in prepare(arguments(limit=1, output=str(tmp_path / "plain")), *target).metadata["plan"]


def test_a_damaged_part_is_deleted_and_made_again(arguments, target, unbroken, monkeypatch):
    with monkeypatch.context() as patch:
        kill_at(patch, prepare_module, "_respond", 2)
        with pytest.raises(Killed):
            prepare(arguments(), *target)
    part = Path(f"{arguments().output}.parts", "batch-00000.safetensors")
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{re.escape(str(part))} cannot be read .*: delete it and repeat"):
        prepare(arguments(), *target)
    part.unlink()
    prepare(arguments(), *target)
    assert Path(arguments().output).read_bytes() == unbroken


def test_a_plan_that_is_no_object_is_named(arguments, target):
    plan = Path(f"{arguments().output}.parts", "plan.json")
    plan.parent.mkdir()
    plan.write_text("[]")
    with pytest.raises(ValueError, match=f"{re.escape(str(plan))} holds a list, not an object"):
        prepare(arguments(), *target)


def samples_of(file, target):
    """Prompts and responses as text."""
    samples = [file.sample(index) for index in range(len(file))]
    return [tuple(target[1].decode(part) for part in (ids[:length], ids[length:])) for ids, length in samples]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


# Longer than the shortest later turn that is a prompt without its context (in characters, not in words).
LONG = "w8" + " " * 30 + "w9 w10 w11"
THREE_TURNS = [
    {"role": "system", "content": "w7"},
    user("w1"),
    assistant("w2"),
    user(LONG),
    assistant("w4"),
    user(f"{LONG} w5"),
    assistant("w6"),
]


def test_all_turns_without_context_for_the_target(arguments, target, tmp_path):
    data = write_data(tmp_path / "turns.jsonl", [THREE_TURNS, dialogues()[0], [user("w1")]])
    file = prepare(arguments(data=data, turns="all", history="none"), *target)
    assert [prompt for prompt, _ in samples_of(file, target)] == [
        "<|system|> w7 </s> <|user|> w1 </s> <|assistant|>",
        "<|system|> w7 </s> <|user|> w8 w9 w10 w11 </s> <|assistant|>",
        "<|system|> w7 </s> <|user|> w8 w9 w10 w11 w5 </s> <|assistant|>",
        "<|user|> w0 </s> <|assistant|>",
        "<|user|> w1 </s> <|assistant|>",
    ]
    assert file.metadata["dropped"] == {} and file.metadata["plan"]["turns"] == "all"
    # The limit counts prompts, not dialogues.
    two = prepare(arguments(data=data, turns="all", history="none", limit=2, output=str(tmp_path / "two")), *target)
    assert [prompt for prompt, _ in samples_of(two, target)] == [prompt for prompt, _ in samples_of(file, target)][:2]


@pytest.mark.parametrize("call", [1, 4, 6])
def test_rounds_of_turns_resume_to_the_same_bytes(arguments, tmp_path, monkeypatch, call):
    """Each turn is a round of batches, whose prompts have the answers of the rounds before."""
    target = make_target()
    # An answer with a special token is no message.
    target[0].generation_config.suppress_tokens = target[1].convert_tokens_to_ids(["<unk>", "<pad>"])
    records = [
        [*first, user(f"w{number} w1"), assistant("w2"), user("w3")] for number, first in enumerate(dialogues())
    ]
    data = write_data(tmp_path / "turns.jsonl", records)
    options = {"data": data, "turns": "all", "history": "target", "batch_size": 6, "max_prompt_tokens": 60}
    whole = prepare(arguments(output=str(tmp_path / "whole"), keep_features=True, **options), *target)
    assert len(whole) == 42 and whole.metadata["dropped"] == {}
    kept_features([str(tmp_path / "whole")], [whole], target[0], [])
    with monkeypatch.context() as patch:
        kill_at(patch, prepare_module, "_respond", call)
        with pytest.raises(Killed):
            prepare(arguments(**options), *target)
    with pytest.raises(ValueError, match="`history` was 'target', now 'data'"):
        prepare(arguments(**{**options, "history": "data"}), *target)
    # The texts of later turns are not yet prompts.
    other = write_data(tmp_path / "other.jsonl", [*records[:-1], [*records[-1][:-1], user("w4")]])
    with pytest.raises(ValueError, match="`texts_sha256` was"):
        prepare(arguments(**{**options, "data": other}), *target)
    # And neither is what is excluded of them, or how a template writes them.
    (tmp_path / "excluded.jsonl").write_text('{"turns": ["a b c d e f g h"]}')
    with pytest.raises(ValueError, match="`exclude_sha256` was"):
        prepare(arguments(**options, exclude=[str(tmp_path / "excluded.jsonl")]), *target)
    with pytest.raises(ValueError, match="`chat_template_kwargs` was {}, now"):
        prepare(arguments(**options, chat_template_kwargs={"deep": True}), *target)
    found = prepare(arguments(**options), *target)
    assert found.tokens.tolist() == whole.tokens.tolist()
    before = os.stat(arguments().output).st_mtime_ns
    prepare(arguments(**options), *target)
    assert os.stat(arguments().output).st_mtime_ns == before


def test_an_answer_with_special_tokens_is_no_message(arguments, target, tmp_path, monkeypatch):
    """Such as one of several channels: the later turns of its dialogue have no context."""
    unknown, w4, w9 = target[1].convert_tokens_to_ids(["<unk>", "w4", "w9"])
    answers = {True: torch.tensor([w9, unknown, w9, EOS]), False: torch.tensor([w9, EOS])}
    monkeypatch.setattr(prepare_module, "_respond", lambda *args: [answers[w4 in prompt] for prompt in args[2]])
    data = write_data(
        tmp_path / "turns.jsonl",
        [[user(first), assistant("w2"), user("w3"), assistant("w2"), user("w5")] for first in ("w1", "w4")],
    )
    file = prepare(arguments(data=data, turns="all", history="target", max_prompt_tokens=40), *target)
    second = "<|user|> w1 </s> <|assistant|> w9 </s> <|user|> w3 </s> <|assistant|>"
    assert [prompt for prompt, _ in samples_of(file, target)] == [
        "<|user|> w1 </s> <|assistant|>",
        "<|user|> w4 </s> <|assistant|>",
        second,
        f"{second} w9 </s> <|user|> w5 </s> <|assistant|>",
    ]
    assert file.metadata["dropped"] == {"answer_with_special_tokens": 1, "needs_context": 2}


def test_all_turns_with_context_for_responses_of_the_data(arguments, target, tmp_path):
    data = write_data(tmp_path / "turns.jsonl", [THREE_TURNS, dialogues()[0]])
    options = {"data": data, "responses": "data", "turns": "all"}
    file = prepare(arguments(max_prompt_tokens=40, **options), *target)
    first = "<|system|> w7 </s> <|user|> w1 </s> <|assistant|>"
    second = f"{first} w2 </s> <|user|> w8 w9 w10 w11 </s> <|assistant|>"
    third = f"{second} w4 </s> <|user|> w8 w9 w10 w11 w5 </s> <|assistant|>"
    assert samples_of(file, target) == [
        (first, "w2 </s>"),
        (second, "w4 </s>"),
        (third, "w6 </s>"),
        ("<|user|> w0 </s> <|assistant|>", "w1 w2 w3 </s>"),
    ]
    assert file.metadata["dropped"] == {}
    shorter = prepare(arguments(max_prompt_tokens=20, output=str(tmp_path / "shorter"), **options), *target)
    assert [prompt for prompt, _ in samples_of(shorter, target)] == [first, second, "<|user|> w0 </s> <|assistant|>"]
    assert shorter.metadata["dropped"] == {"prompt_too_long": 1}


def test_work_is_linear_in_the_turns(arguments, target, tmp_path, monkeypatch):
    """After a prompt that is too long, the turns that follow are counted and not rendered."""
    turns = [each for number in range(2000) for each in (user(f"w1 w{number % 20}"), assistant("w2"))]
    data = write_data(tmp_path / "turns.jsonl", [turns, THREE_TURNS])
    monkeypatch.setattr(prepare_module, "_TOKENIZED_AT_ONCE", 16)
    rendered = []
    render = ChatTemplate._render
    monkeypatch.setattr(ChatTemplate, "_render", lambda *args: rendered.append(len(args[1])) or render(*args))
    options = {"data": data, "responses": "data", "turns": "all", "max_prompt_tokens": 100}
    file = prepare(arguments(**options), *target)
    lengths = [length for _, length in map(file.sample, range(len(file)))]
    assert max(lengths) <= 100 and file.metadata["dropped"] == {"prompt_too_long": 2003 - len(file)}
    assert 2 * len(file) <= len(rendered) <= 2 * (len(file) + 16)
    # One at a time gives the same.
    monkeypatch.setattr(prepare_module, "_CHARACTERS_AT_ONCE", 1)
    again = prepare(arguments(**options, output=str(tmp_path / "again")), *target)
    assert again.tokens.tolist() == file.tokens.tolist() and again.metadata == file.metadata


def test_roles_that_the_template_refuses(arguments, target, tmp_path):
    template = tmp_path / "strict.jinja"
    template.write_text("{% for message in messages %}{{ raise_exception('no system') }}{% endfor %}")
    with pytest.raises(ValueError, match=r"refuses messages of the roles \['user'\] \(no system\): remove"):
        prepare(arguments(chat_template=str(template)), *target)


@pytest.mark.parametrize("line", ["[" * 100_000, '{"turns": 5}', '{"turns": [5]}', "[]", "{", '{"turns": "a b c"}'])
def test_evaluation_prompts_that_are_none(arguments, target, tmp_path, line):
    (tmp_path / "evaluation.jsonl").write_text('{"turns": ["a"]}\n' + line)
    with pytest.raises(ValueError, match="`exclude`: .*evaluation.jsonl, line 2"):
        prepare(arguments(exclude=[str(tmp_path / "evaluation.jsonl")]), *target)


def test_later_turns_that_are_dropped(arguments, target, tmp_path, caplog):
    context = [user("continue"), assistant("w1")]
    beginnings = ["  Continue:", "please continue,", "go on", "keep going:", "NEXT", "more\n"]
    beginnings += ["continue...", "more.", "go on!"]
    left_out = ["w9", *(f"{beginning} {LONG}" for beginning in beginnings)]
    kept = [f"moreover {LONG}", f"goes on {LONG}", f"w12 more {LONG}", "w" * 40]
    # Words of their own, which are the same unknown token here: each is told from the others by what follows.
    kept += [f"{word} w{number} {LONG}" for number, word in enumerate(["Next.js", "more-or-less", "continue.py"], 1)]
    turns = [message for text in left_out + kept + ["w" * 39] for message in (user(text), assistant("w2"))]
    data = write_data(tmp_path / "turns.jsonl", [context + turns + [user(LONG), user(" "), user(LONG)], []])
    with caplog.at_level(logging.WARNING):
        file = prepare(arguments(data=data, turns="all", history="none"), *target)
    # Words outside the tiny vocabulary. A first turn is never dropped for its words.
    assert [prompt.removesuffix(" </s> <|assistant|>") for prompt, _ in samples_of(file, target)] == [
        "<|user|> <unk>",
        "<|user|> <unk> w8 w9 w10 w11",
        "<|user|> <unk> <unk> w8 w9 w10 w11",
        "<|user|> w12 <unk> w8 w9 w10 w11",
        *(f"<|user|> <unk> w{number} w8 w9 w10 w11" for number in (1, 2, 3)),
        "<|user|> w8 w9 w10 w11",
    ]
    # The word of 40 characters is the same token as the first turn.
    assert file.metadata["dropped"] == {"duplicate": 2, "needs_context": len(left_out) + 1, "no_turn": 2}
    assert "11 later turns that need the turns before them, 2 without" in caplog.text


def test_turns_of_the_data_alternate(arguments, target, tmp_path):
    """Many chat templates raise an error for a prompt with two turns of the user, or of the assistant, in a row."""
    records = [
        [assistant("w0"), user("w1"), assistant("w2"), assistant("w3"), user("w4"), assistant("w5")],
        [user("w6"), user("w7"), assistant("w8"), user("w9")],
        [user("w10"), assistant("w11"), user("w12")],
    ]
    data = write_data(tmp_path / "turns.jsonl", records)
    file = prepare(arguments(data=data, responses="data", turns="all"), *target)
    assert samples_of(file, target) == [
        ("<|user|> w1 </s> <|assistant|>", "w2 </s>"),
        ("<|user|> w10 </s> <|assistant|>", "w11 </s>"),
    ]
    assert file.metadata["dropped"] == {"no_turn": 5}


def test_dialogues_that_are_dropped(arguments, target, tmp_path, caplog):
    records = [
        [user("w0 W1, w2 w3! w4 w5 w6 w7 w8")],  # Eight words in a row of the first evaluation turn.
        [user("w0 w1 w2 w3 w4 w5 w6 w9")],  # Seven.
        [user("w1 " * 30)],  # Too long.
        [user("w5 w6")],
        [{"role": "system", "content": "w7"}, user("w5 w6")],  # Not a duplicate: it has a system prompt.
        [user("w5 w6"), {"role": "assistant", "content": "w1"}],  # A duplicate.
        [{"role": "assistant", "content": "w1"}],
        [],
    ]
    excluded = tmp_path / "evaluation.jsonl"
    excluded.write_text(json.dumps({"turns": ["w12 w0 w1 w2 w3 w4 w5 w6 w7", "short"]}) + "\n")
    data = write_data(tmp_path / "records.jsonl", records)
    with caplog.at_level(logging.WARNING):
        file = prepare(arguments(data=data, exclude=[str(excluded)]), *target)
    assert file.metadata["dropped"] == {"duplicate": 1, "excluded": 1, "no_turn": 2, "prompt_too_long": 1}
    assert "1 that share 8 words in a row" in caplog.text
    assert [prompt for prompt, _ in samples_of(file, target)] == [
        "<|user|> w0 w1 w2 w3 w4 w5 w6 w9 </s> <|assistant|>",
        "<|user|> w5 w6 </s> <|assistant|>",
        "<|system|> w7 </s> <|user|> w5 w6 </s> <|assistant|>",
    ]
    excluded.write_text("{}")
    with pytest.raises(ValueError, match="line 1 is not a JSON object with `turns`"):
        prepare(arguments(data=data, exclude=[str(excluded)]), *target)


def test_responses_of_the_data(arguments, target):
    file = prepare(arguments(responses="data", limit=5, max_new_tokens=3), *target)
    assert len(file) == 5 and set(file.temperatures.tolist()) == {-1.0}
    for index in range(5):
        token_ids, prompt_length = file.sample(index)
        assert target[1].decode(token_ids[prompt_length:]) == "w1 w2 w3"
    whole = prepare(arguments(responses="data", limit=5, output=arguments().output + "2"), *target)
    token_ids, prompt_length = whole.sample(0)
    assert token_ids[prompt_length:].tolist() == target[1].convert_tokens_to_ids(["w1", "w2", "w3", "</s>"])


# None of them marks what it generates.
TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "strips": "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "ends with more than EOS": "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "writes a prompt of its own": "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:(thinks){% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_loss_counts_the_response_alone(arguments, target, tmp_path, name):
    """Of a dialogue of several turns: the first response up to EOS, whatever the template does around it."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate(["<unk>", "</s>", *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATES[name]
    )
    first = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Sky? "},
        {"role": "assistant", "content": " Blue. "},
    ]
    later = [{"role": "user", "content": "Sea?"}, {"role": "assistant", "content": "Green."}]
    data = write_data(tmp_path / "turns.jsonl", [first + later])
    file = prepare(
        arguments(data=data, responses="data", max_new_tokens=40, max_prompt_tokens=80), target[0], tokenizer
    )

    batch = collate([DraftSamples(file, [0], max_length=128)[0]])
    tokens = tokenizer.convert_ids_to_tokens(batch["token_ids"][0].tolist())
    counted = "".join(token for token, counts in zip(tokens, batch["response"][0]) if counts)
    assert counted == ("Blue.</s>" if name == "strips" else " Blue. </s>")
    prompt = tokenizer.apply_chat_template(first[:2], add_generation_prompt=True, tokenize=False)
    assert "".join(tokens) == prompt + counted


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"temperatures": []}, "`temperatures` is"),
        ({"temperatures": [-0.5]}, "`temperatures` is"),
        ({"turns": "last"}, "`turns` is 'last': it must be 'first' or 'all'"),
        ({"responses": "none"}, "`responses` is 'none'"),
        ({"max_prompt_tokens": 123}, "context of 128 tokens"),
        ({"max_prompt_tokens": 1}, "No prompt.*prompt_too_long"),
    ],
)
def test_wrong_arguments(arguments, target, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        prepare(arguments(**options), *target)


def test_tokenizer_without_template(arguments, target, unbroken, tmp_path, caplog):
    model, tokenizer = target[0], make_target()[1]
    tokenizer.chat_template = None
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 0)])
    with pytest.raises(ValueError, match="no chat template"):
        prepare(arguments(responses="data"), model, tokenizer)
    # What a base model reads: the text, with the special tokens that its tokenizer adds. So do the other commands.
    file = prepare(arguments(output=str(tmp_path / "plain")), model, tokenizer)
    assert "no chat template" in caplog.text
    for index, messages in enumerate(dialogues()):
        token_ids, prompt_length = file.sample(index)
        prompt = encode(tokenizer, messages[0]["content"], torch.device("cpu"))["input_ids"][0].tolist()
        assert token_ids[:prompt_length].tolist() == prompt and prompt[0] == 0
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    prepare(arguments(chat_template=str(tmp_path / "template.jinja")), model, tokenizer)
    assert Path(arguments().output).read_bytes() == unbroken


@pytest.mark.parametrize(("name", "value"), [("use_cache", False), ("cache_implementation", "static")])
def test_the_targets_own_settings_of_the_cache_change_nothing(arguments, unbroken, name, value):
    model, tokenizer = make_target()
    setattr(model.generation_config, name, value)
    file = prepare(arguments(), model, tokenizer)
    assert file.tokens.tolist() == load(unbroken)["tokens"].tolist()


def test_a_padding_token_without_an_embedding(arguments, target, unbroken):
    model, tokenizer = target[0], make_target()[1]
    tokenizer.add_special_tokens({"pad_token": "<added>"})
    assert tokenizer.pad_token_id == model.config.vocab_size
    file = prepare(arguments(), model, tokenizer)
    assert file.tokens.tolist() == load(unbroken)["tokens"].tolist()


def test_command(arguments, target, monkeypatch, capsys):
    monkeypatch.setattr(command, "load_target", lambda name, dtype, device: target)
    options = arguments()
    argv = f"--data {options.data} --output {options.output} --limit 6 --batch-size 2 --temperatures 0 1".split()
    argv += ["--max-new-tokens", "5", "--max_prompt_tokens", "20"]
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_respond", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert command.main(argv) == 130
        assert "the same command continues" in capsys.readouterr().err
    assert command.main(argv) == 0
    assert "6 samples, " in capsys.readouterr().out
    assert set(TokenFile.load(options.output).temperatures.tolist()) == {0.0, 1.0}


def test_a_missing_file_is_found_before_the_target_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "load_target", lambda *arguments: pytest.fail("loaded"))
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        command.main(["--data", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "tokens.safetensors")])


@pytest.mark.parametrize("processes", [2, 3, 7])
def test_processes_share_the_batches(arguments, target, unbroken, monkeypatch, processes):
    """Each process dies after its own share, but the main one, which comes last and assembles."""
    generated = []
    respond = prepare_module._respond
    monkeypatch.setattr(prepare_module, "_respond", lambda *args: generated.append(args[2]) or respond(*args))
    monkeypatch.setattr(prepare_module, "_PARENT", os.getppid())
    for rank in reversed(range(processes)):
        barriers = []

        def wait_for_everyone(rank=rank, barriers=barriers):
            barriers.append(1)
            # Two come before generation, the third after it.
            if rank and len(barriers) == 3:
                raise Killed

        state = SimpleNamespace(
            num_processes=processes,
            process_index=rank,
            is_main_process=rank == 0,
            main_process_first=nullcontext,
            wait_for_everyone=wait_for_everyone,
        )
        monkeypatch.setattr(prepare_module, "process_state", lambda state=state: state)
        with pytest.raises(Killed) if rank else nullcontext():
            prepare(arguments(), *target)
    assert len(generated) == 4
    assert Path(arguments().output).read_bytes() == unbroken


def test_a_process_without_its_launcher_ends(arguments, target, monkeypatch):
    state = SimpleNamespace(
        num_processes=2,
        process_index=0,
        is_main_process=True,
        main_process_first=nullcontext,
        wait_for_everyone=lambda: None,
    )
    monkeypatch.setattr(prepare_module, "process_state", lambda: state)
    monkeypatch.setattr(prepare_module, "_PARENT", -1)
    with pytest.raises(ChildProcessError, match="launcher"):
        prepare(arguments(), *target)


def start(command, **environment):
    """The command in a session of its own, with the package and these tests on its path."""
    paths = [str(Path(dialogues_to_prepare.__file__).parent), str(Path(prepare_module.__file__).parents[2])]
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_for_parts(process, parts, number):
    while len(list(parts.glob("batch-*.safetensors"))) < number:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.001)


@pytest.mark.slow
def test_kill_9(arguments, target, tmp_path):
    whole = arguments(output=str(tmp_path / "whole"), batch_size=1)
    prepare(whole, *target)
    script = (
        "import sys, dialogues_to_prepare as t; from hf_falcon.training.prepare import PrepareArguments, prepare; "
        "prepare(PrepareArguments(data=sys.argv[1], output=sys.argv[2], max_new_tokens=6, batch_size=1, "
        "max_prompt_tokens=20), *t.make_target())"
    )
    output, parts = tmp_path / "out", tmp_path / "out.parts"
    for number in (0, 1, 4, 9):
        process = start(["-c", script, whole.data, str(output)])
        try:
            while not (parts / "plan.json").exists():
                time.sleep(0.001)
            wait_for_parts(process, parts, number)
        finally:
            process.kill()
            process.wait()
        assert not output.exists()
    finished = len(list(parts.glob("batch-*.safetensors")))
    assert 9 <= finished < 14
    respond, generated = prepare_module._respond, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "_respond", lambda *args: generated.append(1) or respond(*args))
        prepare(arguments(batch_size=1), *target)
    assert len(generated) == 14 - finished
    assert output.read_bytes() == Path(whole.output).read_bytes()
    assert not list(tmp_path.glob("out.*"))


@pytest.mark.slow
def test_kill_9_under_accelerate(arguments, target, tmp_path):
    """A worker, the launcher and everybody are killed in turn; the last of four commands finishes the file."""
    model, tokenizer = target
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    data = write_data(
        tmp_path / "many.jsonl", [[{"role": "user", "content": f"w{i} w{j}"}] for i in range(24) for j in range(10)]
    )
    options = ["--data", data, "--target", str(tmp_path / "target"), "--dtype", "float32", "--batch_size", "2"]
    options += ["--max_new_tokens", "40", "--max_prompt_tokens", "20"]
    alone = start(["-m", "hf_falcon", "prepare", *options, "--output", str(tmp_path / "whole")])
    assert alone.wait() == 0

    output, parts = tmp_path / "out", tmp_path / "out.parts"
    # With `--cpu`, only one process would start.
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    launch += ["-m", "hf_falcon", "prepare", *options, "--output", str(output)]
    for number, kill in ((10, "worker"), (30, "launcher"), (50, "everybody")):
        process = start(launch)
        try:
            wait_for_parts(process, parts, number)
            workers = psutil.Process(process.pid).children()
            assert len(workers) == 2
            if kill == "worker":
                workers[-1].kill()
                assert process.wait() != 0
            elif kill == "launcher":
                process.kill()
                # No wait for the workers, who find out by themselves: the next command may come at once.
            else:
                os.killpg(process.pid, signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
        assert not output.exists()
    finished = len(list(parts.glob("batch-*.safetensors")))
    assert 50 <= finished < 120
    assert start(launch).wait() == 0
    assert output.read_bytes() == (tmp_path / "whole").read_bytes()
    assert not list(tmp_path.glob("out.*"))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_prompts_to_exclude_may_have_any_text(arguments, target, tmp_path, encoding):
    text = "one two three four five six seven eight"
    lines = [json.dumps({"turns": [f"\u2028{text}\x85"]}, ensure_ascii=False), "", json.dumps({"turns": ["a"]}), ""]
    (tmp_path / "evaluation.jsonl").write_text("\n".join(lines), encoding=encoding)
    file = prepare(arguments(exclude=[str(tmp_path / "evaluation.jsonl")]), *target)
    assert len(file) == 14
