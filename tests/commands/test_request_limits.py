# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Requests that are huge, slow or malformed: each is answered in words, and the server lives on."""

import http.client
import json
import socket
from contextlib import nullcontext, suppress

import pytest
from serving import chat_tokenizer, needs_the_extra, running
from tiny_models import new_target
from utilities import peak_memory, start_peak

from hf_falcon.commands import request_limits, serving
from hf_falcon.commands.printable import printable

needs_the_extra()
CHAT = [{"role": "user", "content": "abc"}]
BODY = {"messages": CHAT, "max_tokens": 4}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def address():
    with running(serving.TargetServer(new_target("llama"), chat_tokenizer(), "user/tiny")) as found:
        yield found.removeprefix("http://")


def post(address, body, path=PATH, kind="application/json"):
    connection = http.client.HTTPConnection(address, timeout=60)
    text = body if isinstance(body, (str, bytes)) else json.dumps(body)
    connection.request("POST", path, text, {"Content-Type": kind})
    response = connection.getresponse()
    found = response.status, response.read().decode()
    connection.close()
    return found


def message(answer):
    return json.loads(answer)["error"]["message"]


def raw(address, data):
    """The answer to bytes that need not be a request."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(data)
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    return answer.decode()


@pytest.fixture(autouse=True)
def lives_on(address):
    yield
    status, answer = post(address, BODY)
    assert status == 200 and json.loads(answer)["choices"][0]["finish_reason"] == "length"


def head(*lines):
    return "\r\n".join([f"POST {PATH} HTTP/1.1", "Host: x", "Content-Type: application/json", *lines, "", ""]).encode()


@pytest.mark.parametrize(
    "data, status",
    [
        (head("Content-Length: -1"), 400),
        (head("Content-Length: many"), 400),
        (head("Content-Length: 4", "Content-Length: 5") + b"{}", 400),
        (head("Content-Length: 4", "Transfer-Encoding: gzip") + b"{}", 400),
        (head("Transfer-Encoding: chunked") + b"zz\r\n{}\r\n", 400),
        (b"\0\x1b[2J\xff\r\n\r\n", 400),
        (b"GET /\x1b[2J HTTP/1.1\r\n\r\n", 400),
        # No body at all.
        (head("Connection: close"), 422),
    ],
    ids=lambda value: str(value)[:60],
)
def test_malformed_headers(address, data, status):
    answer = raw(address, data)
    assert answer.startswith(f"HTTP/1.1 {status} ") and answer.partition("\r\n\r\n")[2]


def test_a_header_that_is_huge(address):
    """The connection is closed before the header ends; the client may not read why."""
    with suppress(ConnectionError):
        answer = raw(address, b"GET / HTTP/1.1\r\nA: " + b"a" * (1 << 26))
        assert answer.startswith("HTTP/1.1 400 ")


def test_a_length_that_is_huge(address, monkeypatch):
    """It is not waited for."""
    monkeypatch.setattr(request_limits, "_LAST_WORDS", 0.1)
    for length in (request_limits.LARGEST_BODY + 1, 10**12):
        answer = raw(address, head(f"Content-Length: {length}") + b"{")
        assert answer.startswith("HTTP/1.1 413 ")
        expected = f"The body of the request has {length} bytes, more than 2097152 bytes: send a shorter request."
        assert message(answer.partition("\r\n\r\n")[2]) == expected


def test_a_body_that_is_huge(address):
    """Read by a client that reads only after it has sent all; with a length, and in pieces."""
    before = start_peak()
    status, answer = post(address, b" " * (1 << 26))
    assert status == 413 and "has 67108864 bytes" in message(answer)
    connection = http.client.HTTPConnection(address, timeout=60)
    pieces = (b" " * (1 << 20) for _ in range(64))
    connection.request("POST", PATH, pieces, {"Content-Type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert peak_memory() - before < 2**28


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(request_limits, "SECONDS", 0.5)


@pytest.mark.parametrize("data", [b"", b"POST /v1/chat", head("Content-Length: 9")[:-2]], ids=["none", "line", "head"])
def test_a_header_that_does_not_arrive(hurried, address, data):
    answer = raw(address, data)
    assert answer.startswith("HTTP/1.1 400 ")
    assert answer.endswith("The header of the request did not arrive within 0.5 seconds.")


def test_a_second_header_that_does_not_arrive(hurried, address):
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):
            answer += connection.recv(1 << 16)
        connection.sendall(b"GET /hea")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


def test_a_body_that_does_not_arrive(hurried, address):
    answer = raw(address, head("Content-Length: 9") + b"{")
    assert answer.startswith("HTTP/1.1 408 ")
    assert message(answer.partition("\r\n\r\n")[2]) == "The body of the request did not arrive within 0.5 seconds."


def test_more_connections_than_are_served(address, monkeypatch):
    host, port = address.split(":")
    waiting = [socket.create_connection((host, int(port))) for _ in range(request_limits.CONNECTIONS - 1)]
    try:
        assert post(address, BODY)[0] == 200
        waiting.append(socket.create_connection((host, int(port))))
        assert post(address, BODY)[0] == 503
    finally:
        for each in waiting:
            each.close()


@pytest.mark.parametrize(
    "body, status, part",
    [
        ("[" * 100_000, 422, "nested more than 32 deep"),
        ('{"messages": ' * 40 + "1" + "}" * 40, 422, "nested more than 32 deep"),
        ('{"seed": ' + "9" * 5000 + "}", 422, "a number has more than 1,000 digits"),
        ("{", 422, "not JSON"),
        ("NaN", 422, "The body of the request is nan: it must be an object."),
        ('"\\ud800"', 422, "is '\\ud800': it must be an object"),
        (b"\xff\xfe{}", 422, "can't decode byte 0xff"),
        ("", 422, "The body of the request is refused: Field required."),
        ('{"messages": [], "\x00": 1}', 422, "The body of the request is refused: JSON decode error."),
        ('{"messages": [], "a": "\t"}', 422, "The body of the request is refused: JSON decode error."),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bodies_that_are_none(address, body, status, part):
    found, answer = post(address, body)
    assert found == status and part in message(answer)


def test_a_body_of_another_type(address):
    status, answer = post(address, b"\xff\x00", kind="text/plain")
    assert status == 415 and "send JSON" in message(answer)


IMAGE = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
DEEP = json.loads("[" * 25 + "]" * 25)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "changes, part",
    [
        ({"model": "\ud800\x1b[2J\u202e"}, r"requested '\ud800\x1b[2J\u202e'"),
        ({"model": ["user/tiny"]}, "requested '['user/tiny']'"),
        ({"seed": 2**70}, "`seed` is 1180591620717411303424; give a number from"),
        ({"seed": float("inf")}, "`seed` is inf"),
        ({"max_tokens": float("inf")}, "`max_tokens` is inf; give an integer."),
        ({"max_tokens": "many"}, "`max_tokens` is 'many'; give an integer."),
        ({"max_completion_tokens": 1.9}, "`max_completion_tokens` is 1.9"),
        ({"max_tokens": True}, "`max_tokens` is True"),
        ({"stream": "false"}, "`stream` is 'false'; give true or false."),
        ({"temperature": True}, "`temperature` is True; give a number."),
        ({"max_tokens": -(10**30)}, "The limit of new tokens is"),
        ({"temperature": float("nan")}, "`temperature` is nan"),
        ({"temperature": 1e-40}, "`temperature` is 1e-40; give 0 (the most probable token), or 1e-06 or more."),
        ({"generation_config": '{"temperature": 1e-40}'}, "`temperature` of `generation_config` is 1e-40; give 0"),
        ({"frequency_penalty": -1}, "`frequency_penalty` is -1"),
        ({"stop": ["a" * 257]}, "`stop` is ['aaa"),
        ({"stop": ["a"] * 5}, "`stop` is ['a', "),
        ({"stop": ""}, "`stop` is ''"),
        ({"stop": 5}, "`stop` is 5"),
        ({"stop": {"a": 1}}, "`stop` is {'a': 1}"),
        ({"logit_bias": {"64": 1}}, "`logit_bias` has token '64'; give tokens from 0 to 63."),
        ({"logit_bias": {"-1": 1}}, "`logit_bias` has token '-1'"),
        ({"logit_bias": {"1": float("nan")}}, "`logit_bias` of token 1 is nan"),
        ({"logit_bias": {"1": "a"}}, "`logit_bias` of token 1 is 'a'"),
        ({"logit_bias": {str(i): 0 for i in range(2000)}}, "`logit_bias` has 2000 tokens"),
        ({"generation_config": {"num_beams": 2}}, "`generation_config` is {'num_beams': 2}; give a text"),
        ({"generation_config": '{"num_beams": 1000000}'}, "`generation_config` is {'num_beams': 1000000}; give a"),
        ({"generation_config": "[" * 100_000}, "nested more than 32 deep"),
        ({"generation_config": '{"top_k": -1, "do_sample": true}'}, "`top_k` of `generation_config` is -1; give an"),
        ({"generation_config": '{"min_p": 5}'}, "`min_p` of `generation_config` is 5; give a number from 0 to 1."),
        ({"generation_config": '{"no_repeat_ngram_size": 65}'}, "is 65; give an integer from 0 to 64."),
        ({"generation_config": '{"repetition_penalty": 0}'}, "`repetition_penalty` of `generation_config` is 0"),
        ({"generation_config": '{"temperature": -1}'}, "`temperature` of `generation_config` is -1"),
        ({"generation_config": '{"eos_token_id": "x"}'}, "`eos_token_id` of `generation_config` is 'x'"),
        ({"generation_config": '{"eos_token_id": []}'}, "`eos_token_id` of `generation_config` is []"),
        ({"generation_config": '{"do_sample": 1}'}, "`do_sample` of `generation_config` is 1; give true or false."),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "`chat_template_kwargs` is {'chat_template':"),
        ({"chat_template_kwargs": {"tokenize": False}}, "`chat_template_kwargs` is {'tokenize': False}"),
        ({"chat_template_kwargs": [1]}, "`chat_template_kwargs` is [1]"),
        ({"messages": [{"role": "user", "content": "a" * 300}]}, "tokens, and the target's context 256: shorten it"),
        ({"messages": [{"role": "user", "content": DEEP}]}, "TypeError"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [DEEP]}]}, "AttributeError"),
        ({"messages": [{"content": "a"}]}, "`messages` is [{'content': 'a'}]; give a list of objects, such as"),
        ({"messages": "abc"}, "`messages` is 'abc'; give a list of objects"),
        ({"messages": None}, "`messages` is None; give a list of objects"),
        ({"temperature": "x"}, "`temperature` is 'x'; give a number."),
        ({"seed": "a"}, "`seed` is 'a'; give a number from"),
        (
            {"messages": [{"role": "user", "content": IMAGE}]},
            "a part of type 'image_url': this server takes texts only",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_fields_that_are_wrong(address, capfd, changes, part, stream):
    status, answer = post(address, {**BODY, "stream": stream, **changes})
    assert status == 400 and part in message(answer) and len(message(answer)) <= 1000
    error = capfd.readouterr().err
    assert "\x1b" not in error and "\u202e" not in error


@pytest.mark.parametrize(
    "stops, is_taken", [(["\n\n", "User:"] * 2, True), (["-" * 256], True), (["-" * 256] * 4, False)], ids=str
)
def test_the_memory_of_stops(stops, is_taken):
    """transformers would take a gigabyte and more for some texts of one character."""
    with nullcontext() if is_taken else pytest.raises(ValueError, match="up to 256 times, which can take more than 5"):
        request_limits._check_stops(stops, 151936)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("body", [{}, {"prompt": ""}])
def test_a_prompt_without_tokens(address, body, stream):
    status, answer = post(address, {**body, "stream": stream}, path="/v1/completions")
    assert status == 400 and message(answer) == "The prompt has no tokens: give a text."


def test_a_response_without_input(address):
    status, answer = post(address, {}, path="/v1/responses")
    assert status == 400 and message(answer) == "`input` is missing: give a text."


def test_an_answer_ends_with_the_context(address):
    status, answer = post(address, {**BODY, "max_tokens": 10**9})
    answer = json.loads(answer)
    assert status == 200 and answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


def test_settings_of_the_template_and_of_the_answer(address):
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "stop": ["z", "zz"], "logit_bias": {"3": 1.5}}
    assert post(address, {**BODY, **extra})[0] == 200
    # Integers where numbers are meant, and no value.
    config = '{"top_k": 5, "do_sample": true, "repetition_penalty": 2, "temperature": 2, "min_p": null, '
    config += '"no_repeat_ngram_size": 64}'
    for stream in (False, True):
        status, answer = post(address, {**BODY, "stream": stream, "generation_config": config})
        assert status == 200 and "error" not in answer
    status, answer = post(address, {**BODY, "generation_config": '{"temperature": 0, "do_sample": true}'})
    assert status == 200 and "error" not in answer
    assert post(address, {**BODY, "chat_template_kwargs": None})[0] == 200
    for stream in (False, True):
        status, answer = post(address, {**BODY, "stream": stream, "stop": []})
        assert status == 200 and "error" not in answer
    parts = [{"type": "text", "text": "abc"}]
    assert post(address, {**BODY, "messages": [{"role": "user", "content": parts}]})[0] == 200


@pytest.mark.parametrize(
    "item",
    [
        {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_file", "file_id": "b"}]},
    ],
    ids=["item", "message", "output"],
)
def test_responses_are_of_texts(address, item):
    status, answer = post(address, {"input": [{"type": "input_text", "text": "abc"}, item]}, path="/v1/responses")
    assert status == 400 and "this server takes texts only" in message(answer)


def test_biases_of_completions(address):
    body = {"prompt": "abc", "max_tokens": 4}
    found = [
        json.loads(post(address, {**body, **bias}, path="/v1/completions")[1])["choices"][0]["text"]
        for bias in ({}, {"logit_bias": {"5": 100}})
    ]
    assert found[0] != found[1] and len(set(found[1].split() or found[1])) == 1


def test_printable():
    assert printable("a\x1b[2J\r\n\tb\u202e é😀\ud800\0") == "a\\x1b[2J b\\u202e é😀\\ud800\\x00"
