# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The results of a benchmark, computed from its traces: plain Python, no model."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from .traces import Trace

PLAIN = "plain"
# The data of the rows over all sets.
ALL_DATA = "all"


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """The first diverging token of two outputs, or `None` if they are equal. A shorter one diverges at its end."""
    if list(tokens) == list(others):
        return None
    pairs = enumerate(zip(tokens, others))
    return next((place for place, (one, other) in pairs if one != other), min(len(tokens), len(others)))


def summarise(traces: Iterable[Trace], exact: bool, other_samples: Sequence[str] = ()) -> list[dict[str, Any]]:
    """
    One row for each method and data set, and one for each method over `"all"` of them where these are several.

    Args:
        traces (iterable of [`Trace`]): the traces of all methods, plain decoding included.
        exact (`bool`): whether the dtype was float32. If so, a method whose tokens differ from plain decoding's gets
            no speed-up.
        other_samples (sequence of `str`, *optional*): methods whose tokens may differ in any dtype.

    Returns:
        `list[dict]`: rows in the order of first appearance, see the README.
    """
    traces = list(traces)
    plain = {trace.key[1:]: trace for trace in traces if trace.method == PLAIN}
    methods = list(dict.fromkeys(trace.method for trace in traces))
    data = list(dict.fromkeys(trace.data for trace in traces))
    rows = []
    for method in methods:
        for name in [*data, *([ALL_DATA] if len(data) > 1 else [])]:
            # Only prompts that both decoded: a run that was stopped has answers without plain decoding's.
            own = [t for t in traces if t.method == method and name in (t.data, ALL_DATA) and t.key[1:] in plain]
            if own:
                must_equal = exact and method.partition("@")[0] not in other_samples
                rows.append(_row(method, name, own, [plain[trace.key[1:]] for trace in own], must_equal))
    return rows


def _row(method: str, data: str, own: list[Trace], plain: list[Trace], exact: bool) -> dict[str, Any]:
    seconds = [statistics.median(trace.seconds) for trace in own]
    plain_seconds = [statistics.median(trace.seconds) for trace in plain]
    # Time for as many tokens as plain decoding gave: a shorter output is no speed-up.
    comparable = [
        time * len(reference.tokens) / max(1, len(trace.tokens)) for time, trace, reference in zip(seconds, own, plain)
    ]
    differences = [first_difference(trace.tokens, reference.tokens) for trace, reference in zip(own, plain)]
    places = [place for place in differences if place is not None]
    # An answer that only ends earlier has no gap.
    gaps = [trace.gap for place, trace in zip(differences, own) if place is not None and trace.gap is not None]
    prompts = {(trace.data, trace.prompt) for trace in own}
    differing = {(trace.data, trace.prompt) for place, trace in zip(differences, own) if place is not None}
    ratios = [each / time for each, time in zip(plain_seconds, comparable)]
    may_claim = not (exact and differing)
    new_tokens = sum(len(trace.tokens) for trace in own)
    return {
        "method": method,
        "data": data,
        "num_prompts": len(prompts),
        "new_tokens": new_tokens,
        "tokens_per_second": new_tokens / sum(seconds),
        "speedup": sum(plain_seconds) / sum(comparable) if may_claim else None,
        "speedup_spread": _quartiles(ratios) if may_claim else None,
        "slowest_speedup": min(ratios) if may_claim else None,
        "identical_prompts": len(prompts - differing),
        "median_first_difference": statistics.median(places) if places else None,
        "median_logit_gap": statistics.median(gaps) if gaps else None,
        **_drafting([trace.statistics for trace in own if trace.statistics is not None]),
        "peak_memory_mb": max(trace.peak_memory_mb for trace in own),
    }


def _drafting(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Acceptance over all rounds together: a long output weighs more than a short one."""
    if not found:
        return dict.fromkeys(("tokens_per_round", "tau", "alpha", "accepted_by_depth", "time"))
    rounds, accepted, new = (sum(each[name] for each in found) for name in ("rounds", "accepted_tokens", "new_tokens"))
    depths = max(len(each["accepted_by_depth"]) for each in found)
    by_depth = [sum((each["accepted_by_depth"] + [0] * depths)[depth] for each in found) for depth in range(depths)]
    return {
        "tokens_per_round": 1 + accepted / max(1, rounds),
        "tau": accepted / max(1, rounds),
        "alpha": accepted / max(1, new),
        "accepted_by_depth": [count / max(1, rounds) for count in by_depth],
        "time": {part: sum(each["time"][part] for each in found) for part in ("target", "drafter", "other")},
    }


def _quartiles(values: list[float]) -> list[float]:
    """First and third quartile."""
    if len(values) == 1:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]
