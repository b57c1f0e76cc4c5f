# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Measures hf_falcon on a GPU, and writes the results into `docs/gpu.md` and `docs/images/gpu.png`. `make gpu` runs it.

    python docs/measure_gpu.py [--data mt_bench.jsonl humaneval.jsonl gsm8k.jsonl] [--minutes 9]

It works in pieces of less than ten minutes each, which leave their results in `--output`. After an interruption the
same command goes on: a finished piece is not run again, and a benchmark keeps every answer that it has measured. With
`--minutes` no piece begins after so many minutes; run the command again until it says that all is measured.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_falcon.bench.report import memory, operations
from hf_falcon.bench.tuning import drafting, target_seconds
from hf_falcon.commands import bench
from hf_falcon.commands.models import encode, load_drafter, load_target
from hf_falcon.core.draft_options import DraftOptions

DOCS = Path(__file__).parent
# Of the times of a forward: tokens before it, draft nodes at most, and seconds of measuring.
CONTEXT, MOST_NODES, SECONDS = 256, 127, 20.0
BEGIN, END = "<!-- measured -->", "<!-- end -->"
METHODS = "plain,plain_compiled,prompt_lookup,prompt_lookup_8,falcon,falcon_compiled"
# Of the larger network, whose layers would take many minutes to compile.
EAGER = "plain,prompt_lookup,prompt_lookup_8,falcon"
LABELS = {
    "plain": "plain",
    "plain_compiled": "plain, static cache and `torch.compile`",
    "prompt_lookup": "prompt lookup, 3 tokens (transformers)",
    "prompt_lookup_8": "prompt lookup, 8 tokens (transformers)",
    "falcon": "falcon",
    "falcon_compiled": "falcon, compiled rounds",
}


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="Folder of the results.")
    parser.add_argument("--data", nargs="+", default=["mt_bench", "humaneval", "gsm8k"], help="Prompts; see `bench`.")
    parser.add_argument("--device", default="cuda", help="Another device than a GPU only serves as a rehearsal.")
    parser.add_argument("--target", help="Target, from the Hub or a folder; the demo's if left out.")
    parser.add_argument("--drafter", help="Its drafter.")
    parser.add_argument("--limit", type=int, default=10, help="Prompts of each file.")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="New tokens of an answer, at most.")
    parser.add_argument("--scaled", default="7b", help="Shape of the larger network; 'none' leaves it out.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="No piece begins after these.")
    parser.add_argument("--page", type=Path, default=DOCS / "gpu.md", help="The page to write.")
    return parser.parse_args(words)


def run_tests(arguments: argparse.Namespace) -> None:
    """Runs the tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(DOCS.parent / "tests")]
    found = subprocess.run(command, capture_output=True, text=True, cwd=DOCS.parent)
    lines = (found.stdout + found.stderr).strip().splitlines()
    print("\n".join(lines[-30:]))
    # 1: some tests failed, which the page says. Any other end is no result.
    if found.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {found.returncode}: {lines[-1] if lines else 'no output'}")
    kept = {"summary": lines[-1].strip("= ")}
    (arguments.output / "tests.json").write_text(json.dumps(kept), encoding="utf-8")


def run_bench(arguments: argparse.Namespace, name: str, methods: str, limit: int, new_tokens: int, *more: str) -> None:
    """Runs `hf-falcon bench` into a folder of that name."""
    words = ["--data", *arguments.data, "--limit", str(limit), "--max_turns", "1", "--max_new_tokens", str(new_tokens)]
    words += ["--methods", methods, "--output", str(arguments.output / name), *_models(arguments), *more]
    bench.main(words)


def run_times(arguments: argparse.Namespace) -> None:
    """Times the target's forward by draft nodes, and the drafter's passes, in bfloat16."""
    device = torch.device(arguments.device)
    target, tokenizer = load_target(arguments.target, torch.bfloat16, device)
    drafter = load_drafter(arguments.drafter, torch.bfloat16, device, target)
    drafter.check_target(target)
    seconds = target_seconds(target, CONTEXT, MOST_NODES, SECONDS, drafter.config.feature_layers)
    prompt = encode(tokenizer, "Why is the sky blue?", device)
    text = target.generate(**prompt, max_new_tokens=arguments.max_new_tokens, do_sample=False)
    options = DraftOptions.from_generation_config(drafter.generation_config)
    prompt_length = prompt["input_ids"].shape[1]
    _, commit, draft_pass = drafting(drafter, target, [(text, prompt_length)], options)
    kept = {"seconds": seconds, "commit": commit, "draft_pass": draft_pass}
    (arguments.output / "times.json").write_text(json.dumps(kept), encoding="utf-8")


def _models(arguments: argparse.Namespace) -> list[str]:
    given = {"device": arguments.device, "target": arguments.target, "drafter": arguments.drafter}
    return [word for name, value in given.items() if value is not None for word in (f"--{name}", value)]


def pieces(arguments: argparse.Namespace) -> dict[str, tuple[str, Callable[[], None]]]:
    """The pieces by name: the file that a finished one leaves, and the call that runs it."""

    def table(name: str, *more: str) -> tuple[str, Callable[[], None]]:
        limit, new_tokens = arguments.limit, arguments.max_new_tokens
        return f"{name}/report.json", lambda: run_bench(arguments, name, METHODS, limit, new_tokens, *more)

    found = {
        "tests": ("tests.json", lambda: run_tests(arguments)),
        "bfloat16": table("bfloat16", "--dtype", "bfloat16"),
        "float32": table("float32", "--dtype", "float32"),
        "times": ("times.json", lambda: run_times(arguments)),
    }
    if arguments.scaled != "none":
        more = ("--dtype", "bfloat16", "--scaled", arguments.scaled)
        limit, new_tokens = min(2, arguments.limit), min(32, arguments.max_new_tokens)
        found["scaled"] = (
            "scaled/report.json",
            lambda: run_bench(arguments, "scaled", EAGER, limit, new_tokens, *more),
        )
    return found


def table(report: dict[str, Any]) -> list[str]:
    """The speed-ups of a benchmark as a table in Markdown, with peak memory and what a round asks of the device."""
    rows = report["runs"]
    data = list(dict.fromkeys(row["data"] for row in rows))
    lines = ["", f"| method | {' | '.join(data)} | tau | identical | peak memory |"]
    lines.append(f"|{' --- |' * (len(data) + 4)}")
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {row["data"]: row for row in rows if row["method"] == method}
        last = own[data[-1]]
        speeds = ["differs" if own[name]["speedup"] is None else f"{own[name]['speedup']:.2f}" for name in data]
        tau = "" if last["tau"] is None else f"{last['tau']:.2f}"
        identical = f"{last['identical_prompts']}/{last['num_prompts']}"
        lines.append(
            f"| {LABELS.get(method, method)} | {' | '.join(speeds)} | {tau} | {identical} | "
            f"{last['peak_memory_mb']:.0f} MB |"
        )
    falcon = next(row for row in reversed(rows) if row["method"] == "falcon")
    return [*lines, "", memory(falcon), operations(falcon), ""]


def times(found: dict[str, Any]) -> list[str]:
    """The time of a forward by draft nodes as a table in Markdown."""
    seconds = {int(nodes): value for nodes, value in found["seconds"].items()}
    return [
        "",
        f"| draft nodes | {' | '.join(map(str, seconds))} |",
        f"|{' --- |' * (len(seconds) + 1)}",
        f"| ms | {' | '.join(f'{1000 * value:.2f}' for value in seconds.values())} |",
        "",
        f"The first block of a draft takes {1000 * found['commit']:.2f} ms, each further pass "
        f"{1000 * found['draft_pass']:.2f} ms.",
        "",
    ]


def page(arguments: argparse.Namespace, errors: dict[str, str]) -> str:
    """The measured part of the page."""
    results = {
        name: json.loads((arguments.output / file).read_text(encoding="utf-8"))
        for name, (file, _) in pieces(arguments).items()
        if (arguments.output / file).exists()
    }
    titles = {
        "tests": "Tests",
        "bfloat16": "Speed in bfloat16",
        "float32": "Speed in float32",
        "times": "Time of a forward",
        "scaled": f"A network of {arguments.scaled} size",
    }
    environment = next((results[name]["environment"] for name in ("bfloat16", "float32") if name in results), None)
    lines = []
    if environment is not None:
        machine = "{device}, torch {torch}, transformers {transformers}, hf_falcon {hf_falcon}".format(**environment)
        lines += ["", f"Measured with `make gpu` on: {machine}. Target: {environment['target']}.", ""]
    if arguments.device != "cuda":
        lines += ["This was a rehearsal without a GPU.", ""]
    for name in pieces(arguments):
        lines += [f"### {titles[name]}", ""]
        if name not in results:
            lines += [f"Not measured: {errors.get(name, 'not run yet')}.", ""]
        elif name == "tests":
            lines += [f"`pytest -m gpu`: {results[name]['summary']}.", ""]
        elif name == "times":
            lines += [
                f"Milliseconds of the target's forward in bfloat16, after {CONTEXT} tokens:",
                *times(results[name]),
            ]
        else:
            lines += ["Speed-up over plain `generate`:", *table(results[name])]
    if draw(results, arguments.page.parent / "images" / "gpu.png"):
        lines += ["![Speed-up by method, and the time of a forward by draft nodes](images/gpu.png)", ""]
    return "\n".join(lines)


def draw(results: dict[str, Any], file: Path) -> bool:
    """Draws the speed-ups and the time of a forward; `False` where there is nothing to draw, or no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("No picture: matplotlib is not installed.")
        return False
    if "bfloat16" not in results or "times" not in results:
        return False
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    speeds, curve = figure.subplots(1, 2)
    rows = results["bfloat16"]["runs"]
    last = [row for row in rows if row["data"] == rows[-1]["data"]]
    speeds.barh([row["method"] for row in last], [row["speedup"] or 0.0 for row in last])
    speeds.axvline(1.0, color="black", linewidth=0.8)
    speeds.invert_yaxis()
    speeds.set_title("speed-up over plain decoding, bfloat16")
    seconds = {int(nodes): value for nodes, value in results["times"]["seconds"].items()}
    curve.plot(list(seconds), [value / seconds[0] for value in seconds.values()], "o-")
    curve.set_ylim(bottom=0.0)
    curve.set_title("time of a forward, in plain steps")
    curve.set_xlabel("draft nodes")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    return True


def main(words: list[str] | None = None) -> int:
    """Runs what is missing, and writes the page. Returns 1 if a piece failed, 2 if pieces are left."""
    arguments = parse(words)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here. A rehearsal: `make gpu GPU_ARGS='--device cpu --limit 1'`.")
    arguments.output.mkdir(parents=True, exist_ok=True)
    start, errors, left = time.monotonic(), {}, []
    for name, (file, run) in pieces(arguments).items():
        if (arguments.output / file).exists():
            continue
        if time.monotonic() - start > 60 * arguments.minutes:
            left.append(name)
            continue
        print(f"== {name}", flush=True)
        begin = time.monotonic()
        try:
            run()
        except Exception as error:
            # The other pieces can be measured all the same, and this one is tried again next time.
            traceback.print_exc()
            errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(f"== {name}: {(time.monotonic() - begin) / 60:.1f} minutes", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    before, _, rest = arguments.page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    arguments.page.write_text(f"{before}{BEGIN}\n{page(arguments, errors)}\n{END}{after}", encoding="utf-8")
    if left:
        print(f"Left: {', '.join(left)}. Run the same command again.")
    else:
        print(f"All is measured but {', '.join(errors)}." if errors else f"All is measured: see {arguments.page}.")
    return 1 if errors else 2 if left else 0


if __name__ == "__main__":
    sys.exit(main())
