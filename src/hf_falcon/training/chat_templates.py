# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Renders dialogues by a chat template: prompts as `generate` gets them, and which text is the assistant's."""

from __future__ import annotations

import inspect
import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from .json_text import parse_json, short
from .records import Message, RecordError

# A template is a program of others: for messages or variables of another form it can raise any error.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOW = re.compile(r"""strftime_now\(\s*("[^"\\\n]*"|'[^'\\\n]*')\s*\)""")


def template_variables(given: dict[str, Any] | str | None) -> dict[str, Any]:
    """
    The variables of a chat template that an argument `chat_template_kwargs` gives.

    Args:
        given (`dict` or `str`, *optional*): an object, or its JSON.

    Raises:
        `ValueError`: it is no object, or has a name that is an argument of `apply_chat_template`, such as another
            template.
    """
    if given is None:
        return {}
    try:
        found = parse_json(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(
            f"`chat_template_kwargs` is {short(given)}, {error}: give a JSON object such as "
            "'{\"enable_thinking\": false}'."
        ) from error
    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    if not isinstance(found, dict) or any(name in taken or name == "messages" for name in found):
        raise ValueError(
            f"`chat_template_kwargs` is {short(found)}: give a JSON object of variables of the chat template, which "
            f"are none of messages, {', '.join(taken)}."
        )
    return found


def read_template(path: str | Path) -> str:
    """
    The text of an argument `chat_template`.

    Args:
        path (`str` or `Path`): its file.

    Raises:
        `ValueError`: if it is no text in UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"`chat_template` is '{path}', no text in UTF-8 ({error}): give a Jinja template.") from error


def other_variables(trained: Any, given: dict[str, Any]) -> str | None:
    """
    What to say where a drafter was trained with other variables of the chat template than a call has.

    Args:
        trained: `chat_template_kwargs` of the drafter's configuration; anything but an object is not known.
        given (`dict`): those of the call.
    """
    if not isinstance(trained, dict) or trained == given:
        return None
    trained_text = json.dumps(trained) if len(json.dumps(trained)) <= 80 else short(trained)
    return (
        f"the drafter was trained with `chat_template_kwargs` {trained_text}, and this call has {json.dumps(given)}, "
        "so that fewer tokens can be accepted"
    )


def chat_inputs(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    device: torch.device,
    variables: dict[str, Any] | None = None,
    template: str | None = None,
) -> dict[str, torch.Tensor]:
    """
    The inputs of `generate` for a conversation, by the chat template with its `variables`; without one, the plain
    texts.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): the target's.
        messages (`list[dict[str, str]]`): the conversation.
        device (`torch.device`): the device of the inputs.
        variables (`dict`, *optional*): variables of the template, such as `enable_thinking`.
        template (`str`, *optional*): in place of the tokenizer's own.

    Raises:
        `ValueError`: the template refuses the messages, or their text has no tokens.
    """
    if template is None and tokenizer.chat_template is None:
        text = "\n\n".join(message["content"] for message in messages)
        plain = tokenizer(text, return_tensors="pt").to(device)
        if plain["input_ids"].shape[-1] == 0:
            raise ValueError(f"The prompt {short(text)} has no tokens: leave it out, or write one.")
        return dict(plain)
    try:
        inputs = tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            **(variables or {}),
        )
    except _REFUSALS as error:
        raise ValueError(f"The chat template refuses the messages: {error}") from error
    return dict(inputs.to(device))


class ChatTemplate:
    """
    A chat template with its variables.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): the target's.
        template (`str`, *optional*): in place of the tokenizer's own. Without either, texts stand as they are.
        variables (`dict`, *optional*): variables of the template, such as `enable_thinking`.
        day (`date`, *optional*): what `strftime_now` writes in place of now, where its format is written in the call.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        variables: dict[str, Any] | None = None,
        day: date | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._variables = variables or {}
        self._day = day

    def source(self, tools: list[dict[str, Any]] | None = None) -> str | None:
        """The template's text: a tokenizer can have one for tools, and one for all else. `None` if there is none."""
        found = self._template
        if found is None and self._tokenizer.chat_template is not None:
            found = self._tokenizer.get_chat_template(tools=tools)
        if found is None or (day := self._day) is None:
            return found
        # A function among the variables would not do: transformers hands templates nothing but data.
        return _NOW.sub(lambda call: json.dumps(day.strftime(call[1][1:-1])), found)

    @property
    def writes_day(self) -> bool:
        """Whether `day` is in what a template of the tokenizer writes."""
        found: Any = self._tokenizer.chat_template if self._template is None else self._template
        return any(map(_NOW.search, found.values() if isinstance(found, dict) else [found or ""]))

    def ignores(self, field: str, tools: list[dict[str, Any]] | None = None) -> bool:
        """Whether the template does not read a field of messages, or `tools`."""
        names = {"tool_calls": ("tool_call",), "reasoning_content": ("reasoning", "thinking")}.get(field, (field,))
        return not any(name in (self.source(tools) or "") for name in names)

    def prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None, where: str) -> str:
        """
        The messages, and what begins the assistant's answer.

        Args:
            messages (`list[Message]`): the dialogue up to there.
            tools (`list[dict]`, *optional*): JSON schemas of functions.
            where (`str`): names the record in errors.

        Raises:
            [`RecordError`]: the template refuses the messages.
        """
        return self._render(messages, tools, True, where)[0]

    def response(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, where: str
    ) -> tuple[str, str] | None:
        """
        A dialogue that ends with a message of the assistant, as prompt and response.

        The response is what the template marks by `{% generation %}`, less what the prompt of `generate` has of it
        (such as an empty thought). Without marks it is what follows that prompt, which has to be the beginning of the
        whole. Where it is not, as where a template writes a past answer in another way, it is the message's text and
        EOS.

        Returns:
            `tuple[str, str]`, or `None` if the response is not known: it has tool calls or reasoning, which only the
            template can write.

        Raises:
            [`RecordError`]: the template refuses the messages.
        """
        prompt = self.prompt(messages[:-1], tools, where)
        whole, marked = self._render(messages, tools, False, where)
        if whole.startswith(prompt):
            # A template can mark a message in pieces.
            marked = [(begin, end) for begin, end in marked if end > len(prompt)]
            begin, end = (max(marked[0][0], len(prompt)), marked[-1][1]) if marked else (len(prompt), len(whole))
            return whole[:begin], whole[begin:end]
        if marked:
            begin, end = marked[-1]
            return whole[:begin], whole[begin:end]
        last = messages[-1]
        if "tool_calls" in last or "reasoning_content" in last:
            return None
        return prompt, last["content"] + (self._tokenizer.eos_token or "")

    def _render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, adds_prompt: bool, where: str
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the ranges that the template marks as the assistant's."""
        source = self.source(tools)
        if source is None:
            return "\n\n".join(message["content"] for message in messages), []
        if "developer" not in source:
            # Older templates write only the roles that they know.
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
            ]
        marked: list[list[tuple[int, int]]] = []
        try:
            if not adds_prompt and _MARKS.search(source):
                # `apply_chat_template` gives the marks of tokens only, and the response is tokenized by itself.
                [text], marked = render_jinja_template(
                    conversations=[messages],
                    tools=tools,
                    chat_template=source,
                    return_assistant_tokens_mask=True,
                    **{**self._tokenizer.special_tokens_map, **self._variables},
                )
            else:
                text = self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=source,
                    add_generation_prompt=adds_prompt,
                    tokenize=False,
                    **self._variables,
                )
        except _REFUSALS as error:
            roles = short([message["role"] for message in messages])
            raise RecordError(
                "the chat template's refusal",
                f"{where}: The chat template refuses messages of the roles {roles} ({error}): remove such dialogues, "
                "or give another `chat_template`.",
            ) from error
        return str(text), marked[0] if marked else []
