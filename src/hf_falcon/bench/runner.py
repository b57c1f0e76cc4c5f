# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Runs every method on every prompt, in turns, and records each answer."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ..core.drafter import DraftModel
from ..cpu.compiling import compiled_rounds, uncompile_rounds
from ..cpu.packing import packed_weights
from ..training.chat_templates import chat_inputs
from .divergence import first_divergence
from .methods import COMPILED, PACKED
from .metrics import PLAIN
from .operations import RoundOperations, count_round
from .traces import Trace, TraceFile

_SEED = 0


class Benchmark:
    """
    Decodes dialogues by every method. At each turn the methods run one after another, in an order that rotates from
    prompt to prompt, so that a drift of the machine favours none. All methods read the same dialogue, whose earlier
    answers are plain decoding's.

    Args:
        target ([`PreTrainedModel`]): the target.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer.
        methods (`dict[str, dict]`): the arguments of `generate` for each method, plain decoding included.
        settings (`dict`): arguments of `generate` for all of them.
        repeats (`int`): timed runs of each method on each turn.
        variables (`dict`, *optional*): variables of the chat template.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        methods: dict[str, dict[str, Any]],
        settings: dict[str, Any],
        repeats: int,
        variables: dict[str, Any] | None = None,
    ):
        if PLAIN not in methods:
            raise ValueError(f"`methods` are {', '.join(methods)}: add `{PLAIN}`, with which all are compared.")
        self._target, self._tokenizer = target, tokenizer
        self._methods, self._settings, self._repeats = methods, settings, repeats
        self._variables = variables
        self._warm: set[str] = set()

    def run(self, data: dict[str, list[list[str]]], file: TraceFile) -> None:
        """Measures the answers that `file` lacks. `data` are the users' turns of dialogues, by data set."""
        wanted = {
            (method, name, prompt, turn)
            for method in self._methods
            for name, dialogues in data.items()
            for prompt, turns in enumerate(dialogues)
            for turn in range(len(turns))
        }
        # The file may have answers of other methods, too.
        with tqdm(total=len(wanted), initial=len(wanted & file.traces.keys()), unit="answer") as bar:
            for name, dialogues in data.items():
                for prompt, turns in enumerate(dialogues):
                    for trace in self._dialogue(name, prompt, turns, file.traces):
                        file.add(trace)
                        bar.set_postfix_str(f"{name} {prompt + 1}/{len(dialogues)}, {trace.method}")
                        bar.update()

    def _dialogue(
        self, data: str, prompt: int, turns: list[str], known: dict[tuple[str, str, int, int], Trace]
    ) -> Iterator[Trace]:
        names = list(self._methods)
        shift = prompt % len(names)
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(turns):
            messages.append({"role": "user", "content": text})
            missing = [name for name in names[shift:] + names[:shift] if (name, data, prompt, turn) not in known]
            inputs = chat_inputs(self._tokenizer, messages, self._target.device, self._variables)
            plain = known.get((PLAIN, data, prompt, turn))
            waiting = []
            for name in missing:
                trace = self._answer(name, data, prompt, turn, inputs)
                waiting.append(trace)
                plain = trace if name == PLAIN else plain
                # Methods that ran before plain decoding wait for its answer, to be compared with it.
                while plain is not None and waiting:
                    trace = waiting.pop(0)
                    found = first_divergence(self._target, inputs["input_ids"], plain.tokens, trace.tokens)
                    trace.gap = None if found is None else found.gap
                    yield trace
            assert plain is not None
            answer = self._tokenizer.decode(plain.tokens, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})

    def _answer(self, method: str, data: str, prompt: int, turn: int, inputs: dict[str, Tensor]) -> Trace:
        if self._target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._target.device)
        seconds = []
        with self._models_of(method):
            if method not in self._warm:
                # The first call chooses kernels and fills caches, which no timed run should include.
                self._generate(method, inputs)
                self._warm.add(method)
            for _ in range(self._repeats):
                elapsed, output = timed(lambda: self._generate(method, inputs), self._target.device)
                seconds.append(elapsed)
        statistics = getattr(output, "draft_statistics", None)
        return Trace(
            method=method,
            data=data,
            prompt=prompt,
            turn=turn,
            tokens=output.sequences[0, inputs["input_ids"].shape[1] :].tolist(),
            seconds=seconds,
            statistics=None if statistics is None else dict(statistics),
            gap=None,
            peak_memory_mb=peak_memory_mb(self._target.device),
        )

    @contextmanager
    def _models_of(self, method: str) -> Iterator[None]:
        """Packs and compiles the models for a method, while it runs."""
        # What `hf-falcon tune --compile` kept belongs to the compiled methods.
        uncompile_rounds(self._target)
        with ExitStack() as stack:
            drafter = self._methods[method].get("assistant_model")
            if method in PACKED:
                stack.enter_context(packed_weights(self._target, *([drafter] if drafter is not None else [])))
            # On CUDA transformers compiles plain decoding by itself.
            if method in COMPILED and drafter is not None:
                stack.enter_context(compiled_rounds(self._target, drafter=drafter))
            yield

    def operations(self, text: str) -> dict[str, RoundOperations | None]:
        """
        What a plain step asks of the device, and a round of each method that drafts with one of our drafters,
        for a prompt. Packed and compiled methods are left out: their operations are not dispatched one by one.
        """
        inputs = chat_inputs(
            self._tokenizer, [{"role": "user", "content": text}], self._target.device, self._variables
        )
        found = {}
        for name, arguments in self._methods.items():
            drafts = isinstance(arguments.get("assistant_model"), DraftModel)
            if (drafts and name not in (*PACKED, *COMPILED)) or name == PLAIN:
                found[name] = count_round(self._target, partial(self._generate, name, inputs), name == PLAIN)
        return found

    def _generate(self, method: str, inputs: dict[str, Tensor]) -> Any:
        set_seed(_SEED)
        return self._target.generate(**inputs, **self._settings, **self._methods[method], return_dict_in_generate=True)


def longest_context(
    tokenizer: PreTrainedTokenizerBase,
    data: dict[str, list[list[str]]],
    max_new_tokens: int,
    variables: dict[str, Any] | None = None,
) -> int:
    """Tokens of the longest dialogue, if every answer has `max_new_tokens` tokens."""
    longest = 0
    for turns in itertools.chain.from_iterable(data.values()):
        messages = [{"role": "user", "content": turns[0]}]
        for text in turns[1:]:
            messages += [{"role": "assistant", "content": ""}, {"role": "user", "content": text}]
        prompt = chat_inputs(tokenizer, messages, torch.device("cpu"), variables)["input_ids"]
        longest = max(longest, prompt.shape[1] + len(turns) * max_new_tokens)
    return longest


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds of a call, the device's work included, and its result."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    found = call()
    wait()
    return time.perf_counter() - start, found


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory: of the device on CUDA since its last reset, else of the process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    try:
        import resource
    except ImportError:
        # Windows.
        import psutil

        return psutil.Process().memory_info().peak_wset / 1e6
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
