# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Servers of tiny models, on free ports of this machine."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from example_scripts import TEMPLATE
from tiny_models import tiny_tokenizer


def chat_tokenizer():
    """The tiny tokenizer with a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def needs_the_extra() -> None:
    """Skips tests where the packages of the server are not installed."""
    for package in ("fastapi", "openai", "uvicorn"):
        pytest.importorskip(package, reason="comes with the extra `serve`")


@contextmanager
def running(server) -> Iterator[str]:
    """Runs a [`TargetServer`] in a thread; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=(listener,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.stop()
            thread.join(timeout=60)
            assert not thread.is_alive()
