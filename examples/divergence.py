# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Counts the outputs that diverge from plain decoding of a single prompt: outputs of assisted decoding, and, to compare
them with, of plain decoding in a left-padded batch. In float32 none diverges; in bfloat16 near-ties may.

    python examples/divergence.py --data mt_bench.jsonl humaneval.jsonl --limit 4 --max_new_tokens 48
"""

import argparse
import statistics
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_falcon.bench.divergence import Divergence, first_divergence
from hf_falcon.bench.prompts import read_turns
from hf_falcon.commands.models import encode, load_drafter, load_target, resolve_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, help="JSON-lines files; their first turns are the prompts")
    parser.add_argument("--limit", type=int, help="prompts of each file")
    parser.add_argument("--max_new_tokens", type=int, default=48)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--target", help="target, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--drafter", help="its drafter; the demo's if left out")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    target, tokenizer = load_target(arguments.target, arguments.dtype, device)
    drafter = load_drafter(arguments.drafter, arguments.dtype, device)
    texts = [turns[0] for source in arguments.data for turns in read_turns(source, arguments.limit)]
    prompts = [encode(tokenizer, text, device)["input_ids"] for text in texts]
    settings = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    settings["pad_token_id"] = 0 if settings["pad_token_id"] is None else settings["pad_token_id"]

    divergences: dict[str, list[Divergence]] = {"plain decoding in a batch": [], "assisted decoding": []}
    batch, assisted = divergences.values()
    near_ties = foreseen = 0
    for start in tqdm(range(0, len(prompts), arguments.batch_size), unit="batch", leave=False):
        group = prompts[start : start + arguments.batch_size]
        for prompt, in_batch in zip(group, decode_batch(target, group, settings)):
            # The mask: no token of the prompt is padding, whatever its id.
            inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
            length = prompt.shape[1]
            alone = target.generate(**inputs, **settings)[0, length:].tolist()
            found = first_divergence(target, prompt, alone, in_batch[: len(alone)])
            batch += [found] if found is not None else []
            output = target.generate(**inputs, **settings, assistant_model=drafter, return_dict_in_generate=True)
            found = first_divergence(target, prompt, alone, output.sequences[0, length:].tolist())
            near_ties += len(output.draft_statistics.near_ties)
            if found is not None:
                assisted.append(found)
                foreseen += found.token in output.draft_statistics.near_ties

    counts = f"{len(prompts)} prompts, {arguments.max_new_tokens} tokens, batches of {arguments.batch_size}"
    print(f"{counts}, {arguments.dtype}\n")
    print("| against plain decoding alone | outputs that diverge | at token, median | logit gap, median | largest |")
    print("| --- | --- | --- | --- | --- |")
    for name, found in divergences.items():
        print(f"| {name} | {len(found)}/{len(prompts)} | {' | '.join(summary(found))} |")
    print(
        f"\nNear-ties of assisted decoding: {near_ties}. "
        f"Outputs that diverge at one of them: {foreseen}/{len(assisted)}."
    )


def decode_batch(target: Any, prompts: list[torch.Tensor], settings: dict[str, Any]) -> list[list[int]]:
    """New tokens of prompts that are decoded together, padded on the left; after a row's end there is padding."""
    length = max(prompt.shape[1] for prompt in prompts)
    rows = [torch.nn.functional.pad(prompt, (length - prompt.shape[1], 0), value=-1) for prompt in prompts]
    ids = torch.cat(rows)
    mask = (ids >= 0).long()
    output = target.generate(input_ids=ids.clamp(min=0), attention_mask=mask, **settings)
    return output[:, length:].tolist()


def summary(found: list[Divergence]) -> list[str]:
    """Median token, median and largest gap; texts that only end sooner have no gap."""
    gaps = [each.gap for each in found if each.gap is not None]
    places = f"{statistics.median(each.token for each in found):g}" if found else "-"
    return [places, *(f"{measure(gaps):.3g}" if gaps else "-" for measure in (statistics.median, max))]


if __name__ == "__main__":
    main()
