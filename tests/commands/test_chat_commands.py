# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The commands of `hf-falcon chat`."""

import builtins

import pytest
from tiny_models import tiny_tokenizer

from hf_falcon.commands import chat


@pytest.fixture
def talk(monkeypatch):
    """Types some lines into a chat. Returns the conversation at its end, and those that were answered."""

    def run(*lines):
        typed, answered = iter(lines), []

        def answer(target, tokenizer, drafter, messages, arguments):
            if messages[-1]["content"] == "too long":
                raise ValueError("The prompt is too long.")
            answered.append([message["content"] for message in messages])
            return "yes", "2 tokens"

        monkeypatch.setattr(builtins, "input", lambda prompt: next(typed))
        monkeypatch.setattr(chat, "answer", answer)
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "{{ messages }}"
        messages = chat.converse(None, tokenizer, None, chat.ChatArguments(system="s"))
        assert next(typed, None) is None, "the chat ended too early"
        return [message["content"] for message in messages], answered

    return run


@pytest.mark.parametrize("last", ["", "exit", "quit", "/exit", "/quit"])
def test_ends_of_a_chat(talk, last):
    assert talk("a", last) == (["s", "a", "yes"], [["s", "a"]])


def test_clear_keeps_the_system_message(talk):
    assert talk("a", "/clear", "b", "/exit") == (["s", "b", "yes"], [["s", "a"], ["s", "b"]])


def test_help_and_unknown_commands_are_not_sent(talk, capsys):
    assert talk("/help", "/exti", "/etc/hosts is a file", "/exit")[1] == [["s", "/etc/hosts is a file"]]
    error = capsys.readouterr().err
    assert error.count("/clear   forget") == 2 and "There is no command /exti." in error


def test_a_message_that_cannot_be_answered_is_left_out(talk, capsys):
    assert talk("too long", "b", "/exit") == (["s", "b", "yes"], [["s", "b"]])
    assert "The prompt is too long. `/clear` forgets the conversation." in capsys.readouterr().err


def test_a_message_that_is_no_utf_8_is_left_out(talk, capsys):
    assert talk("a\udcff", "b", "/exit") == (["s", "b", "yes"], [["s", "b"]])
    assert r"`message` is 'a\udcff', which is no UTF-8" in capsys.readouterr().err
