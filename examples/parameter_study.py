# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Measures trees of fixed sizes: tau, milliseconds a round and speed-up over nodes (n) and draft passes (m), for each
drafter, beside what the cost model chooses. Prints a table for each, and draws study.png.

    python examples/parameter_study.py --data mt_bench.jsonl --limit 1 --nodes 8 --passes 1 2 3 --max_new_tokens 32

Hardware: 2 CPU cores
Minutes: 1
Expected: tau grows with nodes and passes, and a round takes longer; the best ratio is at a few nodes

The whole grid is the default. In each cell all rounds draft m passes and verify the n most probable nodes, or all that
m passes drafted where these are fewer. All cells and plain decoding answer a prompt before the next one's turn, each
after an answer of its own that is not counted. The answers are in traces.jsonl: the same command resumes after an
interruption.
"""

import argparse
import hashlib
import json
import random
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch

from hf_falcon.bench.metrics import PLAIN, summarise
from hf_falcon.bench.prompts import read_turns
from hf_falcon.bench.runner import Benchmark
from hf_falcon.bench.traces import TraceFile
from hf_falcon.checkpoint_files import weights_fingerprint
from hf_falcon.commands.models import load_drafter, load_target
from hf_falcon.core.policy import AdaptivePolicy, DraftPolicy

# The prompt's forward and one token: what no round can make faster.
PROMPT = "prompt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="target, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--drafters", nargs="+", metavar="NAME=FOLDER", help="its drafters; the demo's if left out")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of all of them")
    parser.add_argument("--device")
    parser.add_argument("--data", nargs="+", required=True, help="JSON-lines files; their first turns are the prompts")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each file")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--nodes", nargs="+", type=int, default=[4, 8, 16, 24, 32, 64], help="nodes of a tree")
    parser.add_argument("--passes", nargs="+", type=int, default=[1, 2, 3, 4, 5, 6], help="draft passes of a round")
    parser.add_argument("--lookup", type=int, default=0, help="tokens of prompt lookup in a tree, at most")
    parser.add_argument("--output", type=Path, default=Path("runs/parameter_study"))
    arguments = parser.parse_args()
    if arguments.max_new_tokens < 2:
        parser.error(f"`--max_new_tokens` is {arguments.max_new_tokens}: give 2 or more, the first is the prompt's.")
    folders = [given.split("=", 1) for given in arguments.drafters or ["falcon="]]
    if any(len(given) < 2 for given in folders):
        parser.error(f"`--drafters` is {' '.join(arguments.drafters)!r}: give NAME=FOLDER for each.")
    target, tokenizer = load_target(arguments.target, arguments.dtype, arguments.device)
    drafters = {name: load_drafter(folder or None, arguments.dtype, target.device, target) for name, folder in folders}
    data = {Path(file).stem: [turns[:1] for turns in read_turns(file, arguments.limit)] for file in arguments.data}
    settings = {
        "prompts": hashlib.sha256(json.dumps(data).encode()).hexdigest(),
        "max_new_tokens": arguments.max_new_tokens,
        "prompt_lookup_num_tokens": arguments.lookup,
        "dtype": str(target.dtype),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "target": weights_fingerprint(target),
        "drafters": {name: weights_fingerprint(drafter) for name, drafter in drafters.items()},
    }
    # A folder of other settings is refused. Further cells may join.
    file = TraceFile(arguments.output, settings)
    Study(target, tokenizer, methods(arguments, drafters), {"do_sample": False}, repeats=1).run(data, file)
    found = measured(file.traces.values(), exact=target.dtype == torch.float32)
    report = "\n\n".join(table(arguments, found, name) for name in drafters)
    (arguments.output / "study.md").write_text(report + "\n", encoding="utf-8")
    print(f"\n{report}\n\nPlain decoding: {found[PLAIN]['ms']:.1f} ms a token, {found[PLAIN]['speed']:.1f} tokens/s.")
    try:
        draw(arguments, found, list(drafters), arguments.output / "study.png")
    except ImportError:
        print("No study.png: matplotlib is not installed. Run `pip install 'hf-falcon[bench]'`.")


def cell(name: str, nodes: int, passes: int) -> str:
    return f"{name}, n = {nodes}, m = {passes}"


def chosen(arguments, name: str) -> str:
    """What the cost model chooses, of trees that are at most as large as the grid's."""
    return f"{name}, n <= {max(arguments.nodes)}, m <= {max(arguments.passes)}"


def methods(arguments, drafters):
    """The arguments of `generate` for plain decoding, for each cell and for the cost model, in mixed order."""
    tokens = {"max_new_tokens": arguments.max_new_tokens}
    found = {PLAIN: tokens, PROMPT: {"max_new_tokens": 1}}
    for name, drafter in drafters.items():
        options = {"prompt_lookup_num_tokens": arguments.lookup}
        # Also where the most probable path is improbable, all passes run.
        fixed = {**options, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
        for nodes in arguments.nodes:
            for passes in arguments.passes:
                sizes = {"num_assistant_tokens": nodes, "num_draft_passes": passes}
                found[cell(name, nodes, passes)] = {"assistant_model": drafter, **tokens, **fixed, **sizes}
        # It learns from its own rounds alone: fixed trees teach it nothing.
        most = {"num_assistant_tokens": max(arguments.nodes), "num_draft_passes": max(arguments.passes)}
        adaptive = {**options, **most, "num_assistant_tokens_schedule": "heuristic"}
        found[chosen(arguments, name)] = {"assistant_model": drafter, **tokens, **adaptive}
    names = list(found)
    # A change of the machine's speed then shows in no row or column of the grid.
    random.Random(0).shuffle(names)
    return {name: found[name] for name in names}


class Study(Benchmark):
    """Also counts the draft passes of each answer."""

    def _generate(self, method, inputs):
        passes = []

        def counting(update):
            def counted(policy, outcome):
                # The first is the commit's.
                passes.append(0 if outcome.time.passes is None else 1 + outcome.time.passes)
                return update(policy, outcome)

            return counted

        with ExitStack() as stack:
            for kind in (DraftPolicy, AdaptivePolicy):
                stack.enter_context(mock.patch.object(kind, "update", counting(kind.update)))
            output = super()._generate(method, inputs)
        statistics = getattr(output, "draft_statistics", None)
        if statistics is not None:
            statistics["passes"] = sum(passes)
        return output


def measured(traces, exact):
    """By method, over all prompts: tau, nodes, passes and milliseconds of a round, tokens a second, and the ratio."""
    traces = list(traces)
    prompt_seconds = {trace.key[1:]: trace.seconds[0] for trace in traces if trace.method == PROMPT}
    rows = {row["method"]: row for row in summarise(traces, exact, other_samples=(PROMPT,))}
    found = {}
    for name, row in rows.items():
        own = [trace for trace in traces if trace.method == name and trace.key[1:] in prompt_seconds]
        statistics = [trace.statistics for trace in own if trace.statistics is not None]
        # Of plain decoding, each token after the first is a round.
        rounds = sum(each["rounds"] for each in statistics) or sum(len(trace.tokens) - 1 for trace in own)
        seconds = sum(trace.seconds[0] - prompt_seconds[trace.key[1:]] for trace in own)
        found[name] = {
            "tau": row["tau"],
            "ms": 1000 * seconds / max(1, rounds),
            "speed": row["tokens_per_second"],
            "ratio": row["speedup"],
            "nodes": sum(each["drafted_tokens"] for each in statistics) / max(1, rounds),
            "passes": sum(each["passes"] for each in statistics) / max(1, rounds),
            "identical": f"{row['identical_prompts']}/{row['num_prompts']}",
        }
    return found


def cells(arguments, found, name):
    """The measured cells of a drafter: nodes, passes and what was found."""
    pairs = ((nodes, passes) for nodes in arguments.nodes for passes in arguments.passes)
    return [(nodes, passes, found[cell(name, nodes, passes)]) for nodes, passes in pairs]


def best(arguments, found, name):
    """The cell with the best ratio; in float32, outputs that are not plain decoding's have none."""
    return max(cells(arguments, found, name), key=lambda each: each[2]["ratio"] or 0.0)


def table(arguments, found, name):
    """A drafter's table, in Markdown: a row for each number of nodes, with what the cost model chose below."""
    lines = [f"{name}: tau, milliseconds a round, times plain decoding", ""]
    lines.append(f"| nodes | {' | '.join(f'm = {passes}' for passes in arguments.passes)} |")
    lines.append(f"| {' | '.join(['---'] * (1 + len(arguments.passes)))} |")
    for nodes in arguments.nodes:
        row = [numbers(found[cell(name, nodes, passes)]) for passes in arguments.passes]
        lines.append(f"| {nodes} | {' | '.join(row)} |")
    nodes, passes, top = best(arguments, found, name)
    model = found[chosen(arguments, name)]
    lines += [
        "",
        "| | nodes | passes | tau | ms a round | tokens/s | times plain | identical |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        f"| best of the grid, n = {nodes}, m = {passes} | {line(top)} |",
        f"| cost model, means of a round | {line(model)} |",
    ]
    return "\n".join(lines)


def numbers(row):
    return f"{row['tau']:.2f}, {row['ms']:.1f}, {ratio(row)}"


def line(row):
    means = f"{row['nodes']:.1f} | {row['passes']:.1f} | {row['tau']:.2f} | {row['ms']:.1f} | {row['speed']:.1f}"
    return f"{means} | {ratio(row)} | {row['identical']}"


def ratio(row):
    return "differs" if row["ratio"] is None else f"{row['ratio']:.2f}"


def draw(arguments, found, drafters, path):
    """Draws a row of heat maps for each drafter: tau, milliseconds a round and times plain decoding over n and m."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    titles = {"tau": "tau", "ms": "ms a round", "ratio": "times plain decoding"}
    figure = Figure(figsize=(13, 0.8 + 3.4 * len(drafters)), layout="constrained")
    for name, panels in zip(drafters, figure.subplots(len(drafters), len(titles), squeeze=False)):
        nodes, passes, _ = best(arguments, found, name)
        top = arguments.passes.index(passes), arguments.nodes.index(nodes)
        model = found[chosen(arguments, name)]
        for axes, (field, title) in zip(panels, titles.items()):
            values = [[found[cell(name, n, m)][field] for n in arguments.nodes] for m in arguments.passes]
            known = [[float("nan") if value is None else value for value in row] for row in values]
            image = axes.imshow(known, aspect="auto", origin="lower", cmap="Blues")
            middle = sum(image.get_clim()) / 2
            for y, row in enumerate(known):
                for x, value in enumerate(row):
                    style = {"color": "white" if value > middle else "black", "ha": "center", "va": "center"}
                    style |= {"weight": "bold"} if (y, x) == top else {}
                    text = f"{value:.1f}" if field == "ms" else f"{value:.2f}"
                    axes.text(x, y, text, **style)
            axes.set_xticks(range(len(arguments.nodes)), arguments.nodes)
            axes.set_yticks(range(len(arguments.passes)), arguments.passes)
            axes.set_xlabel("nodes of a tree (n)")
            axes.set_ylabel("draft passes (m)")
            text = "differs" if model[field] is None else f"{model[field]:.2f}"
            axes.set_title(f"{name}: {title}; cost model {text}", fontsize=10)
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    main()
