# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Writes prompts whose answers repeat much of the prompt: code to edit, texts to summarise, questions about a text. Code
and texts are of Python's standard library, so every machine has them.

    python examples/copying_prompts.py --output runs/copying

The folder then has edit.jsonl, summarise.jsonl and answer.jsonl, for `hf-falcon bench --data`.
"""

import argparse
import ast
import importlib
import inspect
import itertools
import json
import re
from pathlib import Path

MODULES = """argparse ast bisect calendar cmd codecs collections colorsys configparser contextlib copy csv difflib dis
doctest email.utils enum fileinput filecmp fnmatch fractions functools getopt gettext glob gzip heapq hmac html
http.client http.cookies http.server imaplib inspect ipaddress json linecache locale logging logging.config mailbox
mimetypes modulefinder netrc numbers opcode operator optparse os pathlib pdb pickle pickletools pkgutil platform
plistlib poplib posixpath pprint pstats py_compile pyclbr queue quopri random re reprlib sched selectors shelve shlex
shutil smtplib socket socketserver stat statistics string subprocess symtable tabnanny tarfile tempfile textwrap
threading timeit tokenize trace traceback tty types unittest urllib.parse urllib.request urllib.robotparser uuid
warnings wave weakref webbrowser xml.dom.minidom xmlrpc.client zipapp zipfile""".split()
EDITS = [
    "Add type hints to the arguments and the result of this function.",
    "Give the first parameter of this function the name `given`.",
    "Add a comment that says what it does before each loop and each condition of this function.",
    "Print the result before this function returns it.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the three files")
    parser.add_argument("--count", type=int, default=20, help="prompts of each kind")
    arguments = parser.parse_args()
    modules = [importlib.import_module(name) for name in MODULES]
    arguments.output.mkdir(parents=True, exist_ok=True)
    texts = texts_of(modules)
    kinds = {"edit": edits(modules), "summarise": summaries(texts[::2]), "answer": questions(texts[1::2])}
    for name, prompts in kinds.items():
        lines = [json.dumps({"turns": [text]}) + "\n" for text in itertools.islice(prompts, arguments.count)]
        file = arguments.output / f"{name}.jsonl"
        file.write_text("".join(lines), encoding="utf-8")
        print(f"{file}: {len(lines)} prompts")


def edits(modules):
    """A function of each module, with something to change."""
    instructions = itertools.cycle(EDITS)
    for module in modules:
        source = inspect.getsource(module)
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.args.args and 8 <= node.end_lineno - node.lineno <= 20:
                function = ast.get_source_segment(source, node)
                yield f"{next(instructions)} Reply with the whole function.\n\n```python\n{function}\n```"
                break


def texts_of(modules):
    """What modules say of themselves, with the name of each."""
    found = [(module.__name__, inspect.cleandoc(module.__doc__ or "")) for module in modules]
    return [(name, text) for name, text in found if 250 <= len(text) <= 3000]


def summaries(texts):
    """Texts to make shorter."""
    for _, text in texts:
        yield f"Summarise this text in three sentences.\n\n{text}"


def questions(texts):
    """Texts, with a question about a name that occurs in each."""
    for module, text in texts:
        names = [name for name in re.findall(r"\b([A-Za-z_]\w+)\(", text) if len(name) > 3]
        subject = f"`{names[0]}`" if names else f"the module `{module}`"
        yield f"{text}\n\nWhat does this text say about {subject}? Answer with the words of the text."


if __name__ == "__main__":
    main()
