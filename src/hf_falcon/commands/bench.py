# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon bench`: compares decoding methods on the same target, prompts and machine, in one run."""

from __future__ import annotations

import hashlib
import json
import platform
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from ..bench import report
from ..bench.busy import busy_processes
from ..bench.decision import DecisionModel
from ..bench.medusa import MedusaLikeModel
from ..bench.memory import drafter_bytes, weight_bytes
from ..bench.method_names import FALCON
from ..bench.methods import INSTANT, OTHER_SAMPLES, Models, resolve
from ..bench.metrics import PLAIN, summarise
from ..bench.operations import RoundOperations
from ..bench.prompts import read_turns
from ..bench.runner import Benchmark, longest_context
from ..bench.scaled import scaled_drafter, scaled_target
from ..bench.shapes import SHAPES
from ..bench.traces import TRACES_NAME, TraceFile
from ..checkpoint_files import weights_fingerprint
from ..core.draft_options import DraftOptions
from ..core.drafter import DraftModel
from ..cpu.row_invariant import row_invariant
from ..learning.options import check_folder
from ..training.chat_templates import template_variables
from ..training.instant import instant_drafter
from ..training.token_file import write_atomically
from .bench_arguments import BenchArguments, parser
from .main import installed_version
from .models import (
    MEDUSA_LIKE_NAME,
    TARGET_NAME,
    fixed_context,
    load_drafter,
    load_target,
    no_progress_bars,
    note_other_variables,
    resolve_device,
    shipped_folder,
    source_named,
)


def main(argv: list[str]) -> int:
    """
    Runs the benchmark. In float32, or with `--row_invariant`, returns 1 if the tokens of any method differ from plain
    decoding's.
    """
    arguments = BenchArguments(**vars(parser().parse_args(argv)))
    data = {
        Path(source).stem: [turns[: arguments.max_turns] for turns in read_turns(source, arguments.limit)]
        for source in arguments.data
    }
    check_folder("output", arguments.output)
    device = resolve_device(arguments.device)
    models, tokenizer = _load(arguments, device)
    dtype = models.target.dtype
    variables = template_variables(arguments.chat_template_kwargs)
    note_other_variables(models.drafters.get(FALCON), variables)
    models.longest_context = longest_context(tokenizer, data, arguments.max_new_tokens, variables)
    context = fixed_context(models.target)
    if context is not None and models.longest_context > context:
        raise ValueError(
            f"The longest dialogue of `data` takes up to {models.longest_context} tokens, with `max_new_tokens` "
            f"{arguments.max_new_tokens}, and the target's context has {context}: lower `max_new_tokens` or "
            "`max_turns`."
        )
    methods, absent = resolve(arguments.method_names, models)
    for name, why in absent.items():
        print(f"`{name}` is left out: {why}.")

    exact = dtype == torch.float32 or arguments.row_invariant
    settings: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
    if settings["do_sample"]:
        settings["temperature"] = arguments.temperature
    environment = _environment(models, dtype)
    measured = {**environment, **settings, "repeats": arguments.repeats, "prompts": _digest(data)}
    measured["chat_template_kwargs"] = json.dumps(variables, sort_keys=True) if variables else None
    if variables:
        environment["chat_template_kwargs"] = measured["chat_template_kwargs"]
    measured["draft_options"] = {name: asdict(_options(drafter)) for name, drafter in models.drafters.items()}
    # Traces of before have no such settings, which are `None`.
    measured["row_invariant"] = arguments.row_invariant or None
    measured["busy_processes"] = arguments.busy_processes or None
    if arguments.busy_processes:
        environment["busy_processes"] = arguments.busy_processes
    if arguments.row_invariant:
        environment["row_invariant"] = True
    if models.decision is not None:
        measured["decision"] = asdict(models.decision)
    if "eagle_like" in methods and "eagle_like" not in models.drafters:
        environment["eagle_like"] = "the drafter, with a static tree"
    file = TraceFile(arguments.output, measured)
    wanted = {
        (name, source, prompt, turn)
        for name in methods
        for source, dialogues in data.items()
        for prompt, turns in enumerate(dialogues)
        for turn in range(len(turns))
    }
    if wanted <= file.traces.keys():
        print(f"All answers were measured before: delete {Path(arguments.output) / TRACES_NAME} to measure it again.")
    benchmark = Benchmark(models.target, tokenizer, methods, settings, arguments.repeats, variables)
    exactness = row_invariant(models.target) if arguments.row_invariant else nullcontext()
    with exactness, busy_processes(arguments.busy_processes):
        benchmark.run(data, file)

    traces = [trace for key, trace in file.traces.items() if key in wanted]
    rows = summarise(traces, exact, OTHER_SAMPLES if settings["do_sample"] else ())
    _add_drafting(rows, methods, models, arguments.scaled)
    _add_operations(rows, benchmark.operations(next(iter(data.values()))[0][0]))
    folder = Path(arguments.output)
    write_atomically(folder / "report.json", json.dumps({"environment": environment, "runs": rows}, indent=2).encode())
    write_atomically(folder / "report.md", report.markdown(environment, rows, absent, exact).encode())
    try:
        write_atomically(folder / "report.png", report.picture(rows))
    except ImportError:
        print("No report.png: matplotlib is not installed. Run `pip install 'hf-falcon[bench]'`.")
    print(f"\n{report.table(rows)}\n")
    for row in rows:
        if row["method"] == FALCON and row["data"] == rows[-1]["data"] and row["drafter_memory_mb"] is not None:
            print(report.memory(row))
            print(report.operations(row))
    print(f"More in {folder / 'report.md'}.")
    return 1 if exact and any(row["speedup"] is None for row in rows) else 0


def _load(arguments: BenchArguments, device: torch.device) -> tuple[Models, PreTrainedTokenizerBase]:
    """The models of all methods, in the shape that is asked for, and the tokenizer."""
    target, tokenizer = load_target(arguments.target, arguments.dtype, device)
    dtype, models = target.dtype, Models(target, {})
    if arguments.drafter is None and arguments.target not in (None, TARGET_NAME):
        models.absent[FALCON] = "no drafter is given as `drafter`, and there is none for this target"
    else:
        models.drafters[FALCON] = load_drafter(arguments.drafter, dtype, device, target)
    if any(name.partition("@")[0] == INSTANT for name in arguments.method_names):
        try:
            models.drafters[INSTANT] = instant_drafter(target, tokenizer)
        except ValueError as error:
            models.absent[INSTANT] = str(error).rstrip(".")
    folders = dict(given.split("=", 1) for given in arguments.drafters)
    if arguments.eagle_like is not None:
        folders["eagle_like"] = arguments.eagle_like
    models.drafters |= {name: load_drafter(folder, dtype, device, target) for name, folder in folders.items()}

    medusa_like = arguments.medusa_like
    if medusa_like is None and arguments.target in (None, TARGET_NAME):
        medusa_like = shipped_folder(MEDUSA_LIKE_NAME)
    if medusa_like is None:
        models.absent["medusa_like"] = (
            "no drafter is given as `medusa_like`, and there is none for this target: examples/train_peers.sh "
            "trains one"
        )
    else:
        with no_progress_bars(medusa_like):
            drafter = MedusaLikeModel.from_pretrained(medusa_like, dtype=dtype)
        models.drafters["medusa_like"] = drafter.to(device).eval()
    if arguments.draft_model is not None:
        with source_named("draft_model", arguments.draft_model):
            draft_model = AutoModelForCausalLM.from_pretrained(arguments.draft_model, dtype=dtype)
        models.draft_model = draft_model.to(device).eval()
    if arguments.decision is not None:
        models.decision = DecisionModel.load(arguments.decision)
    if arguments.scaled is not None:
        _scale(models, arguments.scaled)
    return models, tokenizer


def _scale(models: Models, name: str) -> None:
    """Puts the target and its drafters into a larger shape; other methods' drafters that do not fit are left out."""
    shape, small = SHAPES[name], models.target
    models.target = scaled_target(small, shape)
    models.target.name_or_path = f"{report.scale(name)} that computes the function of {small.name_or_path}"
    for each, drafter in list(models.drafters.items()):
        try:
            models.drafters[each] = scaled_drafter(drafter, models.target)
        except ValueError as error:
            if each == FALCON:
                raise
            del models.drafters[each]
            models.absent[each] = str(error)
        else:
            models.drafters[each].name_or_path = f"{drafter.name_or_path}, in that shape"


def _environment(models: Models, dtype: torch.dtype) -> dict[str, Any]:
    """The models, libraries and machine of the measurements."""
    device = models.target.device
    named: dict[str, Any] = {"target": models.target}
    named |= {"drafter" if name == FALCON else name: drafter for name, drafter in models.drafters.items()}
    if models.draft_model is not None:
        named["draft_model"] = models.draft_model
    found: dict[str, Any] = {}
    for name, model in named.items():
        found |= {name: model.name_or_path, f"{name}_fingerprint": weights_fingerprint(model)}
    return {
        **found,
        "target_weights": sum(parameter.numel() for parameter in models.target.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "hf_falcon": installed_version(),
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
    }


def _processor() -> str:
    """The processor's name, or its architecture if the system has no name for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _digest(data: dict[str, list[list[str]]]) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def _options(drafter: DraftModel) -> DraftOptions:
    return DraftOptions.from_generation_config(drafter.generation_config)


def _add_drafting(
    rows: list[dict[str, Any]], methods: dict[str, dict[str, Any]], models: Models, scaled: str | None
) -> None:
    """Adds the shape of the network, and the options and memory of the methods that draft trees."""
    target_bytes = weight_bytes(models.target)
    found: dict[str, dict[str, Any]] = {}
    for name, arguments in methods.items():
        drafter = arguments.get("assistant_model")
        fields = ("node_budget", "passes", "drafter_memory_mb", "drafter_memory_share")
        found[name] = dict.fromkeys(fields) | {"scaled": scaled}
        if isinstance(drafter, DraftModel):
            options = _options(drafter)
            size = drafter_bytes(drafter, models.target, max(models.longest_context or 0, 3))
            values = (options.num_assistant_tokens, options.num_draft_passes, size / 1e6, size / target_bytes)
            found[name] |= zip(fields, values)
    for row in rows:
        row |= found[row["method"]]


def _add_operations(rows: list[dict[str, Any]], found: dict[str, RoundOperations | None]) -> None:
    """Adds what a round asks of the device, and its share of what a plain step does."""
    plain = found[PLAIN]
    for row in rows:
        counted = found.get(row["method"])
        row |= dict.fromkeys(("operations", "operations_share", "synchronisations"))
        if counted is not None and plain is not None:
            share = counted.operations / plain.operations
            values = (counted.operations, share, counted.synchronisations)
            row |= zip(("operations", "operations_share", "synchronisations"), values)
