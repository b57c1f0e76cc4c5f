# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Limits of requests to a server: what exceeds one is refused in words before it takes time or memory."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..training.json_text import parse_json, short
from ..training.prepare_arguments import LEAST_TEMPERATURE, is_temperature

# More than the text of 200,000 tokens.
LARGEST_BODY = 2 << 20
# For a header, and again for a body, to arrive.
SECONDS = 30
# Seconds in which a client that still sends can read why its request was refused.
_LAST_WORDS = 2
# Connections at once; more are answered with status 503.
CONNECTIONS = 100
# As many as OpenAI's own interface takes.
_STOPS = 4
_LONGEST_STOP = 256
# Bytes of the table that transformers makes for a request's stops, of which it keeps the last eight: 4 for each token
# of the vocabulary, each stop, and each place where a token can be in it or reach beyond its end. Tokens are up to
# some hundred characters long.
_LARGEST_STOP_TABLE, _LONGEST_TOKEN = 1 << 29, 100
_BIASES = 1024
# Words in the types of a message's parts that are no text, such as "image_url" and "input_audio".
_NO_TEXTS = ("image", "audio", "video", "file")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_number(value: Any, least: float = 0.0, most: float = math.inf) -> bool:
    return type(value) in (int, float) and least <= value <= most and value < math.inf


# Fields of `generation_config` in a request, the rule of each in words, and whether a value is within it: transformers
# would find some wrong only in the middle of a streamed answer. None loads or compiles anything, or multiplies the
# memory of an answer.
_TINY = 1e-30
_GENERATION_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "do_sample": ("true or false", lambda value: type(value) is bool),
    "eos_token_id": (
        "a token, a list of tokens, or -1 for none",
        lambda value: (
            value == -1 or (value != [] and all(map(_is_count, value if isinstance(value, list) else [value])))
        ),
    ),
    "max_new_tokens": ("an integer", lambda value: type(value) is int),
    "min_new_tokens": ("an integer of 0 or more", _is_count),
    "min_p": ("a number from 0 to 1", lambda value: _is_number(value, most=1.0)),
    # transformers compares so many tokens at each place of the text, at once.
    "no_repeat_ngram_size": ("an integer from 0 to 64", lambda value: _is_count(value) and value <= 64),
    "repetition_penalty": ("a number above 0", lambda value: _is_number(value, _TINY)),
    "temperature": (
        f"0 (the most probable token), or {LEAST_TEMPERATURE} or more",
        lambda value: _is_number(value) and is_temperature(value),
    ),
    "top_k": ("an integer of 0 or more", _is_count),
    "top_p": ("a number above 0 and at most 1", lambda value: _is_number(value, _TINY, 1.0)),
    "typical_p": ("a number above 0 and at most 1", lambda value: _is_number(value, _TINY, 1.0)),
}

# In the task of a request: set once its client has left.
client_left: ContextVar[asyncio.Event | None] = ContextVar("client_left", default=None)

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class _Refused(Exception):
    def __init__(self, status: int, text: str):
        self.status, self.text = status, text


class RequestLimits:
    """
    ASGI middleware that reads the body of a request and passes it on, or refuses the request: a body that is too large
    (413), too slow (408), not called JSON (415), or no JSON object within the limits of [`parse_json`] (422).
    """

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(_read_body(scope, receive), SECONDS)
            _check_body(scope, body)
        except asyncio.TimeoutError:
            await _answer(408, f"The body of the request did not arrive within {SECONDS} seconds.", receive, send)
            return
        except _Refused as refused:
            await _answer(refused.status, refused.text, receive, send)
            return
        except ConnectionError:
            return
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])
        left = asyncio.Event()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()

        async def replay() -> Mapping[str, Any]:
            if (message := next(messages, None)) is None:
                await left.wait()
            return message or {"type": "http.disconnect"}

        watcher = asyncio.ensure_future(watch())
        client_left.set(left)
        try:
            await self._app(scope, replay, send)
        finally:
            watcher.cancel()


async def _read_body(scope: Mapping[str, Any], receive: Receive) -> bytes:
    text = f"more than {LARGEST_BODY} bytes: send a shorter request."
    # The server refuses lengths that are no numbers.
    length = int(dict(scope["headers"]).get(b"content-length", 0))
    if length > LARGEST_BODY:
        raise _Refused(413, f"The body of the request has {length} bytes, {text}")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        body += message.get("body", b"")
        if len(body) > LARGEST_BODY:
            raise _Refused(413, f"The body of the request has {text}")
        if not message.get("more_body", False):
            return bytes(body)


def _check_body(scope: Mapping[str, Any], body: bytes) -> None:
    # Only a POST has a body that is read.
    if not body or scope["method"] != "POST":
        return
    kind = dict(scope["headers"]).get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise _Refused(415, "The `Content-Type` of the request is not `application/json`: send JSON.")
    try:
        value = parse_json(body.decode("utf-8"))
    except ValueError as error:
        raise _Refused(422, f"The body of the request is refused: {error}.") from error
    if not isinstance(value, dict):
        raise _Refused(422, f"The body of the request is {short(value)}: it must be an object.")


async def _answer(status: int, text: str, receive: Receive, send: Send) -> None:
    content = json.dumps({"error": {"message": text}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": True})

    async def drain() -> None:
        message = await receive()
        while message["type"] != "http.disconnect" and message.get("more_body", False):
            message = await receive()

    # A connection that is closed while its client sends is reset, and the answer with it.
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(drain(), _LAST_WORDS)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def protocol() -> Any:
    """The protocol of a connection for uvicorn, which by itself waits for the header of a request without end."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        _deadline: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, error: Exception | None) -> None:
            self._watch(lost=True)
            super().connection_lost(error)

        def _watch(self, lost: bool = False) -> None:
            waits = not lost and self.conn.their_state is h11.IDLE
            if waits and self._deadline is None:
                self._deadline = self.loop.call_later(SECONDS, self._expire)
            elif not waits and self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _expire(self) -> None:
            self._deadline = None
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self.send_400_response(f"The header of the request did not arrive within {SECONDS} seconds.")

    return Protocol


def check_request(body: Mapping[str, Any], target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """
    Checks the fields of a request that can cost much, or that transformers' server finds wrong only while it answers.

    Raises:
        `ValueError`: naming field, value and remedy.
    """
    _check_number(body, "seed", -(2**63), 2**64 - 1)
    _check_number(body, "frequency_penalty", -0.99, 100)
    for name in ("temperature", "top_p"):
        _check_number(body, name)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if type(body.get(name)) not in (int, type(None)):
            raise ValueError(f"`{name}` is {short(body[name])}; give an integer.")
    if not isinstance(body.get("stream"), (bool, type(None))):
        raise ValueError(f"`stream` is {short(body['stream'])}; give true or false.")
    for name in ("suffix", "generation_config"):
        if not isinstance(body.get(name), (str, type(None))):
            raise ValueError(f"`{name}` is {short(body[name])}; give a text.")
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    _check_stops(body.get("stop"), vocab_size)
    _check_parts(body.get("messages"), body.get("input"))
    bias = body.get("logit_bias")
    if isinstance(bias, dict):
        _check_bias(bias, vocab_size)
    if body.get("generation_config") is not None:
        fields = parse_json(body["generation_config"])
        if not isinstance(fields, dict) or not fields.keys() <= _GENERATION_FIELDS.keys():
            raise ValueError(
                f"`generation_config` is {short(fields)}; give a JSON object with some of "
                f"{', '.join(sorted(_GENERATION_FIELDS))}."
            )
        for name, value in fields.items():
            rule, is_right = _GENERATION_FIELDS[name]
            if value is not None and not is_right(value):
                raise ValueError(f"`{name}` of `generation_config` is {short(value)}; give {rule}.")
    settings = body.get("chat_template_kwargs")
    if settings is not None:
        # Among them are another template, and how the text is tokenized.
        taken = inspect.signature(tokenizer.apply_chat_template).parameters
        if not isinstance(settings, dict) or any(name in taken for name in settings):
            raise ValueError(
                f"`chat_template_kwargs` is {short(settings)}; give an object of variables of the chat template, "
                f"which are none of {', '.join(taken)}."
            )


def limit_answer(config: Any, target: PreTrainedModel, prompt_length: int) -> None:
    """
    Lowers `max_new_tokens` of a generation configuration to what the target's context leaves.

    Raises:
        `ValueError`: if the prompt alone fills the context, or has no tokens.
    """
    if prompt_length == 0:
        raise ValueError("The prompt has no tokens: give a text.")
    context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is None:
        return
    if prompt_length >= context:
        raise ValueError(f"The prompt has {prompt_length} tokens, and the target's context {context}: shorten it.")
    config.max_new_tokens = min(config.max_new_tokens or context, context - prompt_length)


def check_text(body: Mapping[str, Any], name: str) -> None:
    """
    Checks that a request has the field that holds its text.

    Args:
        body (`dict`): the request.
        name (`str`): "messages" or "input", by the endpoint.

    Raises:
        `ValueError`: naming field, value and remedy.
    """
    value = body.get(name)
    if name == "messages":
        is_right = isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)
        if not value or not is_right:
            raise ValueError(
                f"`messages` is {short(value)}; give a list of objects, such as "
                '{"role": "user", "content": "Hello"}.'
            )
    elif value is None:
        raise ValueError(f"`{name}` is missing: give a text.")
    elif isinstance(value, list) and not all(isinstance(each, dict) for each in value):
        raise ValueError(f"`{name}` is {short(value)}; give a text, or a list of objects.")


def _check_number(body: Mapping[str, Any], name: str, least: float = -math.inf, most: float = math.inf) -> None:
    value = body.get(name)
    if value is not None and not (type(value) in (int, float) and least <= value <= most):
        limits = "" if most == math.inf else f" from {least} to {most}"
        raise ValueError(f"`{name}` is {short(value)}; give a number{limits}.")


def _check_stops(stops: Any, vocab_size: int) -> None:
    texts = [stops] if isinstance(stops, str) else [] if stops is None else stops
    if (
        not isinstance(texts, list)
        or len(texts) > _STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= _LONGEST_STOP for text in texts)
    ):
        raise ValueError(
            f"`stop` is {short(stops)}; give a text, or up to {_STOPS} of them, of 1 to {_LONGEST_STOP} characters."
        )
    # A token is in a text at no more places than its rarest character.
    places = max((max(map(text.count, text)) for text in texts), default=0)
    if 4 * vocab_size * len(texts) * (places + _LONGEST_TOKEN) > _LARGEST_STOP_TABLE:
        raise ValueError(
            f"`stop` is {short(stops)}, {len(texts)} texts in which a character occurs up to {places} times, which "
            f"can take more than {_LARGEST_STOP_TABLE >> 20} MiB: give fewer texts, or shorter ones."
        )


def _check_parts(*texts: Any) -> None:
    """transformers would leave out what is no text, and answer a question about an image that nobody has seen."""
    # The items of `/v1/responses` may themselves be parts, or have an output.
    items = [item for each in texts for item in _dicts(each)]
    for part in (
        *items,
        *(part for item in items for name in ("content", "output") for part in _dicts(item.get(name))),
    ):
        if isinstance(kind := part.get("type"), str) and any(word in kind for word in _NO_TEXTS):
            raise ValueError(f"A message has a part of type {short(kind)}: this server takes texts only.")


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _check_bias(bias: dict[str, Any], vocab_size: int) -> None:
    if len(bias) > _BIASES:
        raise ValueError(f"`logit_bias` has {len(bias)} tokens; give {_BIASES} at most.")
    for token, value in bias.items():
        if not 0 <= int(token) < vocab_size:
            raise ValueError(f"`logit_bias` has token {short(token)}; give tokens from 0 to {vocab_size - 1}.")
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"`logit_bias` of token {token} is {short(value)}; give a number.")
