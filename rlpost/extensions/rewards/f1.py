"""The reward ``f1``: the F1 score of the words of response and label, as SQuAD defines it.

Input: a response and a label. Output: the harmonic mean of precision and recall over words, 0 to 1.
Case, punctuation and articles are ignored (arXiv 1606.05250). ``yes``, ``no`` and ``noanswer`` must
match exactly, as in HotpotQA (arXiv 1809.09600).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping

from rlpost.tasks.reward.answer_extraction import after_thinking

WHOLE_ANSWERS = {"yes", "no", "noanswer"}
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(response: str, label: str | None, metadata: Mapping[str, object]) -> float:
    """Return the F1 score of the words; 0 if they have no word in common or there is no label."""
    if label is None:
        return 0.0
    answered, expected = words(after_thinking(response)), words(label)
    if answered != expected and WHOLE_ANSWERS & {" ".join(answered), " ".join(expected)}:
        return 0.0
    shared = sum((Counter(answered) & Counter(expected)).values())
    return 2 * shared / (len(answered) + len(expected)) if shared else 0.0


def words(text: str) -> list[str]:
    """Return the lower-case words without punctuation and articles."""
    return re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()
