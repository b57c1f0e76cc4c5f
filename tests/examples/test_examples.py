# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The examples of decoding, on a tiny target."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from example_scripts import EXAMPLES, example
from hub_server import TOKEN, running_hub
from transformers import GenerationMixin

import hf_falcon
from hf_falcon.commands import generate
from hf_falcon.commands.models import encode
from hf_falcon.core.target_parts import CACHE_NAME
from hf_falcon.training.dialogues import read_dialogues


def test_every_example_of_the_documents_says_what_it_needs():
    rows = re.findall(r"^\| `examples/(\S+)` \|", (EXAMPLES.parent / "docs" / "usage.md").read_text(), re.M)
    assert {"generate.py", "pipeline.py", "chat.py", "serve.py", "push.py", "benchmark.sh"} < set(rows)
    for name in rows:
        text = (EXAMPLES / name).read_text()
        program = "python" if name.endswith(".py") else "bash"
        assert f"    {program} examples/{name}" in text, name
        for word in ("Hardware: ", "Minutes: ", "Expected: "):
            assert len(re.findall(rf"^(?:# )?{word}\w", text, re.M)) == 1, (name, word)


def test_generate(models, monkeypatch, capsys):
    script = example("generate")
    target, tokenizer, _ = models(script)
    monkeypatch.setattr("sys.argv", ["generate.py", "abc"])
    script.main()
    printed = capsys.readouterr().out.splitlines()
    reply = generate.Reply(target, None, tokenizer, lambda text: None)
    reply.run(encode(tokenizer, "abc", target.device), {"max_new_tokens": 128, "do_sample": False})
    assert printed[0] == reply.text
    assert printed[-1].startswith("128 tokens in ")


def test_candidate_generator(models, monkeypatch, capsys):
    """transformers' own loop verifies the candidates: the text is plain decoding's."""
    script = example("candidate_generator")
    target, tokenizer, _ = models(script)
    monkeypatch.setattr("sys.argv", ["candidate_generator.py", "abc"])
    rounds = script.main()
    text, counts = capsys.readouterr().out.rsplit("\n\n", 1)
    inputs = encode(tokenizer, "abc", target.device)
    plain = target.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert text == tokenizer.decode(plain, skip_special_tokens=True)
    assert counts.startswith(f"{len(rounds)} rounds: ") and any(drafted for drafted, _ in rounds)
    assert all(accepted <= drafted for drafted, accepted in rounds)
    assert hasattr(GenerationMixin.generate, "_is_falcon_hook")


# Of the tiny tokenizer, which has no special tokens: a comma.
EOS = 63


@pytest.fixture
def form(monkeypatch):
    """The example of JSON with a form that the tiny tokenizer can write, and the lengths that its processors saw."""
    script = example("json_answers")
    monkeypatch.setattr(script, "FORM", ["ab", frozenset("cdefgh"), "x", frozenset("0123"), "z"])
    seen = []
    call = script.JsonForm.__call__

    def spy(processor, input_ids, scores):
        seen.append((id(processor), input_ids.shape[1]))
        return call(processor, input_ids, scores)

    monkeypatch.setattr(script.JsonForm, "__call__", spy)
    return script, seen


def test_json_answers(models, form, monkeypatch, capsys):
    script, _ = form
    target, tokenizer, _ = models(script)
    # The target is other tests', too.
    monkeypatch.setattr(target.generation_config, "eos_token_id", EOS)
    monkeypatch.setattr(script, "load_target", lambda *_: (target, tokenizer))
    monkeypatch.setattr("sys.argv", ["json_answers.py", "abc", "def"])
    answers = script.main()
    *lines, rounds = capsys.readouterr().out.splitlines()
    assert len(answers) == 2 and all(line.endswith(": the same plain") for line in lines)
    assert all(re.fullmatch("ab[c-h]*(x([0-3]+z?)?)?", answer.replace(" ", "")) for answer in answers), answers
    told, silent = re.findall(r"\d+\.\d\d", rounds)
    # It drafts no token that the processor forbids.
    assert float(told) > float(silent) >= 1


@pytest.mark.parametrize("sample", [False, True])
def test_a_processor_that_keeps_a_state_sees_each_token_once(models, form, sample, monkeypatch):
    """As plain decoding calls it: with one token more each time, and never with a draft token that is not accepted."""
    script, seen = form
    target, tokenizer, drafter = models(script)
    # The target is other tests', too.
    monkeypatch.setattr(target.generation_config, "eos_token_id", EOS)
    texts = script.token_texts(tokenizer)
    drafted = 0
    for seed, prompt in enumerate(["abc", "hgf", "x1"]):
        inputs, outputs, lengths = encode(tokenizer, prompt, target.device), [], []
        for assistant_model in (None, drafter):
            seen.clear()
            torch.manual_seed(seed)
            processor = script.JsonForm(target.generation_config.eos_token_id, texts)
            options = {"do_sample": sample, "max_new_tokens": 24, "return_dict_in_generate": True}
            if assistant_model is not None:
                options |= {"assistant_model": drafter, "num_assistant_tokens_schedule": "constant"}
            output = target.generate(**inputs, **options, logits_processor=[processor])
            outputs.append(output.sequences.tolist())
            lengths.append([length for name, length in seen if name == id(processor)])
        assert outputs[0] == outputs[1] and lengths[0] == lengths[1]
        assert lengths[1] == list(range(lengths[1][0], lengths[1][0] + len(lengths[1])))
        drafted += output.draft_statistics["drafted_tokens"]
    assert drafted > 0


def test_pipeline(workplace, monkeypatch, capsys):
    script = example("pipeline")
    monkeypatch.setattr(script, "converted_target", lambda: workplace / "chat")
    monkeypatch.setattr(script, "shipped_drafter", lambda: str(workplace / "drafter"))
    monkeypatch.setattr("sys.argv", ["pipeline.py", "abc"])
    script.main()
    first, second, same, _, text = capsys.readouterr().out.splitlines()
    assert first.startswith("plain: ") and second.startswith("drafted: ") and text
    assert same == "the same text: True"


@pytest.mark.parametrize("rewrites", [False, True], ids=["cache is kept", "template rewrites replies"])
def test_chat(models, monkeypatch, capsys, rewrites):
    script = example("chat")
    target, tokenizer, drafter = models(script)
    monkeypatch.setattr(script, "load_target", lambda: (target, tokenizer))
    if rewrites:
        tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.content }}", "{{ m.content[:9] }}")
    # One of the tokens that a random target writes is special.
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, skip_special_tokens: decode(ids))
    given, ask = [], target.generate

    def spy(**kwargs):
        held = 0 if kwargs[CACHE_NAME] is None else kwargs[CACHE_NAME].get_seq_length()
        given.append((kwargs["input_ids"], held))
        return ask(**{**kwargs, "max_new_tokens": 24})

    monkeypatch.setattr(target, "generate", spy)
    monkeypatch.setattr("sys.argv", ["chat.py", "abc", "def", "ghi"])
    script.main()
    printed = capsys.readouterr().out.split("\n\n")
    monkeypatch.setattr(target, "generate", ask)
    assert len(given) == 3 and given[0][1] == 0
    for turn, (ids, held) in enumerate(given):
        # All but the last token of the turn before it, and the whole conversation where that does not serve.
        assert turn == 0 or held == (0 if rewrites else given[turn - 1][0].shape[1] + 23)
        plain = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        plain = plain[0, ids.shape[1] :]
        assert printed[turn].splitlines()[1] == decode(plain)


@pytest.mark.slow
def test_push(workplace, tmp_path):
    with running_hub() as hub:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path)}
        environment |= {"PYTHONPATH": str(Path(hf_falcon.__file__).parents[1]), "HF_HUB_DISABLE_XET": "1"}
        result = subprocess.run(
            [sys.executable, EXAMPLES / "push.py", workplace / "drafter", "tester/mine"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
    assert result.returncode == 0, result.stderr[-4000:]
    address, last = result.stdout.splitlines()
    assert address.startswith(f"{hub.endpoint}/tester/mine/commit/") and last == "loaded from the Hub"
    assert hub.repositories["tester/mine"].private and "decoding.py" in hub.repositories["tester/mine"].files()


@pytest.mark.slow
def test_code_and_math_prompts(tmp_path, monkeypatch, capsys):
    script = example("code_and_math_prompts")
    # To read the standard library takes seconds.
    found = script.functions()
    monkeypatch.setattr(script, "functions", lambda: list(found))
    made = {}
    for name, words in {"first": [], "again": [], "other": ["--seed", "1"]}.items():
        path = tmp_path / f"{name}.jsonl"
        words = ["--output", str(path), "--code", "60", "--math", "200", *words]
        monkeypatch.setattr("sys.argv", ["code_and_math_prompts.py", *words])
        script.main()
        made[name] = [dialogue.messages[0]["content"] for dialogue in read_dialogues(path)]
        assert capsys.readouterr().out == f"{path}: 260 prompts\n"
    assert made["first"] == made["again"] != made["other"]
    code = [prompt for prompt in made["first"] if "def " in prompt or "Python function" in prompt]
    assert len(code) == 60 and len(set(made["first"])) > 250
    # Every field of a problem has a value.
    assert not any(f"{{{name}}}" in prompt for prompt in made["first"] for name in ("a", "name", "things", "product"))


def test_later_turns(tmp_path, monkeypatch, capsys):
    script = example("later_turns")
    texts = ("first", "answer", "w" * script.SHORTEST_PROMPT, "x" * script.SHORTEST_RESPONSE, "go on", "y" * 999)
    dialogue = [{"from": role, "value": text} for role, text in zip(("human", "gpt") * 3, texts)]
    data, output = tmp_path / "dialogues.json", tmp_path / "later.jsonl"
    # The second dialogue repeats the first. The third has one turn.
    data.write_text(json.dumps([{"conversations": part} for part in (dialogue, dialogue, dialogue[4:])]))
    monkeypatch.setattr("sys.argv", ["later_turns.py", "--data", str(data), "--output", str(output)])
    script.main()
    assert capsys.readouterr().out == f"{output}: 1 turns\n"
    assert [[message["content"] for message in turn.messages] for turn in read_dialogues(output)] == [list(texts[2:4])]


def test_grpo(models, tmp_path, monkeypatch, capsys):
    pytest.importorskip("trl")
    script = example("grpo")
    target, tokenizer, _ = models(script)
    # trl pads with it.
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(1)
    monkeypatch.setattr(script, "load_target", lambda *_: (copy.deepcopy(target), tokenizer))
    words = ["--steps", "2", "--max_new_tokens", "8", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["grpo.py", *words])
    found = script.main()
    assert found.keys() == set(script.WAYS)
    assert found["attached"].texts == found["learning"].texts == found["plain"].texts
    assert len(found["plain"].texts) == 2 and not found["plain"].tokens_a_round and found["attached"].tokens_a_round
    assert capsys.readouterr().out.count("2 of 2") == 3


def test_learn_while_serving(models, monkeypatch, capsys):
    script = example("learn_while_serving")
    target, tokenizer, _ = models(script)
    words = ["--calls", "4", "--every", "2", "--held_out", "2", "--max_new_tokens", "8", "--share", "1.0"]
    monkeypatch.setattr("sys.argv", ["learn_while_serving.py", *words])
    rows = script.main()
    assert [row["calls"] for row in rows] == [0, 2, 4] and all(0 <= row["tau"] < 8 for row in rows)
    # The comparisons are no calls to learn from.
    assert "tokens in 4 calls" in capsys.readouterr().out


def test_learn_while_serving_resumes(models, monkeypatch, capsys, tmp_path):
    script = example("learn_while_serving")
    models(script)
    words = "--every 2 --held_out 2 --max_new_tokens 24 --steps_a_call 0.5 --plain_every 2".split()
    words += ["--folder", str(tmp_path / "learnt"), "--output", str(tmp_path / "curve.jsonl")]
    for calls in ("2", "6"):
        monkeypatch.setattr("sys.argv", ["learn_while_serving.py", "--calls", calls, *words])
        rows = script.main()
    assert [row["calls"] for row in rows] == [0, 2, 4, 6]
    assert rows == [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    # The second run went on from the weights and the texts of the first.
    assert "in 6 calls" in capsys.readouterr().out


@pytest.mark.slow
def test_learning_memory(monkeypatch, capsys):
    script = example("learning_memory")
    words = ["--calls", "90", "--every", "30", "--memory", "0.02"]
    monkeypatch.setattr("sys.argv", ["learning_memory.py", *words])
    rows = script.main()
    assert [row["calls"] for row in rows] == [0, 30, 60, 90]
    # The buffer is full after the first 30 calls.
    assert all(0 < row["texts"] <= 0.02 for row in rows[1:])
    assert rows[3]["tensors"] <= 1.5 * rows[1]["tensors"]
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_learning_cost(models, monkeypatch, capsys):
    script = example("learning_cost")
    models(script)
    monkeypatch.setattr("sys.argv", ["learning_cost.py", "--pairs", "2", "--max_new_tokens", "8"])
    assert script.main() > 0
    # Half of the calls are watched, the first three pairs too.
    assert "in 5 calls" in capsys.readouterr().out


def test_batches(models, monkeypatch, capsys, tmp_path):
    script = example("batches")
    target, tokenizer, _ = models(script)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    monkeypatch.setattr(script, "load_target", lambda *_: (target, tokenizer))
    prompts = [{"turns": [text]} for text in ("Why?", "What is rain?", "Tell me a story.", "Who?", "Count.")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts))
    words = ["--data", tmp_path / "prompts.jsonl", "--limit", "5", "--rows", "1", "2", "--max_new_tokens", "8"]
    monkeypatch.setattr("sys.argv", ["batches.py", *map(str, words)])
    script.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    # In float32 all texts are plain decoding's. The fifth prompt fills no batch of two.
    assert [(row[0], row[1], row[-1]) for row in rows] == [("1", "5", "5/5"), ("2", "2", "2/2")]


def test_never_slower(models, workplace, monkeypatch, capsys, tmp_path):
    script = example("never_slower")
    models(script)
    # A process whose threads have computed cannot be forked.
    calls = []
    monkeypatch.setattr(script, "in_new_process", lambda run, *arguments: calls.append(run) or run(*arguments))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    words = ["--data", workplace / "prompts.jsonl", "--output", tmp_path / "times.jsonl", "--drafters", "other=folder"]
    words += ["--busy", "0", "1", "--lengths", "4"]
    monkeypatch.setattr("sys.argv", ["never_slower.py", *map(str, words)])
    script.main()
    header, _, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header[3::4] == ["lookup,", "default,", "other,", "random,"]
    assert [row[:2] for row in rows] == [["0", "4"], ["1", "4"]] and all(len(row) == 10 for row in rows)
    # Plain decoding and each drafter beside no process and beside one. The same command measures nothing again.
    assert len(calls) == 10
    script.main()
    assert len(calls) == 10
    # With other settings, or another drafter of that name, a result is another one.
    monkeypatch.setattr("sys.argv", ["never_slower.py", *map(str, words), "--limit", "2"])
    script.main()
    assert len(calls) == 20
    words[words.index("other=folder")] = "other=another"
    monkeypatch.setattr("sys.argv", ["never_slower.py", *map(str, words)])
    script.main()
    assert len(calls) == 30
