# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The examples that measure or compare, on a tiny target."""

import contextlib
import io
import json
import os
import re
import sys

import pytest
import torch
from example_scripts import example, run_example
from safetensors.torch import load_file
from tiny_models import VOCAB, new_drafter, new_target, prompt, tiny_drafter, tiny_target, tiny_tokenizer
from transformers import AutoModelForCausalLM

from hf_falcon import DraftTree, StaticTree
from hf_falcon.bench.decision import DecisionModel
from hf_falcon.bench.metrics import first_difference
from hf_falcon.commands import main as entry
from hf_falcon.core.candidate_generator import ContextHead
from hf_falcon.core.draft_session import TargetHead
from hf_falcon.training.csgd import shift_left
from hf_falcon.training.features import target_features


@pytest.mark.slow
def test_compare_recipes(workplace, tmp_path, monkeypatch, capsys):
    script = example("compare_recipes")
    names = ["A: k = 1, one pass", "B, Muon"]
    monkeypatch.setattr(script, "RECIPES", {name: script.RECIPES[name] for name in names})
    small = "--draft_vocab_size 40 --eval_samples 4 --target_dtype float32 --learning_rate 1e-2 --use_cpu"
    monkeypatch.setattr(script, "TRAINING", f"{script.TRAINING} {small} --bf16 false")
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
    assert commands.count("train") == 2 and commands.count("evaluate") == 4
    first, second = (load_file(tmp_path / folder / "model.safetensors")["norm.weight"] for folder in ("00", "01"))
    assert not torch.equal(first, second)

    # Nothing is done twice.
    commands.clear()
    script.main()
    assert capsys.readouterr().out.splitlines() == table and commands == []
    # And nothing is taken for a result of other settings.
    monkeypatch.setattr("sys.argv", ["compare_recipes.py", *map(str, words), "--limit", "1"])
    with pytest.raises(SystemExit, match="has other settings or recipes"):
        script.main()


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


@pytest.fixture
def diverging_assisted(monkeypatch):
    """Assisted decoding that prefers other tokens than plain decoding does; returns what both say of a prompt."""
    target = tiny_target("llama")
    generate = type(target).generate

    def other(self, *args, **kwargs):
        bias = {"sequence_bias": {(5,): 1.0}} if "assistant_model" in kwargs else {}
        return generate(self, *args, **kwargs, **bias)

    monkeypatch.setattr(type(target), "generate", other)

    def texts(ids):
        kwargs = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        both = (generate(target, ids, **kwargs), generate(target, ids, **kwargs, sequence_bias={(5,): 1.0}))
        return [each[0, ids.shape[1] :].tolist() for each in both]

    return texts


def divergence_words(workplace, folder):
    tiny_drafter(tiny_target("llama")).save_pretrained(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS))
    words = ["--data", folder / "prompts.jsonl", "--target", workplace / "target", "--drafter", folder]
    return [*map(str, words), "--dtype", "float32", "--max_new_tokens", "12"]


TEXTS = ("abcdef", "Why", "1,2,3,4,5", "no", "xyz")


def test_divergence_in_float32_is_none(workplace, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["divergence.py", *divergence_words(workplace, tmp_path), "--batch_size", "3"])
    example("divergence").main()
    printed = capsys.readouterr().out
    assert "| plain decoding in a batch | 0/5 | - | - | - |" in printed
    assert "| assisted decoding | 0/5 | - | - | - |" in printed
    assert "Near-ties of assisted decoding: 0. Outputs that diverge at one of them: 0/0." in printed


def test_both_commands_name_the_first_diverging_token(workplace, tmp_path, monkeypatch, capsys, diverging_assisted):
    words = divergence_words(workplace, tmp_path)
    monkeypatch.setattr("sys.argv", ["divergence.py", *words])
    example("divergence").main()
    printed = capsys.readouterr().out
    expected = []
    for number, text in enumerate(TEXTS):
        ids = tiny_tokenizer()(text, return_tensors="pt").input_ids
        tokens, others = diverging_assisted(ids)
        place = first_difference(tokens, others)
        if place is not None:
            with torch.no_grad():
                logits = tiny_target("llama")(torch.cat((ids, torch.tensor([tokens[:place]]).long()), 1)).logits[0, -1]
            gap = float(logits[tokens[place]] - logits[others[place]])
            expected.append({"prompt": number, "token": place, "gap": pytest.approx(gap, abs=1e-4)})
    assert 0 < len(expected) < len(TEXTS)
    assert f"| assisted decoding | {len(expected)}/5 |" in printed
    assert "| plain decoding in a batch | 0/5 |" in printed

    # In float32 that is a failure.
    assert entry.main(["evaluate", *words, "--check", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["data"]["prompts"]
    assert found["divergences"] == expected
    assert found["identical"] == len(TEXTS) - len(expected)
    assert entry.main(["evaluate", *words, "--check"]) == 1
    first = expected[0]
    line = f"prompts, prompt {first['prompt']}: diverges from plain decoding at token {first['token']}, logit gap "
    printed = capsys.readouterr().out
    assert line in printed and "Rounding" not in printed

    # Also where the machine chose float32; and no failure elsewhere.
    monkeypatch.setattr("hf_falcon.commands.models.fastest_dtype", lambda device: torch.float32)
    assert entry.main(["evaluate", *words, "--check", "--dtype", "auto"]) == 1
    capsys.readouterr()
    assert entry.main(["evaluate", *words, "--check", "--dtype", "bfloat16"]) == 0
    assert "With --row_invariant, and in float32, no output may diverge." in capsys.readouterr().out


def test_confidence_heads(workplace, tmp_path, monkeypatch, capsys):
    script = example("confidence_heads")
    tiny_drafter(tiny_target("llama"), block_size=1, num_lstm_layers=0).save_pretrained(tmp_path)
    words = ["--data", workplace / "tokens.safetensors", "--target", workplace / "target", "--drafter", tmp_path]
    monkeypatch.setattr("sys.argv", ["confidence_heads.py", *map(str, words), "--held_out", "20"])
    script.main()
    table = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[4:]]
    assert [name.removeprefix("| ") for name, *_ in table] == ["own probability, as it is", *script.JUDGES]
    assert all(float(loss) > 0 and 0 <= float(auc.removesuffix(" |")) <= 1 for _, loss, auc in table)
    monkeypatch.setattr("sys.argv", ["confidence_heads.py", *map(str, words), "--held_out", "1000"])
    with pytest.raises(SystemExit):
        script.main()
    assert "`--held_out` is 1000" in capsys.readouterr().err


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


def test_decision_model(workplace, tmp_path, monkeypatch, capsys):
    script = example("decision_model")
    tiny_drafter(tiny_target("llama"), block_size=1, num_lstm_layers=0).save_pretrained(tmp_path)
    words = ["--data", workplace / "tokens.safetensors", "--target", workplace / "target", "--drafter", tmp_path]
    words += ["--prompts", "4", "--new_tokens", "20", "--output", tmp_path / "decision.json"]
    monkeypatch.setattr("sys.argv", ["decision_model.py", *map(str, words)])
    script.main()
    printed = capsys.readouterr().out.splitlines()
    # At 20 less the depth of a tree places of each answer, and all passes but the first.
    assert printed[0].startswith(f"{4 * (20 - 4) * 3:,} passes")
    assert [line.split(" | ")[0] for line in printed[4:]] == ["| probability of the paths", "| decision model"]
    assert DecisionModel.load(tmp_path / "decision.json").bias != 0


def test_depth_of_the_right_path():
    script = example("decision_model")
    tree = StaticTree([[0], [1], [1, 0], [1, 1]])
    made = DraftTree(torch.tensor([5, 6, 7, 8, 9]), tree.parents, tree.depths, tree.visible)
    for text, depth in {(6,): 1, (7, 9, 1): 2, (9,): 0, (5, 6): 0, (7, 8): 2, (6, 8): 1, (): 0}.items():
        assert script.right_depth(made, list(text)) == depth


def test_long_context(workplace, tmp_path, monkeypatch, capsys):
    words = ["--lengths", "20", "60", "--turns", "2", "--nodes", "4", "--passes", "2"]
    heading, *rows = run_example("long_context", workplace, tmp_path, monkeypatch, capsys, *words)
    assert heading[:4] == ["context", "plain", "round", "round/plain"] and [row[0] for row in rows] == ["20", "60"]
    assert all(float(number) > 0 for row in rows for number in row[1:8])


NODE = """#!{python}
import json, pathlib, sys
worker, packages, file, threads, tokens, *speculation = sys.argv[1:]
assert worker.endswith("examples/llama_cpp.mjs") and pathlib.Path(file).read_bytes()[:4] == b"GGUF"
print("{{}}", flush=True)
for line in sys.stdin:
    assert json.loads(line)["ids"]
    print(json.dumps({{"tokens": int(tokens), "seconds": 1.0 if speculation else 2.0}}), flush=True)
"""


def test_llama_cpp(workplace, tmp_path, monkeypatch, capsys):
    """With a program in the place of Node.js, whose times are known."""
    (tmp_path / "node").write_text(NODE.format(python=sys.executable))
    (tmp_path / "node").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    words = ["--packages", tmp_path, "--data", workplace / "prompts.jsonl", "--target", workplace / "target"]
    words += ["--drafter", workplace / "drafter", "--dtype", "float32", "--max_new_tokens", "8"]
    words += ["--gguf", tmp_path / "model.gguf", "--lookups", "3"]
    monkeypatch.setattr("sys.argv", ["llama_cpp.py", *map(str, words)])
    example("llama_cpp").main()
    rows = capsys.readouterr().out.splitlines()[-4:]
    assert [row.split("  ")[0] for row in rows] == [
        "plain",
        "falcon",
        "llama.cpp, model",
        "llama.cpp, model, its lookup of 3",
    ]
    assert rows[0].split()[1:-1] == ["1.00"] * 2
    assert [float(row.split()[-1]) for row in rows[2:]] == [4.0, 8.0]


def test_llama_cpp_writes_the_weights_of_the_target(tmp_path, monkeypatch):
    """The file that llama.cpp reads has the values of the demo target's, its matrices in the wanted type."""
    gguf = pytest.importorskip("gguf")
    values = {"norm": torch.randn(32).numpy(), "matrix": torch.randn(8, 64).numpy()}
    writer = gguf.GGUFWriter(tmp_path / "source.gguf", "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b"])
    for name, value in values.items():
        writer.add_tensor(name, value)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    script = example("llama_cpp")
    monkeypatch.setattr(script, "packaged_target", lambda: tmp_path / "source.gguf")
    for kind, error in (("bf16", 0.02), ("q8_0", 0.02)):
        read = gguf.GGUFReader(script.write_gguf(kind, tmp_path))
        assert read.fields["llama.block_count"].contents() == 2
        assert read.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
        for tensor in read.tensors:
            is_matrix = tensor.name == "matrix"
            assert tensor.tensor_type.name == (kind.upper() if is_matrix else "F32")
            found = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)).view(-1)
            wanted = torch.tensor(values[tensor.name]).view(-1)
            torch.testing.assert_close(found, wanted, atol=error if is_matrix else 0.0, rtol=0.0)


def test_oracle_bound(workplace, tmp_path, monkeypatch, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(workplace / "target")
    words = ["--turns", "1", "--rounds", "3", "--nodes", "8", "--passes", "2"]
    _, *rows = run_example("oracle_bound", workplace, tmp_path, monkeypatch, capsys, *words)
    # Two passes of two tokens, and the target's own.
    assert len(rows) == 3 and all(row[8:12] == ["5.00", "of", "5", "tokens"] for row in rows)


@pytest.mark.parametrize("draft_vocab_size", [None, 30])
def test_context_bonuses(workplace, tmp_path, monkeypatch, capsys, draft_vocab_size):
    """Fitted bonuses are no worse than none, and the loss is that of the logits that decoding has."""
    script = example("context_bonuses")
    target = tiny_target("llama")
    drafter = new_drafter(target, block_size=1, num_lstm_layers=0, draft_vocab_size=draft_vocab_size)
    drafter.save_pretrained(tmp_path)
    words = ["--data", workplace / "tokens.safetensors", "--target", workplace / "target", "--drafter", tmp_path]
    monkeypatch.setattr("sys.argv", ["context_bonuses.py", *map(str, words), "--samples", "8"])
    script.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("context_bonuses: [") and printed[1].startswith("negative log-likelihood of ")

    # A text that repeats itself: what followed the latest tokens is a good guess.
    text = torch.cat((prompt(9), prompt(9), prompt(9)), dim=1)
    (sample,) = script.observe(drafter, target, text, 9, 2)
    assert sample.equal.max() == 2 and sample.equal.shape == sample.seen.shape
    bonuses = script.fit([sample], 2)
    assert script.loss(sample, bonuses) <= script.loss(sample, torch.zeros(3)) + 1e-3
    context = ContextHead(TargetHead(drafter, target), [0.5, 1.0, 3.0], VOCAB, torch.device("cpu"))
    features = target_features(target, text, torch.ones_like(text, dtype=torch.bool))
    choices = target.lm_head(features)[0].argmax(dim=-1)
    expected, count = 0.0, 0
    with torch.no_grad():
        embeds = context._head.embed(shift_left(text, 1))
        states = drafter(features, embeds, torch.arange(27)[None])[0]
        for place in range(7, 25):
            context.extend(text[0, len(context) : place + 2])
            logits = context.prefer_repetitions(context.logits(states[place : place + 1]), context.latest())[0]
            known = list(range(VOCAB)) if context.vocab_ids is None else context.vocab_ids.tolist()
            if int(choices[place + 1]) in known:
                expected -= float(logits.log_softmax(dim=0)[known.index(int(choices[place + 1]))])
                count += 1
    assert count == len(sample.right)
    assert float(script.loss(sample, torch.tensor([0.5, 1.0, 3.0]))) == pytest.approx(expected, rel=1e-3)


def test_copying_prompts(tmp_path, monkeypatch, capsys):
    """Twenty prompts of each kind, all different, whose material stands in the prompt."""
    monkeypatch.setattr("sys.argv", ["copying_prompts.py", "--output", str(tmp_path / "copying")])
    example("copying_prompts").main()
    prompts = {}
    for name in ("edit", "summarise", "answer"):
        lines = (tmp_path / "copying" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        prompts[name] = [json.loads(line)["turns"][0] for line in lines]
        assert len(set(prompts[name])) == 20
    assert all("```python\ndef " in text for text in prompts["edit"])
    assert all(len(text) > 250 for text in prompts["summarise"] + prompts["answer"])


@pytest.fixture
def wide_target(tmp_path):
    """A target whose numbers of inputs are multiples of 64."""
    new_target("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.bfloat16).eval()


@pytest.mark.parametrize(("bits", "step"), [(8, 2 / 254), (4, 1 / 15)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_bits_keep_the_weights(bits, step, dtype):
    """Products with the identity are the weights, at most half a step away; no row depends on others."""
    script = example("low_bits")
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48).to(dtype)
    low = script.LAYERS[bits](linear)
    with torch.no_grad():
        weight = (low(torch.eye(64, dtype=dtype)) - linear.bias).T.float()
        spread = 2 * linear.weight.abs().max().float()
        allowed = 0.5 * step * spread + (2**-7 * spread if dtype == torch.bfloat16 else 1e-6)
        error = (weight - linear.weight.float()).abs().max()
        assert 0 < error <= allowed
        rows = torch.randn(2, 8, 64, dtype=dtype)
        assert low(rows).shape == (2, 8, 48)
        assert torch.equal(low(rows)[1, 3:4], low(rows[1, 3:4]))
    assert low.weight.nbytes == 64 * 48 * bits // 8


def test_low_bits(wide_target, workplace, tmp_path, monkeypatch, capsys):
    tiny_drafter(wide_target.float()).save_pretrained(tmp_path / "drafter")
    words = ["--target", tmp_path / "target", "--drafter", tmp_path / "drafter", "--turns", "2", "--length", "9"]
    words += ["--dtype", "float32", "--data", workplace / "prompts.jsonl", "--max_new_tokens", "12"]
    monkeypatch.setattr("sys.argv", ["low_bits.py", *map(str, words)])
    script = example("low_bits")
    script.main()
    printed = capsys.readouterr().out
    first, second = (block.splitlines() for block in printed.strip().split("\n\n"))
    names = ["float32", "8 bits", "4 bits"]
    for name, line in zip(names, first):
        assert line.startswith(f"{name}: the probe says trees; a row beside 7 others has ")
    # Rows of these products do not depend on others.
    assert all(line.endswith(" has 0.0% other values") for line in first[1:3])
    assert first[3].split() == ["ms", "T(1)", "T(4)", "T(8)", "T(16)"]
    assert all(float(number) > 0 for row in first[5:] for number in row.split()[-4:])
    assert [row.split("  ")[0] for row in second[2:]] == names
    for row in second[2:]:
        assert row.split()[-1] == "1/1" and float(row.split()[-2]) >= 1


def test_layers_of_low_bits_that_do_not_fit(wide_target):
    """Layers whose inputs are no multiple of 32 stay; the original keeps all of its layers, and heads are left."""
    script = example("low_bits")
    changed = script.replaced(tiny_target("llama"), script.Int4Linear)
    kinds = {name.rpartition(".")[2]: type(module) for name, module in changed.named_modules()}
    assert kinds["down_proj"] is torch.nn.Linear and kinds["lm_head"] is torch.nn.Linear
    assert kinds["up_proj"] is script.Int4Linear
    assert not any(isinstance(module, script.Int4Linear) for module in tiny_target("llama").modules())
    ids = prompt(9)
    with torch.no_grad():
        wanted = wide_target(ids).logits.float()
        found = script.replaced(wide_target, script.Int8Linear)(ids).logits.float()
    assert 0 < (found - wanted).norm() / wanted.norm() < 0.1


def test_share_of_values_that_depend_on_other_rows():
    """A layer with one scale for all rows gives a row other values beside others."""
    script = example("low_bits")

    class Shared(torch.nn.Linear):
        def forward(self, states):
            return super().forward(states) / states.abs().max()

    target = new_target("llama")
    assert script.share(target) < 1
    for layer in script.decoder_layers(target):
        layer.mlp.up_proj.__class__ = Shared
    values = sum(m.out_features for m in script.decoder_layers(target)[0].modules() if hasattr(m, "in_features"))
    assert script.share(target) >= 0.9 * target.config.intermediate_size / values


def study_words(workplace, folder, *words):
    tiny_drafter(tiny_target("llama"), block_size=2).save_pretrained(folder / "k2")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS[:2]))
    found = ["--target", workplace / "target", "--drafters", f"k1={workplace / 'drafter'}", f"k2={folder / 'k2'}"]
    found += ["--data", folder / "prompts.jsonl", "--dtype", "float32", "--max_new_tokens", "12"]
    return [*map(str, found), "--output", str(folder / "study"), *words]


def test_parameter_study(workplace, tmp_path, monkeypatch, capsys):
    grid = ["--nodes", "2", "6", "--passes", "1", "2"]
    monkeypatch.setattr("sys.argv", ["parameter_study.py", *study_words(workplace, tmp_path, *grid)])
    script = example("parameter_study")
    script.main()
    printed = capsys.readouterr().out
    # In float32 every cell has plain decoding's tokens, and so a ratio.
    assert (
        "differs" not in printed
        and len(re.findall(r"^\| [26] \| (?:[\d.]+, [\d.]+, [\d.]+ \| ?){2}$", printed, re.M)) == 4
    )
    assert len(re.findall(r"^\| (?:best of the grid|cost model).* \| 2/2 \|$", printed, re.M)) == 4
    traces = (tmp_path / "study" / "traces.jsonl").read_text().splitlines()
    # Two drafters with four cells and the cost model each, plain decoding and the prompt alone, on two prompts.
    assert len(traces) == 1 + 2 * (2 * 5 + 2)
    assert (tmp_path / "study" / "study.md").read_text().strip() in printed
    for line in map(json.loads, traces[1:]):
        if sizes := re.search(r"n = (\d), m = (\d)", line["method"]):
            nodes, passes = map(int, sizes.groups())
            found = line["statistics"]
            assert 0 < found["drafted_tokens"] <= nodes * found["rounds"]
            # The last round may have no place for a draft token.
            assert found["rounds"] - 1 <= found["passes"] <= passes * found["rounds"]
            assert passes == 1 or found["passes"] > found["rounds"]

    # An interrupted run resumes, also in the middle of a line; nothing is measured twice.
    (tmp_path / "study" / "traces.jsonl").write_text("\n".join(traces[:-1]) + "\n" + traces[-1][:40])
    asked = []
    generate = script.Study._generate
    monkeypatch.setattr(script.Study, "_generate", lambda *args: asked.append(args[1]) or generate(*args))
    script.main()
    # It warms up first.
    assert asked == [json.loads(traces[-1])["method"]] * 2
    assert (tmp_path / "study" / "study.png").read_bytes()[:4] == b"\x89PNG"


def test_parameter_study_of_other_settings(workplace, tmp_path, monkeypatch, capsys):
    words = study_words(workplace, tmp_path, "--nodes", "2", "--passes", "1")
    monkeypatch.setattr("sys.argv", ["parameter_study.py", *words])
    script = example("parameter_study")
    script.main()
    monkeypatch.setattr("sys.argv", ["parameter_study.py", *words, "--lookup", "4"])
    with pytest.raises(ValueError, match="`prompt_lookup_num_tokens` 0, and this run has 4"):
        script.main()
    monkeypatch.setattr("sys.argv", ["parameter_study.py", *words, "--drafters", "k1"])
    with pytest.raises(SystemExit):
        script.main()
    assert "`--drafters` is 'k1'" in capsys.readouterr().err
