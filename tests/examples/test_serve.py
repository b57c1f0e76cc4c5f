# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The example page: its answers with and without the drafter, in Node and in a browser."""

import http.client
import itertools
import json
import re
import shutil
import subprocess
import threading
import time

import pytest
from example_scripts import example
from serving import chat_tokenizer, needs_the_extra, running
from tiny_models import new_target, tiny_drafter

from hf_falcon import FalconDraftModel

needs_the_extra()
CHAT = [{"role": "user", "content": "abc"}]


@pytest.fixture
def served():
    """The address of the example's server with tiny models, and a function that asks it."""
    target = new_target("llama")
    server = example("serve").make_server(target, chat_tokenizer(), tiny_drafter(target), "user/tiny")
    with running(server) as address:

        def ask(method, path, body=None):
            connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read().decode()
            connection.close()
            return response, content

        yield address, ask


def answer(ask, path="/v1"):
    body = {"messages": CHAT, "max_tokens": 128, "temperature": 0}
    return json.loads(ask("POST", f"{path}/chat/completions", body)[1])["choices"][0]["message"]["content"]


def test_both_answers_and_the_page(served, monkeypatch):
    _, ask = served
    drafted = []
    run = FalconDraftModel.assisted_decoding

    def assisted_decoding(*args, **kwargs):
        drafted.append(1)
        return run(*args, **kwargs)

    monkeypatch.setattr(FalconDraftModel, "assisted_decoding", assisted_decoding)
    plain = answer(ask, "/plain/v1")
    assert drafted == []
    assert answer(ask) == plain and drafted == [1]
    response, content = ask("GET", "/?prompt=abc")
    assert response.headers["Content-Type"].startswith("text/html") and "<script>" in content


def test_serve_from_the_command_line(monkeypatch, capsys):
    script, target = example("serve"), new_target("llama")
    monkeypatch.setattr(script, "load_target", lambda *_: (target, chat_tokenizer()))
    monkeypatch.setattr(script, "load_drafter", lambda *_: tiny_drafter(target))
    monkeypatch.setattr(script.TargetServer, "run", lambda self, listener: None)
    monkeypatch.setattr("sys.argv", ["serve.py", "--port", "0"])
    script.main()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+\n", capsys.readouterr().out)


# What the page's script needs of a browser, beside what Node has.
BROWSER = """
const elements = {}, base = process.argv[2], real = fetch;
class Element {
  own = ""; parts = []; value = "";
  get textContent() { return this.own + this.parts.map(part => part.textContent).join("") }
  set textContent(text) { this.own = text; this.parts = [] }
  append(part) { this.parts.push(part) }
  requestSubmit() { this.onsubmit({preventDefault() {}}).then(() => console.log(JSON.stringify(
    Object.fromEntries(Object.entries(elements).map(([id, element]) => [id, element.textContent]))))) }
}
globalThis.document = {getElementById: id => elements[id] ??= new Element(), createElement: () => new Element()};
globalThis.location = {search: "?prompt=abc"};
globalThis.fetch = (path, options) => real(base + path, options);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_the_page_shows_both_answers(served, tmp_path):
    address, ask = served
    page = ask("GET", "/")[1]
    (tmp_path / "page.js").write_text(BROWSER + re.search(r"<script>(.*)</script>", page, re.S)[1])
    result = subprocess.run(["node", tmp_path / "page.js", address], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["plain"] == found["drafted"] == answer(ask)
    assert re.fullmatch(r"128 tokens, [\d.]+ tokens/s", found["plain-gain"])
    assert re.fullmatch(r"128 tokens, [\d.]+ tokens/s, [\d.]+ at a time", found["drafted-gain"])
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
    address, ask = served
    expected = answer(ask)
    evaluate = browse(f"{address}/?prompt=abc")
    answered = """document.title === "Answered" && !at("both").disabled &&
      ["plain", "drafted", "plain-gain", "drafted-gain"].map(id => at(id).textContent)"""
    # Asked by the address, then by the button, which cannot be pressed again before both have answered.
    for again in (False, True):
        if again:
            assert evaluate('document.title = ""; at("both").click(); at("both").disabled')
        plain, drafted, plain_gain, drafted_gain = evaluate(answered)
        assert plain == drafted == expected
        assert plain_gain.startswith("128 tokens, ") and drafted_gain.endswith(" at a time")
