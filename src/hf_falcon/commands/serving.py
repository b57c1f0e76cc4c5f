# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
transformers' own server, for one target that is loaded already.

This is the only file that uses `transformers.cli.serving`, whose classes are not documented: its server takes no model
that is loaded already. If a version of transformers lacks a name, `serving_name` raises an error that names it; where
that is not so, a comment says what happens.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import wait
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import torch
import transformers
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from ..attaching import attached_drafter
from ..training.chat_templates import other_variables
from .generate_arguments import check_sampling
from .printable import printable
from .request_limits import CONNECTIONS, RequestLimits, check_request, check_text, client_left, limit_answer, protocol

logger = logging.get_logger(__name__)

# What the extra `serve` installs.
_PACKAGES = ("fastapi", "openai", "uvicorn")
# The endpoints: the argument of `build_server`, and the module and the class of its handler.
_HANDLERS = {
    "chat_handler": ("chat_completion", "ChatCompletionHandler"),
    "completion_handler": ("completion", "CompletionHandler"),
    "response_handler": ("response", "ResponseHandler"),
}
# The fields without which their requests have no text. Without a prompt the third's has no tokens, which is refused.
_TEXTS = {"ChatCompletionHandler": "messages", "ResponseHandler": "input"}
# Errors of a request's fields. transformers' server checks their names only.
_MISTAKES = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, TemplateError)
_LONGEST_ERROR = 1000
# Of an answer for which a request sets no limit.
_NEW_TOKENS = 1024
# Seconds that answers get to end in once the server stops.
_GRACE = 5
# The status of an answer that nobody gets, as other servers write it.
_CLIENT_LEFT = 499


class TargetServer:
    """
    A server for one target, with OpenAI's chat completions, completions and responses. It calls `target.generate`, in
    a thread of its own and for one request at a time, and so drafts with an attached drafter.

    Args:
        target ([`PreTrainedModel`]): the target.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer.
        name (`str`): the name that requests may give as `model`.

    Attributes:
        app (`fastapi.FastAPI`): the application.

    Raises:
        `ImportError`: if packages are not installed.
        `RuntimeError`: if this version of transformers has no such server.
    """

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str):
        check_packages()
        self._target = target
        self._stopping = threading.Event()
        self._server: Any = None
        manager = _model_manager(target, tokenizer, name)
        self._thread = _generate_manager()
        state = _generation_state(self._thread)
        compare_variables = _variables_comparer(target, tokenizer)
        handlers = {
            argument: _handler(serving_name(*where), target, tokenizer, compare_variables)(manager, state)
            for argument, where in _HANDLERS.items()
        }
        self.app = _build_app(manager, state, handlers)
        self.app.add_middleware(RequestLimits)
        for mistake in (_http_error(), *_MISTAKES):
            self.app.add_exception_handler(mistake, _refuse)
        self.app.add_exception_handler(_validation_error(), _refuse_body)

    def generate(self, **arguments: Any) -> Any:
        """`target.generate(**arguments)` in the thread of the requests: some backends keep a state for each thread."""
        return self._thread.submit(self._target.generate, **arguments).result()

    def run(self, listener: socket.socket) -> None:
        """
        Serves until `stop`, or until a signal: Ctrl-C raises `KeyboardInterrupt` after the answers have ended.

        Args:
            listener (`socket.socket`): accepts the connections.
        """
        import uvicorn

        # At its end, transformers' server would unload the models that it has loaded.
        config = uvicorn.Config(
            self.app,
            http=protocol(),
            ws="none",
            # It refuses the one that makes so many.
            limit_concurrency=CONNECTIONS + 1,
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=_GRACE,
        )
        self._server = uvicorn.Server(config)
        # A handler of signals: running answers end at once.
        handle_exit = self._server.handle_exit

        def end_answers(*signal: Any) -> None:
            self._stopping.set()
            handle_exit(*signal)

        self._server.handle_exit = end_answers
        hook = self._target.register_forward_pre_hook(self._end_answer)
        try:
            self._server.run(sockets=[listener])
        finally:
            self._stopping.set()
            # Python must not end while the thread, which it does not wait for, is inside torch.
            wait([self._thread.submit(lambda: None)], timeout=_GRACE)
            hook.remove()

    def stop(self) -> None:
        """Ends running answers, and then `run`, which another thread is in."""
        self._stopping.set()
        if self._server is not None:
            self._server.should_exit = True

    def _end_answer(self, *_: Any) -> None:
        """A forward hook of the target: the thread of an answer cannot be ended from outside."""
        if self._stopping.is_set():
            raise _http_error()(status_code=503, detail="The server stops.")


def check_packages() -> None:
    """
    Raises:
        `ImportError`: if packages that the server needs are not installed, with the remedy.
    """
    missing = [f"`{package}`" for package in _PACKAGES if find_spec(package) is None]
    if missing:
        raise ImportError(f"The server needs {', '.join(missing)}: run `pip install 'hf-falcon[serve]'`.")


def serving_name(module: str, name: str) -> Any:
    """
    Looks up a name of transformers' server.

    Args:
        module (`str`): a module of `transformers.cli.serving`.
        name (`str`): a name in it, or with a dot the method of a class.

    Raises:
        `RuntimeError`: if this version of transformers lacks it, with the remedy.
    """
    full = f"transformers.cli.serving.{module}"
    try:
        return attrgetter(name)(importlib.import_module(full))
    except (ImportError, AttributeError):
        raise RuntimeError(
            f"transformers {transformers.__version__} has no `{full}.{name}`, which `hf-falcon serve` needs: install "
            "a newer hf_falcon, or an older transformers (5.17 or later)."
        ) from None


def _model_manager(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> Any:
    """What gives the server its models: always this one. If requests ask for another, the server refuses them."""
    # Under another name, the server would load the target a second time, and without the drafter.
    serving_name("model_manager", "ModelManager.load_model_and_processor")
    kind: Any = serving_name("model_manager", "ModelManager")

    class OneModel(kind):
        def load_model_and_processor(self, model_id: str, progress_callback: Any = None, **_: Any) -> tuple[Any, Any]:
            if model_id != self.process_model_name(name):
                raise ValueError(_other_model(model_id, name))
            if progress_callback is not None:
                progress_callback({"status": "ready", "model": model_id, "cached": True})
            return target, tokenizer

        # If a release renames these two, an answer says whether a path exists here, and the log has a client's words.
        @staticmethod
        def process_model_name(model_id: str) -> str:
            return model_id.removesuffix("@main")

        async def load_model_streaming(self, model_id: str, *_: Any, **__: Any) -> AsyncIterator[str]:
            event = {"status": "ready", "model": model_id, "cached": True}
            if model_id != self.process_model_name(name):
                event = {"status": "error", "model": model_id, "message": _other_model(model_id, name)}
            yield f"data: {json.dumps(event)}\n\n"

        # If a release renames it, `/v1/models` lists the models of the Hub's cache, or says less of this one.
        def list_models(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
            owner = name.partition("/")[0] if "/" in name else ""
            entry = {"id": name, "object": "model", "created": created, "owned_by": owner}
            return [{**entry, "status": {"value": "loaded"}}]

        # Its name before transformers 5.24.
        get_gen_models = list_models

    created = int(time.time())
    manager = OneModel()
    # Set afterwards: the constructor would load the model. If a release renames it, requests must name the model.
    manager.force_model = name
    return manager


def _other_model(asked: str, name: str) -> str:
    return f"`model` is {asked!r}: this server has {name!r} only."


def _generate_manager() -> Any:
    """What calls `generate`, in a thread of its own; answers end with the target's context."""
    serving_name("utils", "GenerateManager.submit")
    kind: Any = serving_name("utils", "GenerateManager")

    class Manager(kind):
        # If a release renames these two, an answer may be longer than the target's context.
        def generate_streaming(self, model: Any, processor: Any, inputs: Any, config: Any, **options: Any) -> Any:
            limit_answer(config, model, inputs["input_ids"].shape[-1])
            return super().generate_streaming(model, processor, inputs, config, **options)

        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, config: Any, **options: Any
        ) -> Any:
            limit_answer(config, model, inputs["input_ids"].shape[-1])
            return await super().generate_non_streaming(model, processor, inputs, config, **options)

        # Of an answer that is not streamed. If a release renames it, such an answer runs to its end.
        def async_submit(self, generate: Callable[..., Any], **arguments: Any) -> Any:
            left = client_left.get()
            criteria = None if left is None else StoppingCriteriaList([_ClientLeft(left)])

            def answer(*args: Any, **kwargs: Any) -> Any:
                # A criterion is asked after the prompt's forward, which is long where requests wait.
                if left is not None and left.is_set():
                    raise _http_error()(status_code=_CLIENT_LEFT, detail="The client has left.")
                return generate(*args, **kwargs)

            return super().async_submit(answer, **arguments, stopping_criteria=criteria)

    return Manager()


class _ClientLeft(StoppingCriteria):
    """Ends an answer that nobody waits for any more; `left` is set then."""

    def __init__(self, left: asyncio.Event):
        self._left = left

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._left.is_set(), device=input_ids.device)


def _generation_state(manager: Any) -> Any:
    """What gives the handlers the manager of their model: always this one."""
    serving_name("utils", "GenerationState.get_manager")
    kind: Any = serving_name("utils", "GenerationState")

    class State(kind):
        def get_manager(self, *_: Any, **__: Any) -> Any:
            return manager

    # Requests run by `generate`, not by continuous batching, which bypasses it and drafts nothing.
    return State(continuous_batching=False)


def _handler(
    kind: Any,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    compare_variables: Callable[[dict[str, Any]], None],
) -> Any:
    """The class of an endpoint's handler, which prepares requests as the other commands do."""

    class Handler(kind):
        # If a release renames it, `/v1/responses` streams unless a request says otherwise.
        async def handle_request(self, body: dict[str, Any], *args: Any) -> Any:
            if (name := _TEXTS.get(kind.__name__)) is not None:
                check_text(body, name)
            check_request(body, target, tokenizer)
            compare_variables(body)
            # Some clients send null for what they leave out, which transformers takes in `/v1/responses` only.
            if body.get("chat_template_kwargs", {}) is None:
                body = {name: value for name, value in body.items() if name != "chat_template_kwargs"}
            return await super().handle_request({"stream": False, **body}, *args)

        # Private in transformers. If a release renames it, a temperature has an effect only if the target's own
        # configuration samples, and some wrong values are found only in the middle of a streamed answer.
        def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            config = super()._build_generation_config(body, *args, **kwargs)
            given = [name for name in ("temperature", "top_p") if body.get(name) is not None]
            check_sampling(*(getattr(config, name) if name in given else None for name in ("temperature", "top_p")))
            for name in ("temperature", "repetition_penalty"):
                # In JSON a number may be written as an integer, which transformers refuses in the middle of an answer.
                if getattr(config, name) is not None:
                    setattr(config, name, float(getattr(config, name)))
            if given or config.temperature == 0:
                config.do_sample = config.temperature != 0
            # What `generation_config` of a request leaves out is the target's own.
            own = target.generation_config
            if not (own.do_sample if config.do_sample is None else config.do_sample):
                # transformers would warn that they have no effect.
                config.temperature = config.top_p = None
            if (biases := body.get("logit_bias")) is not None:
                # For `/v1/completions` transformers leaves them out, and it refuses an empty object.
                config.sequence_bias = {(int(token),): float(value) for token, value in biases.items()} or None
            # An empty list ends no text; transformers fails at it in the middle of an answer.
            config.stop_strings = config.stop_strings or None
            if config.max_new_tokens is None:
                # As transformers does for a request without a `generation_config`.
                config.max_new_tokens = max(own.max_new_tokens or 0, _NEW_TOKENS)
            if config.max_new_tokens < 1:
                raise ValueError(f"The limit of new tokens is {config.max_new_tokens}; give 1 or more.")
            return config

    return Handler


def _variables_comparer(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Callable[[dict[str, Any]], None]:
    """
    Warns of the first request that has other variables of the chat template than the attached drafter's training had.
    """
    warned = False

    def compare(body: dict[str, Any]) -> None:
        nonlocal warned
        # Completions are plain texts.
        if warned or tokenizer.chat_template is None or "prompt" in body:
            return
        trained = getattr(getattr(attached_drafter(target), "config", None), "chat_template_kwargs", None)
        if text := other_variables(trained, body.get("chat_template_kwargs") or {}):
            warned = True
            logger.warning(printable(f"A request differs from the training: {text}.")[:_LONGEST_ERROR])

    return compare


def _http_error() -> Any:
    """The class of errors that are answers to requests. FastAPI's own, which transformers raises, is a subclass."""
    from starlette.exceptions import HTTPException

    return HTTPException


class _NotServed:
    """The handler of endpoints that a target for text has no use for, such as transcriptions."""

    async def handle_request(self, *_: Any) -> Any:
        raise _http_error()(
            status_code=404, detail="This server has chat completions, completions and responses only."
        )


def _build_app(manager: Any, state: Any, handlers: dict[str, Any]) -> Any:
    """
    Raises:
        `RuntimeError`: if transformers builds its server in another way.
    """
    build = serving_name("server", "build_server")
    # Transcriptions, decisions, and what later versions add.
    names = [name for name in inspect.signature(build).parameters if name.endswith("_handler")]
    others = {name: _NotServed() for name in names if name not in handlers}
    try:
        return build(manager, generation_state=state, **handlers, **others)
    except TypeError as error:
        raise RuntimeError(
            f"transformers {transformers.__version__} builds its server in another way ({error}): install a newer "
            "hf_falcon, or an older transformers (5.17 or later)."
        ) from error


def _validation_error() -> Any:
    from fastapi.exceptions import RequestValidationError

    return RequestValidationError


async def _refuse_body(request: Any, error: Any) -> Any:
    """FastAPI refuses an empty body, and reads JSON more strictly than we do."""
    text = "; ".join(str(each["msg"]) for each in error.errors())
    return await _refuse(
        request, _http_error()(status_code=422, detail=f"The body of the request is refused: {text}.")
    )


async def _refuse(request: Any, error: Exception) -> Any:
    """The answer to a request that is refused, in the form that OpenAI's client reads."""
    from fastapi.responses import JSONResponse

    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    # Requests are the client's words, and may hold what a terminal obeys or what is no text.
    text = printable(str(getattr(error, "detail", text)))[:_LONGEST_ERROR]
    logger.warning(f"[Request refused] {text}", exc_info=os.environ.get("HF_FALCON_DEBUG") == "1")
    return JSONResponse({"error": {"message": text}}, status_code=getattr(error, "status_code", 400))
