# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Parameters of tests, of which the quick run takes a part: `make test-all` takes all of them."""

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(chosen: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """`values`, of which only those in `chosen` are for the quick run."""
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.slow) for value in values]


def one_in(share: int, *columns: Iterable[Any]) -> list[Any]:
    """
    All combinations of the columns' values. The quick run takes one in `share` of them, by the sum of their places:
    every value of each column, with other values of the others each time, unless `share` is greater than their number.

    Args:
        share (`int`): how many times fewer the quick run takes.
        columns: the values of each parameter, as for `pytest.mark.parametrize` with several names.
    """
    params = []
    for places in itertools.product(*(list(enumerate(column)) for column in columns)):
        values = [value for _, value in places]
        marks = [] if sum(place for place, _ in places) % share == 0 else [pytest.mark.slow]
        params.append(pytest.param(*values, marks=marks, id="-".join(map(str, values))))
    return params
