# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Compiled code that a child process builds while this process already generates. The child has the lowest priority and
one thread, stands still during calls, and ends with this process. What it has built is loaded between calls.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..call_observers import observe_calls
from ..core.draft_options import DraftOptions
from ..core.hook import attention_implementation
from .compiled_passes import CompilableDrafter
from .compiling import check_whether_possible
from .kept_programs import shelf_of
from .kept_rounds import expect_rounds, load_rounds, passes_for, rounds_for, stop_expecting, undo_decline
from .packing import is_packed
from .row_invariant import is_row_invariant

logger = logging.get_logger(__name__)

# The builder in a group of its own, with the compiler that it calls, so that the group can be stopped. The guard never
# stops. It kills the group once its input ends: closed by the process that started it, or by the end of that process,
# however it ended. Until then it keeps the number of the group.
_GUARD = """
import os, signal, subprocess, sys
os.nice(19)
builder = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
try:
    print(builder.pid, flush=True)
    os.close(2)
    sys.stdin.read()
except BrokenPipeError:
    pass
try:
    os.killpg(builder.pid, signal.SIGKILL)
except ProcessLookupError:
    pass
sys.exit(1 if builder.wait() else 0)
"""
# Modules come from where this process has them. With `-c` and `-m` the first place would be the current folder, whose
# files may be anybody's.
_BUILDER = """
import sys
sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]
from hf_falcon.cpu.build_kept import main
main(sys.argv[1:])
"""
# Characters of what a builder says that are kept, from the end.
_LONGEST_OUTPUT = 4096


class BackgroundBuild:
    """
    A child process that builds the compiled code of a target, and of a drafter's passes for it.

    Args:
        target ([`PreTrainedModel`]): the target.
        drafter: the drafter, or `None`.
        request (`dict`): what the child gets; see [`build_kept`].
    """

    def __init__(self, target: PreTrainedModel, drafter: Any, request: dict[str, Any]):
        self._target = weakref.ref(target)
        self._drafter = None if drafter is None else weakref.ref(drafter)
        self._name, self._request = type(target).__name__, request
        # Number of the builder's group, while it may get signals.
        self._group: int | None = None
        # The guard's input; the guard ends the group once it is closed.
        self._input: IO[str] | None = None
        self._is_ended = False
        # Without the target nothing would pause it for calls.
        weakref.finalize(target, self.end).atexit = False
        self.thread = threading.Thread(target=self._run, name="hf_falcon-build", daemon=True)

    @property
    def is_running(self) -> bool:
        """Whether its code is being built, or waits to be loaded."""
        return self.thread.is_alive() and not self._is_ended

    def end(self) -> None:
        """Ends the child."""
        with _changed:
            self._is_ended = True
            if self._input is not None:
                self._input.close()
            _changed.notify_all()

    def disown(self) -> None:
        """Leaves the child to another process: to the parent of this one, which is a fork."""
        self._is_ended, self._group = True, None
        if self._input is not None:
            self._input.close()

    def signal(self, number: int) -> None:
        """Sends a signal to the builder and to what it runs; the caller holds the lock."""
        if self._group is not None:
            try:
                os.killpg(self._group, number)
            except (ProcessLookupError, PermissionError):
                # Its processes have ended.
                pass

    def _run(self) -> None:
        try:
            self._build()
            self._load()
        # A call never fails because of it.
        except Exception as error:
            if not self._is_ended:
                reason = " ".join(str(error).split())[:300] or type(error).__name__
                logger.warning(f"Rounds of {self._name} run uncompiled, no code was built in the background: {reason}")

    def _build(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment["HF_HUB_OFFLINE"] = "1"
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, *_command(self._request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as guard:
            assert guard.stdin is not None and guard.stdout is not None and guard.stderr is not None
            with _changed:
                self._input = guard.stdin
            number = guard.stdout.readline()
            with _changed:
                self._group = int(number) if number else None
                if _calls:
                    self.signal(signal.SIGSTOP)
                if self._is_ended:
                    guard.stdin.close()
            output = ""
            # Ends with the last process of the group.
            while part := guard.stderr.read(1024):
                output = (output + part)[-_LONGEST_OUTPUT:]
            with _changed:
                self._group = None
                guard.stdin.close()
            status = guard.wait()
        if status and not self._is_ended:
            lines = [line for line in output.replace("\r", "\n").splitlines() if line.strip()]
            raise RuntimeError(lines[-1] if lines else "the process that builds it was ended.")

    def _load(self) -> None:
        """Loads the rounds while no call runs, and then the passes."""
        for load in (load_rounds, self._load_passes):
            with _changed:
                _changed.wait_for(lambda: not _calls or self._is_ended)
            target = self._target()
            if self._is_ended or target is None:
                return
            load(target)
            # A weak reference, while it waits.
            del target

    def _load_passes(self, target: PreTrainedModel) -> None:
        drafter = None if self._drafter is None else self._drafter()
        if drafter is not None:
            passes_for(drafter, target)


# The latest build of each target.
_builds: weakref.WeakKeyDictionary[nn.Module, BackgroundBuild] = weakref.WeakKeyDictionary()
# Guards the number of calls that run, and what gets signals; notified when the last call ends.
_changed = threading.Condition()
# One build is started at a time.
_starting = threading.Lock()
_calls = 0


def build_in_background(target: PreTrainedModel, drafter: Any = None, source: str | None = None) -> bool:
    """
    Builds compiled rounds of a target, and the passes of a drafter, in a child process, unless there are some for the
    target as it is now: those are loaded at once. The child loads both models from where they were loaded. Later
    processes use the code without being asked, as after `hf-falcon tune --compile`.

    Args:
        target ([`PreTrainedModel`]): the target, on a CPU.
        drafter ([`DraftModel`], *optional*): its drafter.
        source (`str`, *optional*): the folder of the target's weights; by default its `name_or_path`.

    Returns:
        `bool`: whether code is being built.

    Raises:
        `ValueError`: if no code can be built for the target in the background, with the reason.
    """
    check_background_build(target, source)
    # Only passes of this kind can be compiled, and a drafter that is nowhere on disk cannot be loaded.
    if not isinstance(drafter, CompilableDrafter) or not getattr(drafter, "name_or_path", None):
        drafter = None
    with _starting:
        build = _builds.get(target)
        if build is not None and build.is_running:
            return True
        undo_decline(target)
        if rounds_for(target) is not None:
            return False
        expect_rounds(target)
        build = BackgroundBuild(target, drafter, _request(target, drafter, source))
        with _changed:
            _builds[target] = build
        build.thread.start()
    return True


def check_background_build(target: PreTrainedModel, source: str | None = None) -> None:
    """
    Checks whether code can be built for a target in the background.

    Args:
        target, source: see [`build_in_background`].

    Raises:
        `ValueError`: if not, with the reason.
    """
    kind, reason = type(target), None
    remedy = "Call `hf_falcon.compile_rounds(target, drafter=drafter)`, or leave `compile` out."
    if target.device.type != "cpu":
        reason = f"it is on {target.device}, and only code for a CPU is built so"
    elif not hasattr(os, "killpg") or not hasattr(os, "getuid"):
        reason = "no compiled code is kept on this system"
    elif is_row_invariant(target):
        reason = "inside `row_invariant` each process compiles, and compares, its own code"
    elif not kind.__module__.startswith("transformers."):
        reason = f"its class is of {kind.__module__}, and not one of transformers"
    elif source is None and not target.name_or_path:
        reason = "it was not loaded from a folder or the Hub"
    if reason is not None:
        raise ValueError(f"The code of {kind.__name__} cannot be built in the background: {reason}. {remedy}")
    check_whether_possible(target)


def end_build(target: PreTrainedModel) -> None:
    """Ends the build for a target, if one runs."""
    with _changed:
        build = _builds.pop(target, None)
    if build is not None:
        build.end()


def install() -> None:
    """Counts the calls that run, also those that have begun before the first build."""
    observe_calls(_paused_builds)


def _forget_builds() -> None:
    """In a fork: the builds are its parent's, which has to be the only one that keeps them alive."""
    global _changed, _starting, _calls
    # Their locks are as they were in some thread of the parent.
    _changed, _starting, _calls = threading.Condition(), threading.Lock(), 0
    for target, build in list(_builds.items()):
        build.disown()
        stop_expecting(target)
    _builds.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_builds)


def background_build(target: PreTrainedModel) -> BackgroundBuild | None:
    """The latest build for a target, or `None`."""
    return _builds.get(target)


@contextmanager
def _paused_builds(drafter: Any, target: PreTrainedModel) -> Iterator[None]:
    """Around a call: inside, all builds stand still."""
    global _calls
    with _changed:
        _calls += 1
        if _calls == 1:
            for build in list(_builds.values()):
                build.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with _changed:
            # A fork begins with none.
            _calls = max(0, _calls - 1)
            if _calls == 0:
                for build in list(_builds.values()):
                    build.signal(signal.SIGCONT)
                _changed.notify_all()


def _request(target: PreTrainedModel, drafter: Any, source: str | None) -> dict[str, Any]:
    request: dict[str, Any] = {
        "target": {
            "class": [type(target).__module__, type(target).__name__],
            "name": source or target.name_or_path,
            "attention": attention_implementation(target.config.get_text_config(decoder=True)),
            **_state(target),
        },
        "state": shelf_of(target).name,
    }
    if drafter is not None:
        width = DraftOptions.from_generation_config(drafter.generation_config).draft_width
        request["drafter"] = {"name": drafter.name_or_path, "draft_width": width, **_state(drafter)}
    return request


def _state(model: Any) -> dict[str, Any]:
    return {"dtype": str(model.dtype).removeprefix("torch."), "packed": is_packed(model)}


def _command(request: dict[str, Any]) -> list[str]:
    """The command line of the builder."""
    # Docstrings and assertions are code, too.
    optimize = [f"-{'O' * sys.flags.optimize}"] if sys.flags.optimize else []
    return [sys.executable, *optimize, "-c", _BUILDER, str(Path(__file__).parents[2]), json.dumps(request)]
