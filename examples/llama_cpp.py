# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Compares `generate`, with drafters and without, with llama.cpp on a CPU: same prompts, same weights, same number of
threads, in turns prompt by prompt. llama.cpp runs alone, and with its own speculation.

    npm install --prefix runs/llama --save-exact node-llama-cpp@3.21.1
    python examples/llama_cpp.py --packages runs/llama --data mt_bench.jsonl humaneval.jsonl gsm8k.jsonl --limit 10

The npm package has llama.cpp's binaries; it needs Node.js 20. The demo target's GGUF file is written anew with weights
in bfloat16 and in 8 bits, as `generate` runs the values of that file; `--gguf` takes files of other targets.
"""

import argparse
import json
import subprocess
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from pathlib import Path

import gguf
import numpy as np
import torch
from tqdm.auto import tqdm

from hf_falcon import compiled_rounds, packed_weights, uncompile_rounds
from hf_falcon.bench.busy import busy_processes
from hf_falcon.bench.methods import COMPILED, PACKED, Models, resolve
from hf_falcon.bench.prompts import read_turns
from hf_falcon.bench.runner import timed
from hf_falcon.bench.tables import aligned
from hf_falcon.commands.models import encode, load_drafter, load_target, packaged_target

WORKER = Path(__file__).with_suffix(".mjs")
PLAIN = "plain"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", required=True, help="folder that node-llama-cpp was installed in")
    parser.add_argument("--data", nargs="+", required=True, help="JSON-lines files; their first turns are the prompts")
    parser.add_argument("--limit", type=int, default=10, help="prompts of each file")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--target", help="target, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--drafter", help="its drafter; the demo's if left out")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--methods", default="plain,falcon", help="methods of `hf-falcon bench`, plain among them")
    parser.add_argument(
        "--gguf", nargs="+", help="GGUF files of the target; by default the demo's are written, bf16 and q8_0"
    )
    parser.add_argument("--lookups", nargs="*", type=int, default=[3, 8], help="tokens of llama.cpp's prompt lookup")
    parser.add_argument("--draft_model", help="GGUF file of a smaller model, for llama.cpp's speculation")
    parser.add_argument("--busy", type=int, default=0, help="other processes that compute")
    arguments = parser.parse_args()
    if arguments.target is not None and arguments.gguf is None:
        parser.error("--target has no files for llama.cpp: give them as --gguf")
    names = arguments.methods.split(",")
    if PLAIN not in names:
        parser.error(f"--methods has no {PLAIN}, which the others are compared with: add it")

    target, tokenizer = load_target(arguments.target, arguments.dtype, "cpu")
    drafter = load_drafter(arguments.drafter, arguments.dtype, "cpu", target)
    methods, absent = resolve(names, Models(target, {"falcon": drafter}))
    for name, why in absent.items():
        print(f"`{name}` is left out: {why}.")
    files = arguments.gguf or [write_gguf(kind, Path(arguments.packages)) for kind in ("bf16", "q8_0")]
    with ExitStack() as stack:
        peers = {}
        for file in map(Path, files):
            peers[f"llama.cpp, {file.stem}"] = stack.enter_context(llama_cpp(arguments, file))
            for count in arguments.lookups:
                peer = stack.enter_context(llama_cpp(arguments, file, str(count)))
                peers[f"llama.cpp, {file.stem}, its lookup of {count}"] = peer
            if arguments.draft_model is not None:
                peer = stack.enter_context(llama_cpp(arguments, file, arguments.draft_model))
                peers[f"llama.cpp, {file.stem}, its draft model"] = peer
        stack.enter_context(busy_processes(arguments.busy))
        measured = measure(arguments, target, tokenizer, methods, peers)
    print(table(measured))


def measure(arguments, target, tokenizer, methods, peers):
    """Tokens and seconds of each way, by data set. All ways decode a prompt before the next one's turn."""
    data = {Path(source).stem: read_turns(source, arguments.limit) for source in arguments.data}
    prompts = [(name, encode(tokenizer, turns[0], target.device)) for name, found in data.items() for turns in found]
    settings = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False, "return_dict_in_generate": True}

    def ours(name, inputs):
        generate = methods[name]
        with prepared(name, target, generate.get("assistant_model")):
            seconds, output = timed(lambda: target.generate(**inputs, **settings, **generate), target.device)
        return output.sequences.shape[1] - inputs["input_ids"].shape[1], seconds

    def theirs(name, inputs):
        return ask(peers[name], {"ids": inputs["input_ids"][0].tolist()})

    ways = [(name, ours) for name in methods] + [(name, theirs) for name in peers]
    for name, run in tqdm(ways, desc="warming up", unit="way", leave=False):
        run(name, prompts[0][1])
    found = {name: defaultdict(lambda: [0, 0.0]) for name, _ in ways}
    for number, (source, inputs) in enumerate(tqdm(prompts, unit="prompt", leave=False)):
        shift = number % len(ways)
        for name, run in ways[shift:] + ways[:shift]:
            for count, value in enumerate(run(name, inputs)):
                found[name][source][count] += value
    return found


@contextmanager
def prepared(name, target, drafter):
    """The target packed and compiled as a method of `hf-falcon bench` has it, and otherwise as it is."""
    # Also code that `hf-falcon tune --compile` has kept.
    uncompile_rounds(target)
    with ExitStack() as stack:
        if name in PACKED:
            stack.enter_context(packed_weights(target, *([drafter] if drafter is not None else [])))
        if name in COMPILED and drafter is not None:
            stack.enter_context(compiled_rounds(target, drafter=drafter))
        yield


@contextmanager
def llama_cpp(arguments, file, *speculation):
    """A process that decodes with llama.cpp, ready for its first prompt."""
    command = ["node", str(WORKER), arguments.packages, str(file), str(torch.get_num_threads())]
    command += [str(arguments.max_new_tokens), *speculation]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        if not process.stdout.readline():
            raise SystemExit(f"llama.cpp did not start for {file}: node's message is above.")
        yield process
    finally:
        process.kill()
        process.wait()


def ask(process, line):
    """Tokens and seconds of llama.cpp for a prompt."""
    print(json.dumps(line), file=process.stdin, flush=True)
    answer = json.loads(process.stdout.readline())
    return answer["tokens"], answer["seconds"]


def write_gguf(kind, folder):
    """The demo target's file with its matrices as `kind`, "bf16" or "q8_0"."""
    file = folder / f"{kind}.gguf"
    if file.is_file():
        return file
    reader, partial = gguf.GGUFReader(packaged_target()), file.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            of = {"sub_type": field.types[-1]} if is_array else {}
            writer.add_key_value(name, field.contents(), field.types[0], **of)
    wanted = gguf.GGMLQuantizationType[kind.upper()]
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(file)


def table(measured):
    """A row for each way: its speed over plain decoding's by data set and in all, and its tokens a second in all."""
    data = list(measured[PLAIN])

    def speed(name, sources):
        tokens, seconds = (sum(measured[name][source][count] for source in sources) for count in (0, 1))
        return tokens / seconds

    cells = [["tokens a second over plain", *data, "all", "tokens a second"]]
    for name in measured:
        ratios = [speed(name, sources) / speed(PLAIN, sources) for sources in ([each] for each in data)]
        ratios.append(speed(name, data) / speed(PLAIN, data))
        cells.append([name, *(f"{ratio:.2f}" for ratio in ratios), f"{speed(name, data):.1f}"])
    return aligned(cells)


if __name__ == "__main__":
    main()
