# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The example scripts, on a tiny target."""

import contextlib
import importlib.util
import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import VOCAB, prompt, tiny_drafter, tiny_target, tiny_tokenizer

from hf_falcon.commands import main as entry
from hf_falcon.training.token_file import TokenFile

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name):
    """An example script as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A target with its tokenizer, a token file and prompts, in a folder."""
    folder = tmp_path_factory.mktemp("workplace")
    tiny_target("llama").save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    samples = [prompt(12 + seed % 7, seed)[0] for seed in range(40)]
    TokenFile.from_samples(samples, [4] * 40, [0.0] * 40, VOCAB).save(folder / "tokens.safetensors")
    (folder / "prompts.jsonl").write_text('{"turns": ["Why?"]}\n')
    return folder


def test_compare_recipes(workplace, tmp_path, monkeypatch, capsys):
    script = example("compare_recipes")
    names = ["A: the same, distillation weight 1", script.STARTED, script.AVERAGED]
    monkeypatch.setattr(script, "RECIPES", {name: script.RECIPES[name] for name in names})
    small = "--draft_vocab_size 40 --eval_samples 4 --target_dtype float32 --learning_rate 1e-2 --use_cpu"
    monkeypatch.setattr(script, "TRAINING", f"{script.TRAINING} {small} --bf16 false")
    monkeypatch.setattr(script, "SPACING", 2)
    commands = []

    def run(*words):
        commands.append(words[0])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert entry.main(list(words)) == 0
        return printed.getvalue()

    monkeypatch.setattr(script, "run", run)
    words = ["--data", workplace / "tokens.safetensors", "--prompts", workplace / "prompts.jsonl", "--target"]
    words += [workplace / "target", "--output_dir", tmp_path, "--max_steps", "6", "--max_new_tokens", "8"]
    monkeypatch.setattr("sys.argv", ["compare_recipes.py", *map(str, words)])
    script.main()
    table = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {name}" for name in names]
    assert commands.count("train") == 4 and commands.count("evaluate") == 6

    # Layers of the target, but the other weights of any new drafter.
    new, started = (load_file(tmp_path / "01" / name / "model.safetensors") for name in ("new", "started"))
    theirs = tiny_target("llama").get_decoder().layers.state_dict()
    for name, weights in started.items():
        layer = theirs.get(name.removeprefix("layers."))
        assert torch.equal(weights, new[name] if layer is None else layer), name
    assert len(theirs) == sum(name.startswith("layers.") for name in started)

    # The same training as that of A, and of its weights the average.
    assert torch.equal(*(load_file(tmp_path / n / "model.safetensors")["norm.weight"] for n in ("00", "02")))
    taken = [load_file(tmp_path / "02" / f"checkpoint-{step}" / "model.safetensors") for step in (2, 4, 6)]
    averaged = load_file(tmp_path / "02" / "averaged" / "model.safetensors")
    for name in ("norm.weight", "fusion.linear.weight"):
        first, second, last = (weights[name] for weights in taken)
        torch.testing.assert_close(averaged[name], 0.64 * first + 0.16 * second + 0.2 * last)
    assert torch.equal(averaged["draft_vocab_ids"], taken[0]["draft_vocab_ids"])

    # Nothing is done twice.
    commands.clear()
    script.main()
    assert capsys.readouterr().out.splitlines() == table and commands == []


def test_choices_are_those_of_drafting_token_by_token():
    script = example("confidence_heads")
    target = tiny_target("llama")
    drafter = tiny_drafter(target, block_size=1, num_lstm_layers=0)
    tokens, prompt_length = prompt(14), 5
    known, right = script.first_choices(drafter, target, tokens, prompt_length)
    # The first token that a prediction before the response's last can be read for is the response's first.
    places = range(prompt_length - 2, 12)
    known, right = (found.unflatten(0, (script.PASSES, len(places))) for found in (known, right))
    assert known[:, :, 4].tolist() == [[number] * len(places) for number in (1, 2, 3)]

    with torch.no_grad():
        features = target.model(tokens).last_hidden_state
        embeds = target.get_input_embeddings()(tokens[:, 1:])
        for column, place in enumerate(places):
            wanted = target.lm_head(features[0, place + 1]).argmax()
            for number in range(1, min(script.PASSES, place + 1) + 1):
                given = features[:, : place - number + 2]
                for _ in range(number):
                    blocks = torch.arange(given.shape[1])[None]
                    predicted = drafter(given, embeds[:, : given.shape[1]], blocks)[:, -1:]
                    given = torch.cat((given, predicted), dim=1)
                scores = target.lm_head(predicted[0, 0]).log_softmax(dim=-1)
                best = scores.topk(2)
                found = known[number - 1, column]
                torch.testing.assert_close(found[5:], predicted[0, 0], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(found[:2], best.values, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(found[2], torch.distributions.Categorical(logits=scores).entropy())
                torch.testing.assert_close(found[3], best.values[0].exp().logit(), rtol=1e-3, atol=1e-3)
                assert right[number - 1, column] == (best.indices[0] == wanted)


def test_confidence_heads(workplace, tmp_path, monkeypatch, capsys):
    script = example("confidence_heads")
    tiny_drafter(tiny_target("llama"), block_size=1, num_lstm_layers=0).save_pretrained(tmp_path)
    words = ["--data", workplace / "tokens.safetensors", "--target", workplace / "target", "--drafter", tmp_path]
    monkeypatch.setattr("sys.argv", ["confidence_heads.py", *map(str, words), "--held_out", "20"])
    script.main()
    table = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[4:]]
    assert [name.removeprefix("| ") for name, *_ in table] == ["own probability, as it is", *script.JUDGES]
    assert all(float(loss) > 0 and 0 <= float(auc.removesuffix(" |")) <= 1 for _, loss, auc in table)


def test_a_judge_learns_what_can_be_learnt():
    script = example("confidence_heads")
    generator = torch.Generator().manual_seed(0)
    known = torch.randn(4000, 3, generator=generator)
    chances = (2 * known[:, 1] - 1).sigmoid()
    right = torch.bernoulli(chances, generator=generator)
    logits = script.fit(known[:2000], right[:2000])(known[2000:])
    torch.testing.assert_close(logits.sigmoid(), chances[2000:], rtol=0, atol=0.1)
    pairs = logits[right[2000:] > 0][:, None] > logits[right[2000:] == 0]
    assert script.auc(logits, right[2000:]) == pytest.approx(pairs.double().mean().item())


def run_example(name, workplace, tmp_path, monkeypatch, capsys, *words):
    """Runs an example that prints a table with the workplace's target and a random drafter; returns its rows."""
    tiny_drafter(tiny_target("llama"), block_size=2).save_pretrained(tmp_path / "drafter")
    common = ["--target", workplace / "target", "--drafter", tmp_path / "drafter", "--dtype", "float32"]
    monkeypatch.setattr("sys.argv", [name, *map(str, common), *words])
    script = example(name)
    script.main()
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_long_context(workplace, tmp_path, monkeypatch, capsys):
    words = ["--lengths", "20", "60", "--turns", "2", "--nodes", "4", "--passes", "2"]
    heading, *rows = run_example("long_context", workplace, tmp_path, monkeypatch, capsys, *words)
    assert heading[:4] == ["context", "plain", "round", "round/plain"] and [row[0] for row in rows] == ["20", "60"]
    assert all(float(number) > 0 for row in rows for number in row[1:8])


def test_oracle_bound(workplace, tmp_path, monkeypatch, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(workplace / "target")
    words = ["--turns", "1", "--rounds", "3", "--nodes", "8", "--passes", "2"]
    _, *rows = run_example("oracle_bound", workplace, tmp_path, monkeypatch, capsys, *words)
    # Two passes of two tokens, and the target's own.
    assert len(rows) == 3 and all(row[8:12] == ["5.00", "of", "5", "tokens"] for row in rows)
