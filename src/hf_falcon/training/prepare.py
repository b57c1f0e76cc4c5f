# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Makes training data: the target's responses to the prompts of dialogues, as one token file."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import random
import re
import shutil
from array import array
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StaticCache, StoppingCriteria

from ..checkpoint_files import exact_fingerprint, weights_fingerprint
from ..core.target_parts import CACHE_NAME, FeatureTap, longest_text
from ..json_files import read_own_object
from ..private_names import takes_static_cache
from .chat_templates import ChatTemplate, read_template, template_variables
from .dialogues import read_dialogues
from .features import identity, kept_file, kept_folder, record_features, save_features
from .json_text import parse_json, short
from .prepare_arguments import PrepareArguments
from .records import Dialogue, Message, RecordError
from .skipped_records import SkippedRecords, skipped_table
from .token_file import TokenFile, chat_template_sha256, write_atomically

logger = logging.getLogger(__name__)

_EXCLUDED_WORDS = 8
_TOKENIZED_AT_ONCE = 256
_CHARACTERS_AT_ONCE = 1 << 20
# The roles that may follow a message. Many chat templates raise an error for others.
_FOLLOW = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}
_UNRECORDED = -1.0
# In the folder of kept features.
_KEPT_PLAN = "plan.json"
# Later turns that are shorter (in characters) or begin like this mean little without the turns before them.
_SHORTEST_LATER_TURN = 40
# The word ends there: "Next.js" and "more-or-less" are words of their own.
_CONTINUES = re.compile(r"(continue|go on|please continue|more|keep going|next)([,:;!?]|[.…]*(\s|$))", re.IGNORECASE)
# Under `accelerate launch`, the launcher.
_PARENT = os.getppid()


def process_state() -> PartialState:
    """The state of this process, the only one or one of several that `accelerate launch` or `torchrun` started."""
    # One process may wait for another as long as a run takes.
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=365))


def _warn(message: str) -> None:
    """Logs a warning in the main process only."""
    if process_state().is_main_process:
        logger.warning(message)


def prepare(arguments: PrepareArguments, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TokenFile:
    """
    Writes the token file `arguments.output`, or resumes an interrupted call with the same arguments.

    The file depends only on arguments, data and target: each batch has its own seed, so a resumed run gives the same
    bytes as an uninterrupted one (on the same machine and library versions). So does a run of several processes, each
    of which generates its share of the batches. They need a common file system.

    Args:
        arguments ([`PrepareArguments`]):
            The arguments. `target`, `dtype` and `device` are ignored, as `model` is given.
        model ([`~transformers.PreTrainedModel`]):
            The target.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.

    Returns:
        [`TokenFile`]: the file that was written.

    Raises:
        ValueError: the data is malformed, or no prompt is left; `output` or its parts come from other arguments;
            prompt and response exceed the target's context.
        FileNotFoundError: a file is missing.
    """
    output, parts = Path(arguments.output), Path(f"{arguments.output}.parts")
    state = process_state()
    _check_context(arguments, model)
    selection = _Selection(arguments, tokenizer, _eos_token_ids(model, tokenizer), _day(output, parts))
    selection.add_turn(0)
    selection.check()
    plan = _plan(arguments, model, selection)

    is_complete = output.exists()
    # The main process may write it, before another has looked.
    state.wait_for_everyone()
    if is_complete:
        # Either a finished run, or one that died between writing the output and removing its parts.
        _refuse_other_plan(output, TokenFile.load(output).metadata.get("plan", {}), plan)
        if state.is_main_process:
            shutil.rmtree(parts, ignore_errors=True)
        _warn(f"{output} is complete already.")
        if arguments.keep_features and not kept_folder(output).exists():
            _warn(f"It was made without `keep_features`: `hf-falcon train` will compute them, or delete {output}.")
        elif arguments.keep_features:
            _open_features(kept_folder(output), plan, arguments.feature_layers)
        return TokenFile.load(output)

    output.parent.mkdir(parents=True, exist_ok=True)
    vocab_size = max(model.config.get_text_config(decoder=True).vocab_size, len(tokenizer))
    batches: list[list[int]] = []
    if arguments.responses == "target":
        with state.main_process_first():
            _open_parts(parts, plan)
            if arguments.keep_features:
                _open_features(kept_folder(output), plan, arguments.feature_layers)
        # No process may finish, and remove the parts, before all processes have found them.
        state.wait_for_everyone()
        begin = 0
        while begin < len(selection.prompts):
            lengths = [len(prompt) for prompt in selection.prompts[begin:]]
            new = [[begin + i for i in batch] for batch in _batches(lengths, arguments.batch_size, arguments.seed)]
            batches += new
            _generate_parts(arguments, model, tokenizer, selection.prompts, batches, len(new), parts, vocab_size)
            state.wait_for_everyone()
            begin = len(selection.prompts)
            if selection.has_rounds:
                for prompt, (token_ids, length, _) in _read_parts(
                    batches[-len(new) :], parts, len(batches) - len(new)
                ):
                    selection.add_answer(prompt, token_ids[length:])
                # The main process removes the parts after the last round.
                state.wait_for_everyone()
                selection.add_turn(selection.turn + 1)
        if count := selection.dropped["answer_with_special_tokens"]:
            _warn(
                f"{count} answers have special tokens between others: the later turns of their dialogues are left out."
            )
    if state.is_main_process:
        metadata = {
            "target": model.config.name_or_path or None,
            "target_fingerprint": weights_fingerprint(model),
            "chat_template_sha256": chat_template_sha256(_chat_template(arguments, tokenizer)),
            "chat_template_kwargs": arguments.chat_template_kwargs,
            # The name of a file: its path depends on the machine.
            "data": Path(arguments.data).name if Path(arguments.data).exists() else arguments.data,
            "dropped": dict(sorted(selection.dropped.items())),
            "skipped": selection.skipped.to_dict(),
            "plan": plan,
            "transformers_version": transformers.__version__,
            "torch_version": str(torch.__version__),
        }
        file = _assemble(selection, batches, parts, vocab_size, metadata)
        if arguments.keep_features:
            record_features(kept_folder(output), identity(model, file, arguments.feature_layers))
        file.save(output)
        shutil.rmtree(parts, ignore_errors=True)
    state.wait_for_everyone()
    return TokenFile.load(output)


def _day(output: Path, parts: Path) -> str:
    """The day that the prompts of an earlier call name, of templates that write the date; else today."""
    if output.exists():
        found = TokenFile.load(output).metadata.get("plan", {})
    else:
        found = read_own_object(parts / "plan.json") if (parts / "plan.json").exists() else {}
    return str(found.get("day", date.today().isoformat()))


def _chat_template(arguments: PrepareArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
    given = arguments.chat_template
    return tokenizer.chat_template if given is None else read_template(given)


class _Selection:
    """
    Prompts that pass, as token ids in 4-byte arrays (lists of Python integers take ten times the memory).

    Args:
        arguments ([`PrepareArguments`]): the arguments.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): the target's.
        eos_token_ids (`list[int]`): tokens that end a response.
        day (`str`): today's date for the template, as `"2026-01-31"`.
    """

    def __init__(
        self, arguments: PrepareArguments, tokenizer: PreTrainedTokenizerBase, eos_token_ids: list[int], day: str
    ) -> None:
        self._arguments, self._tokenizer, self._eos_token_ids = arguments, tokenizer, eos_token_ids
        given = None if arguments.chat_template is None else _chat_template(arguments, tokenizer)
        variables = template_variables(arguments.chat_template_kwargs)
        # A run that goes on the next day has the prompts that it began with.
        self._template = ChatTemplate(tokenizer, given, variables, date.fromisoformat(day))
        self.day = day if self._template.writes_day else None
        self._with_response = arguments.responses == "data"
        if self._template.source() is None:
            name = tokenizer.name_or_path
            if self._with_response:
                # Without a template, the text between a prompt and its response is not known.
                raise ValueError(
                    f"The tokenizer of {name!r} has no chat template: give a Jinja file as `chat_template`."
                )
            _warn(f"The tokenizer of {name!r} has no chat template: the prompts are the users' texts themselves.")
        self._excluded = read_excluded(arguments.exclude)
        self._seen: set[bytes] = set()
        self._ignored: Counter[str] = Counter()
        # Each turn is a round of generation of its own, because the turns after it need its answers.
        self.has_rounds = arguments.turns == "all" and arguments.history == "target" and not self._with_response
        self.turn = 0
        # The last dialogue with a prompt that is too long: with the turns before it, each later prompt is longer.
        self._too_long = -1
        self.prompts: list[array[int]] = []
        self.responses: list[array[int]] | None = [] if self._with_response else None
        self.dropped: Counter[str] = Counter()
        self.skipped = SkippedRecords(arguments.max_bad_share, "max_bad_share")
        # What later rounds read of the data.
        self.texts = hashlib.sha256()
        # The target's answers by dialogue, and the dialogue of each prompt whose answer belongs there.
        self._answers: dict[int, list[str]] = {}
        self._dialogues: dict[int, int] = {}

    def later_prompts(self) -> dict[str, Any]:
        """What the prompts of later rounds depend on, beside the target's answers, as JSON values."""
        return {
            "texts_sha256": self.texts.hexdigest(),
            "chat_template_sha256": chat_template_sha256(_chat_template(self._arguments, self._tokenizer)),
            "chat_template_kwargs": template_variables(self._arguments.chat_template_kwargs),
            "exclude_sha256": hashlib.sha256(json.dumps(sorted(self._excluded)).encode()).hexdigest(),
        }

    def check(self) -> None:
        """Refuses data of which nothing is left, or too little could be read, and says what is left out."""
        self.skipped.check()
        dropped, arguments = self.dropped, self._arguments
        if not self.prompts:
            skipped = ", ".join(reason.example for reason in self.skipped.reasons.values())
            raise ValueError(
                f"No prompt of {arguments.data!r} is left (dropped: {dict(dropped)}): raise the limits."
                + (f" {self.skipped.count} records could not be read: {skipped}" if skipped else "")
            )
        _warn(
            f"{len(self.prompts)} prompts; dropped: {dropped['excluded']} that share {_EXCLUDED_WORDS} words in a row "
            f"with `exclude`, {dropped['prompt_too_long']} longer than `max_prompt_tokens`, {dropped['duplicate']} "
            f"duplicates, {dropped['needs_context']} later turns that need the turns before them, "
            f"{dropped['no_turn']} without a turn to use, {dropped['no_prefix']} whose prompt is not the "
            "beginning of prompt and response."
        )
        for name, count in (+self._ignored).items():
            _warn(f"{count} dialogues have `{name}`, which the chat template does not read: it is left out.")
        if self.skipped.reasons:
            _warn(f"{self.skipped.count} of {self.skipped.read} records are skipped:\n{self._table()}")

    def _table(self) -> str:
        return skipped_table(self.skipped.to_dict())

    def add_answer(self, prompt: int, token_ids: torch.Tensor) -> None:
        """Takes the target's answer to a prompt into the history of its dialogue."""
        text = [token for token in token_ids.tolist() if token not in self._eos_token_ids]
        answer = self._tokenizer.decode(text, skip_special_tokens=True)
        if (number := self._dialogues.get(prompt)) is None:
            return
        if answer == self._tokenizer.decode(text):
            self._answers[number].append(answer)
        else:
            # With other special tokens it is no message, as where an answer has several channels.
            self.dropped["answer_with_special_tokens"] += 1

    def add_turn(self, turn: int) -> None:
        """Adds the prompts of all turns; or where each turn is a round, of one turn."""
        self.turn = turn
        arguments, tokenizer, dropped = self._arguments, self._tokenizer, self.dropped
        if len(self.prompts) == arguments.limit:
            return
        self._too_long = -1
        remaining = self._rendered()
        has_template = self._template.source() is not None
        while chunk := _chunk(remaining):
            prompt_ids = _tokenize(tokenizer, chunk, has_template)
            # Separately from the prompt, as in decoding: no token may span the boundary.
            texts = [each.response for each in chunk]
            response_ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            for each, prompt, response in zip(chunk, prompt_ids, response_ids, strict=True):
                if each.is_text:
                    # A beginning of a text is a text. Its first token is the least that a prompt can be.
                    length = 1 if self._with_response else arguments.max_prompt_tokens
                    prompt, response = prompt[:length], prompt[length:] if self._with_response else array("i")
                response = array("i", response)
                ends = (i + 1 for i, token in enumerate(response) if token in self._eos_token_ids)
                response = response[: min(next(ends, len(response)), arguments.max_new_tokens)]
                if len(prompt) > arguments.max_prompt_tokens:
                    dropped["prompt_too_long"] += 1
                    self._too_long = each.dialogue
                elif not prompt or (self._with_response and not response):
                    dropped["no_turn"] += 1
                elif not _word_runs(each.text).isdisjoint(self._excluded):
                    dropped["excluded"] += 1
                elif (key := hashlib.sha256((prompt + response).tobytes()).digest()) in self._seen:
                    dropped["duplicate"] += 1
                else:
                    self._seen.add(key)
                    if self.has_rounds and each.ends_turn:
                        self._dialogues[len(self.prompts)] = each.dialogue
                        self._answers.setdefault(each.dialogue, [])
                    self.prompts.append(prompt)
                    if self.responses is not None:
                        self.responses.append(response)
                    if len(self.prompts) == arguments.limit:
                        remaining.close()
                        break

    def _rendered(self) -> Generator[_Rendered, None, None]:
        arguments = self._arguments
        # Later rounds read the same records again.
        skipped = None if arguments.strict else self.skipped if self.turn == 0 else SkippedRecords(max_share=1)
        found = read_dialogues(arguments.data, arguments.split, skipped)
        hides = not process_state().is_main_process
        for dialogue in tqdm(found, desc="reading", unit=" dialogues", disable=hides):
            if self.has_rounds and self.turn == 0:
                self.texts.update(json.dumps([dialogue.messages, dialogue.tools]).encode())
            try:
                yield from self._of_dialogue(dialogue)
            except RecordError as error:
                if self.turn > 0:
                    self.dropped["refused"] += 1
                elif arguments.strict:
                    raise
                else:
                    self.skipped.add(error, dialogue.number)

    def _of_dialogue(self, dialogue: Dialogue) -> Iterator[_Rendered]:
        """
        Raises:
            [`RecordError`]: the template cannot write the dialogue. Prompts before that place are good.
        """
        number, template = dialogue.number, self._template
        if dialogue.text is not None:
            if self.turn == 0 and dialogue.text.strip():
                yield _Rendered(number, dialogue.text, dialogue.text, "", is_text=True)
            elif self.turn == 0:
                self.dropped["no_turn"] += 1
            return
        messages = dialogue.messages
        system = _system(messages)
        if self.has_rounds:
            answers = self._answers.get(number, [])
            messages = _with_answers(messages, answers, self.turn)
            if self.turn > 0 and messages and len(answers) < self.turn:
                self.dropped["needs_context"] += 1
                return
            if self.turn > 0 and not messages:
                return
        tools = dialogue.tools
        if tools is not None and template.ignores("tools", tools):
            self._ignored["tools"] += self.turn == 0
            tools = None
        if self.turn == 0 and any("reasoning_content" in message for message in messages):
            self._ignored["reasoning_content"] += template.ignores("reasoning_content", tools)
        has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        if has_calls and template.ignores("tool_calls", tools):
            # It would write results without calls, or empty answers.
            raise RecordError(
                "tool calls that the chat template ignores",
                f"{dialogue.where}: The chat template does not write `tool_calls`: remove such dialogues, or give a "
                "`chat_template` for tools.",
            )
        for begin, end, ends_turn in _turns(messages, self._arguments, self.dropped, self.turn, self.has_rounds):
            if number == self._too_long and begin < end - 1:
                self.dropped["prompt_too_long"] += 1
                continue
            turn = [*system, *messages[begin:end]]
            text = "\n".join(message["content"] for message in turn)
            if not self._with_response:
                yield _Rendered(number, text, template.prompt(turn, tools, dialogue.where), "", ends_turn)
            elif (sample := template.response(turn, tools, dialogue.where)) is not None:
                yield _Rendered(number, text, *sample, ends_turn)
            else:
                self.dropped["no_prefix"] += 1


@dataclass
class _Rendered:
    """
    A sample as text: number of its dialogue, text to compare with `exclude`, prompt, response (if needed), whether
    the response is the one that ends the turn, and whether the prompt is plain text.
    """

    dialogue: int
    text: str
    prompt: str
    response: str
    ends_turn: bool = True
    is_text: bool = False


def _chunk(samples: Iterator[_Rendered]) -> list[_Rendered]:
    """The next samples, which are tokenized at once."""
    chunk: list[_Rendered] = []
    while len(chunk) < _TOKENIZED_AT_ONCE and sum(len(each.prompt) for each in chunk) < _CHARACTERS_AT_ONCE:
        if (sample := next(samples, None)) is None:
            break
        chunk.append(sample)
    return chunk


def _system(messages: list[Message]) -> list[Message]:
    """The system prompt before the first user turn, if any."""
    before = itertools.takewhile(lambda message: message["role"] != "user", messages)
    return [message for message in before if message["role"] in ("system", "developer")][:1]


def _with_answers(messages: list[Message], answers: list[str], turn: int) -> list[Message]:
    """
    The messages up to a user's turn and the calls and results of tools that follow it, with the target's answers in
    place of the data's; empty if there is no such turn.
    """
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if turn >= len(users):
        return []
    found: list[Message] = []
    ends = [*users[1:], len(messages)]
    for number in range(turn + 1):
        segment = messages[users[number] : ends[number]]
        if number < turn:
            while segment[-1]["role"] == "assistant" and "tool_calls" not in segment[-1]:
                segment = segment[:-1]
            if number < len(answers):
                segment = [*segment, {"role": "assistant", "content": answers[number]}]
        found += segment
    return found


def _turns(
    messages: list[Message], arguments: PrepareArguments, dropped: Counter[str], turn: int, one_turn: bool
) -> Iterator[tuple[int, int, bool]]:
    """
    The messages of each sample of a dialogue, besides its system prompt, as the range of their indices: context (if
    any), the user's turn or the results of tools, and, if wanted, the response that follows; and whether the response
    is the last one of its turn. Counts in `dropped` what it leaves out.
    """
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        dropped["no_turn"] += 1
        return
    first, with_response = users[0], arguments.responses == "data"
    in_order = first + 1
    while in_order < len(messages) and messages[in_order]["role"] in _FOLLOW.get(messages[in_order - 1]["role"], ()):
        in_order += 1
    wanted = range(turn, turn + 1) if one_turn else range(len(users) if arguments.turns == "all" else 1)
    for number in wanted:
        index = users[number]
        text = messages[index]["content"].strip()
        end = min(users[number + 1] if number + 1 < len(users) else len(messages), in_order)
        if with_response:
            places = [place + 1 for place in range(index + 1, end) if messages[place]["role"] == "assistant"]
        elif arguments.history == "none":
            if index > first and text and _needs_context(text):
                dropped["needs_context"] += 1
            elif not text:
                dropped["no_turn"] += 1
            else:
                # Without context: its responses are another model's, so the target would not continue its own text.
                yield index, index + 1, True
            continue
        else:
            places = [index + 1] if index < in_order else []
            for place in range(index + 1, end):
                is_last = place + 1 == len(messages) or messages[place + 1]["role"] != "tool"
                if messages[place]["role"] == "tool" and is_last:
                    places.append(place + 1)
        if not text or not places:
            dropped["no_turn"] += 1
            continue
        for place in places:
            yield first, place, place == places[-1]


def _needs_context(text: str) -> bool:
    return len(text) < _SHORTEST_LATER_TURN or _CONTINUES.match(text) is not None


def _tokenize(tokenizer: PreTrainedTokenizerBase, samples: list[_Rendered], has_template: bool) -> list[array[int]]:
    """The tokens of prompts. Chat templates write the special tokens themselves."""
    found: dict[int, list[int]] = {}
    for plain in (False, True):
        places = [place for place, each in enumerate(samples) if (each.is_text or not has_template) == plain]
        if places:
            texts = [samples[place].prompt for place in places]
            found |= zip(places, tokenizer(texts, add_special_tokens=plain, verbose=False)["input_ids"])
    return [array("i", found[place]) for place in range(len(samples))]


def read_excluded(paths: list[str]) -> set[tuple[str, ...]]:
    """
    The word runs of evaluation prompts, which no prompt may share.

    Args:
        paths (`list[str]`): see `exclude` of [`PrepareArguments`].

    Raises:
        ValueError: a file cannot be read, or is not of this form.
    """
    runs: set[tuple[str, ...]] = set()
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"`exclude` is {path!r}, which cannot be read ({error}): give JSON Lines files in UTF-8."
            ) from error
        # Not `splitlines`, which splits inside strings, too, at separators that JSON allows there.
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                turns = parse_json(line)["turns"]
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(
                    f"`exclude`: {path}, line {number} is not a JSON object with `turns` ({error!r})."
                ) from error
            if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
                raise ValueError(f"`exclude`: {path}, line {number}: `turns` is {short(turns)}: give a list of texts.")
            for turn in turns:
                runs |= _word_runs(turn)
    return runs


def _word_runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return set(zip(*(words[i:] for i in range(_EXCLUDED_WORDS)), strict=False))


def _check_context(arguments: PrepareArguments, model: PreTrainedModel) -> None:
    longest = longest_text(model.config.get_text_config(decoder=True))
    if longest is not None and arguments.max_prompt_tokens + arguments.max_new_tokens > longest:
        raise ValueError(
            f"`max_prompt_tokens` ({arguments.max_prompt_tokens}) and `max_new_tokens` ({arguments.max_new_tokens}) "
            f"exceed the target's context of {longest} tokens: lower one of them."
        )


def _plan(arguments: PrepareArguments, model: PreTrainedModel, selection: _Selection) -> dict[str, Any]:
    """All values that the result depends on, as JSON values."""
    tokens = hashlib.sha256()
    for ids in selection.prompts + (selection.responses or []):
        tokens.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    generation_config = model.generation_config.to_diff_dict() if model.generation_config is not None else {}
    plan = {
        "target_fingerprint": exact_fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "generation_config": {
            key: value
            for key, value in generation_config.items()
            if key != "transformers_version" and not key.startswith("_")
        },
        "dialogues": len(selection.prompts),
        "dialogues_sha256": tokens.hexdigest(),
    }
    keys = ("turns", "responses", "temperatures", "max_new_tokens", "max_prompt_tokens", "limit", "batch_size", "seed")
    for key in keys:
        plan[key] = getattr(arguments, key)
    if selection.day is not None:
        plan["day"] = selection.day
    if arguments.turns == "all" and arguments.responses == "target":
        plan["history"] = arguments.history
        if selection.has_rounds:
            plan |= selection.later_prompts()
    # Converted to JSON and back, so that it equals a plan that is read from a file.
    return json.loads(json.dumps(plan, default=str))


def _refuse_other_plan(path: Path, found: dict[str, Any], plan: dict[str, Any]) -> None:
    if found != plan:
        names = sorted(name for name in found.keys() | plan.keys() if found.get(name) != plan.get(name))
        differences = "; ".join(f"`{name}` was {found.get(name)!r}, now {plan.get(name)!r}" for name in names)
        raise ValueError(
            f"{path} was made with other arguments or data ({differences}): repeat the first command to continue it, "
            f"delete {path} to start anew, or choose another `output`."
        )


def _open_parts(parts: Path, plan: dict[str, Any]) -> None:
    parts.mkdir(exist_ok=True)
    plan_file = parts / "plan.json"
    if plan_file.exists():
        _refuse_other_plan(parts, read_own_object(plan_file), plan)
    elif any(parts.glob("batch-*")):
        raise ValueError(f"{parts} holds batches but no plan.json, so they cannot be trusted: delete {parts}.")
    else:
        write_atomically(plan_file, json.dumps(plan, indent=2, sort_keys=True).encode())


def _open_features(folder: Path, plan: dict[str, Any], layers: list[int]) -> None:
    """Refuses kept features of another plan, which a part that is missing would not show."""
    made_by = {**plan, "feature_layers": layers}
    if (folder / _KEPT_PLAN).exists():
        _refuse_other_plan(folder, read_own_object(folder / _KEPT_PLAN), made_by)
    else:
        folder.mkdir(exist_ok=True)
        write_atomically(folder / _KEPT_PLAN, json.dumps(made_by, indent=2, sort_keys=True).encode())


def _part(parts: Path, index: int) -> Path:
    return parts / f"batch-{index:05d}.safetensors"


def _batches(lengths: list[int], batch_size: int, seed: int) -> list[list[int]]:
    """
    Prompts grouped by length (little padding). The groups are in random order, so that neither temperatures
    nor the time estimate of the progress bar depend on length.
    """
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    random.Random(f"batches {seed}").shuffle(batches)
    return batches


def _generate_parts(
    arguments: PrepareArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[array[int]],
    batches: list[list[int]],
    new: int,
    parts: Path,
    vocab_size: int,
) -> None:
    """Generates the last `new` batches."""
    state = process_state()
    # Consecutive batches, not every n-th: temperatures alternate, and each process should get all of them.
    begin, end = (
        len(batches) - new + new * rank // state.num_processes
        for rank in (state.process_index, state.process_index + 1)
    )
    share = range(begin, end)
    done = sum(len(batches[index]) for index in share if _is_done(arguments, parts, index))
    total = sum(len(batches[index]) for index in share)
    new_tokens = 0
    with tqdm(
        total=total, initial=done, desc="generating", unit=" prompts", disable=not state.is_main_process
    ) as progress:
        for index in share:
            if _is_done(arguments, parts, index):
                continue
            if state.num_processes > 1 and os.getppid() != _PARENT:
                # A process without its launcher would disturb the run that resumes this one.
                raise ChildProcessError("The launcher of this process is gone: it ends, too.")
            batch = batches[index]
            temperature = arguments.temperatures[index % len(arguments.temperatures)]
            seed = random.Random(f"batch {arguments.seed} {index}").getrandbits(32)
            batch_prompts = [prompts[i] for i in batch]
            with FeatureTap(model, arguments.feature_layers) if arguments.keep_features else nullcontext() as tap:
                responses = _respond(model, tokenizer, batch_prompts, temperature, arguments.max_new_tokens, seed)
            if tap is not None:
                rows = _features_of(tap.take(), batch_prompts, responses)
                # Before the part, which says that the batch is done.
                save_features(kept_file(arguments.output, index), dict(zip(batch, rows, strict=True)))
                del rows
            TokenFile.from_samples(
                [torch.cat([torch.tensor(p), r]) for p, r in zip(batch_prompts, responses, strict=True)],
                [len(prompt) for prompt in batch_prompts],
                [temperature] * len(batch),
                vocab_size,
            ).save(_part(parts, index))
            new_tokens += sum(len(response) for response in responses)
            if not progress.disable:
                rate = new_tokens / progress.format_dict["elapsed"]
                progress.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            progress.update(len(batch))


def responses_in_memory(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_new_tokens: int,
    layers: Sequence[int] = (),
    batch_size: int = 48,
    seed: int = 0,
    progress: bool = True,
) -> tuple[TokenFile, list[torch.Tensor]]:
    """
    The target's responses to some texts, as [`prepare`] makes them, without files.

    Args:
        model, tokenizer: the target. Without a chat template, a text itself is the prompt.
        texts (sequence of `str`): users' messages.
        max_new_tokens (`int`): longest response in tokens.
        layers (sequence of `int`, *optional*): layers whose outputs are kept beside the features.
        batch_size, seed (`int`, *optional*): see [`PrepareArguments`].
        progress (`bool`, *optional*, defaults to `True`): whether a progress bar is shown.

    Returns:
        [`TokenFile`], and of each sample the features as of [`target_features`], in bfloat16 on the CPU; the last row
        is zero.
    """
    template = ChatTemplate(tokenizer)
    rendered = [template.prompt([{"role": "user", "content": text}], None, "prompt") for text in texts]
    # A chat template writes the special tokens itself.
    ids = tokenizer(rendered, add_special_tokens=template.source() is None, verbose=False)["input_ids"]
    prompts = [array("i", row) for row in ids]
    batches = _batches([len(prompt) for prompt in prompts], batch_size, seed)
    found: dict[int, tuple[torch.Tensor, float, torch.Tensor]] = {}
    with tqdm(total=len(batches) * max_new_tokens, desc="responses", unit=" steps", disable=not progress) as bar:
        for number, batch in enumerate(batches):
            # Half of the batches are greedy.
            temperature, own = 0.7 * (number % 2), [prompts[index] for index in batch]
            with FeatureTap(model, layers) as tap:
                responses = _respond(model, tokenizer, own, temperature, max_new_tokens, seed + number, _Steps(bar))
            rows = _features_of(tap.take(), own, responses)
            for index, response, features in zip(batch, responses, rows, strict=True):
                found[index] = torch.cat([torch.tensor(prompts[index]), response]), temperature, features
            bar.update((number + 1) * max_new_tokens - bar.n)
    in_order = [found[index] for index in range(len(texts))]
    metadata = {
        "target": model.config.name_or_path or None,
        "target_fingerprint": weights_fingerprint(model),
        "chat_template_sha256": chat_template_sha256(tokenizer.chat_template),
    }
    file = TokenFile.from_samples(
        [tokens for tokens, _, _ in in_order],
        [len(prompt) for prompt in prompts],
        [temperature for _, temperature, _ in in_order],
        max(model.config.get_text_config(decoder=True).vocab_size, len(tokenizer)),
        metadata,
    )
    return file, [features for _, _, features in in_order]


class _Steps(StoppingCriteria):
    """Moves a progress bar at each step, and stops nothing."""

    def __init__(self, bar: Any):
        self._bar = bar

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._bar.update()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _is_done(arguments: PrepareArguments, parts: Path, index: int) -> bool:
    """Whether a batch is on disk. The same command without `keep_features` may have written its part."""
    return _part(parts, index).exists() and (
        not arguments.keep_features or kept_file(arguments.output, index).exists()
    )


def _features_of(
    features: torch.Tensor, prompts: list[array[int]], responses: list[torch.Tensor]
) -> list[torch.Tensor]:
    """
    The features of each sample, without padding.

    Args:
        features (`torch.Tensor` of shape `(batch, positions, size)`): of left-padded prompts and what followed.

    Returns:
        `list` of `torch.Tensor` of shape `(length, size)`. The last row, of a token that the target has written but
        not read, is zero: no prediction needs it.
    """
    width, rows = max(len(prompt) for prompt in prompts), []
    if features.shape[1] < width:
        # Gemma 4's layers that share keys and values.
        raise ValueError(
            "`keep_features` is True, but some layers of the target compute only the last token of a prompt: leave it "
            "out, and `hf-falcon train` computes the features."
        )
    for row, prompt, response in zip(features, prompts, responses, strict=True):
        read = row[width - len(prompt) : width + len(response) - 1]
        rows.append(torch.cat((read, read.new_zeros(1, read.shape[1]))).to("cpu", torch.bfloat16))
    return rows


def _respond(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[array[int]],
    temperature: float,
    max_new_tokens: int,
    seed: int,
    observer: StoppingCriteria | None = None,
) -> list[torch.Tensor]:
    """
    The target's responses to a batch of prompts. `observer` is called at every step.

    Returns:
        `list` of `torch.Tensor` of shape `(new_tokens,)`, int64: up to and with the first EOS, no padding.
    """
    eos_token_ids = _eos_token_ids(model, tokenizer)
    pad_token_id, text_config = tokenizer.pad_token_id, model.config.get_text_config(decoder=True)
    if pad_token_id is None or pad_token_id >= text_config.vocab_size:
        # A token that was added to the tokenizer alone has no embedding.
        pad_token_id = (eos_token_ids or [0])[0]
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), width), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    options: dict[str, Any] = {"do_sample": temperature > 0, "temperature": temperature}
    if temperature == 0:
        options = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
    if takes_static_cache(model):
        # The default cache copies itself at every step: 409 against 569 tokens/s (SmolLM2-135M, CPU, batch 96).
        # `generate` would keep the longest size seen so far, so that the rounding of a batch would depend on the
        # batches before it.
        options[CACHE_NAME] = StaticCache(config=text_config, max_cache_len=width + max_new_tokens)
        # Those of the target's own generation configuration do not go with a cache that is given.
        options |= {"use_cache": True, "cache_implementation": None}
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        sequences = model.generate(
            input_ids=input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            max_new_tokens=max_new_tokens,
            num_beams=1,
            num_return_sequences=1,
            return_dict_in_generate=False,
            eos_token_id=eos_token_ids or None,
            pad_token_id=pad_token_id,
            # Every batch has another shape, for which `generate` would compile again.
            disable_compile=True,
            stopping_criteria=[] if observer is None else [observer],
            **options,
        )
    new = sequences[:, width:].cpu()
    ends = torch.isin(new, torch.tensor(eos_token_ids, dtype=new.dtype))
    lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, new.shape[1]).tolist()
    return [row[:length] for row, length in zip(new, lengths, strict=True)]


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The EOS tokens of plain `generate`; the tokenizer's if the target has none."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    eos = tokenizer.eos_token_id if configured is None else configured
    return [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]


def _assemble(
    selection: _Selection, batches: list[list[int]], parts: Path, vocab_size: int, metadata: dict[str, Any]
) -> TokenFile:
    """Prompts and responses, from the data or from the parts, in the order of the data."""
    prompt_lengths = [len(prompt) for prompt in selection.prompts]
    if selection.responses is not None:
        samples = [torch.tensor(p + r) for p, r in zip(selection.prompts, selection.responses, strict=True)]
        return TokenFile.from_samples(samples, prompt_lengths, [_UNRECORDED] * len(samples), vocab_size, metadata)
    found = dict(_read_parts(batches, parts, 0))
    in_order = [found[i] for i in range(len(found))]
    samples, temperatures = [sample for sample, _, _ in in_order], [temperature for _, _, temperature in in_order]
    return TokenFile.from_samples(samples, prompt_lengths, temperatures, vocab_size, metadata)


def _read_parts(
    batches: list[list[int]], parts: Path, first: int
) -> Iterator[tuple[int, tuple[torch.Tensor, int, float]]]:
    """Index of the prompt, then tokens, length of the prompt and temperature, from the part `first` on."""
    for index, batch in enumerate(batches, start=first):
        path = _part(parts, index)
        try:
            file = TokenFile.load(path)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read ({error}): delete it and repeat the command.") from error
        if len(file) != len(batch):
            raise ValueError(
                f"{path} holds {len(file)} responses, not {len(batch)}: delete it and repeat the command."
            )
        for row, prompt in enumerate(batch):
            yield prompt, (*file.sample(row), float(file.temperatures[row]))
