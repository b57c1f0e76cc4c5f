# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Writes tests/COMPATIBILITY.md, and the lists of docs/targets.md: `python tests/support/compatibility_page.py`. It takes
some six minutes of a core.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import transformers
from compatibility import CHAINS, DECODERS, MULTIMODAL, PLAIN, REFUSED, TREES, UNTRIED, Row, classify
from image_inputs import WITH_IMAGES, classify_with_image
from tqdm.auto import tqdm
from transformers.utils import logging

TABLE = Path(__file__).parents[1] / "COMPATIBILITY.md"
TARGETS = TABLE.parents[1] / "docs" / "targets.md"
_LISTS = re.compile(r"(?<=`make compatibility` -->\n).*(?=<!-- end -->)", re.DOTALL)
_RESULTS = (TREES, CHAINS, PLAIN, REFUSED, UNTRIED)
_INTRODUCTION = """# Compatibility

What becomes of `target.generate(..., assistant_model=drafter)` for each decoder of transformers {version}, tried with
tiny random weights in float32; `make compatibility` writes this page.

- **trees**: drafted, and tokens and logits are those of plain `generate`
- **chains**: the same, with a single path of draft tokens a round
- **plain**: plain decoding runs, with a warning that says why
- **refused**: an error says why, before anything is generated
- **not tried**: transformers could not make or run a small one of it without further packages or inputs

The columns are a prompt of text, one with an image, two prompts at once, and a prompt with quantised linear layers.

| result | {columns} |
| --- |{rules}
{counts}
"""


def page(texts: Iterable[Row], images: Iterable[Row]) -> str:
    """
    The page, as Markdown.

    Args:
        texts (iterable of `Row`): see [`compatibility.classify`], of all model types.
        images (iterable of `Row`): see [`image_inputs.classify_with_image`].
    """
    of_text = {row.model_type: row for row in texts}
    decoders = [row for row in of_text.values() if row.model_type in DECODERS]
    with_images = [(of_text[row.model_type], row) for row in images]
    columns = {
        "decoders, text": Counter(row.result for row in decoders),
        "batch": Counter(row.batch for row in decoders),
        "quantised": Counter(row.quantised for row in decoders),
        "with images, text": Counter(text.result for text, _ in with_images),
        "image": Counter(image.result for _, image in with_images),
    }
    counts = [[result, *(str(count[result]) for count in columns.values())] for result in _RESULTS]
    return (
        _INTRODUCTION.format(
            version=transformers.__version__,
            columns=" | ".join(columns),
            rules=" --- |" * len(columns),
            counts="\n".join(map(_line, counts)),
        )
        + _section(
            "Decoders",
            ("model type", "class", "text", "batch", "quantised", "why"),
            [[row.model_type, row.class_name, row.result, row.batch, row.quantised, row.remark] for row in decoders],
        )
        + _section(
            "With images",
            ("model type", "class", "text", "image", "quantised", "why"),
            [
                [text.model_type, text.class_name, text.result, image.result, text.quantised, _why(text, image)]
                for text, image in with_images
            ],
        )
    )


def with_lists(document: str, table: str) -> str:
    """docs/targets.md with the model types of each result, as they are in the table of a page."""
    decoders = table[table.index("## Decoders") : table.index("## With images")]
    rows = re.findall(r"^\| ([\w.-]+) \| \w+ \| ([a-z ]+) \|", decoders, re.MULTILINE)
    found = {result: [f"`{name}`" for name, each in rows if each == result] for result in _RESULTS}
    lists = "\n".join(f"- {result} ({len(names)}): {', '.join(names)}" for result, names in found.items() if names)
    return _LISTS.sub(lambda _: f"\n{lists}\n\n", document)


def _why(text: Row, image: Row) -> str:
    if text.remark == image.remark:
        return text.remark
    parts = {"text": text.remark, "image": image.remark}
    return "; ".join(f"{name}: {remark}" for name, remark in parts.items() if remark)


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = [_line(columns), _line(["---"] * len(columns))]
    return f"\n## {title}\n\n" + "\n".join([*head, *map(_line, rows)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    logging.set_verbosity_error()
    texts = [classify(name) for name in tqdm((*DECODERS, *MULTIMODAL), unit="model")]
    images = [classify_with_image(name) for name in tqdm(WITH_IMAGES, unit="model")]
    TABLE.write_text(page(texts, images), encoding="utf-8")
    TARGETS.write_text(with_lists(TARGETS.read_text(encoding="utf-8"), TABLE.read_text(encoding="utf-8")), "utf-8")
    print(f"Written: {TABLE}")


if __name__ == "__main__":
    main()
