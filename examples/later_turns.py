# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Writes the later turns of dialogues, each with its response and without the turns before it, as dialogues of one turn.
`hf-falcon prepare --responses data` takes them as further training text: it keeps a later turn only with the turns
before it, and these rarely fit into a sample.

    python examples/later_turns.py --data sharegpt --output later.jsonl
    hf-falcon prepare --data later.jsonl --responses data --output later.safetensors
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from hf_falcon.training.dialogues import read_dialogues
from hf_falcon.training.records import Message

# In characters. Shorter turns ("go on") mean nothing alone; shorter responses have little to learn from.
SHORTEST_PROMPT, LONGEST_PROMPT = 40, 1500
SHORTEST_RESPONSE = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="sharegpt", help="what `hf-falcon prepare` reads, with responses")
    parser.add_argument("--output", type=Path, required=True, help="JSON Lines file to write")
    arguments = parser.parse_args()
    count = 0
    with arguments.output.open("w", encoding="utf-8") as file:
        for turn in later_turns(dialogue.messages for dialogue in read_dialogues(arguments.data)):
            file.write(json.dumps({"messages": turn}) + "\n")
            count += 1
    print(f"{arguments.output}: {count} turns")


def later_turns(dialogues: Iterable[list[Message]]) -> Iterator[list[Message]]:
    """The turns after the first, as prompt and response; of equal prompts, the first."""
    seen = set()
    for messages in dialogues:
        is_later = False
        for prompt, response in pairwise(messages):
            if is_later and (prompt["role"], response["role"]) == ("user", "assistant"):
                text = prompt["content"]
                fits = SHORTEST_PROMPT <= len(text) <= LONGEST_PROMPT and len(response["content"]) >= SHORTEST_RESPONSE
                if fits and text not in seen:
                    seen.add(text)
                    yield [prompt, response]
            is_later = is_later or prompt["role"] == "user"


if __name__ == "__main__":
    main()
