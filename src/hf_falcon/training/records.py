# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The forms of records that public data sets have, and the dialogue that each stands for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .json_text import parse_json, short

# As a chat template takes it: `role` and `content`, and where there are any `reasoning_content`, `tool_calls`, `name`
# and `tool_call_id`.
Message = dict[str, Any]

FORMS = (
    "`conversations` (ShareGPT), `messages`, `prompt` with `completion` or `response`, `instruction` with `output` or "
    "`response` (Alpaca, Dolly), `turns` or `text`"
)
_ROLES = {
    "system": "system",
    "developer": "developer",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass
class Dialogue:
    """
    What one record stands for.

    Args:
        messages (`list[Message]`): the messages; empty where the record has none, or is plain text.
        tools (`list[dict]`, *optional*): JSON schemas of the functions that the assistant may call.
        text (`str`, *optional*): plain text, which no template surrounds; there are no messages then.
        number (`int`, *optional*, defaults to 0): the record's number, from 1.
        where (`str`, *optional*, defaults to `""`): file and number, for errors.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    number: int = field(default=0, compare=False)
    where: str = field(default="", compare=False)


class RecordError(ValueError):
    """
    A record that cannot be read.

    Args:
        reason (`str`): one of a few texts, by which such records are counted.
        text (`str`): names file, record, field, value and remedy.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def read_record(record: Any, where: str, number: int = 0) -> Dialogue:
    """
    Args:
        record: a value of JSON, or of a data set's row without its empty fields.
        where (`str`): names the record in errors.
        number (`int`, *optional*, defaults to 0): the record's number.

    Raises:
        [`RecordError`]: the record has none of the forms.
    """
    if not isinstance(record, dict):
        raise RecordError("not an object", f"{where} is {short(record)}: each record must be an object with {FORMS}.")
    tools, text = _tools(record.get("tools"), where), None
    form = next((name for name in ("conversations", "messages") if record.get(name) is not None), None)
    if form is not None:
        messages = _messages(record[form], form, where)
    elif record.get("prompt") is not None:
        answer = next((name for name in ("completion", "response") if record.get(name) is not None), None)
        messages = _side(record["prompt"], "prompt", "user", where)
        messages += [] if answer is None else _side(record[answer], answer, "assistant", where)
    elif record.get("instruction") is not None:
        messages = _alpaca(record, where)
    elif record.get("turns") is not None:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise RecordError("no list of turns", f"{where}: `turns` is {short(turns)}: it must be a list of texts.")
        messages = [{"role": "user", "content": _text(turn, f"turns[{i}]", where)} for i, turn in enumerate(turns)]
    elif record.get("text") is not None:
        messages, text = [], _text(record["text"], "text", where)
    else:
        raise RecordError("no known form", f"{where}: {short(record)} has none of {FORMS}: convert the record to one.")
    if messages and messages[0]["role"] not in ("system", "developer") and record.get("system") is not None:
        system = _content(record["system"], "system", where)
        messages = [{"role": "system", "content": system}, *messages] if system.strip() else messages
    return Dialogue(messages, tools, text, number, where)


def _alpaca(record: dict[str, Any], where: str) -> list[Message]:
    question = _text(record["instruction"], "instruction", where)
    for name in ("input", "context"):
        if record.get(name) is not None and (given := _content(record[name], name, where)).strip():
            question += f"\n\n{given}"
    messages: list[Message] = []
    history = record.get("history") or []
    for index, pair in enumerate(history if isinstance(history, list) else [history]):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RecordError(
                "a history of another form", f"{where}: `history[{index}]` is {short(pair)}: it must be two texts."
            )
        for role, text in zip(("user", "assistant"), pair):
            messages.append({"role": role, "content": _text(text, f"history[{index}]", where)})
    messages.append({"role": "user", "content": question})
    answer = next((name for name in ("output", "response") if record.get(name) is not None), None)
    if answer is not None:
        messages.append({"role": "assistant", "content": _text(record[answer], answer, where)})
    return messages


def _side(value: Any, name: str, role: str, where: str) -> list[Message]:
    """One half of a pair: a text, or messages."""
    if isinstance(value, list):
        return _messages(value, name, where)
    return [{"role": role, "content": _text(value, name, where)}]


def _messages(items: Any, name: str, where: str) -> list[Message]:
    if not isinstance(items, list):
        raise RecordError(
            "no list of messages", f"{where}: `{name}` is {short(items)}: it must be a list of messages."
        )
    return [_message(item, name, f"{name}[{index}]", where) for index, item in enumerate(items)]


def _message(item: Any, form: str, name: str, where: str) -> Message:
    if not isinstance(item, dict):
        raise RecordError("a message that is no object", f"{where}: `{name}` is {short(item)}: it must be an object.")
    is_sharegpt = "from" in item or (form == "conversations" and "role" not in item)
    role_key, content_key = ("from", "value") if is_sharegpt else ("role", "content")
    given = _text(item.get(role_key), f"{name}.{role_key}", where)
    if is_sharegpt and given not in _ROLES:
        raise RecordError(
            "an unknown role",
            f"{where}: `{name}.{role_key}` is {short(given)}: it must be one of {', '.join(_ROLES)}.",
        )
    # The name of OpenAI's before `tool`.
    role = "tool" if given == "function" else _ROLES[given] if is_sharegpt else given
    message: Message = {"role": role}
    content = item.get(content_key)
    calls = item.get("tool_calls") or ([] if item.get("function_call") is None else [item["function_call"]])
    if is_sharegpt and given == "function_call":
        calls, content = [content], None
    if not isinstance(calls, list):
        raise RecordError(
            "a tool call in no known form", f"{where}: `{name}.tool_calls` is {short(calls)}: it must be a list."
        )
    reasoning = next((item[key] for key in _REASONING if item.get(key) is not None), None)
    # A call stands without a text.
    is_empty = content is None and (calls or reasoning is not None)
    message["content"] = "" if is_empty else _content(content, f"{name}.{content_key}", where)
    if reasoning is not None:
        message["reasoning_content"] = _text(reasoning, f"{name}.reasoning_content", where)
    if calls:
        message["tool_calls"] = [_call(call, f"{name}.tool_calls[{i}]", where) for i, call in enumerate(calls)]
    for key in ("name", "tool_call_id"):
        if isinstance(item.get(key), str):
            message[key] = _clean(item[key])
    return message


def _content(value: Any, name: str, where: str) -> str:
    """A content: a text, or parts that are texts, which are joined by line breaks."""
    if not isinstance(value, list):
        return _text(value, name, where)
    texts = []
    for index, part in enumerate(value):
        if isinstance(part, dict):
            if part.get("type", "text") not in ("text", "input_text", "output_text"):
                raise RecordError(
                    "a part that is no text",
                    f"{where}: `{name}[{index}].type` is {short(part.get('type'))}: only parts of text are read.",
                )
            part = part.get("text")
        texts.append(_text(part, f"{name}[{index}]", where))
    return "\n".join(texts)


def _call(call: Any, name: str, where: str) -> dict[str, Any]:
    """A tool call, with the arguments as an object, which templates write as JSON."""
    error = RecordError(
        "a tool call in no known form",
        f"{where}: `{name}` is {short(call)}: it must have a `name` and `arguments`, an object or its JSON.",
    )
    identifier = call.get("id") if isinstance(call, dict) else None
    try:
        call = parse_json(call) if isinstance(call, str) else call
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, AttributeError):
        raise error from None
    if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
        raise error
    found = {"type": "function", "function": {"name": _clean(function["name"]), "arguments": _clean(arguments)}}
    return {**found, "id": _clean(identifier)} if isinstance(identifier, str) else found


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    error = RecordError(
        "tools in no known form",
        f"{where}: `tools` is {short(value)}: it must be a list of JSON schemas of functions, or its JSON.",
    )
    try:
        # Data sets keep them as JSON, because each function has fields of its own.
        value = parse_json(value) if isinstance(value, str) and value.strip() else value
    except ValueError:
        raise error from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise error
    return [_clean(tool if "name" not in tool else {"type": "function", "function": tool}) for tool in value]


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise RecordError("a field that is no text", f"{where}: `{name}` is {short(value)}: it must be a string.")
    return _clean(value)


def _clean(value: Any) -> Any:
    """Replaces half surrogate pairs, which JSON escapes can encode and no tokenizer accepts, in objects, too."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_clean(each) for each in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(each) for key, each in value.items()}
    return value
