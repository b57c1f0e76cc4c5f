# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Examples as modules, and shell scripts whose commands are recorded."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from tiny_models import tiny_drafter, tiny_target

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


def example(name):
    """An example script as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_recorded(script, words, folder, **environment):
    """Runs a shell script with an `hf-falcon` that does nothing. Returns its commands, and what it printed."""
    record, stub = folder / "record", folder / "bin" / "hf-falcon"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "" >> "$RECORD"\n')
    stub.chmod(0o755)
    record.write_text("")
    path = os.pathsep.join((str(stub.parent), str(Path(sys.executable).parent), os.environ["PATH"]))
    result = subprocess.run(
        ["bash", EXAMPLES / script, *words],
        cwd=folder,
        env={**os.environ, "PATH": path, "RECORD": str(record), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [block.split("\n") for block in record.read_text().split("\n\n")[:-1]], result.stdout


def run_example(name, workplace, tmp_path, monkeypatch, capsys, *words):
    """Runs an example that prints a table with the workplace's target and a random drafter; returns its rows."""
    tiny_drafter(tiny_target("llama"), block_size=2).save_pretrained(tmp_path / "drafter")
    common = ["--target", workplace / "target", "--drafter", tmp_path / "drafter", "--dtype", "float32"]
    monkeypatch.setattr("sys.argv", [name, *map(str, common), *words])
    script = example(name)
    script.main()
    return [line.split() for line in capsys.readouterr().out.splitlines()]
