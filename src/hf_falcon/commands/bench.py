# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon bench`: ways to decode against each other, on the same target, prompts and machine, in one run."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser

from ..bench import report
from ..bench.medusa import MedusaLikeModel
from ..bench.methods import METHODS, Models, resolve
from ..bench.metrics import PLAIN, summarise
from ..bench.prompts import HUB_DATA, read_turns
from ..bench.runner import Benchmark
from ..bench.traces import TraceFile
from ..configuration_falcon_draft import weights_fingerprint
from ..draft_options import DraftOptions
from ..modeling_falcon_draft import FalconDraftModel
from ..training.token_file import write_atomically
from .models import load_drafter, load_target, resolve_device, resolve_dtype


@dataclass
class BenchArguments:
    """Arguments of `hf-falcon bench`; `help` describes each."""

    data: list[str] = field(
        metadata={"help": f"JSON-lines files with `turns`, or names of the Hub: {', '.join(HUB_DATA)}."}
    )
    target: str | None = field(default=None, metadata={"help": "Target, from the Hub or a folder."})
    drafter: str | None = field(default=None, metadata={"help": "Drafter, from the Hub or a folder."})
    eagle_like: str | None = field(
        default=None, metadata={"help": "Drafter of `eagle_like`; the same one if left out and of that kind."}
    )
    medusa_like: str | None = field(
        default=None, metadata={"help": "Drafter of `medusa_like`, of `train --architecture medusa_like`."}
    )
    draft_model: str | None = field(default=None, metadata={"help": "Smaller language model, for `draft_model`."})
    methods: str = field(
        default="plain,prompt_lookup,falcon", metadata={"help": f"Separated by commas; of {', '.join(METHODS)}."}
    )
    max_new_tokens: int = field(default=128, metadata={"help": "New tokens an answer, at most."})
    limit: int | None = field(default=None, metadata={"help": "Prompts of each file, from the start."})
    max_turns: int | None = field(default=None, metadata={"help": "Turns of a prompt, from the first."})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy decoding."})
    repeats: int = field(default=1, metadata={"help": "Timed runs of each answer; the median counts."})
    dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})
    device: str | None = field(default=None, metadata={"help": "By default cuda where there is one, else cpu."})
    output: str = field(default="bench", metadata={"help": "Folder of the traces and the report."})

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; give 1 or more.")
        for name in ("limit", "max_turns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}; give 1 or more.")
        if self.temperature < 0:
            raise ValueError(f"`temperature` is {self.temperature}; give 0 (greedy) or more.")


def main(argv: list[str]) -> int:
    """Runs the benchmark. In float32, returns 1 if any method's tokens are not plain decoding's."""
    parser = HfArgumentParser(BenchArguments, prog="hf-falcon bench", description=__doc__)
    arguments = BenchArguments(**vars(parser.parse_args(argv)))
    data = {
        Path(source).stem: [turns[: arguments.max_turns] for turns in read_turns(source, arguments.limit)]
        for source in arguments.data
    }
    device = resolve_device(arguments.device)
    dtype = resolve_dtype(arguments.dtype, device)
    target, tokenizer = load_target(arguments.target, dtype, device)
    models = Models(
        target,
        load_drafter(arguments.drafter, dtype, device),
        None if arguments.eagle_like is None else load_drafter(arguments.eagle_like, dtype, device),
        None
        if arguments.medusa_like is None
        else MedusaLikeModel.from_pretrained(arguments.medusa_like, dtype=dtype).to(device).eval(),
        None
        if arguments.draft_model is None
        else AutoModelForCausalLM.from_pretrained(arguments.draft_model, dtype=dtype).to(device).eval(),
    )
    names = list(dict.fromkeys([PLAIN, *(name.strip() for name in arguments.methods.split(",") if name.strip())]))
    methods, absent = resolve(names, models)
    for name, why in absent.items():
        print(f"`{name}` is left out: {why}.")

    exact = dtype == torch.float32
    settings: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
    if settings["do_sample"]:
        settings["temperature"] = arguments.temperature
    environment = _environment(models, dtype)
    measured = {**environment, **settings, "repeats": arguments.repeats, "prompts": _digest(data)}
    file = TraceFile(arguments.output, measured)
    Benchmark(target, tokenizer, methods, settings, arguments.repeats).run(data, file)

    wanted = {
        (name, source, prompt, turn)
        for name in methods
        for source, dialogues in data.items()
        for prompt, turns in enumerate(dialogues)
        for turn in range(len(turns))
    }
    rows = summarise([trace for key, trace in file.traces.items() if key in wanted], exact)
    _add_options(rows, methods)
    folder = Path(arguments.output)
    write_atomically(folder / "report.json", json.dumps({"environment": environment, "runs": rows}, indent=2).encode())
    write_atomically(folder / "report.md", report.markdown(environment, rows, absent, exact).encode())
    try:
        write_atomically(folder / "report.png", report.picture(rows))
    except ImportError:
        print("No report.png: matplotlib is not installed. Run `pip install hf-falcon[bench]`.")
    print(f"\n{report.table(rows)}\n\nMore in {folder / 'report.md'}.")
    return 1 if exact and any(row["speedup"] is None for row in rows) else 0


def _environment(models: Models, dtype: torch.dtype) -> dict[str, Any]:
    """What the numbers hold for."""
    device = models.target.device
    return {
        "target": models.target.name_or_path,
        "target_fingerprint": weights_fingerprint(models.target),
        "drafter": models.drafter.name_or_path,
        "drafter_fingerprint": weights_fingerprint(models.drafter),
        "dtype": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
    }


def _processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _digest(data: dict[str, list[list[str]]]) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def _add_options(rows: list[dict[str, Any]], methods: dict[str, dict[str, Any]]) -> None:
    """Adds the node budget and the passes of the methods that draft trees."""
    for row in rows:
        drafter = methods[row["method"]].get("assistant_model")
        row["node_budget"] = row["passes"] = None
        if isinstance(drafter, FalconDraftModel):
            options = DraftOptions.from_generation_config(drafter.generation_config)
            row["node_budget"], row["passes"] = options.num_assistant_tokens, options.num_draft_passes
