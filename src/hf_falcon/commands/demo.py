# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon demo`: the same text with and without the drafter, side by side, and the time that the drafter saves."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ..bench.runner import timed
from ..cpu.compiling import uncompile_rounds
from ..cpu.row_invariant import row_invariant, unsupported_reason
from .demo_arguments import DemoArguments, parser
from .models import encode, load_drafter, load_target, resolve_device, within_context
from .report import Row, run_order, summary, table

PROMPTS = {
    "chat": "My sister moves to a small town by the sea next month and worries about feeling lonely there. "
    "What can she do in the first weeks to meet people?",
    "code": "Write a Python function that takes a list of (name, score) pairs and returns a dictionary with the "
    "average score of each name. Add a docstring and one example of its use.",
    "mathematics": "A gardener plants 4 rows of 12 tulips and 3 rows of 9 roses. A storm breaks a quarter of the "
    "tulips and 6 of the roses. How many flowers are left? Explain each step.",
}

# Takes the next piece of text of the plain (0) or of the assisted (1) column.
Show = Callable[[int, str], None]


def generate(
    target: PreTrainedModel,
    drafter: PreTrainedModel | None,
    inputs: dict[str, torch.Tensor],
    max_new_tokens: int,
    streamer: TextStreamer | None = None,
) -> Any:
    """Greedy decoding, plain or with a drafter, called the same way for both."""
    return target.generate(
        **inputs,
        assistant_model=drafter,
        max_new_tokens=within_context(target, inputs["input_ids"].shape[1], max_new_tokens),
        do_sample=False,
        return_dict_in_generate=True,
        streamer=streamer,
    )


def tau_and_alpha(output: Any) -> tuple[float, float]:
    """The acceptance that a `generate` output with `draft_statistics` carries."""
    if getattr(output, "draft_statistics", None) is None:
        raise ValueError("The target was decoded plainly, without the drafter: the warning above says why.")
    return float(output.draft_statistics["tau"]), float(output.draft_statistics["alpha"])


class ColumnStreamer(TextStreamer):
    """Hands each piece of text, as it is decoded, to a column of the display."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Show, column: int) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show, self.column = show, column

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.show(self.column, text)


@contextmanager
def display(name: str, prompt: str) -> Iterator[Show]:
    """Shows the two outputs of a prompt: side by side on a terminal, one after the other elsewhere."""
    texts, titles = ["", ""], [f"{name}: plain", f"{name}: with the drafter"]
    print(f"\n{name}: {prompt}\n")
    if not sys.stdout.isatty():
        yield lambda column, text: texts.__setitem__(column, texts[column] + text)
        print("\n\n".join(f"== {title}\n{text.strip()}" for title, text in zip(titles, texts)))
        return

    try:
        from rich.columns import Columns
        from rich.live import Live
        from rich.panel import Panel
        from rich.text import Text
    except ImportError as error:
        raise OSError("The demo's display needs the package `rich`. Run `pip install 'hf-falcon[demo]'`.") from error

    def columns() -> Columns:
        width = live.console.width // 2 - 1
        return Columns([Panel(Text(text.strip()), title=title, width=width) for title, text in zip(titles, texts)])

    drawn = 0.0

    def show(column: int, text: str) -> None:
        nonlocal drawn
        texts[column] += text
        if time.perf_counter() - drawn > 0.1:
            live.update(columns(), refresh=True)
            drawn = time.perf_counter()

    with Live(auto_refresh=False) as live:
        yield show
        live.update(columns(), refresh=True)


def measure(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    prompt: str,
    arguments: DemoArguments,
) -> Row:
    """
    Runs one prompt both ways; `identical` holds for the dtype of the timed runs.

    The first run of each way is shown, and warms up. The timed runs have no streamer, so that the display takes no
    part of their time.
    """
    inputs = encode(tokenizer, prompt, target.device)
    with nullcontext(lambda column, text: None) if arguments.json else display(name, prompt) as show:
        outputs = [
            generate(target, model, inputs, arguments.max_new_tokens, ColumnStreamer(tokenizer, show, column))
            for column, model in enumerate((None, drafter))
        ]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for assisted in run_order(arguments.repeats):
        run = partial(generate, target, drafter if assisted else None, inputs, arguments.max_new_tokens)
        seconds[assisted].append(timed(run, target.device)[0])

    plain, assisted_ids = (output.sequences[0, inputs["input_ids"].shape[1] :].tolist() for output in outputs)
    tau, alpha = tau_and_alpha(outputs[1])
    return Row(
        name=name,
        tokens=len(plain),
        assisted_tokens=len(assisted_ids),
        plain_seconds=statistics.median(seconds[False]),
        assisted_seconds=statistics.median(seconds[True]),
        tau=tau,
        alpha=alpha,
        identical=plain == assisted_ids,
    )


def load(
    arguments: DemoArguments, dtype: str | torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]:
    """The target, the drafter and the tokenizer."""
    target, tokenizer = load_target(arguments.target, dtype, device)
    if target.dtype == torch.float32:
        # Kept code rounds in its own way, and these outputs are compared.
        uncompile_rounds(target)
    drafter = load_drafter(arguments.drafter, target.dtype, device, target)
    if arguments.num_assistant_tokens is not None:
        drafter.generation_config.num_assistant_tokens = arguments.num_assistant_tokens
    return target, drafter, tokenizer


def identical_in_fp32(arguments: DemoArguments, prompts: dict[str, str], device: torch.device) -> list[bool]:
    """For each prompt, whether plain and assisted decoding give the same tokens in float32."""
    target, drafter, tokenizer = load(arguments, torch.float32, device)
    found = []
    for prompt in prompts.values():
        inputs = encode(tokenizer, prompt, device)
        outputs = [generate(target, model, inputs, arguments.max_new_tokens) for model in (None, drafter)]
        found.append(torch.equal(outputs[0].sequences, outputs[1].sequences))
    return found


def main(argv: list[str]) -> int:
    """
    Runs the demo. Returns 1 if any output differs, else 0. In 16 bits on a CPU both ways of decoding run inside
    [`row_invariant`]; elsewhere only float32 shows whether the drafter changes an output.
    """
    arguments = DemoArguments(**vars(parser().parse_args(argv)))
    device = resolve_device(arguments.device)
    prompts = {f"prompt {i}": prompt for i, prompt in enumerate(arguments.prompt or (), start=1)} or PROMPTS

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    note(f"Loading the target and the drafter on {device}.")
    models = load(arguments, arguments.dtype, device)
    dtype = models[0].dtype
    dtype_name = str(dtype).removeprefix("torch.")
    rows = []
    # On other devices nobody has measured what it costs.
    is_row_invariant = device.type == "cpu" and unsupported_reason(models[0]) is None
    is_exact = dtype == torch.float32 or is_row_invariant
    with row_invariant(models[0]) if is_row_invariant else nullcontext():
        for name, prompt in prompts.items():
            rows.append(measure(*models, name, prompt, arguments))
    del models
    if not is_exact:
        # By rounding alone equal outputs can diverge here.
        diverging = [row.name for row in rows if not row.identical]
        if diverging:
            note(f"By rounding in {dtype_name}, outputs diverge for: {', '.join(diverging)}.")
        note("Checking in float32 that both outputs are identical.")
        for row, identical in zip(rows, identical_in_fp32(arguments, prompts, device)):
            row.identical = identical

    result = summary(rows)
    if arguments.json:
        print(json.dumps(result))
    else:
        checked_in = dtype_name if is_exact else "float32"
        verdict = f"identical in {checked_in}" if result["identical"] else f"NOT identical in {checked_in}"
        print(f"\n{table(rows)}\n\nspeed-up {result['speedup']:.2f}, outputs {verdict}")
    return 0 if result["identical"] else 1
