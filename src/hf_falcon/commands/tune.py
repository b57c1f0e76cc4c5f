# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon tune`: what a round costs on this machine, and what trees of each size would gain."""

from __future__ import annotations

import io
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import DynamicCache, HfArgumentParser, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from ..bench.prompts import read_turns
from ..core.candidate_generator import FalconCandidateGenerator
from ..core.costs import CostKey, Costs, Stopwatch, measure, save
from ..core.draft_options import DraftOptions
from ..core.drafter import FalconDraftModel
from ..core.policy import AcceptanceStats, DraftPolicy, acceptance_stats_of
from ..core.target_parts import FeatureTap
from ..core.target_run import TargetRun
from ..core.tree import Branches
from ..cpu.packing import pack_weights
from ..training.token_file import write_atomically
from .models import encode, load_drafter, load_target, resolve_device, resolve_dtype
from .report import aligned

_SECONDS = 20.0
# Part of that time for each number of threads, and the share of all threads' seconds that fewer must stay below.
_PART, _CLEARLY = 0.1, 0.95
_PROMPTS = ["Why is the sky blue?", "Write a Python function that merges two sorted lists.", "What is 17 * 23 + 4?"]


@dataclass
class TuneArguments:
    """
    Arguments of `hf-falcon tune`.

    Args:
        target, drafter (`str`, *optional*): names or folders; those of the demo if left out.
        data (`list[str]`, *optional*): JSON-lines files with `turns` whose answers are drafted; three prompts of its
            own if left out.
        limit (`int`, *optional*, defaults to 3): prompts of each file, from the start.
        max_new_tokens (`int`, *optional*, defaults to 64): tokens of an answer, at most.
        context (`int`, *optional*, defaults to 256): tokens before the round that is timed.
        seconds (`float`, *optional*, defaults to 20): how long the target is timed.
        pack (`bool`, *optional*, defaults to `False`): pack the weights of both first, for calls with packed weights.
        output (`str`, *optional*): folder of `tune.json` and `tune.png`; the drafter's if that is a folder. There its
            `generation_config.json` gets `draft_calibration`, in any case.
    """

    target: str | None = field(default=None, metadata={"help": "Target, from the Hub or a folder."})
    drafter: str | None = field(default=None, metadata={"help": "Drafter, from the Hub or a folder."})
    data: list[str] | None = field(default=None, metadata={"help": "JSON-lines files with `turns`."})
    limit: int = field(default=3, metadata={"help": "Prompts of each file, from the start."})
    max_new_tokens: int = field(default=64, metadata={"help": "Tokens of an answer, at most."})
    context: int = field(default=256, metadata={"help": "Tokens before the round that is timed."})
    seconds: float = field(default=_SECONDS, metadata={"help": "How long the target is timed."})
    pack: bool = field(default=False, metadata={"help": "Pack the weights of both first (`pack_weights`)."})
    dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})
    device: str | None = field(default=None, metadata={"help": "By default cuda where there is one, else cpu."})
    output: str | None = field(default=None, metadata={"help": "Folder of tune.json and tune.png."})

    def __post_init__(self) -> None:
        for name in ("limit", "max_new_tokens", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; give 1 or more.")
        if not self.seconds > 0:
            raise ValueError(f"`seconds` is {self.seconds}; give a number above 0.")


class _Recorder(DraftPolicy):
    """Drafts all passes; notes after each how many tokens the best 0, 1, 2, ... nodes are expected to have right."""

    def __init__(self, options: DraftOptions, device: torch.device):
        super().__init__(options, AcceptanceStats(), device)
        self.expected: list[Tensor] = []

    def another_pass(self, branches: Branches, best: Tensor) -> bool:
        self._note(best)
        return True

    def size(self, best: Tensor) -> int:
        self._note(best)
        return 0

    def _note(self, best: Tensor) -> None:
        tokens = torch.zeros(self._options.num_assistant_tokens + 1, device=best.device)
        tokens[1 : 1 + best.shape[0]] = best.exp()
        self.expected.append(tokens.cumsum(dim=0).cpu())


@torch.no_grad()
def target_seconds(target: PreTrainedModel, context: int, max_nodes: int, seconds: float) -> dict[int, float]:
    """Seconds of the target's forward by draft nodes, behind `context` tokens."""
    input_ids = torch.randint(target.config.get_text_config(decoder=True).vocab_size, (1, context))
    kwargs = {"past_key_values": DynamicCache(config=target.config), "use_cache": True}
    run = TargetRun(target, input_ids.to(target.device), target.generation_config, kwargs)
    run.prefill(input_ids.to(target.device))
    return measure(run.dry_run, max_nodes, target.device, seconds, repeats=1000)


def seconds_by_threads(
    target: PreTrainedModel, context: int, nodes: int, seconds: float
) -> dict[int, tuple[float, float]]:
    """
    Seconds of the target's forward for a single token and for a tree of `nodes` draft nodes, by threads: as many as
    torch uses now, half of them, and so on. Empty where the target is not on a CPU, or has one thread.
    """
    most, found = torch.get_num_threads(), {}
    counts = [most // 2**step for step in range(most.bit_length())]
    if target.device.type != "cpu" or len(counts) == 1:
        return {}
    try:
        for count in counts:
            torch.set_num_threads(count)
            took = target_seconds(target, context, nodes, seconds)
            found[count] = took[0], took[nodes]
    finally:
        torch.set_num_threads(most)
    return found


@torch.no_grad()
def drafting(
    drafter: FalconDraftModel, target: PreTrainedModel, texts: list[Tensor], options: DraftOptions
) -> tuple[Tensor, float, float]:
    """
    Drafts at every place of some texts.

    Args:
        drafter, target, options: the drafter, its target, its options.
        texts (`list` of `torch.LongTensor` of shape `(1, length)`): the texts, each of 3 tokens or more.

    Returns:
        Expected tokens by passes and nodes, of shape `(passes, nodes + 1)`, by the drafter's own probabilities; and
        median seconds of a commit with the first block, and of each further pass.
    """
    total, places = torch.zeros(options.num_draft_passes, options.num_assistant_tokens + 1), 0
    commits, passes = [], []
    for text in texts:
        with FeatureTap(target, drafter.config.feature_layers) as tap:
            target(text)
        features = tap.take()
        generator = FalconCandidateGenerator(drafter, target, options)
        for place in range(1, text.shape[1] - 1):
            watch, recorder = Stopwatch(), _Recorder(options, drafter.device)
            new = slice(0, 2) if place == 1 else slice(place, place + 1)
            generator.commit(features[:, new], text[:, new.start + 1 : new.stop + 1])
            commits.append(watch.lap())
            generator.propose(text[0, place + 1 : place + 2], generator.max_depth, recorder)
            passes.append(watch.lap() / options.num_draft_passes)
            if len(recorder.expected) == options.num_draft_passes:
                total += torch.stack(recorder.expected)
                places += 1
    return total / max(1, places), statistics.median(commits), statistics.median(passes)


def speedups(expected: Tensor, costs: Costs) -> Tensor:
    """Predicted speed-up over plain decoding by passes and nodes, of the shape of `expected`."""
    target = torch.tensor(costs.target(expected.shape[1] - 1))
    drafted = costs.commit + costs.draft_pass * torch.arange(expected.shape[0])
    return (1.0 + expected) / (target[None] + drafted[:, None])


def fastest_count(seconds: dict[int, tuple[float, float]]) -> int:
    """The number of threads that trees are fastest with, or the first where it is hardly slower."""
    first, best = next(iter(seconds)), min(seconds, key=lambda count: seconds[count][1])
    return best if seconds[best][1] < _CLEARLY * seconds[first][1] else first


def main(argv: list[str]) -> int:
    """Runs `hf-falcon tune`."""
    parser = HfArgumentParser(TuneArguments, prog="hf-falcon tune", description=__doc__)
    arguments = TuneArguments(**vars(parser.parse_args(argv)))
    prompts = _PROMPTS
    if arguments.data:
        prompts = [turns[0] for path in arguments.data for turns in read_turns(path, arguments.limit)]
    device = resolve_device(arguments.device)
    dtype = resolve_dtype(arguments.dtype, device)
    target, tokenizer = load_target(arguments.target, dtype, device)
    drafter = load_drafter(arguments.drafter, dtype, device)
    if arguments.pack:
        pack_weights(target)
        pack_weights(drafter)
    # The trees are searched for, not given: all passes, and nothing looked up.
    drafter.generation_config.assistant_confidence_threshold = 0.0
    options = DraftOptions.from_generation_config(drafter.generation_config)
    if options.draft_tree != "dynamic":
        raise ValueError(f"`draft_tree` is {options.draft_tree!r}: only dynamic trees have a size to be tuned.")

    seconds = target_seconds(target, arguments.context, options.num_assistant_tokens, arguments.seconds)
    cost_key = CostKey.of(target, arguments.context, options.num_assistant_tokens)
    save(target, cost_key, seconds)
    experience = acceptance_stats_of(drafter, target)
    # Not measured again for the answers.
    experience.costs[cost_key] = Costs(seconds)
    # What is looked up would take nodes from the draft, and tell nothing of it.
    drafter.generation_config.prompt_lookup_num_tokens = 0
    drafter.generation_config.draft_calibration = []
    drafter.generation_config.num_assistant_tokens_schedule = "heuristic"
    texts = []
    for prompt in tqdm(prompts, unit="prompt", desc="Answers to draft", leave=False):
        answer = target.generate(
            **encode(tokenizer, prompt, device),
            assistant_model=drafter,
            max_new_tokens=arguments.max_new_tokens,
            do_sample=False,
        )
        texts.append(answer)
    calibration = [round(share.value, 3) for share in experience.depths]
    expected, commit, draft_pass = drafting(drafter, target, texts, options)
    costs = Costs(seconds)
    costs.commit, costs.draft_pass = commit / seconds[0], draft_pass / seconds[0]
    gains = speedups(expected, costs)
    best = divmod(int(gains.argmax()), gains.shape[1])

    curve = [["nodes", *map(str, seconds)], ["ms", *(f"{1e3 * value:.1f}" for value in seconds.values())]]
    print(aligned(curve))
    nodes = max(1, best[1])
    by_threads = seconds_by_threads(target, arguments.context, nodes, _PART * arguments.seconds)
    for count, (plain, tree) in by_threads.items():
        print(f"{count} threads: {1e3 * plain:.1f} ms without nodes, {1e3 * tree:.1f} ms with {nodes}")
    if by_threads and (count := fastest_count(by_threads)) != torch.get_num_threads():
        print(f"Fewer threads are faster here: set `OMP_NUM_THREADS={count}`.")
    print(f"first block {1e3 * commit:.1f} ms, each further pass {1e3 * draft_pass:.1f} ms")
    print(
        f"predicted: {gains.max():.2f} times plain decoding with {best[1]} nodes and {best[0] + 1} passes a round; "
        f"{expected[best]:.2f} draft tokens a round by the drafter's own probabilities"
    )
    print(f"right, over the drafter's own probability, by depth: {' '.join(f'{share:.2f}' for share in calibration)}")
    folder = _output(arguments)
    found = {
        "seconds": seconds,
        "commit": commit,
        "draft_pass": draft_pass,
        "expected": expected.tolist(),
        "speedup": gains.tolist(),
        "nodes": best[1],
        "passes": best[0] + 1,
        "draft_calibration": calibration,
        "seconds_by_threads": by_threads,
        **cost_key._asdict(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "tune.json", json.dumps(found, indent=2).encode())
    try:
        write_atomically(folder / "tune.png", picture(gains))
    except ImportError:
        print("No tune.png: matplotlib is not installed. Run `pip install hf-falcon[bench]`.")
    if own := _own_folder(arguments):
        keep_calibration(own, calibration)
    print(f"More in {folder / 'tune.json'}. `generate` uses the target's times from now on.")
    return 0


def _own_folder(arguments: TuneArguments) -> Path | None:
    """The drafter's, where it is named by one."""
    return Path(arguments.drafter) if arguments.drafter and Path(arguments.drafter).is_dir() else None


def _output(arguments: TuneArguments) -> Path:
    return Path(arguments.output) if arguments.output is not None else _own_folder(arguments) or Path("tune")


def keep_calibration(folder: Path, calibration: list[float]) -> None:
    """Writes `draft_calibration` into the generation configuration of the drafter in `folder`; the rest stays."""
    file = folder / GENERATION_CONFIG_NAME
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    write_atomically(file, (json.dumps({**kept, "draft_calibration": calibration}, indent=2) + "\n").encode())


def picture(gains: Tensor) -> bytes:
    """Predicted speed-up over nodes and passes as a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes: Any = figure.subplots()
    passes, nodes = gains.shape
    image = axes.imshow(gains.numpy(), aspect="auto", origin="lower", extent=(-0.5, nodes - 0.5, 0.5, passes + 0.5))
    axes.set_xlabel("draft nodes that are verified")
    axes.set_ylabel("draft passes")
    axes.set_yticks(range(1, passes + 1))
    figure.colorbar(image, label="times plain decoding, predicted")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
