# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Searches files and requests of strangers for one that is neither used nor refused in words. `make fuzz` runs it.

    python tests/support/fuzz.py --minutes 10             # or --inputs 10000, counted with those of earlier runs
    python tests/support/fuzz.py --classes dialogues server

Each input must give what plain decoding gives, or end in `ValueError` or `OSError` with a message, within 10 seconds
and with less than 1 GB of memory. Inputs run in batches, each in a process of its own. The folder (`--folder`) keeps
how many were tried, hypothesis' database, and in `found/` each input that broke a rule, with the error. The same
command goes on after an interruption, and tries what broke a rule first.
"""

import argparse
import base64
import contextlib
import faulthandler
import itertools
import json
import logging
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SECONDS = 10
MEMORY = 1 << 30
# Seconds after which a process that does not react to its own alarm is ended.
_PATIENCE = 3 * SECONDS
# Seconds for the imports of a process, and for the models of a class.
_START = 120
_BATCH = 250
Files = dict[str, bytes]


class Slow(BaseException):
    """The alarm of an input; no `except Exception` hides it."""


class Kind(NamedTuple):
    """A class of inputs: a strategy for its files, what uses them in a folder, and whether errors name a file."""

    inputs: object
    use: Callable[[Path], None]
    names_file: bool = True


# The classes. Each function runs once in a process, and gives the class.


def falcon_drafters() -> Kind:
    """Folders of a Falcon drafter, without digests: what was changed goes on to be read."""
    import torch
    from fuzz_inputs import json_bytes, safetensors_bytes, split_safetensors
    from hypothesis import strategies as st
    from tiny_models import new_drafter, prompt, tiny_drafter, tiny_target
    from utilities import edit

    from hf_falcon import FalconDraftModel

    target, ids = tiny_target("llama"), prompt(12)
    expected = plain(target, ids)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        drafter = new_drafter(target, draft_vocab_size=40)
        drafter.generation_config = tiny_drafter(target, draft_tree="dynamic").generation_config
        drafter.save_pretrained(folder)
        edit(folder / "config.json", weights_sha256=None)
        files = {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix in (".json", ".safetensors")}
    weights = files["model.safetensors"]
    names = [name for name in split_safetensors(weights)[0] if name != "__metadata__"]
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    sharded = {name: data for name, data in files.items() if name != "model.safetensors"} | {"a.safetensors": weights}
    sharded["model.safetensors.index.json"] = json.dumps(index).encode()

    @st.composite
    def inputs(draw):
        found = dict(draw(st.sampled_from([files, files, sharded])))
        name = draw(st.sampled_from([name for name in found if not name.startswith("provenance")]))
        strategy = safetensors_bytes if name.endswith(".safetensors") else json_bytes
        original = found[name] if name.endswith(".safetensors") else json.loads(found[name])
        return {**found, name: draw(strategy(original))}

    def use(folder: Path) -> None:
        loaded = FalconDraftModel.from_pretrained(folder, dtype=torch.float32)
        assert plain(target, ids, assistant_model=loaded) == expected, "The output is not that of plain decoding."

    return Kind(inputs(), use, names_file=False)


def other_drafters() -> Kind:
    """Folders of EAGLE-3, DFlash and DSpark drafters, original and of speculators: `config.json` and weights."""
    import torch
    from fuzz_inputs import damaged, json_bytes, safetensors_bytes
    from hypothesis import strategies as st

    from hf_falcon import AutoDrafter

    references = Path(__file__).parents[1] / "drafters" / "references"
    folders = sorted(path.parent for path in references.glob("*/config.json"))
    mutations = {"model.safetensors": safetensors_bytes, "pytorch_model.bin": damaged}

    @st.composite
    def inputs(draw):
        folder = draw(st.sampled_from(folders))
        weights = next(name for name in mutations if (folder / name).exists())
        found = {name: (folder / name).read_bytes() for name in ("config.json", weights)}
        name = draw(st.sampled_from(["config.json", "config.json", weights]))
        if name == "config.json":
            return {**found, name: draw(json_bytes(json.loads(found[name])))}
        return {**found, name: draw(mutations[name](found[name]))}

    def use(folder: Path) -> None:
        AutoDrafter.from_pretrained(str(folder), dtype=torch.float32)

    return Kind(inputs(), use, names_file=False)


def cost_caches() -> Kind:
    """The file of measured costs: whatever is in it, `generate` answers as without it."""
    from fuzz_inputs import damaged, json_bytes
    from hypothesis import strategies as st
    from tiny_models import new_target, prompt, tiny_drafter

    from hf_falcon import cost_files
    from hf_falcon.core import costs, policy

    target, ids = new_target("llama"), prompt(12)
    schedule = {"num_assistant_tokens_schedule": "heuristic", "draft_tree": "dynamic"}
    drafter = tiny_drafter(target, num_assistant_tokens=9, **schedule)
    expected = plain(target, ids, max_new_tokens=100)

    def decode(tokens: int) -> None:
        # What this process knows is forgotten, so that the file is read.
        policy._acceptance_stats.clear()
        found = plain(target, ids, assistant_model=drafter, max_new_tokens=tokens)
        assert found[0] == expected[0][: ids.shape[1] + tokens], "The output is not that of plain decoding."

    cost_files.save(target, costs.CostKey.of(target, 12, 9), {0: 1.0, 9: 1.5})
    decode(100)
    (kept,) = Path(os.environ["HF_FALCON_CACHE"]).rglob("*.json")
    original = json.loads(kept.read_bytes())
    sizes = st.sampled_from(["0", "-1", "100000", "1000000000", "1" * 5000, "x", "1.5", "nan"])

    @st.composite
    def inputs(draw):
        if draw(st.booleans()):
            return {"costs.json": draw(json_bytes(original))}
        seconds = draw(st.dictionaries(sizes, st.floats() | st.integers(), max_size=4))
        text = json.dumps({**original, "seconds": {**original["seconds"], **seconds}}).encode()
        return {"costs.json": draw(st.just(text) | damaged(text))}

    def use(folder: Path) -> None:
        shutil.copy(folder / "costs.json", kept)
        try:
            decode(16)
        except (ValueError, OSError) as error:
            raise AssertionError("`generate` must go on as if the file were not there.") from error

    return Kind(inputs(), use)


def token_files() -> Kind:
    """Token files, as training reads them."""
    import torch
    from fuzz_inputs import as_bytes, changed, join_safetensors, safetensors_bytes, split_safetensors
    from hypothesis import strategies as st

    from hf_falcon.training.token_file import TokenFile

    metadata = {"target": "t", "target_fingerprint": "f", "data": ["a", "b"], "plan": {"seed": 1, "turns": "first"}}
    originals = []
    for vocab_size in (100, 1 << 17):
        samples = [torch.tensor([5, 6, 7]), torch.tensor([99, 1]), torch.tensor([3, 4, 5, 6])]
        with tempfile.TemporaryDirectory() as name:
            TokenFile.from_samples(samples, [1, 1, 2], [0.0, -1.0, 0.7], vocab_size, metadata).save(Path(name, "file"))
            originals.append(Path(name, "file").read_bytes())

    @st.composite
    def with_metadata(draw, data):
        header, tensors = split_safetensors(data)
        metadata = draw(changed(json.loads(header["__metadata__"]["hf_falcon"])))
        header["__metadata__"] = draw(st.just({"hf_falcon": as_bytes(metadata).decode()}) | st.just(metadata))
        return join_safetensors(as_bytes(header), tensors)

    def use(folder: Path) -> None:
        path = folder / "tokens.safetensors"
        data = TokenFile.load(path)
        data.check_vocabulary(100, path)
        for index in range(len(data)):
            token_ids, length = data.sample(index)
            assert 0 < length < len(token_ids) and 0 <= int(token_ids.min()) and int(token_ids.max()) < 100
        both = TokenFile.concatenate([data, data])
        assert len(both) == 2 * len(data) and all(isinstance(source, str) for source in both.sources)
        both.save(folder / "again")

    one = st.sampled_from(originals)
    inputs = one.flatmap(lambda data: safetensors_bytes(data) | safetensors_bytes(data) | with_metadata(data))
    return Kind(inputs.map(lambda data: {"tokens.safetensors": data}), use)


def dialogues() -> Kind:
    """Files of dialogues: JSON and JSON Lines, in both forms."""
    from fuzz_inputs import as_bytes, changed, damaged, json_bytes
    from hypothesis import strategies as st

    from hf_falcon.training.dialogues import read_dialogues
    from hf_falcon.training.skipped_records import SkippedRecords

    texts = ['Hi "you", \\ é 😀\n', "Yes]}", "-1e5, true", "a" * 3000]
    sharegpt = [
        {"id": str(number), "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text}]}
        for number, text in enumerate(texts)
    ]
    messages = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}], "score": 1.5}
        for text in texts
    ]

    @st.composite
    def lines(draw, records):
        data = b"\n".join(map(as_bytes, draw(changed(records))))
        return draw(st.just(data) | damaged(data))

    def use(folder: Path) -> None:
        # Leaving out what cannot be read has the same limits.
        with contextlib.suppress(ValueError):
            skipped = SkippedRecords(max_share=1)
            found = list(read_dialogues(folder / "data.json", skipped=skipped))
            assert len(found) + skipped.count == skipped.read
        for dialogue in read_dialogues(folder / "data.json"):
            for message in dialogue.messages:
                assert message.keys() >= {"role", "content"} and isinstance(message["content"], str)
                json.dumps(message, ensure_ascii=False).encode()

    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "b"}
    tools = [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}, called], "tools": "[]"}
        for text in texts
    ]
    pairs = [
        record
        for text in texts
        for record in ({"prompt": text, "completion": [called]}, {"instruction": text, "output": text}, {"text": text})
    ]
    records = st.sampled_from([sharegpt, messages, tools, pairs])
    inputs = records.flatmap(lambda value: json_bytes(value) | lines(value))
    return Kind(inputs.map(lambda data: {"data.json": data}), use)


def requests() -> Kind:
    """Requests to the server of `hf-falcon serve`: it answers each, and lives on."""
    from fuzz_inputs import changed, damaged, json_bytes
    from hypothesis import strategies as st
    from serving import chat_tokenizer
    from tiny_models import new_drafter, new_target

    import hf_falcon
    from hf_falcon.commands import request_limits
    from hf_falcon.commands.serving import TargetServer

    # A request that does not end is refused sooner than in use.
    request_limits.SECONDS, request_limits._LAST_WORDS = 0.3, 0.05
    target = new_target("llama", max_position_embeddings=64)
    hf_falcon.attach(target, new_drafter(target))
    server = TargetServer(target, chat_tokenizer(), "user/tiny")
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=server.run, args=(listener,), daemon=True).start()
    options = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["x"], "stream": True}
    chat = {"messages": [{"role": "user", "content": "abc"}], **options, "logit_bias": {"3": 1}, "model": "user/tiny"}
    chat |= {"chat_template_kwargs": {"a": 1}, "generation_config": '{"top_k": 5}', "frequency_penalty": 0.5}
    chat |= {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
    answer = {"input": "abc", "max_output_tokens": 4, "instructions": "a", "stream": False, "temperature": 0.5}
    bodies = {
        "/v1/chat/completions": chat,
        "/v1/completions": {"prompt": "abc", **options, "suffix": "b"},
        "/v1/responses": answer,
        "/load_model": {"model": "user/tiny"},
        "/reset": {},
        "/v1/audio/transcriptions": {},
    }

    def request(path: str, body: bytes) -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    @st.composite
    def inputs(draw):
        path = draw(st.sampled_from([*bodies, "/v1/chat/completions", "/v1/chat/completions", "/v1/responses"]))
        body = bodies[path]
        if draw(st.booleans()):
            # Few fields, so that those that are wrong are reached.
            body = {
                name: value for name, value in body.items() if name in ("messages", "input") or draw(st.booleans())
            }
        data = request(path, draw(json_bytes(draw(changed(body) | st.just(body)))))
        return {"request": draw(st.just(data) | st.just(data) | st.just(data) | damaged(data))}

    def send(data: bytes) -> bytes:
        found = b""
        with socket.create_connection(listener.getsockname(), timeout=SECONDS) as connection:
            # A connection that the server closes while this end sends is reset.
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
                while piece := connection.recv(1 << 16):
                    found += piece
        return found

    def use(folder: Path) -> None:
        data = (folder / "request").read_bytes()
        status, _, rest = send(data).partition(b"\r\n")
        health = send(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert health.startswith(b"HTTP/1.1 200"), f"The server does not live on: {health!r}"
        code = status.split(b" ")[1] if status.startswith(b"HTTP/1.1 ") else status
        # Several requests in one, or a reset.
        if code.startswith(b"4"):
            assert rest.partition(b"\r\n\r\n")[2] or data.startswith(b"HEAD"), f"No words: {status!r}"
            raise ValueError(f"request: {status.decode()}")
        assert code in (b"200", b""), f"{status!r} {rest[-500:]!r}"

    return Kind(inputs(), use)


def run_files() -> Kind:
    """YAML files of `hf-falcon train --config`."""
    import yaml
    from fuzz_inputs import changed, damaged
    from hypothesis import strategies as st

    from hf_falcon.commands.run_arguments import parse_run
    from hf_falcon.commands.train_arguments import DrafterArguments
    from hf_falcon.training.trainer import FalconTrainingArguments

    examples = Path(__file__).parents[2] / "examples"
    names = ("paper.yaml", "train_llama_8b.yaml")
    originals = [{"data": ["x"], **yaml.safe_load((examples / name).read_text())} for name in names]
    # Small as text, 2**30 values as lists.
    doubled = ", ".join(f"&{b} [*{a}, *{a}]" for a, b in itertools.pairwise(f"x{number}" for number in range(30)))
    doubled = f"[&x0 [y, y], {doubled}]"

    @st.composite
    def inputs(draw):
        text = yaml.dump(draw(changed(draw(st.sampled_from(originals)))))
        if draw(st.integers(0, 9)) == 0:
            text = re.sub("(?<=: ).*", doubled, text, count=draw(st.sampled_from([1, 5])))
        return {"run.yaml": draw(st.just(text.encode("utf-8", "replace")) | damaged(text.encode("utf-8", "replace")))}

    def use(folder: Path) -> None:
        types = (DrafterArguments, FalconTrainingArguments)
        parse_run(["--config", str(folder / "run.yaml")], types, prog="hf-falcon train", description=None)

    return Kind(inputs(), use, names_file=False)


CLASSES = {
    "falcon-drafters": falcon_drafters,
    "other-drafters": other_drafters,
    "cost-caches": cost_caches,
    "token-files": token_files,
    "dialogues": dialogues,
    "requests": requests,
    "run-files": run_files,
}


def plain(target, ids, **options) -> list:
    return target.generate(ids, **{"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, **options}).tolist()


# The process of a batch.


def try_inputs(name: str, seed: int, count: int, folder: Path) -> dict:
    """Tries `count` inputs of a class. Returns outcomes, the slowest, the peak of memory, and what broke a rule."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis.database import DirectoryBasedExampleDatabase

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    kind = CLASSES[name]()
    work = Path(tempfile.mkdtemp())
    outcomes: Counter[str] = Counter()
    slowest = [0.0]
    signal.signal(signal.SIGALRM, alarm)
    before = peak()
    limit_memory(3 * MEMORY)

    def attempt(files: Files) -> None:
        (folder / f"{name}.current").write_text(packed(files))
        shutil.rmtree(work)
        for file, data in files.items():
            (work / file).parent.mkdir(parents=True, exist_ok=True)
            (work / file).write_bytes(data)
        start = time.monotonic()
        # Where it hangs, if it does not hear the alarm.
        faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            kind.use(work)
            outcome = "works"
        except (ValueError, OSError) as error:
            outcome = "OSError" if isinstance(error, OSError) else "ValueError"
            text = str(error)
            assert text, f"No words: {error!r}"
            assert not kind.names_file or any(file in text for file in files), f"Names no file: {error!r}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
        slowest[0] = max(slowest[0], time.monotonic() - start)
        outcomes[outcome] += 1
        assert peak() - before < MEMORY, f"{(peak() - before) >> 20} MiB more than before"

    test = given(kind.inputs)(attempt)
    phases = (Phase.reuse, Phase.generate, Phase.shrink)
    database = DirectoryBasedExampleDatabase(folder / "examples" / name)
    options = {"max_examples": count, "phases": phases, "database": database, "deadline": None}
    test = settings(**options, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)(test)
    broken = None
    try:
        seeded(seed)(test)()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        # Hypothesis notes the whole input, which is kept as files.
        error.__notes__ = []
        broken = "".join(traceback.format_exception(error))[-20_000:]
    shutil.rmtree(work)
    return {"outcomes": outcomes, "slowest": slowest[0], "memory": peak() - before, "broken": broken}


def child(name: str, seed: int, count: int, folder: Path) -> None:
    """Prints the report of a batch as a line of JSON."""
    print(json.dumps(try_inputs(name, seed, count, folder)), flush=True)
    # Threads, such as the server's, do not keep the process.
    os._exit(0)


def alarm(*_) -> None:
    raise Slow(f"It took more than {SECONDS} seconds.")


def peak() -> int:
    """Bytes, of this process so far."""
    try:
        # What `getrusage` counts begins with the memory of the process that started this one.
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    except (OSError, TypeError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def limit_memory(more: int) -> None:
    """A process that wants far more fails, where the machine would."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    used = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))


def packed(files: Files) -> str:
    return json.dumps({name: base64.b64encode(data).decode() for name, data in files.items()})


# The process that starts batches.


def run_batch(name: str, seed: int, count: int, folder: Path) -> dict:
    """The report of a batch in a process of its own, which is ended if an input stops it."""
    current = folder / f"{name}.current"
    current.write_text("{}")
    words = [sys.executable, __file__, "--child", name, str(seed), str(count), "--folder", str(folder)]
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as errors:
        environment = {**os.environ, "HF_FALCON_CACHE": cache, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process:
            output: list[str] = []
            reader = threading.Thread(target=lambda: output.extend(process.stdout))
            reader.start()
            try:
                while process.poll() is None:
                    started = current.stat().st_size > len("{}")
                    if time.time() - current.stat().st_mtime > (_PATIENCE if started else _START):
                        break
                    time.sleep(0.05)
            finally:
                process.kill()
            reader.join()
        errors.seek(0)
        said = errors.read()[-20_000:]
    try:
        return json.loads(output[-1])
    except (IndexError, ValueError):
        how = f"The process ended by itself, or gave no sign of life for {_PATIENCE} seconds.\n{said}"
        return {"outcomes": {}, "slowest": _PATIENCE, "memory": 0, "broken": how}


def keep_input(name: str, broken: str, folder: Path) -> Path:
    """Writes the last input of a class, and its error, to a folder of `found`."""
    number = len(list(folder.glob(f"found/{name}-*")))
    place = folder / "found" / f"{name}-{number}"
    place.mkdir(parents=True)
    (place / "error.txt").write_text(broken, encoding="utf-8", errors="backslashreplace")
    for file, data in json.loads((folder / f"{name}.current").read_text()).items():
        (place / file).write_bytes(base64.b64decode(data))
    return place


def line(name: str, state: dict) -> str:
    counts = ", ".join(f"{value:,} {key}" for key, value in sorted(state["outcomes"].items()))
    memory, slowest = state["memory"] >> 20, state["slowest"]
    return f"{name}: {state['tried']:,} inputs ({counts}), +{memory} MiB at most, the slowest {slowest:.1f} s"


def search(folder: Path, names: list[str], inputs: int | None, minutes: float | None, batch: int = _BATCH) -> int:
    """
    Tries inputs of the classes `names` in turn, until `inputs` were tried in all or `minutes` are over.

    Returns:
        `int`: how many classes have an input that breaks a rule.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "state.json"
    states = json.loads(file.read_text()) if file.exists() else {}
    end = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    broken: dict[str, Path] = {}
    share = None if inputs is None else -(-inputs // len(names))
    while time.monotonic() < end:
        left = [name for name in names if name not in broken]
        left = [name for name in left if share is None or states.get(name, {"tried": 0})["tried"] < share]
        if not left:
            break
        name = min(left, key=lambda name: states.get(name, {"tried": 0})["tried"])
        state = states.setdefault(name, {"tried": 0, "batches": 0, "outcomes": {}, "memory": 0, "slowest": 0.0})
        count = batch if share is None else min(batch, share - state["tried"])
        report = run_batch(name, state["batches"], count, folder)
        state["outcomes"] = dict(Counter(state["outcomes"]) + Counter(report["outcomes"]))
        state |= {"tried": state["tried"] + count, "batches": state["batches"] + 1}
        state |= {key: max(state[key], report[key]) for key in ("memory", "slowest")}
        if report["broken"]:
            broken[name] = keep_input(name, report["broken"], folder)
            # They are not counted as tried: the next run begins with the one that broke a rule.
            state["tried"] -= count
        file.write_text(json.dumps(states, indent=2))
        print(line(name, state) + (f"; BROKEN: {broken[name]}" if name in broken else ""), flush=True)
    for name, place in broken.items():
        print(f"{name}: an input breaks a rule, see {place}")
    return len(broken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES), help="all by default")
    parser.add_argument("--inputs", type=int, help="end after so many inputs in all, those of earlier runs included")
    parser.add_argument("--minutes", type=float, help="end after so many minutes; 10 by default, without `--inputs`")
    parser.add_argument("--folder", type=Path, default=Path("runs/fuzz"), help="what is kept from run to run")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        name, seed, count = arguments.child
        child(name, int(seed), int(count), arguments.folder)
    minutes = 10.0 if arguments.inputs is None and arguments.minutes is None else arguments.minutes
    sys.exit(min(1, search(arguments.folder, arguments.classes, arguments.inputs, minutes)))


if __name__ == "__main__":
    main()
