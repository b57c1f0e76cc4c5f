# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Metrics, reports and files of traces."""

import pytest
from bench_runs import drafted, trace

from hf_falcon.bench import report
from hf_falcon.bench.metrics import first_difference, summarise
from hf_falcon.bench.traces import TRACES_NAME, TraceFile


@pytest.mark.parametrize(
    "tokens, others, place",
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([5], [4, 5], 0)],
)
def test_first_difference(tokens, others, place):
    assert first_difference(tokens, others) == place


def test_metrics():
    traces = [
        trace(seconds=(4.0, 2.0, 3.0)),
        trace("falcon", seconds=(1.5,), statistics=drafted(2, 2, 4, [1, 1]), peak_memory_mb=12.0),
        trace(prompt=1, seconds=(6.0,)),
        trace("falcon", prompt=1, seconds=(2.0,), statistics=drafted(3, 1, 4, [1], target=3.0)),
    ]
    plain, falcon = summarise(traces, exact=True)
    assert (plain["method"], plain["speedup"], plain["tau"], plain["time"]) == ("plain", 1.0, None, None)
    assert plain["tokens_per_second"] == pytest.approx(8 / 9)
    assert (falcon["num_prompts"], falcon["new_tokens"], falcon["identical_prompts"]) == (2, 8, 2)
    # Medians of 3 and 6 seconds against 1.5 and 2; a share of each prompt's time, not a mean of ratios.
    assert falcon["speedup"] == pytest.approx(9 / 3.5)
    assert falcon["speedup_spread"] == pytest.approx([2.25, 2.75])
    assert (falcon["tokens_per_round"], falcon["tau"], falcon["alpha"]) == (1 + 3 / 5, 3 / 5, 3 / 8)
    assert falcon["accepted_by_depth"] == [2 / 5, 1 / 5]
    assert falcon["time"] == {"target": 4.0, "drafter": 1.0, "other": 0.5}
    assert falcon["peak_memory_mb"] == 12.0


def test_a_shorter_text_is_no_speedup():
    traces = [trace(), trace("other", tokens=(1, 2), seconds=(1.0,))]
    found = summarise(traces, exact=False)[1]
    assert found["speedup"] == 1.0 and found["median_first_difference"] == 2 and found["median_logit_gap"] is None


@pytest.mark.parametrize("exact", [True, False])
def test_a_method_that_differs_is_reported_as_such(exact):
    traces = [
        trace(),
        trace("other", tokens=(1, 2, 9, 4), seconds=(1.0,), gap=0.125),
        trace(prompt=1),
        trace("other", prompt=1, seconds=(1.0,)),
    ]
    plain, other = rows = summarise(traces, exact)
    assert (other["identical_prompts"], other["num_prompts"]) == (1, 2)
    assert (other["median_first_difference"], other["median_logit_gap"]) == (2, 0.125)
    assert other["speedup"] == (None if exact else 2.0)
    assert (other["speedup_spread"] is None) is exact and plain["speedup"] == 1.0
    assert ("differs" in report.table(rows).splitlines()[3]) is exact
    assert ("differs" in report.markdown({}, rows, {}, exact).split("| other |")[1].split("\n")[0]) is exact


def test_rows_for_each_data_set_and_for_all():
    traces = [
        trace(m, data, seconds=(s,))
        for data, times in {"a": (2, 1), "b": (6, 1)}.items()
        for m, s in zip(("plain", "fast"), times)
    ]
    rows = {(row["method"], row["data"]): row["speedup"] for row in summarise(traces, exact=True)}
    assert rows["fast", "a"] == 2 and rows["fast", "b"] == 6 and rows["fast", "all"] == 4
    # What plain decoding has no counterpart of counts nowhere.
    assert summarise([trace("fast")], exact=True) == []


def test_samples_may_be_others():
    traces = [trace(), trace("other", tokens=(1, 2, 9, 4), seconds=(1.0,)), trace("other@3", tokens=(7, 2, 9, 4))]
    assert [row["speedup"] for row in summarise(traces, exact=True, other_samples=("other",))] == [1.0, 2.0, 1.0]
    assert [row["speedup"] for row in summarise(traces, exact=True, other_samples=("another",))] == [1.0, None, None]


def test_report_is_drawn():
    rows = summarise([trace(), trace("falcon", statistics=drafted(2, 2, 4, [1, 1]))], exact=True)
    assert report.picture(rows).startswith(b"\x89PNG")
    text = report.markdown({"device": "a machine"}, rows, {"draft_model": "none is given"}, exact=True)
    assert "device: a machine" in text and "Not run: `draft_model`, because none is given." in text


# Files.


def test_trace_file_survives_a_kill(tmp_path):
    file = TraceFile(tmp_path, {"dtype": "float32"})
    file.add(trace())
    file.add(trace("falcon"))
    path = tmp_path / TRACES_NAME
    path.write_bytes(path.read_bytes()[:-7])
    file = TraceFile(tmp_path, {"dtype": "float32"})
    assert list(file.traces) == [("plain", "a", 0, 0)]
    file.add(trace("falcon"))
    assert TraceFile(tmp_path, {"dtype": "float32"}).traces == {t.key: t for t in (trace(), trace("falcon"))}
    with pytest.raises(ValueError, match="`dtype` 'float32', and this run has 'bfloat16': give another `output`"):
        TraceFile(tmp_path, {"dtype": "bfloat16"})


@pytest.mark.parametrize("text", [b"{\n", b"[1]\n", b'{}\n{"method": "plain"}\n', b"{}\n\xff\n"])
def test_a_trace_file_that_is_damaged_is_named(tmp_path, text):
    (tmp_path / TRACES_NAME).write_bytes(text)
    with pytest.raises(ValueError, match=r"traces\.jsonl cannot be read \(.*\): delete it, or give another `output`"):
        TraceFile(tmp_path, {})
    assert (tmp_path / TRACES_NAME).read_bytes() == text


def test_speedup_against_node_budget():
    def row(method, data, budget, speedup):
        return {"method": method, "data": data, "node_budget": budget, "speedup": speedup}

    rows = [
        row("plain", "all", None, 1.0),
        row("falcon", "all", 8, 1.5),
        row("falcon@16", "all", 16, 1.2),
        row("falcon@4", "all", 4, 1.3),
        row("falcon@4", "a", 4, 9.0),
        row("k2@4", "all", 4, None),
        row("medusa_like", "all", 12, 1.1),
    ]
    found = report.speedup_by_budget(rows, "all")
    assert found == {"falcon": [(4, 1.3), (8, 1.5), (16, 1.2)], "medusa_like": [(12, 1.1)]}
