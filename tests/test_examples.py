# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The example scripts, on a tiny target."""

import contextlib
import copy
import http.client
import importlib.util
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN, running_hub
from safetensors.torch import load_file
from tiny_models import VOCAB, prompt, tiny_drafter, tiny_target, tiny_tokenizer
from transformers import AutoTokenizer

import hf_falcon
from hf_falcon import DraftTree, StaticTree
from hf_falcon.bench.decision import DecisionModel
from hf_falcon.bench.metrics import first_difference
from hf_falcon.commands import generate
from hf_falcon.commands import main as entry
from hf_falcon.commands.models import encode
from hf_falcon.training.token_file import TokenFile

EXAMPLES = Path(__file__).parents[1] / "examples"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


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
    dialogues = [{"messages": [{"role": "user", "content": f"abc{i}"}]} for i in range(12)]
    (folder / "dialogues.jsonl").write_text("".join(json.dumps(dialogue) + "\n" for dialogue in dialogues))
    shutil.copytree(folder / "target", folder / "chat")
    (folder / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    tiny_drafter(tiny_target("llama")).save_pretrained(folder / "drafter")
    return folder


@pytest.fixture
def models(workplace, monkeypatch):
    """A function that has an example use the tiny models."""

    def give(script):
        drafter = tiny_drafter(tiny_target("llama"))
        monkeypatch.setattr(script, "load_target", lambda *_: (tiny_target("llama"), chat_tokenizer()))
        monkeypatch.setattr(script, "load_drafter", lambda *_: drafter)
        return tiny_target("llama"), chat_tokenizer(), drafter

    def chat_tokenizer():
        return AutoTokenizer.from_pretrained(workplace / "chat")

    return give


def run_recorded(script, words, folder, **environment):
    """Runs a shell script with an `hf-falcon` that does nothing. Returns its commands, and what it printed."""
    record, stub = folder / "record", folder / "bin" / "hf-falcon"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "" >> "$RECORD"\n')
    stub.chmod(0o755)
    record.write_text("")
    path = os.pathsep.join((str(stub.parent), str(Path(sys.executable).parent), os.environ["PATH"]))
    result = subprocess.run(
        ["bash", EXAMPLES / script, *words],
        cwd=folder,
        env={**os.environ, "PATH": path, "RECORD": str(record), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [block.split("\n") for block in record.read_text().split("\n\n")[:-1]], result.stdout


def test_every_example_of_the_readme_says_what_it_needs():
    rows = re.findall(r"^\| \[`examples/(\S+)`\]\(examples/\1\) \|", (EXAMPLES.parent / "README.md").read_text(), re.M)
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
        held = 0 if kwargs["past_key_values"] is None else kwargs["past_key_values"].get_seq_length()
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


def test_benchmark(workplace, tmp_path, monkeypatch, capsys):
    names = [str(workplace / name) for name in ("prompts.jsonl", "target", "drafter")]
    commands, _ = run_recorded("benchmark.sh", names, tmp_path, OPTIONS="--max_new_tokens 8")
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert entry.main(command) == 0
    rows = re.findall(r"^(plain|prompt_lookup|falcon_static|falcon) ", capsys.readouterr().out, re.M)
    assert rows == ["plain", "prompt_lookup", "falcon_static", "falcon"]
    assert (tmp_path / "runs" / "benchmark" / "report.md").is_file() and len(commands) == 1


SMALL = ["--draft_vocab_size", "40", "--eval_samples", "2", "--bf16", "false", "--use_cpu", "--final_tau_prompts", "0"]
SMALL += ["--target_dtype", "float32", "--per_device_train_batch_size", "2"]


def test_train_a_drafter(workplace, tmp_path, monkeypatch, capsys):
    commands, _ = run_recorded("train_a_drafter.sh", ["out", str(workplace / "target")], tmp_path)
    assert [command[0] for command in commands] == ["prepare", "train", "evaluate"]
    commands[0][commands[0].index("sharegpt")] = str(workplace / "dialogues.jsonl")
    commands[0] += ["--max_new_tokens", "12", "--max_prompt_tokens", "64"]
    commands[1] += [*SMALL, "--max_steps", "3"]
    commands[2] += ["--max_new_tokens", "8", "--dtype", "float32"]
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert entry.main(command) == 0
    assert "2/2" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_train_on_gpu(workplace, tmp_path, monkeypatch):
    words = ["out", str(workplace / "tokens.safetensors")]
    options = " ".join([*SMALL, "--target", str(workplace / "target")])
    monkeypatch.chdir(tmp_path)
    for stage in ("first", "second"):
        commands, printed = run_recorded(
            "train_on_gpu.sh", words, tmp_path, FIRST_STEPS="2", SECOND_STEPS="2", OPTIONS=options, ONE_PIECE="1"
        )
        assert printed == f"A piece of out/{stage} is done: run the same command again.\n"
        (command,) = commands
        assert entry.main(command) == 0
    commands, printed = run_recorded("train_on_gpu.sh", words, tmp_path, FIRST_STEPS="2", SECOND_STEPS="2")
    assert commands == [] and printed == "The drafter is done: out/second\n"


@pytest.mark.slow
def test_train_peers(workplace, tmp_path, monkeypatch):
    words = ["out", str(workplace / "tokens.safetensors")]
    options = " ".join([*SMALL, "--target", str(workplace / "target"), "--max_steps", "2"])
    commands, _ = run_recorded("train_peers.sh", words, tmp_path, OPTIONS=options)
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert entry.main(command) == 0
    assert all((tmp_path / "out" / name / "model.safetensors").is_file() for name in ("eagle_like", "medusa_like"))


def test_train_on_many_gpus_in_one_process(workplace, tmp_path, monkeypatch):
    words = [str(tmp_path / "out"), str(workplace / "target"), str(workplace / "dialogues.jsonl")]
    commands, _ = run_recorded("train_on_many_gpus.sh", words, tmp_path, LAUNCH="hf-falcon")
    assert [command[:3] for command in commands] == [["-m", "hf_falcon", "prepare"], ["-m", "hf_falcon", "train"]]
    assert entry.main([*commands[0][2:], "--max_new_tokens", "12", "--max_prompt_tokens", "64"]) == 0
    assert entry.main([*commands[1][2:], *SMALL, "--max_steps", "2"]) == 0
    assert (tmp_path / "out" / "drafter" / "model.safetensors").is_file()


def test_accelerate_reads_the_configuration():
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(EXAMPLES / "accelerate_8_gpus.yaml"))
    assert found.distributed_type == "MULTI_GPU" and found.num_processes == 8 and found.mixed_precision == "bf16"


@pytest.mark.slow
def test_train_on_many_gpus_in_two_processes(workplace, tmp_path):
    words = [str(tmp_path / "out"), str(workplace / "target"), str(workplace / "dialogues.jsonl")]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {"PATH": path, "PYTHONPATH": str(Path(hf_falcon.__file__).parents[1])}
    environment |= {
        "LAUNCH": "torchrun --standalone --nproc_per_node 2",
        "PREPARE_OPTIONS": "--max_new_tokens 12 --max_prompt_tokens 64",
    }
    environment["TRAIN_OPTIONS"] = " ".join([*SMALL, "--max_steps", "2"])
    subprocess.run(
        ["bash", EXAMPLES / "train_on_many_gpus.sh", *words],
        env={**os.environ, **environment},
        check=True,
        timeout=600,
    )
    state = json.loads((tmp_path / "out" / "drafter" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    hf_falcon.FalconDraftModel.from_pretrained(tmp_path / "out" / "drafter")


@pytest.fixture
def served(models):
    """The server of the example with tiny models, and a function that asks it."""
    script = example("serve")
    server = script.Server(("127.0.0.1", 0), *models(script))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()

    def ask(method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request(method, path, body if isinstance(body, str | None) else json.dumps(body))
        response = connection.getresponse()
        content = response.read().decode()
        connection.close()
        return response, content

    yield server, ask
    server.shutdown()
    thread.join()
    server.server_close()


CHAT = [{"role": "user", "content": "abc"}]


@pytest.mark.parametrize("options", [{"max_tokens": 30}, {"max_tokens": 30, "temperature": 0.9, "seed": 3}], ids=str)
def test_served_answers_are_plain_decodings(served, options):
    server, ask = served
    inputs = encode(server.tokenizer, "abc", server.target.device)
    length = inputs["input_ids"].shape[1]
    sampling = {"temperature": 0.9, "top_p": 1.0} if "seed" in options else {}
    torch.manual_seed(3)
    tokens = server.target.generate(**inputs, max_new_tokens=30, do_sample=bool(sampling), **sampling)
    text = server.tokenizer.decode(tokens[0, length:], skip_special_tokens=True)
    for model in ("plain", "drafted"):
        body = {"model": model, "messages": CHAT, **options}
        response, content = ask("POST", "/v1/chat/completions", body)
        answer = json.loads(content)
        assert response.status == 200 and answer["object"] == "chat.completion" and answer["model"] == model
        assert answer["choices"] == [
            {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
        ]
        assert answer["usage"] == {"prompt_tokens": length, "completion_tokens": 30, "total_tokens": length + 30}
        assert ("tokens a round" in answer["gain"]) == (model == "drafted")

        response, content = ask("POST", "/v1/chat/completions", {**body, "stream": True})
        assert response.headers["Content-Type"] == "text/event-stream"
        *events, done, rest = content.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len(chunks) > 30
        assert len({chunk["id"] for chunk in chunks}) == 1
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == text
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


@pytest.mark.parametrize(
    "body, part",
    [
        ("no json", "JSONDecodeError"),
        ("[]", "AttributeError"),
        ({"model": "gpt", "messages": CHAT}, "`model` is 'gpt': choose one of plain, drafted."),
        ({}, "'messages'"),
        ({"messages": CHAT, "max_tokens": -1}, "`max_tokens` is -1"),
        ({"messages": CHAT, "temperature": "hot"}, "could not convert"),
    ],
)
def test_wrong_requests_are_refused(served, body, part):
    response, content = served[1]("POST", "/v1/chat/completions", body)
    assert response.status == 400 and part in json.loads(content)["error"]["message"]


def test_other_addresses_of_the_server(served):
    _, ask = served
    assert [model["id"] for model in json.loads(ask("GET", "/v1/models")[1])["data"]] == ["plain", "drafted"]
    assert [ask(*words)[0].status for words in (("GET", "/x"), ("POST", "/x", "{}"))] == [404, 404]
    response, content = ask("GET", "/?prompt=abc")
    assert response.headers["Content-Type"].startswith("text/html") and "<script>" in content


def test_serve_from_the_command_line(models, monkeypatch, capsys):
    script = example("serve")
    models(script)
    monkeypatch.setattr(script.Server, "serve_forever", lambda self: None)
    monkeypatch.setattr("sys.argv", ["serve.py", "--port", "0"])
    script.main()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+\n", capsys.readouterr().out)


def test_a_client_that_leaves_ends_its_answer(served):
    server, ask = served
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    body = {"messages": CHAT, "stream": True, "max_tokens": 100000}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    response = connection.getresponse()
    response.read(10)
    response.close()
    connection.close()
    assert ask("POST", "/v1/chat/completions", {"messages": CHAT, "max_tokens": 4})[0].status == 200


# What the page's script needs of a browser, beside what Node has.
BROWSER = """
const elements = {}, base = process.argv[2], real = fetch;
globalThis.document = {getElementById: id => elements[id] ??= {textContent: "", value: "",
  requestSubmit() { this.onsubmit({preventDefault() {}}).then(() => console.log(JSON.stringify(elements))) }}};
globalThis.location = {search: "?prompt=abc"};
globalThis.fetch = (path, options) => real(base + path, options);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_the_page_shows_both_answers(served, tmp_path):
    server, ask = served
    page = ask("GET", "/")[1]
    (tmp_path / "page.js").write_text(BROWSER + re.search(r"<script>(.*)</script>", page, re.S)[1])
    base = f"http://127.0.0.1:{server.server_port}"
    result = subprocess.run(["node", tmp_path / "page.js", base], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    found = {name: element["textContent"] for name, element in json.loads(result.stdout).items()}
    answer = json.loads(ask("POST", "/v1/chat/completions", {"messages": CHAT, "max_tokens": 128})[1])
    assert found["plain"] == found["drafted"] == answer["choices"][0]["message"]["content"]
    assert found["plain-gain"].startswith("128 tokens, ") and " tokens a round, " in found["drafted-gain"]
    # Every place that the script writes to is there.
    assert all(f'id="{name}"' in page for name in found)


BROWSERS = [name for name in ("chromium", "chromium-browser", "google-chrome") if shutil.which(name)]


@pytest.fixture
def browse(tmp_path):
    """Opens an address in Chromium; returns what evaluates JavaScript there, once it gives something true."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    # Chromium takes commands from descriptor 3 and answers on 4, each message with a zero byte at its end.
    words = ["sh", "-c", 'exec "$@" 3<&0 4>&1 >&2', "sh", BROWSERS[0], *options, "--remote-debugging-pipe"]
    numbers = itertools.count(1)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        # Ends what waits below: nothing more can be read.
        timer = threading.Timer(120, process.kill)
        timer.start()

        def call(method, session=None, **parameters):
            message = {"id": next(numbers), "method": method, "params": parameters}
            message |= {"sessionId": session} if session else {}
            process.stdin.write(json.dumps(message).encode() + b"\0")
            process.stdin.flush()
            while True:
                answer = b""
                while (byte := process.stdout.read(1)) not in (b"", b"\0"):
                    answer += byte
                assert answer, f"No answer to {message}: Chromium ended, by itself or after 120 seconds."
                answer = json.loads(answer)
                if answer.get("id") == message["id"]:
                    return answer["result"]

        def open_page(address):
            page = call("Target.createTarget", url=address)["targetId"]
            session = call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]

            def evaluate(script):
                while True:
                    found = call("Runtime.evaluate", session, expression=script, returnByValue=True)["result"]
                    if found.get("value"):
                        return found["value"]
                    time.sleep(0.1)

            return evaluate

        yield open_page
        timer.cancel()
        process.terminate()


@pytest.mark.slow
@pytest.mark.skipif(not BROWSERS, reason="needs Chromium")
def test_the_page_in_a_browser(served, browse):
    server, ask = served
    answer = json.loads(ask("POST", "/v1/chat/completions", {"messages": CHAT, "max_tokens": 128})[1])
    evaluate = browse(f"http://127.0.0.1:{server.server_port}/?prompt=abc")
    answered = """document.title === "Answered" && !at("both").disabled &&
      ["plain", "drafted", "plain-gain", "drafted-gain"].map(id => at(id).textContent)"""
    # Asked by the address, then by the button, which cannot be pressed again before both have answered.
    for again in (False, True):
        if again:
            assert evaluate('document.title = ""; at("both").click(); at("both").disabled')
        plain, drafted, plain_gain, drafted_gain = evaluate(answered)
        assert plain == drafted == answer["choices"][0]["message"]["content"]
        assert plain_gain.startswith("128 tokens, ") and " tokens a round, " in drafted_gain


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


@pytest.fixture
def parting_assisted(monkeypatch):
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


def test_divergence_and_evaluate_say_where_texts_part(workplace, tmp_path, monkeypatch, capsys, parting_assisted):
    words = divergence_words(workplace, tmp_path)
    monkeypatch.setattr("sys.argv", ["divergence.py", *words])
    example("divergence").main()
    printed = capsys.readouterr().out
    expected = []
    for number, text in enumerate(TEXTS):
        ids = tiny_tokenizer()(text, return_tensors="pt").input_ids
        tokens, others = parting_assisted(ids)
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
    assert "In float32 no output may diverge." in capsys.readouterr().out


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
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(workplace / "target")
    words = ["--turns", "1", "--rounds", "3", "--nodes", "8", "--passes", "2"]
    _, *rows = run_example("oracle_bound", workplace, tmp_path, monkeypatch, capsys, *words)
    # Two passes of two tokens, and the target's own.
    assert len(rows) == 3 and all(row[8:12] == ["5.00", "of", "5", "tokens"] for row in rows)
