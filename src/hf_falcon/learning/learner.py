# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The learner: it watches the calls of a drafter, trains a copy of it between them, and replaces its weights."""

from __future__ import annotations

import atexit
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..call_observers import observe_calls
from ..checkpoint_files import weights_fingerprint
from ..core.draft_session import TensorMark
from ..core.drafter import DraftModel
from ..training.token_file import write_atomically
from . import state as files
from .budget import Budget
from .gate import FEWEST_TEXTS, Verdict, compare, estimated_tau, is_enough
from .history import History, draw
from .learning_statistics import LearningStatistics
from .options import LearningOptions
from .recorder import CallCounts, CallRecorder
from .replay_buffer import CallRecord, ReplayBuffer
from .serving_weights import replace_weights
from .student import Student, unsupported_reason

logger = logging.getLogger(__name__)

# Comparisons in a row without a gain, after which the student goes back to its weights at the latest gain.
_PATIENCE = 8
# Seconds that the idle thread waits where there is nothing to do, and that the end of a process waits for it.
_LONG, _GRACE = 5.0, 10.0
_MEGABYTE = 1 << 20
# The learner of each drafter, which is freed with the drafter.
_learners: weakref.WeakKeyDictionary[Any, Learner] = weakref.WeakKeyDictionary()


class Learner:
    """
    Trains a drafter on what its target computes in calls of `generate`. It needs no forward of the target: the
    features of every verified token are there already, and the target's head gives its choices.

    Every call of the target with the drafter is watched from now on. Texts are kept in memory, some of them held out.
    A copy of the drafter is trained between calls and, by a thread of low priority, while no call runs; see
    [`LearningOptions`] for the limits. The drafter gets the copy's weights when they accept more of the held-out texts
    and no call runs; only half of the change, where this keeps most of the gain, so that it forgets less. Outputs stay
    the target's own.

    ```python
    with hf_falcon.Learner(drafter, target, hf_falcon.LearningOptions(folder="learnt")) as learner:
        target.generate(**inputs, assistant_model=drafter)
        print(learner.statistics)
    ```

    Args:
        drafter ([`DraftModel`]): a drafter of Falcon or EAGLE-3. Its weights change in place.
        target ([`PreTrainedModel`]): its target. The learner keeps neither of both alive; with a folder it keeps the
            drafter until it is closed, to save it at the latest when the process ends.
        options ([`LearningOptions`], *optional*): limits, and the folder on disk.
        clock (`Callable[[], float]`, *optional*): gives seconds; by default `time.perf_counter`.

    Attributes:
        log (`Callable[[str], None]`): gets a line after each comparison.

    Raises:
        `ValueError`: if the drafter has nothing to learn, if it has a learner already, if it was made for another
            target, or if the folder is of another drafter.
    """

    def __init__(
        self,
        drafter: DraftModel,
        target: PreTrainedModel,
        options: LearningOptions | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        check_whether_it_learns(drafter)
        if learner_of(drafter) is not None:
            raise ValueError("The drafter has a learner already: close it first (`learner.close()`, or `detach`).")
        drafter.check_target(target)
        self.options = options or LearningOptions()
        self.log: Callable[[str], None] = logger.info
        self._drafter, self._target, self._clock = weakref.ref(drafter), weakref.ref(target), clock
        # To be saved at the end of the process, also if nobody else has it any more.
        self._unsaved = None if self.options.folder is None else drafter
        self._vocab_size = target.config.get_text_config(decoder=True).vocab_size
        self._student = Student(drafter, self.options)
        self._fingerprint = weights_fingerprint(drafter)
        chance = random.Random(self.options.seed)
        self._buffer = ReplayBuffer(self.options.memory * _MEGABYTE, self.options.held_out, self.options.uses, chance)
        self._budget = Budget(self.options.share, self.options.steps_a_minute)
        self._history = History()
        # The weights that draft, or will at the next boundary of calls; their number; and whether they wait for it.
        self._drafting, self._version, self._waits = self._student.weights(), 0, False
        # The student's weights that they are of: the same ones, or those that they are halfway to.
        self._accepted = self._drafting
        self._verdict: Verdict | None = None
        self._before: float | None = None
        # The target's head that the scores of held-out texts are of.
        self._head_marks: list[TensorMark] = []
        self._replacements, self._refusals, self._refused_in_a_row = 0, 0, 0
        self._seconds = 0.0
        # Guards the calls that run, the buffer and the weights of the drafter.
        self._lock = threading.Lock()
        # One unit of learning runs at a time.
        self._working = threading.Lock()
        self._active, self._busy_since = 0, 0.0
        self._idle_since = self._saved_at = clock()
        self._saved: tuple[int, int] | None = None
        self._exported: int | None = None
        # Fingerprints of what the folder's drafter may be: it is written after the state, which names them.
        self._learnt: list[str | None] = []
        # Whether it has stopped, also after an error; and whether it was closed.
        self._closed = self._is_left = False
        # Whether the save after the last call failed.
        self._failed_late = False
        # What is to be told of the latest comparison.
        self._news: str | None = None
        self._here = _Here()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._work = self._units()
        if self.options.folder is not None:
            folder = Path(self.options.folder)
            # A folder that is refused ends no other learner. Another one of this folder saves before it is read.
            refuse_other_drafter(drafter, folder)
            _leave_others(folder)
            self._resume(drafter, folder)
        _learners[drafter] = self
        _install()

    def __enter__(self) -> Learner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    @property
    def statistics(self) -> LearningStatistics:
        """How far it has come."""
        total = self._history.total()
        with self._lock:
            texts, held_out, memory = len(self._buffer.records), len(self._buffer.held_out), self._buffer.nbytes
        return LearningStatistics(
            int(sum(entry[0] for entry in self._history.entries)),
            total.tokens,
            total.accepted / max(1, total.rounds),
            self._student.positions,
            self._student.steps,
            self._replacements,
            self._refusals,
            self._before,
            self._now,
            self._seconds,
            total.seconds,
            texts,
            held_out,
            memory,
        )

    @property
    def _now(self) -> float | None:
        """The acceptance of the weights that draft."""
        if self._verdict is None:
            return None
        return self._verdict.after if self._verdict.replaces else self._verdict.before

    def learn(self, steps: int = 1) -> int:
        """
        Learns in this thread, whatever the limits of time are.

        Args:
            steps (`int`, *optional*, defaults to 1): steps of the optimizer.

        Returns:
            `int`: the steps that were done: fewer, where nothing is left to learn from.
        """
        first = self._student.steps
        while self._student.steps < first + steps and self._do(waits=True):
            pass
        done = self._student.steps - first
        # The comparison that is due after the last step.
        while done and self._compares and self._do(waits=True):
            pass
        return done

    def save(self) -> None:
        """Writes the folder of the options; nothing without one."""
        drafter = self._drafter()
        if self.options.folder is None or drafter is None:
            return
        with self._working, torch.inference_mode(False), torch.no_grad():
            self._save(drafter, Path(self.options.folder))

    def close(self) -> None:
        """
        Stops watching and learning, and saves. The drafter keeps what it has learnt; if calls run, it gets the latest
        weights when the last of them ends.
        """
        self._leave()

    def _leave(self, at_once: bool = False) -> None:
        """See `close`. With `at_once` the drafter gets its weights also while calls run, which then draft worse."""
        if not self._is_left:
            self._closed = self._is_left = True
            self._wake.set()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(_GRACE)
        elif not at_once and self._unsaved is None:
            return
        with self._lock:
            # Otherwise the last call that runs does the rest.
            is_last = at_once or self._active == 0
            if is_last:
                self._replace()
        # An error leaves it where the end of the process, or another `close`, finds it.
        self.save()
        self._unsaved = None
        if is_last:
            self._forget()

    def _forget(self) -> None:
        """Later calls of the drafter are not this learner's any more."""
        drafter = self._drafter()
        if drafter is not None and _learners.get(drafter) is self:
            del _learners[drafter]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, calls of this thread are not watched: nothing is learnt from them. Others are as before."""
        before, self._here.is_paused = self._here.is_paused, True
        try:
            yield
        finally:
            self._here.is_paused = before

    def watches(self, target: PreTrainedModel) -> bool:
        """
        Whether it watches the calls of a target in this thread.

        Args:
            target ([`PreTrainedModel`]): the target.

        Returns:
            `bool`
        """
        return not self._closed and not self._here.is_paused and self._target() is target

    def is_of(self, target: PreTrainedModel) -> bool:
        """Whether it learns from the calls of `target`, or did until an error."""
        return self._target() is target

    def observer(self) -> CallRecorder:
        """The observer of a call."""
        return CallRecorder(self, self.options.longest, self._vocab_size, self.options.rejected > 0)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Around a call that is not watched: the weights stay as they are in it, too."""
        with self._lock:
            if self._active == 0:
                self._busy_since = self._clock()
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
                if self._active == 0:
                    self._idle_since = self._clock()
                    self._replace()
            self._save_after_close()

    def _save_after_close(self) -> None:
        """The last of the calls that ran when the learner was closed saves what its drafter got."""
        drafter = self._drafter()
        if not self._is_left or self._active > 0 or drafter is None or _learners.get(drafter) is not self:
            return
        if self._failed_late:
            return
        try:
            self.save()
            self._forget()
        # The call has its tokens. The end of the process, or another `close`, tries it again.
        except Exception as error:
            self._failed_late, self._unsaved = True, drafter
            _warn_of_loss(error)

    # What a [`CallRecorder`] asks for.

    def begin_call(self) -> None:
        """A call begins."""
        with self._lock:
            if self._active == 0:
                # The boundary of a call: weights that waited are used from here on.
                self._replace()
                self._busy_since = self._clock()
            self._active += 1

    def end_call(self, records: list[CallRecord], counts: CallCounts) -> None:
        """
        A call has ended. If no other one runs, a part of its time is learnt.

        Args:
            records (`list[CallRecord]`): its rows.
            counts ([`CallCounts`]): its tokens and rounds.
        """
        with self._lock:
            now = self._clock()
            self._active -= 1
            for record in records:
                self._buffer.add(record)
            if self._active == 0:
                counts.seconds = now - self._busy_since
                self._budget.earn(counts.seconds)
                self._idle_since = now
                self._replace()
            # The seconds are of all calls that ran at the same time.
            if counts.rounds or (counts.tokens and counts.seconds):
                self._history.add(counts)
        self._save_after_close()
        while self._may_learn and self._budget.is_enough and self._budget.seconds_to_step(self._clock()) == 0:
            if not self._unit(between_calls=True):
                break
        with self._lock:
            if self._active == 0:
                self._idle_since = self._clock()
        if self.options.idle_share > 0 and not self._closed:
            self._start_thread()

    def learning(self) -> dict[str, Any]:
        """What [`DraftStatistics`] shows."""
        return {
            "tokens_seen": self._history.total().tokens,
            "steps": self._student.steps,
            "replacements": self._replacements,
            "acceptance_before": self._before,
            "acceptance_now": self._now,
        }

    def fail(self, error: Exception) -> None:
        """
        Ends the learning after an error, which no call gets.

        Args:
            error (`Exception`): what a warning tells.
        """
        if not self._closed:
            self._closed = True
            logger.warning(f"The drafter does not learn any more: {type(error).__name__}: {error}")

    def idle_turn(self) -> float:
        """
        One turn of the thread that learns while idle: a unit of learning, if no call runs.

        Returns:
            `float`: seconds until the next turn.
        """
        with self._lock:
            now, is_busy = self._clock(), self._active > 0
            rest = self._idle_since + self.options.idle_after - now
        if is_busy and not self.options.during_calls:
            return max(self.options.idle_after, 0.01)
        if rest > 0 and not self.options.during_calls:
            return rest
        if (wait := self._budget.seconds_to_step(now)) > 0:
            return min(wait, _LONG)
        before = self._seconds
        if not self._unit():
            return _LONG
        return (self._seconds - before) * (1 / self.options.idle_share - 1)

    @property
    def _may_learn(self) -> bool:
        return not self._closed and (self._active == 0 or self.options.during_calls)

    @property
    def _compares(self) -> bool:
        """Whether a comparison is due that has not ended."""
        return self._student.steps % self.options.gate_steps == 0 and self._compared_at != self._student.steps

    def _unit(self, between_calls: bool = False) -> bool:
        """As `_do`, if no other thread learns. An error ends the learning, and no call."""
        try:
            return self._do(between_calls)
        except Exception as error:
            self.fail(error)
            return False

    def _do(self, between_calls: bool = False, waits: bool = False) -> bool:
        """One unit of learning. Returns whether there was something to do."""
        is_dead = self._target() is None or self._drafter() is None
        if self._closed or is_dead or not self._working.acquire(blocking=waits):
            return False
        try:
            began, steps = self._clock(), self._student.steps
            # Whatever the caller's mode is.
            with torch.inference_mode(False), torch.no_grad():
                found = next(self._work)
            took = self._clock() - began
            if found:
                self._seconds += took
                self._budget.spend(took, between_calls)
            if self._student.steps > steps:
                self._budget.add_step(self._clock())
        except BaseException:
            # Also Ctrl-C ends a generator.
            self._work = self._units()
            raise
        finally:
            self._working.release()
        news, self._news = self._news, None
        if news is not None:
            # It may save, or close.
            self.log(news)
        return found

    def _units(self) -> Iterator[bool]:
        """
        The learning, in units that are not interrupted: between two of them a call may run. Each gives whether there
        was something to do. No unit keeps a reference to a model.
        """
        while True:
            if self._save_is_due:
                self._save_now()
                yield True
            while not self._student.step_is_full:
                with self._lock:
                    record = self._buffer.draw()
                if record is None:
                    yield False
                    break
                self._learn(record)
                yield True
            else:
                if not self._student.step():
                    logger.warning("Weights were not finite after a step: learning begins again from earlier ones.")
                    self._student.load(self._accepted)
                yield True
                if self._student.steps % self.options.gate_steps == 0:
                    yield from self._comparison()

    _compared_at = 0

    def _comparison(self) -> Iterator[bool]:
        with self._lock:
            held_out = list(self._buffer.held_out)
        if self._head_has_changed():
            for record in held_out:
                record.scores.clear()
        if len(held_out) >= FEWEST_TEXTS:
            weights, before, after = self._student.weights(), [], []
            drafting = weights
            for record in held_out:
                after.append(self._score(record, weights))
                yield True
                for name, version, known in (
                    ("start", 0, self._student.start),
                    ("now", self._version, self._drafting),
                ):
                    if name in record.scores and record.scores[name][0] == version:
                        continue
                    if version == 0 and "start" in record.scores:
                        record.scores[name] = record.scores["start"]
                        continue
                    record.scores[name] = version, self._score(record, known)
                    yield True
                before.append(record.scores["now"][1])
            start = [record.scores["start"][1] for record in held_out]
            verdict = compare(before, after)
            if verdict.replaces:
                halfway, between = self._student.halfway(weights), []
                for record in held_out:
                    between.append(self._score(record, halfway))
                    yield True
                of_halfway = compare(before, between)
                # If the drafter went the whole way before, half of this one may accept less: then it goes all of it.
                is_better = of_halfway.replaces or self._drafting is not self._accepted
                if is_enough(start, between, after) and is_better:
                    drafting, after, verdict = halfway, between, of_halfway
            self._before, self._verdict = estimated_tau(start), verdict
            if verdict.replaces:
                for record, score in zip(held_out, after):
                    record.scores["now"] = self._version + 1, score
            self._decide(weights, drafting, verdict)
        self._compared_at = self._student.steps

    def _head_has_changed(self) -> bool:
        """Whether the target's head or embedding is another than at the comparison before, as after a step of RL."""
        target = self._target()
        assert target is not None
        modules = target.get_output_embeddings(), target.get_input_embeddings()
        sources = [getattr(module, name, None) for module in modules for name in ("weight", "bias")]
        marks = self._head_marks
        is_same = len(marks) == len(sources) and all(mark.is_of(each) for mark, each in zip(marks, sources))
        self._head_marks = [TensorMark(each) for each in sources]
        return not is_same

    def _decide(self, weights: dict[str, Tensor], drafting: dict[str, Tensor], verdict: Verdict) -> None:
        if verdict.replaces:
            self._replacements += 1
            self._refused_in_a_row = 0
            with self._lock:
                self._accepted, self._drafting = weights, drafting
                self._version, self._waits = self._version + 1, True
                if self._active == 0:
                    self._replace()
        else:
            self._refusals += 1
            self._refused_in_a_row += 1
            if self._refused_in_a_row == _PATIENCE:
                self._refused_in_a_row = 0
                self._student.load(self._accepted)
        self._news = str(self.statistics)

    def _learn(self, record: CallRecord) -> None:
        if (target := self._target()) is not None:
            self._student.learn(record, target)

    def _score(self, record: CallRecord, weights: dict[str, Tensor]) -> Tensor:
        target = self._target()
        assert target is not None
        return self._student.score(record, weights, target)

    def _replace(self) -> None:
        """Gives the drafter the weights that wait. The lock is held, and no call runs."""
        drafter = self._drafter()
        if self._waits and drafter is not None:
            try:
                replace_weights(drafter, self._drafting)
            # Outputs are the target's with any weights.
            except Exception as error:
                self.fail(error)
            # After Ctrl-C it is done again, at the next boundary of calls.
            self._waits = False

    @property
    def _save_is_due(self) -> bool:
        is_late = self._clock() - self._saved_at >= 60 * self.options.save_minutes
        return self.options.folder is not None and is_late and self._saved != (self._student.steps, self._buffer.seen)

    def _save_now(self) -> None:
        drafter = self._drafter()
        if drafter is not None and self.options.folder is not None:
            self._save(drafter, Path(self.options.folder))

    def _save(self, drafter: DraftModel, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._saved, self._saved_at = (self._student.steps, self._buffer.seen), self._clock()
        found = self.statistics
        with self._lock:
            records = list(self._buffer)
        if (latest := weights_fingerprint(drafter)) not in self._learnt:
            self._learnt.append(latest)
        progress = {
            "drafter": self._fingerprint,
            "learnt": self._learnt,
            "held_out": self._buffer.held_out_share,
            "steps": self._student.steps,
            "positions": self._student.positions,
            "seconds": self._seconds,
            "replacements": self._replacements,
            "refusals": self._refusals,
            "halfway": self._drafting is not self._accepted,
            "history": self._history.entries,
            "calls_an_entry": self._history.calls_an_entry,
        }
        optimizer = files.optimizer_tensors(self._student.optimizer)
        student = self._student
        files.LearnerState(student.parameters, student.start, self._accepted, optimizer, progress).save(folder)
        if self.options.keep_samples:
            files.save_samples(folder, records)
        else:
            # Texts that an earlier learner was asked to keep.
            (folder / files.SAMPLES_NAME).unlink(missing_ok=True)
        if self._exported != self._version and not self._waits:
            files.save_drafter(drafter, folder)
            self._exported = self._version
            self._learnt = [latest]
        files.save_report(folder, asdict(found))
        try:
            png = draw(self._history.entries)
        except ImportError:
            return
        if png is not None:
            write_atomically(folder / files.PLOT_NAME, png)

    def _known(self) -> list[str | None]:
        """Fingerprints of what its drafter was and is."""
        drafter = self._drafter()
        return [self._fingerprint, *self._learnt, None if drafter is None else weights_fingerprint(drafter)]

    def _resume(self, drafter: DraftModel, folder: Path) -> None:
        """Takes what an earlier process has saved."""
        found = files.LearnerState.load(folder)
        if found is None:
            return
        found.check(folder, self._student.parameters)
        progress, self._learnt = found.progress, list(found.progress["learnt"])
        # Of the drafter that learning began with, also where the one that was given has learnt.
        self._fingerprint = progress.get("drafter")
        self._student.load(found.trained)
        with torch.inference_mode(False):
            files.load_optimizer(self._student.optimizer, found.optimizer)
            like = self._student.start
            # Not those of the drafter that was given: it may have learnt already.
            self._student.start = {name: each.to(like[name]) for name, each in found.start.items()}
            self._accepted = {name: each.to(like[name]) for name, each in found.accepted.items()}
            is_halfway = progress["halfway"]
            self._drafting = self._student.halfway(self._accepted) if is_halfway else self._accepted
        self._student.steps, self._student.positions = int(progress["steps"]), int(progress["positions"])
        self._compared_at = self._student.steps
        self._replacements, self._refusals = int(progress["replacements"]), int(progress["refusals"])
        self._seconds = float(progress["seconds"])
        self._history = History(progress["history"], int(progress["calls_an_entry"]))
        self._version = self._replacements
        if self._replacements:
            self._waits = True
            self._replace()
        # Which prompts are held out depends on the share: a greater one would hold out some that were learnt from.
        known = self._buffer.held_out_share = min(self.options.held_out, progress.get("held_out", 1.0))
        if known < self.options.held_out:
            logger.warning(
                f"`held_out` is {self.options.held_out}, and learning in `{folder}` began with {known}, which stays: "
                "give another folder for a greater share."
            )
        if self.options.keep_samples:
            for record in files.load_samples(folder):
                self._buffer.add(record)

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                arguments = weakref.ref(self), self._wake, self.options.threads
                self._thread = threading.Thread(target=_learn_while_idle, args=arguments, daemon=True)
                self._thread.start()


class _Here(threading.local):
    """What holds for one thread."""

    is_paused = False


def _learn_while_idle(reference: weakref.ref[Learner], wake: threading.Event, threads: int) -> None:
    """The thread that learns while idle. It keeps no learner alive."""
    _lower_priority()
    _use_threads(threads)
    while True:
        learner = reference()
        if learner is None or learner._closed:
            return
        wait = learner.idle_turn()
        del learner
        if wake.wait(wait):
            return


def _lower_priority() -> None:
    # On Linux a priority is a thread's own.
    if hasattr(os, "setpriority") and os.uname().sysname == "Linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _use_threads(count: int) -> None:
    """Makes torch use so many threads in this thread, and as many as before in others."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    # A thread that is new to torch takes the number that any thread has set last.
    last = threading.Thread(target=torch.set_num_threads, args=(before,))
    last.start()
    last.join()


def learner_of(drafter: Any) -> Learner | None:
    """The learner of a drafter, if it has one that was not closed."""
    found = _learners.get(drafter)
    return None if found is None or found._is_left else found


def learning_options(learn: bool | str | os.PathLike[str] | LearningOptions) -> LearningOptions:
    """The options that `learn` stands for, an argument of [`attach`]."""
    if isinstance(learn, LearningOptions):
        return learn
    return LearningOptions(folder=None if isinstance(learn, bool) else learn)


def start_learning(drafter: Any, target: PreTrainedModel, options: LearningOptions) -> Learner:
    """Makes a drafter learn from the calls of a target, in place of an earlier learner; see [`attach`]."""
    if (earlier := _learners.get(drafter)) is not None:
        # The next one begins with what it has learnt.
        had_left = earlier._is_left
        try:
            earlier._leave(at_once=True)
        except Exception as error:
            if not had_left:
                raise
            # It could not save when it was closed, either.
            _warn_of_loss(error)
            earlier._forget()
    return Learner(drafter, target, options)


def check_whether_it_learns(drafter: Any) -> None:
    """
    Raises:
        `ValueError`: if a drafter has nothing to learn, with the reason.
    """
    if (reason := unsupported_reason(drafter)) is not None:
        raise ValueError(f"The drafter cannot learn: {reason}.")


def refuse_other_drafter(drafter: Any, folder: str | os.PathLike[str]) -> None:
    """
    Raises:
        `ValueError`: if what is learnt in a folder, in this process or in the folder's file, is of another drafter.
    """
    running = _learners_in(Path(folder))
    progress = {} if running else files.progress_in(Path(folder))
    known = running[0]._known() if running else [progress.get("drafter"), *progress.get("learnt", ())]
    fingerprint = weights_fingerprint(drafter)
    if any(known) and fingerprint is not None and fingerprint not in known:
        raise ValueError(
            f"`{folder}` was begun with another drafter: give that one, the folder `{Path(folder, 'drafter')}` which "
            "it became, or another folder."
        )


def _learners_in(folder: Path) -> list[Learner]:
    own = [(each, each.options.folder) for each in list(_learners.values())]
    return [each for each, place in own if place is not None and Path(place).resolve() == folder.resolve()]


def _leave_others(folder: Path) -> None:
    """Ends and saves what other learners of a folder learn, such as one whose target is gone. The next goes on."""
    for learner in _learners_in(folder):
        learner._leave(at_once=True)


def _observer_of(drafter: Any, target: PreTrainedModel) -> AbstractContextManager[CallRecorder | None]:
    learner = _learners.get(drafter)
    if learner is None:
        return nullcontext()
    return learner.observer() if learner.watches(target) else learner.beside()


def _warn_of_loss(error: Exception) -> None:
    logger.warning(f"What the drafter has learnt was not saved: {type(error).__name__}: {error}")


def _close_all() -> None:
    for learner in list(_learners.values()):
        try:
            learner._leave(at_once=True)
        # The others are saved all the same.
        except Exception as error:
            _warn_of_loss(error)


_installed = False


def _install() -> None:
    """At the first learner: calls are watched, and the end of the process waits for a unit and saves."""
    global _installed
    if not _installed:
        observe_calls(_observer_of)
        atexit.register(_close_all)
        _installed = True
