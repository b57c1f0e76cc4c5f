# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What the headers of safetensors files say of their tensors, read without torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from ..json_files import printable

# Bytes of a configuration, and of the header of a safetensors file, which takes some hundred for each tensor.
LARGEST_CONFIG, _LARGEST_HEADER = 2**22, 2**24


class StoredTensor(NamedTuple):
    """
    What the header of a safetensors file says of a tensor.

    Args:
        file (`Path`): the file.
        dtype (`str`): its dtype, in the words of safetensors.
        shape (`tuple[int, ...]`): its shape.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """
    The tensors in safetensors files, by their names, read from the headers. All tensors are inside their files.

    Raises:
        `OSError`: if a file is not a complete safetensors file, or its header is larger than that of any drafter; it
            names the file.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
            # safetensors itself parses headers of up to 100 MB, which take gigabytes.
            if size > _LARGEST_HEADER:
                raise SafetensorError(f"its header says that it has {size:,} bytes, more than {_LARGEST_HEADER:,}")
            with safe_open(file, framework="np") as weights:
                for name in weights.keys():
                    part = weights.get_slice(name)
                    tensors[name] = StoredTensor(file, part.get_dtype(), tuple(part.get_shape()))
        except SafetensorError as error:
            raise OSError(
                f"The weight file `{file.name}` in {file.parent} is not a whole safetensors file "
                f"({printable(str(error))}): download it again, or save the drafter again with `save_pretrained`."
            ) from error
    return tensors
