# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The example server: its answers, its page, and requests that it refuses."""

import http.client
import itertools
import json
import re
import shutil
import subprocess
import threading
import time

import pytest
import torch
from example_scripts import example

from hf_falcon.commands.models import encode


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
