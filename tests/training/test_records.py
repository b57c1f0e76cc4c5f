# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Forms of records, and records that have none."""

import json
import random

import pytest
from dialogues_to_prepare import make_target
from record_forms import FORMS, TOOL_DIALOGUE, WEATHER

from hf_falcon.commands import prepare as command
from hf_falcon.training.dialogues import read_dialogues
from hf_falcon.training.prepare import PrepareArguments, prepare
from hf_falcon.training.records import Dialogue, RecordError, read_record
from hf_falcon.training.skipped_records import SkippedRecords, check_bad_share, skipped_table
from hf_falcon.training.token_file import TokenFile


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
READ = {
    "sharegpt": [{"role": "system", "content": "Be brief."}, user("Sky?"), assistant("Blue.")]
    + [user("Sea?"), assistant("Green.")],
    "sharegpt with calls": [user("Rain in Oslo?"), assistant("", tool_calls=[CALL])]
    + [{"role": "tool", "content": "no"}, assistant("It is dry.")],
    "messages of parts": [{"role": "developer", "content": "Be brief."}, user("Sky?\nNow."), assistant("Blue.")],
    "messages with calls": [user("Rain in Oslo?"), assistant("", tool_calls=[{**CALL, "id": "1"}])]
    + [{"role": "tool", "content": "no", "tool_call_id": "1"}, assistant("It is dry.")],
    "messages with reasoning": [user("Sky?"), assistant("Blue.", reasoning_content="By day.")]
    + [user("Sea?"), assistant("Green.", reasoning_content="Or not.")],
    "prompt and completion": [user("Sky?"), assistant("Blue.")],
    "prompt and completion of messages": [
        {"role": "system", "content": "Be brief."},
        user("Sky?"),
        assistant("Blue."),
    ],
    "prompt and response": [user("Sky?"), assistant("Blue.")],
    "alpaca": [user("Translate.\n\nHimmel"), assistant("Sky.")],
    "text": [],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    found = read_record(FORMS[form], "")
    assert found.messages == READ[form]
    assert (found.tools is not None) == ("calls" in form)
    assert found.text == ("The sky is blue." if form == "text" else None)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [], "conversations": None, "text": "a"}, Dialogue([])),
        ({"conversations": [user("a")]}, Dialogue([user("a")])),
        ({"messages": [{"from": "human", "value": "a"}]}, Dialogue([user("a")])),
        ({"turns": ["a", "b"]}, Dialogue([user("a"), user("b")])),
        ({"prompt": "a"}, Dialogue([user("a")])),
        ({"prompt": "a", "completion": None, "tools": []}, Dialogue([user("a")])),
        ({"instruction": "a", "input": " ", "system": "b"}, Dialogue([{"role": "system", "content": "b"}, user("a")])),
        ({"instruction": "a", "context": "b", "response": "c"}, Dialogue([user("a\n\nb"), assistant("c")])),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]},)
        + (Dialogue([user("c"), assistant("d"), user("a"), assistant("b")]),),
        (
            {"messages": [assistant(None, function_call=CALL["function"])]},
            Dialogue([assistant("", tool_calls=[CALL])]),
        ),
        ({"messages": [{"role": "function", "name": "f", "content": "1"}]},)
        + (Dialogue([{"role": "tool", "name": "f", "content": "1"}]),),
        ({"messages": [assistant("a", reasoning="b")]}, Dialogue([assistant("a", reasoning_content="b")])),
        ({"messages": [assistant(["a", {"text": "b"}])]}, Dialogue([assistant("a\nb")])),
        ({"messages": [], "tools": json.dumps([WEATHER])}, Dialogue([], [WEATHER])),
        ({"messages": [], "tools": [WEATHER["function"]]}, Dialogue([], [WEATHER])),
        ({"text": "a\ud83d"}, Dialogue([], None, "a?")),
        ({"messages": [assistant("", tool_calls=[{"name": "f\ud83d", "arguments": {"\ud83d": ["\ud83d"]}}])]},)
        + (
            Dialogue(
                [
                    assistant(
                        "", tool_calls=[{"type": "function", "function": {"name": "f?", "arguments": {"?": ["?"]}}}]
                    )
                ]
            ),
        ),
    ],
)
def test_other_forms(record, expected):
    assert read_record(record, "") == expected


@pytest.mark.parametrize("form", ["conversations", "messages", "prompt"])
def test_a_system_text_beside_the_messages_is_their_first(form):
    system = {"role": "system", "content": "b"}
    record = {form: "a" if form == "prompt" else [user("a")]}
    assert read_record({**record, "system": "b"}, "").messages == [system, user("a")]
    assert read_record({**record, "system": " "}, "").messages == [user("a")]
    # The messages have their own.
    for role in ("system", "developer"):
        own = [{"role": role, "content": "c"}, user("a")]
        assert read_record({form: own, "system": "b"}, "").messages == own


def called(**fields):
    return {"messages": [assistant(None, tool_calls=[fields])]}


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"prompt": "a", "completion": 5}, "`completion` is 5: it must be a string"),
        ({"instruction": ["a"]}, r"`instruction` is \['a'\]: it must be a string"),
        ({"instruction": "a", "history": [["b", "c"], ["d"]]}, r"`history\[1\]` is \['d'\]: it must be two texts"),
        ({"instruction": "a", "history": [["b", 5]]}, r"`history\[0\]` is 5: it must be a string"),
        ({"instruction": "a", "history": 5}, r"`history\[0\]` is 5: it must be two texts"),
        ({"messages": [user("a")], "system": 5}, "`system` is 5"),
        ({"text": 5}, "`text` is 5"),
        ({"turns": "a"}, "`turns` is 'a'"),
        ({"conversations": "a"}, "`conversations` is 'a': it must be a list of messages"),
        ({"messages": [{"content": "a"}]}, r"`messages\[0\].role` is None"),
        ({"messages": [user([{"type": "image", "image": "x"}])]}, r"`messages\[0\].content\[0\].type` is 'image'"),
        ({"messages": [user([5])]}, r"`messages\[0\].content\[0\]` is 5"),
        ({"messages": [assistant("a", reasoning_content=5)]}, r"`messages\[0\].reasoning_content` is 5"),
        ({"messages": [assistant("a", tool_calls="f")]}, r"`messages\[0\].tool_calls` is 'f'"),
        ({"messages": [assistant("a", tool_calls=[5])]}, r"`messages\[0\].tool_calls\[0\]` is 5"),
        (called(function="f"), "must have a `name` and `arguments`"),
        (called(name="f", arguments="{"), "must have a `name` and `arguments`"),
        (called(name="f", arguments="[1]"), "must have a `name` and `arguments`"),
        (called(name=5, arguments={}), "must have a `name` and `arguments`"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "must have a `name` and `arguments`"),
        ({"messages": [], "tools": "["}, r"`tools` is '\['"),
        ({"messages": [], "tools": "[" * 100}, "`tools` is"),
        ({"messages": [], "tools": [5]}, r"`tools` is \[5\]"),
    ],
)
def test_records_that_have_none(record, complaint):
    with pytest.raises(RecordError, match=f"^file, record 7: .*{complaint}") as error:
        read_record(record, "file, record 7")
    assert len(str(error.value)) < 300


GOOD = '{"text": "a"}'


def read(path, text, **options):
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    skipped = SkippedRecords(**{"max_share": 1, **options})
    found = [dialogue.number for dialogue in read_dialogues(path, skipped=skipped)]
    return found, {name: each["numbers"] for name, each in skipped.to_dict().items()}


@pytest.mark.parametrize("read_bytes", [5, 1 << 20])
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"body": 1}', "no known form"),
        ("[1]", "not an object"),
        ('{"text": 5}', "a field that is no text"),
        ('{"text": "cut o', "text that is not JSON"),
        ('{"messages": [{"role": "user", "con', "text that is not JSON"),
        ('{"messages": [', "text that is not JSON"),
        ("nonsense nonsense", "text that is not JSON"),
        ('{"text": "a"} and more of it', "text that is not JSON"),
        ('{"a":' * 40 + "1" + "}" * 40, "too many levels or digits"),
        ("[" * 100_000, "too many levels or digits"),
        ('{"text": "a", "n": ' + "9" * 2000 + "}", "too many levels or digits"),
        (b'{"text": "\xe9"}', "bytes that are not UTF-8"),
        (b'{"text": \xe9}', "bytes that are not UTF-8"),
    ],
    ids=repr,
)
def test_a_line_that_cannot_be_read_costs_no_other(tmp_path, monkeypatch, line, reason, read_bytes):
    monkeypatch.setattr("hf_falcon.training.dialogues._READ_BYTES", read_bytes)
    line = line if isinstance(line, bytes) else line.encode()
    lines = [GOOD.encode(), line, *[GOOD.encode()] * 3]
    found, skipped = read(tmp_path / "data.jsonl", b"\n".join(lines) + b"\n")
    # Where a good record stands before the malformed rest of a line, it counts.
    first = 2 if line.startswith(GOOD.encode()) else 1
    assert skipped == {reason: [first + 1]}
    assert found == [number for number in range(1, 5 + first) if number != first + 1]
    with pytest.raises(RecordError, match=f"data.jsonl, record {first + 1}"):
        list(read_dialogues(tmp_path / "data.jsonl"))


def test_a_long_line_is_left_out(tmp_path):
    """Read in pieces, and no more of it is kept than the longest record."""
    path = tmp_path / "data.jsonl"
    for line in ('{"text": "' + "a" * (1 << 24) + '"}', '{"text": "' + "a" * (1 << 24)):
        found, skipped = read(path, f"{GOOD}\n{line}\n{GOOD}\n{GOOD}")
        assert found == [1, 3, 4] and skipped == {"too many characters": [2]}


@pytest.mark.parametrize("read_bytes", [5, 1 << 20])
@pytest.mark.parametrize("layout", [", ", ",\n", "\n  ,  "])
@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ('{"body": 1}', "no known form"),
        ('{"text"}', "text that is not JSON"),
        ("nonsense, nonsense", "text that is not JSON"),
        ('{"text": "cut o', "text that is not JSON"),
        ('{"text": "a"', "text that is not JSON"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "x", "content": "b"}', "text that is not JSON"),
        ('{"messages": [{"role": "user" "content": "a"}, {"role": "x", "content": "b"}]}', "text that is not JSON"),
        ('{"messages": [{"role": "user", "content": [}]}, {"role": "x", "content": ["]", "}"]}]}',)
        + ("text that is not JSON",),
        ('{"a":' * 40 + "1" + "}" * 40, "too many levels or digits"),
        (b'{"text": "\xe9"}', "bytes that are not UTF-8"),
    ],
    ids=repr,
)
def test_a_malformed_record_of_an_array_costs_no_other(tmp_path, monkeypatch, record, reason, layout, read_bytes):
    monkeypatch.setattr("hf_falcon.training.dialogues._READ_BYTES", read_bytes)
    record = record if isinstance(record, bytes) else record.encode()
    # Records of a data set begin with any field.
    other = b'{"id": 3, "prompt": "[a, b], {}"}'
    array = b"[" + layout.encode().join([other, record, other, GOOD.encode(), record, other]) + b" ]\n"
    found, skipped = read(tmp_path / "data.json", array)
    assert found == [1, 3, 4, 6] and skipped == {reason: [2, 5]}
    with pytest.raises(RecordError, match="data.json, record 2"):
        list(read_dialogues(tmp_path / "data.json"))


def test_the_first_or_the_last_record_of_an_array_is_malformed(tmp_path, caplog):
    path, good = tmp_path / "data.json", '{"id": 1, "text": "a"}'
    # The first begins as the others do, though none was read.
    found, skipped = read(path, f'[{{"id": 0, "text": }},\n{good},\n{good},\n\n  {{"id": 2,, "text": "b"}}\n]\n')
    assert found == [2, 3] and skipped == {"text that is not JSON": [1, 4]}
    assert "no record begins behind record 4 (line 5, column 3), which is malformed: the last 26 char" in caplog.text
    assert "the 3 records before it are read" in caplog.text


def test_an_array_in_which_no_further_record_begins(tmp_path):
    """Not all of it is searched."""
    path = tmp_path / "data.json"
    with pytest.raises(
        ValueError, match=r"record 2 \(line 2, column 1\) is malformed, and no .*: 1 records were read"
    ):
        read(path, f"[{GOOD},\nnonsense\n" + '{"other": 1},\n' * 1_000_000 + "]")


def test_nested_values_that_begin_like_records(tmp_path):
    """They count as odd records, and the records behind them are read."""
    call = '{"id": 5, "calls": [{"id": 1}, {"id": 2}, {"id": 3}]}'
    good = '{"id": 1, "text": "a"}'
    found, skipped = read(tmp_path / "data.json", f"[{good}, {call.replace('5', '')}, {good}, {good}]")
    assert len(found) == 3 and skipped["text that is not JSON"] == [2]


def test_too_many_end_the_reading(tmp_path):
    """After enough records, and not at the end of a file of any length."""
    path = tmp_path / "data.jsonl"
    with pytest.raises(ValueError, match=r"10000 of 10000 records .*more than a share of 0.05\."):
        read(path, '{"body": 1}\n' * 30_000, max_share=0.05)
    # The first records do not decide.
    found, skipped = read(path, '{"body": 1}\n' * 200 + f"{GOOD}\n" * 9_800, max_share=0.05)
    assert len(found) == 9_800 and skipped == {"no known form": [1, 2, 3, 4, 5]}


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_shares_that_are_none(value):
    with pytest.raises(ValueError, match="`max_bad_share` is"):
        check_bad_share(value)


# Each is one of 50, so that 200 of 10,000 are odd.
ODD = [
    {"body": "w1"},
    {"messages": [user([{"type": "image", "image": "x"}])]},
    {"messages": [assistant(None, tool_calls=[{"name": 5}])]},
    {"messages": TOOL_DIALOGUE},
    "{malformed, and long enough",
]


@pytest.fixture(params=["jsonl", "json"])
def mixed(request, tmp_path):
    """10,000 records in seven forms, 200 of which cannot be read; as lines and as an array."""
    draw = random.Random(0)

    def good(number):
        text = f"w{number % 24} w{number // 24 % 24} w{number // 576}"
        return draw.choice(
            [
                {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "w1"}]},
                {"messages": [user([{"type": "text", "text": text}]), assistant("w1")]},
                {"prompt": text, "completion": "w1"},
                {"prompt": [user(text)], "completion": [assistant("w1")]},
                {"prompt": text, "response": "w1"},
                {"instruction": text, "input": "", "output": "w1"},
                {"turns": [text]},
            ]
        )

    records = [ODD[number // 50 % 5] if number % 50 == 49 else good(number) for number in range(10_000)]
    path, texts = (
        tmp_path / f"mixed.{request.param}",
        [each if type(each) is str else json.dumps(each) for each in records],
    )
    path.write_text("\n".join(texts) if request.param == "jsonl" else f"[{', '.join(texts)}]")
    return path


def test_a_mixed_file_is_prepared_to_its_end(mixed, tmp_path, monkeypatch, capsys):
    target = make_target()
    monkeypatch.setattr(command, "load_target", lambda *arguments: target)
    output = tmp_path / "tokens.safetensors"
    words = f"--data {mixed} --output {output} --max_new_tokens 1 --max_prompt_tokens 20 --batch_size 2048"
    assert command.main([*words.split(), "--temperatures", "0"]) == 0
    file = TokenFile.load(output)
    assert len(file) == 9_800
    expected = {
        "no known form": 40,
        "a part that is no text": 40,
        "a tool call in no known form": 40,
        "tool calls that the chat template ignores": 40,
        "text that is not JSON": 40,
    }
    assert {name: each["records"] for name, each in file.metadata["skipped"].items()} == expected
    printed = capsys.readouterr().out
    assert printed.endswith(f"{skipped_table(file.metadata['skipped'])}\n")
    assert printed.count("     40") == 5 and "50, 300, 550, 800, 1050, ..." in printed
    # The first ends a strict run, and a lower share of them a run before the target writes anything.
    share = r"200 of 10000 .* more than `max_bad_share` \(0.01\)\. .* or raise `max_bad_share`\."
    for option, complaint in (("--strict", "record 50: .* has none of"), ("--max_bad_share=0.01", share)):
        monkeypatch.setattr("hf_falcon.training.prepare._respond", lambda *arguments: pytest.fail("generates"))
        with pytest.raises(ValueError, match=complaint):
            command.main([*words.split(), option, "--output", f"{output}2"])


def test_tables_of_data_sets(tmp_path, monkeypatch):
    """Files of Parquet and Arrow, and folders of `save_to_disk`; fields that only other rows have are no fields."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    records = [{"messages": READ[form], "tools": None} for form in ("sharegpt", "messages with calls")]
    records[1]["tools"] = json.dumps([WEATHER])
    made = datasets.Dataset.from_list(records)
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(tmp_path / "both")
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    expected = [Dialogue(READ["sharegpt"]), Dialogue(READ["messages with calls"], [WEATHER])]
    for source in (tmp_path / "a.parquet", arrow, tmp_path / "saved", tmp_path / "both"):
        assert list(read_dialogues(source)) == expected
    assert list(read_dialogues(tmp_path / "both", "test")) == expected[:1]
    with pytest.raises(ValueError, match="`split` is 'validation': .* has train, test"):
        list(read_dialogues(tmp_path / "both", "validation"))
    with pytest.raises(FileNotFoundError, match="none.parquet"):
        list(read_dialogues(tmp_path / "none.parquet"))
    monkeypatch.setattr("hf_falcon.training.dialogues.importlib.util.find_spec", lambda name: None)
    with pytest.raises(OSError, match="a Parquet or Arrow file needs the package `datasets`"):
        list(read_dialogues(tmp_path / "a.parquet"))


def test_plain_text_stays_plain(tmp_path):
    """The target goes on with its beginning; as data, all but the first token is learnt."""
    (tmp_path / "data.jsonl").write_text('{"text": "w1 w2 w3 w4 w5"}\n{"text": " "}')
    model, tokenizer = make_target()
    found = []
    for responses in ("target", "data"):
        arguments = PrepareArguments(
            data=str(tmp_path / "data.jsonl"),
            output=str(tmp_path / responses),
            responses=responses,
            max_prompt_tokens=3,
            max_new_tokens=2,
        )
        file = prepare(arguments, model, tokenizer)
        assert len(file) == 1 and file.metadata["dropped"] == {"no_turn": 1}
        token_ids, length = file.sample(0)
        found.append((tokenizer.decode(token_ids[:length]), tokenizer.decode(token_ids[length:])))
    assert found[0][0] == "w1 w2 w3" and found[1] == ("w1", "w2 w3")
