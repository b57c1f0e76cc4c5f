# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon serve`: its answers are the target's own, drafted; requests that it refuses; how it ends."""

import concurrent.futures
import copy
import http.client
import importlib.util
import json
import logging
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import transformers
from serving import chat_tokenizer, needs_the_extra, running
from tiny_models import new_drafter, new_target, tiny_drafter

import hf_falcon
from hf_falcon import FalconDraftModel
from hf_falcon.commands import main as entry
from hf_falcon.commands import request_limits, serve, serving

needs_the_extra()
NAME = "user/tiny"
CHAT = [{"role": "user", "content": "abc"}]
TOKENS = 24


@pytest.fixture(scope="module")
def target():
    return new_target("llama")


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target)


@pytest.fixture(params=["drafted", "plain"])
def way(request, target, drafter):
    if request.param == "drafted":
        hf_falcon.attach(target, drafter)
    yield request.param
    hf_falcon.detach(target)


@pytest.fixture(scope="module")
def address(target):
    with running(serving.TargetServer(target, chat_tokenizer(), NAME)) as found:
        yield found


@pytest.fixture(scope="module")
def client(address):
    from openai import OpenAI

    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture
def passes(monkeypatch):
    """Draft passes, and the threads that ran them."""
    found = []
    run_layers = FalconDraftModel.run_layers

    def count(self, *args, **kwargs):
        found.append(threading.get_ident())
        return run_layers(self, *args, **kwargs)

    monkeypatch.setattr(FalconDraftModel, "run_layers", count)
    return found


def plain_text(target, prompt, seed=None):
    """What the target itself writes after a prompt, greedy or sampled."""
    tokenizer = chat_tokenizer()
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompt, return_tensors="pt")
    settings = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 0.9}
    if seed is not None:
        torch.manual_seed(seed)
    output = target.generate(**inputs, **settings, assistant_model=None, max_new_tokens=TOKENS)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def chat(client, **settings):
    stream = settings.get("stream", False)
    answer = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=TOKENS, **settings)
    if not stream:
        assert answer.usage.completion_tokens == TOKENS and answer.choices[0].finish_reason == "length"
        return answer.choices[0].message.content
    chunks = list(answer)
    # A token without text of its own has no chunk.
    assert len(chunks) > TOKENS // 2 and chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == TOKENS
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def complete(client, **settings):
    stream = settings.get("stream", False)
    answer = client.completions.create(model=NAME, prompt="abcabd", max_tokens=TOKENS, **settings)
    if not stream:
        assert answer.usage.completion_tokens == TOKENS
        return answer.choices[0].text
    return "".join(chunk.choices[0].text for chunk in answer)


def respond(client, stream=False, **settings):
    extra = {"seed": settings.pop("seed")} if "seed" in settings else None
    # As OpenAI's own, the endpoint streams on request only.
    settings |= {"stream": True} if stream else {}
    answer = client.responses.create(model=NAME, input="abc", max_output_tokens=TOKENS, extra_body=extra, **settings)
    if not stream:
        assert answer.usage.output_tokens == TOKENS
        return answer.output_text
    events = list(answer)
    assert events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    return text


ENDPOINTS = {"chat": (chat, CHAT), "completions": (complete, "abcabd"), "responses": (respond, CHAT)}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "sampled"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_answers_are_the_targets(endpoint, seed, stream, way, target, client, passes):
    ask, prompt = ENDPOINTS[endpoint]
    expected = plain_text(target, prompt, seed)
    assert passes == []
    # A temperature samples, though the target's own configuration does not.
    settings = {"temperature": 0} if seed is None else {"temperature": 0.9, "seed": seed}
    assert ask(client, stream=stream, **settings) == expected
    assert (len(passes) > 4) == (way == "drafted")
    # All in the one thread that generates.
    assert len(set(passes)) == (way == "drafted") and threading.get_ident() not in passes


def test_requests_at_the_same_time(way, target, client, passes):
    expected = plain_text(target, CHAT)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda place: chat(client, stream=place % 2 == 0), range(6)))
    assert answers == [expected] * 6
    assert (len(passes) > 4 * 6) == (way == "drafted")


def test_the_one_model(client, address):
    [model] = client.models.list()
    assert (model.id, model.owned_by) == (NAME, NAME.partition("/")[0]) and model.created > 0
    # `transformers chat` asks for its model in this way.
    for name, status in ((NAME, "ready"), ("user/other", "error")):
        [event] = post(address, "/load_model", {"model": name})[1].split("\n\n")[:-1]
        assert json.loads(event.removeprefix("data: "))["status"] == status
    # Nothing unloads it, and a request need not name it.
    assert post(address, "/reset", {})[0] == 200
    assert post(address, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 2})[0] == 200


def test_another_model_is_refused_in_the_same_words_wherever_it_is(address, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for name in (str(tmp_path), str(tmp_path / "none"), "user/\x1b[2J"):
        [event] = post(address, "/load_model", {"model": name})[1].split("\n\n")[:-1]
        text = f"`model` is {name!r}: this server has {NAME!r} only."
        assert json.loads(event.removeprefix("data: ")) == {"status": "error", "model": name, "message": text}
    # The words of a client are not in the log.
    assert not caplog.records


@pytest.fixture
def configs(monkeypatch):
    """The generation configurations with which answers begin; the answers are short."""
    found = []

    def limit(config, *args):
        request_limits.limit_answer(config, *args)
        found.append(copy.copy(config))
        config.max_new_tokens = min(config.max_new_tokens, TOKENS)

    monkeypatch.setattr(serving, "limit_answer", limit)
    return found


def test_a_temperature_of_generation_config_has_an_effect_where_the_target_samples(
    target, address, configs, monkeypatch
):
    body = {"messages": CHAT, "seed": 3, "generation_config": '{"temperature": 1e-4, "top_p": 0.9}'}
    expected = plain_text(target, CHAT)
    for samples in (True, False):
        monkeypatch.setattr(target.generation_config, "do_sample", samples)
        answer = json.loads(post(address, "/v1/chat/completions", body)[1])
        assert answer["choices"][0]["message"]["content"] == expected
    assert [(config.temperature, config.top_p) for config in configs] == [(1e-4, 0.9), (None, None)]


def test_a_generation_config_without_a_limit_gets_the_usual_one(target, address, configs, monkeypatch):
    for own, context in ((None, 4096), (2000, 4096), (None, 256)):
        monkeypatch.setattr(target.generation_config, "max_new_tokens", own)
        monkeypatch.setattr(target.config, "max_position_embeddings", context)
        status, answer = post(address, "/v1/chat/completions", {"messages": CHAT, "generation_config": "{}"})
        assert status == 200
    length = json.loads(answer)["usage"]["prompt_tokens"]
    assert [config.max_new_tokens for config in configs] == [1024, 2000, 256 - length]


def post(address, path, body):
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    text = body if isinstance(body, str) else json.dumps(body)
    connection.request("POST", path, text, {"Content-Type": "application/json"})
    response = connection.getresponse()
    found = response.status, response.read().decode()
    connection.close()
    return found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "changes, part",
    [
        ({"model": "gpt"}, "Server is pinned to 'user/tiny'; requested 'gpt'"),
        ({"messages": None}, "`messages` is None; give a list of objects"),
        ({"messages": []}, "`messages` is []; give a list of objects"),
        ({"max_tokens": 0}, "The limit of new tokens is 0; give 1 or more."),
        ({"temperature": "hot"}, "`temperature` is 'hot'; give a number."),
        ({"temperature": -1}, "`temperature` is -1.0; give 0"),
        ({"top_p": 3}, "`top_p` is 3.0; give a number above 0"),
        ({"seed": "x"}, "`seed` is 'x'; give a number from"),
        ({"logit_bias": 3}, "AttributeError: 'int' object has no attribute 'items'"),
    ],
    ids=str,
)
def test_wrong_requests(changes, part, stream, address):
    body = {"messages": CHAT, "max_tokens": 4, "stream": stream, **changes}
    status, answer = post(address, "/v1/chat/completions", body)
    assert status == 400 and part in json.loads(answer)["error"]["message"]


def test_variables_that_the_drafter_was_not_trained_with(target, monkeypatch):
    """The first request that has others is warned of; a request as in the training, or of plain text, is not."""
    warned, drafter = [], new_drafter(target)
    monkeypatch.setattr(serving.logger, "warning", warned.append)
    drafter.config.chat_template_kwargs = {"thinks": False}
    hf_falcon.attach(target, drafter)
    chat = "/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}
    with running(serving.TargetServer(target, chat_tokenizer(), NAME)) as address:
        for path, body, count in (
            ("/v1/completions", {"prompt": "abc", "max_tokens": 2}, 0),
            (chat[0], {**chat[1], "chat_template_kwargs": {"thinks": False}}, 0),
            (chat[0], {**chat[1], "chat_template_kwargs": {"thinks": True}}, 1),
            (*chat, 1),
            ("/v1/responses", {"input": "abc", "max_output_tokens": 16}, 1),
        ):
            assert post(address, path, body)[0] == 200
            assert len(warned) == count
    hf_falcon.detach(target)
    assert '`chat_template_kwargs` {"thinks": false}, and this call has {"thinks": true}' in warned[0]


def test_other_wrong_requests(address, client):
    from openai import BadRequestError, UnprocessableEntityError

    assert post(address, "/v1/chat/completions", {"max_tokens": 4})[0] == 400
    assert [post(address, "/v1/chat/completions", body)[0] for body in ("no json", "[]")] == [422, 422]
    assert post(address, "/v1/responses", {})[0] == 400
    for path in ("/v1/audio/transcriptions", "/v1/nothing"):
        assert post(address, path, {})[0] == 404
    with pytest.raises(UnprocessableEntityError, match="Unexpected fields in the request: {'width'}"):
        client.chat.completions.create(model=NAME, messages=CHAT, extra_body={"width": 3})
    with pytest.raises(BadRequestError, match="prompt must be a string"):
        client.completions.create(model=NAME, prompt=[1, 2])


def test_a_client_that_leaves_ends_its_answer(way, address, client):
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    body = {"messages": CHAT, "stream": True, "max_tokens": 100000}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read(10)
    response.close()
    connection.close()
    assert len(chat(client)) > 0


def test_a_client_that_leaves_ends_an_answer_that_is_not_streamed(target):
    asked, begun = [], threading.Event()

    def slow_step(*_):
        asked.append(1)
        begun.set()
        time.sleep(0.02)

    hook = target.register_forward_hook(slow_step)
    try:
        with running(serving.TargetServer(target, chat_tokenizer(), NAME)) as address:
            connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
            body = {"messages": CHAT, "max_tokens": 100000}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            assert begun.wait(60)
            connection.close()
            # It waits for the answer before it; of all tokens of the context there would be some 240.
            assert post(address, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 2})[0] == 200
            assert len(asked) < 100
    finally:
        hook.remove()


def test_a_client_that_leaves_while_it_waits_costs_no_forward(target):
    """Of an answer that is not streamed: it has no criterion that is asked before the prompt is read."""
    begun, left, prompts = threading.Event(), threading.Event(), []

    def hook(module, arguments, keywords):
        length = keywords["input_ids"].shape[1]
        if length > 1:
            prompts.append(length)
        begun.set()
        left.wait(60)

    handle = target.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        server = serving.TargetServer(target, chat_tokenizer(), NAME)
        with running(server) as address, concurrent.futures.ThreadPoolExecutor() as pool:
            first = pool.submit(post, address, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 2})
            assert begun.wait(60)
            waiting = []
            for text in ("ab", "abcd"):
                connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
                body = {"messages": [{"role": "user", "content": text * 20}], "max_tokens": 2}
                connection.request(
                    "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
                )
                waiting.append(connection)
            while server._thread._thread._queue.qsize() < len(waiting):
                assert not first.done()
            for connection in waiting:
                connection.close()
            last = pool.submit(post, address, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 3})
            while server._thread._thread._queue.qsize() <= len(waiting):
                assert not first.done()
            left.set()
            assert first.result()[0] == last.result()[0] == 200
    finally:
        left.set()
        handle.remove()
    assert len(prompts) == 2 and prompts[0] == prompts[1]


def test_the_end_of_the_server_ends_its_answers(target, drafter):
    server, asked = serving.TargetServer(target, chat_tokenizer(), NAME), []
    with running(server) as address, concurrent.futures.ThreadPoolExecutor() as pool:
        hook = target.register_forward_hook(lambda *_: asked.append(1))
        answer = pool.submit(post, address, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 100000})
        while not asked:
            assert not answer.done()
        server.stop()
        assert answer.result() == (503, '{"error":{"message":"The server stops."}}')
    hook.remove()
    # The target is as before.
    assert target.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2).shape == (1, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target, drafter):
    found = tmp_path_factory.mktemp("models")
    target.save_pretrained(found / "target")
    chat_tokenizer().save_pretrained(found / "target")
    drafter.save_pretrained(found / "drafter")
    return found


def test_the_command(folder, target):
    """As a user runs it: the command that it prints gives an answer, and Ctrl-C ends it."""
    models = ["--target", folder / "target", "--drafter", folder / "drafter", "--dtype", "float32"]
    command = [sys.executable, "-m", "hf_falcon", "serve", *models, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(120, process.kill)
        timer.start()
        first, second = process.stdout.readline(), process.stdout.readline()
        match = re.fullmatch(r"(.*) with the drafter (.*): http://(127\.0\.0\.1:\d+)/v1\n", first)
        assert match[1] == str(folder / "target") and match[2] == str(folder / "drafter")
        words = shlex.split(second.removeprefix("Try it: "))
        assert words[:4] == ["curl", f"http://{match[3]}/v1/chat/completions", "-H", "Content-Type: application/json"]
        body = {**json.loads(words[-1]), "stream": False, "max_tokens": TOKENS}
        status, answer = post(match[3], "/v1/chat/completions", body)
        text = plain_text(target, [{"role": "user", "content": "Why is the sky blue?"}])
        assert status == 200 and json.loads(answer)["choices"][0]["message"]["content"] == text
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
        timer.cancel()
    assert process.returncode == 0 and rest == ""
    assert errors.splitlines()[-1] == "Stopped." and "Traceback" not in errors


def test_what_the_command_refuses(folder, capsys, monkeypatch):
    models = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter"), "--dtype", "float32"]
    assert entry.main(["serve", *models, "--port", "70000"]) == 1
    assert "`port` is 70000; give 0 (a free port) to 65535." in capsys.readouterr().err
    assert entry.main(["serve", *models, "--host", ""]) == 1
    assert "`host` is '': give an address, such as 127.0.0.1" in capsys.readouterr().err
    assert entry.main(["serve", *models, "--port", "0", "--host", "a\udc80b"]) == 1
    assert "Cannot listen on `host` 'a\\udc80b', `port` 0 (" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert entry.main(["serve", *models, "--port", str(port)]) == 1
        assert re.search(rf"Cannot listen on `host` '127.0.0.1', `port` {port} \(.*\): give", capsys.readouterr().err)
    find = importlib.util.find_spec
    monkeypatch.setattr(serving, "find_spec", lambda name: None if name in ("fastapi", "openai") else find(name))
    assert entry.main(["serve", *models]) == 1
    expected = "The server needs `fastapi`, `openai`: run `pip install 'hf-falcon[serve]'`."
    assert expected in capsys.readouterr().err


def test_other_versions_of_transformers(target, monkeypatch):
    from transformers.cli.serving import server

    build = server.build_server
    others = [name for name in ("transcription_handler", "systemone_handler") if name in build.__annotations__]

    def later(model_manager, chat_handler, poem_handler, **kwargs):
        return build(model_manager, chat_handler, **dict.fromkeys(others, poem_handler), **kwargs)

    def make():
        return serving.TargetServer(target, chat_tokenizer(), NAME)

    # An endpoint that a later version adds is not served.
    monkeypatch.setattr(server, "build_server", later)
    assert make().app is not None
    version = f"transformers {re.escape(transformers.__version__)}"
    monkeypatch.setattr(server, "build_server", lambda model: None)
    with pytest.raises(RuntimeError, match=rf"{version} builds its server in another way \(.*\): install a newer"):
        make()
    monkeypatch.delattr(server, "build_server")
    with pytest.raises(RuntimeError, match=rf"{version} has no `transformers\.cli\.serving\.server\.build_server`"):
        make()


def test_a_target_without_a_chat_template():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    words = shlex.split(serve.example_request("http://[::1]:8000/v1", tokenizer))
    assert words[1] == "http://[::1]:8000/v1/completions" and json.loads(words[-1])["prompt"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_save_what_was_learnt(folder, tmp_path, number):
    """As services are stopped, and where the terminal is closed."""
    models = ["--target", folder / "target", "--drafter", folder / "drafter", "--dtype", "float32"]
    command = [sys.executable, "-m", "hf_falcon", "serve", *models, "--port", "0", "--learn", tmp_path / "learnt"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Under `nohup` the tests ignore it, and so would the command.
    with subprocess.Popen(command, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL), **options) as process:
        timer = threading.Timer(120, process.kill)
        timer.start()
        address = re.search(r"http://\S+(?=/v1$)", process.stdout.readline().strip())[0]
        process.stdout.readline()
        assert post(address, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 8})[0] == 200
        process.send_signal(number)
        errors = process.communicate()[1]
        timer.cancel()
    assert process.returncode == 0 and errors.splitlines()[-1] == "Stopped." and "Traceback" not in errors
    assert json.loads((tmp_path / "learnt" / "learning.json").read_text())["calls"] == 1
