"""Detection of repetition loops at the end of an answer. Pure.

A loop repeats a word, a sentence or a paragraph, with small variations or none, until a limit ends
it. Tables, expansions of numbers and enumerations compress as well, but end. So the criterion is how
far back from its end an answer compresses tenfold, and whether it ended by itself. The bounds were
chosen on the labelled texts of ``tests/unit/algorithm/repetition_texts.py``.
"""

from __future__ import annotations

import zlib

COMPRESSION = 10
"""Factor by which deflate compresses a loop; prose and code reach 2 to 4."""
WINDOWS = (512, 1024, 2048, 4096, 8192, 16384)
"""Bytes at the end of an answer, of which each is tried; long paragraphs need long ones."""
LEAST_WORDS, LEAST_OTHER, LEAST_ENDED = 512, 2048, 8192
"""Bytes from which a loop counts: of words, of other characters, and of an answer that ended."""
WORDS = 0.25
"""Least share of letters in the last LEAST_WORDS characters of a loop of words."""


def is_repetitive(text: str, *, is_truncated: bool) -> bool:
    """Return whether a text ends in a repetition loop.

    ``is_truncated``: a length limit ended it. Digits and symbols need a longer loop than words, and
    a text that ended by itself a longer one still.
    """
    least = LEAST_ENDED
    if is_truncated:
        end = text[-LEAST_WORDS:]
        num_letters = sum(map(str.isalpha, end))
        least = LEAST_WORDS if num_letters >= WORDS * len(end) else LEAST_OTHER
    end_bytes = text[-WINDOWS[-1] :].encode()
    return any(
        len(end_bytes) >= window and _compresses(end_bytes[-window:])
        for window in WINDOWS
        if window >= least
    )


def _compresses(text: bytes) -> bool:
    # Level 1 finds the same loops as level 6 in half the time.
    return len(text) >= COMPRESSION * len(zlib.compress(text, 1))
