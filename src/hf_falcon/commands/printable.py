# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Texts of others in the terminal: they may not move the cursor, change colours or hide what follows."""


def printable(text: str) -> str:
    """A text on one line, with each character that cannot be seen written as an escape (`\\x1b`, `\\u202e`)."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in " ".join(text.split())
    )
