# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The prompts of examples/out_of_domain."""

import json

from example_scripts import EXAMPLES

from hf_falcon.bench.prompts import read_turns
from hf_falcon.commands import main as entry

FILES = sorted((EXAMPLES / "out_of_domain").glob("*.jsonl"))
# Words in a row that no two prompts share.
SHARED = 8


def test_files_and_numbers():
    assert [file.stem for file in FILES] == ["abstracts", "contracts", "icelandic", "swahili", "welsh"]
    for file in FILES:
        dialogues = read_turns(str(file))
        assert len(dialogues) == 30
        assert all(len(turns) == 1 and 4 <= len(turns[0].split()) <= 120 for turns in dialogues)


def shared_words(texts):
    """Runs of words that occur in several texts, or twice in one."""
    seen, found = set(), []
    for text in texts:
        words = text.casefold().split()
        runs = [tuple(words[start : start + SHARED]) for start in range(len(words) - SHARED + 1)]
        found += [" ".join(run) for run in runs if run in seen]
        seen |= set(runs)
    return found


def test_no_two_prompts_share_eight_words():
    texts = [turns[0] for file in FILES for turns in read_turns(str(file))]
    assert len(set(texts)) == 150 and shared_words(texts) == []
    assert shared_words(["One two three four five six seven eight nine", "x one two three four five six seven eight"])


def test_evaluate_reads_them(workplace, tmp_path, capsys):
    words = ["--target", workplace / "target", "--drafter", workplace / "drafter", "--dtype", "float32"]
    words += ["--limit", "2", "--max_new_tokens", "4", "--json", "--check", "--data", *FILES]
    # The tiny tokenizer knows few letters, and its target has short contexts: the ends of the prompts will do.
    for number, file in enumerate(FILES, start=len(words) - len(FILES)):
        words[number] = tmp_path / file.name
        cut = [json.dumps({"turns": [turns[0][-60:]]}) + "\n" for turns in read_turns(str(file))]
        words[number].write_text("".join(cut), encoding="utf-8")
    assert entry.main(["evaluate", *map(str, words)]) == 0
    found = json.loads(capsys.readouterr().out)["data"]
    assert set(found) == {file.stem for file in FILES}
