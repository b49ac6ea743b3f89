"""The chain of segments that are made in memory: records of ten bytes, digests that name a place."""

from pathlib import Path

import pytest

from rlpost.durable.journal_chain import follow
from rlpost.durable.journal_format import BATCH, GROUP, PART, TURN, Header, Record, Seal
from rlpost.durable.journal_segments import Segment


def segment(number, base, step, events="", *, previous=None, damaged=(), **header):
    """``events``: a letter each: g a group, b a batch, p a part; the record at byte 0 is the header."""
    kinds = {"g": GROUP, "b": BATCH, "p": PART}
    path = Path(f"{number}.log")
    records = []
    for place, letter in enumerate(events, start=1):
        event = 10 * number + place
        meta = {"prompt_id": event, "step": event, "num_tokens": 3, "wanted": True}
        meta |= {"index": 0, "part": TURN, "number": 0}
        records.append(Record(kinds[letter], meta, path, 10 * place, 10))
    ends = range(10, 10 * len(records) + 20, 10)
    return Segment(
        path,
        Header(number, base, step, header.pop("settings", "s"), previous=previous, **header),
        tuple(records),
        ends[-1],
        None,
        {end: f"{number} to {end}" for end in ends},
        damaged,
    )


def seal(number, num_bytes):
    return Seal(number, num_bytes, f"{number} to {num_bytes}")


def test_records_beyond_the_seal_of_the_next_segment_are_not_used():
    """They were written by an older attempt after the owner had continued from the seal."""
    chain = [
        segment(0, 0, 0, "gbg"),
        segment(1, 1, 1, "gb", previous=seal(0, 30)),
        segment(2, 2, 2, "g", previous=seal(1, 20)),
    ]
    found = follow(chain[::-1], 0, 0)
    assert [record.key[1] for record in found.records] == [1, 2, 11, 21]
    assert found.problems == () and found.chain == tuple(chain) and found.previous is None
    later = follow(chain, 1, 1)
    assert later.previous == seal(0, 30) and later.chain == tuple(chain[1:])


NONE = "no segment continues the checkpoint of step {}, which names segment {}"
UNUSED = "{}; it is not used. To generate again: groups: {} ({} tokens), batches: {}"
SETTINGS = "settings that decide what is generated have changed since: recorded by another version of rlpost"


@pytest.mark.parametrize(
    ("segments", "state", "problems"),
    [
        ([], (0, 0), []),
        ([], (1, 5), [NONE.format(5, 1)]),
        ([segment(0, 0, 0), segment(1, 1, 1)], (2, 5), [NONE.format(5, 2)]),
        (
            [segment(0, 0, 1, "gbp")],
            (0, 5),
            [
                NONE.format(5, 0),
                UNUSED.format("0.log: follows records that are lost", 1, 3, 1)
                + ", answers and turns: 1",
            ],
        ),
        (
            [segment(3, 0, 0), segment(1, 0, 0)],  # a resume superseded 1
            (0, 0),
            [],
        ),
        (
            [segment(0, 0, 0), segment(1, 1, 1, "gg", unbroken=False)],
            (0, 0),
            [UNUSED.format("1.log: the records before it could not be written", 2, 6, 0)],
        ),
        (
            [
                segment(0, 0, 0),
                segment(2, 2, 2, "b", previous=seal(1, 10)),
                segment(3, 3, 3, "g", previous=seal(2, 20)),
            ],
            (0, 0),
            [
                UNUSED.format("2.log: follows segment 1, which is missing or damaged", 0, 0, 1),
                UNUSED.format("3.log: follows segment 2, which is not used", 1, 3, 0),
            ],
        ),
        (
            [segment(0, 0, 0), segment(1, 1, 1, "g", previous=seal(0, 90))],
            (0, 0),
            [
                UNUSED.format(
                    "1.log: follows records that are lost: the first 90 bytes of segment 0 have "
                    "changed",
                    *(1, 3, 0),
                )
            ],
        ),
        (
            [
                segment(0, 0, 0, damaged=("a part",)),
                segment(1, 1, 1, "g", previous=seal(0, 10), settings="others"),
            ],
            (0, 0),
            [UNUSED.format(f"1.log: {SETTINGS}", 1, 3, 0), "0.log: a part"],
        ),
    ],
)
def test_each_segment_that_is_not_used_is_named_with_the_reason_and_its_cost(
    segments, state, problems
):
    assert list(follow(segments, *state, settings="s").problems) == problems
