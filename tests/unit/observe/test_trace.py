"""Traces: spans become rows in which nothing crosses, on one clock, whatever the clocks of the
processes say.
"""

import json
import threading

from hypothesis import given
from hypothesis import strategies as st

from rlpost.observe.spans import ProcessSpans, Spans, clock_offset, lanes, trace

MOMENTS = st.floats(0, 100, allow_nan=False)


def crossing(spans):
    """Pairs of which one begins within the other and ends after it."""
    return [(a, b) for a in spans for b in spans if a[2] < b[2] < a[3] < b[3]]


def complete(document, process):
    return [e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == process]


@given(st.lists(st.tuples(MOMENTS, MOMENTS).map(sorted), max_size=30))
def test_in_a_row_spans_are_nested_or_apart_and_none_is_lost(moments):
    spans = [("x", "t", begin, end) for begin, end in moments]
    rows = lanes(spans)
    assert sorted(one for row in rows for one in row) == sorted(spans)
    assert [crossing(row) for row in rows] == [[]] * len(rows)


def test_nested_phases_share_a_row_and_requests_at_the_same_time_do_not():
    nested = [("train", "t", 1.0, 4.0), ("step", "t", 0.0, 5.0), ("sync", "t", 4.0, 5.0)]
    assert lanes(nested) == [[nested[1], nested[0], nested[2]]]
    assert len(lanes([("generate", "t", n / 10, n / 10 + 1) for n in range(5)])) == 5


def test_a_span_is_kept_with_its_thread_also_when_its_block_fails():
    spans = Spans()
    with spans.span("outer"):
        try:
            with spans.span("inner"):
                raise ValueError
        except ValueError:
            pass
    other = threading.Thread(target=lambda: spans.add("there", spans.now()), name="second")
    other.start()
    other.join()
    names = [(name, thread) for name, thread, _, _ in spans.since(0.0)]
    assert names == [("inner", "MainThread"), ("outer", "MainThread"), ("there", "second")]
    inner, outer = spans.since(0.0)[:2]
    assert outer[2] <= inner[2] <= inner[3] <= outer[3]
    assert spans.seconds("outer", since=0.0) == outer[3] - outer[2]
    assert spans.seconds("outer", since=outer[3]) is None


def test_a_process_never_keeps_more_than_its_share():
    spans = Spans(at_most=3)
    for n in range(10):
        spans.add(str(n), spans.now())
    assert [one[0] for one in spans.since(0.0)] == ["7", "8", "9"]


def test_a_clock_that_is_ahead_is_set_back_unless_the_question_took_longer():
    assert clock_offset(10.0, 13.05, 10.1) == 3.0
    assert clock_offset(10.0, 10.3, 11.0) == 0.0


def test_the_document_has_every_process_on_the_drivers_clock_within_the_chosen_time():
    driver = ProcessSpans("driver", [("step", "main", 100.0, 104.0), ("step", "main", 90.0, 95.0)])
    actor = ProcessSpans("actor-0", [("train_step", "main", 1101.0, 1103.0)], ahead_s=1000.0)
    document = json.loads(json.dumps(trace([driver, actor], begin=100.0, end=105.0)))
    names = {
        e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"
    }
    assert names == {1: "driver", 2: "actor-0"}
    assert [(e["name"], e["ts"], e["dur"]) for e in complete(document, 1)] == [
        ("step", 0, 4_000_000)
    ]
    assert [(e["name"], e["ts"], e["dur"]) for e in complete(document, 2)] == [
        ("train_step", 1_000_000, 2_000_000)
    ]
