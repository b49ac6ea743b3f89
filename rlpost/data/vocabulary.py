"""Compare the vocabularies of two Hugging Face folders, without loading a tokenizer.

Input: two folders. Output: the first difference. Two tokenizers are equal if one of their
vocabulary files is the same byte for byte, or if tokenizer.json maps the same tokens to the same
ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlpost.data.tokenizer import VOCABULARIES


def vocabulary_problem(own: Path, theirs: Path) -> str | None:
    """Return how the vocabulary of ``theirs`` differs from that of ``own``; None if it does not.

    A vocabulary file that only one folder has does not count while another can be compared.
    """
    common = [name for name in VOCABULARIES if (own / name).is_file() and (theirs / name).is_file()]
    if not common:
        return f"no vocabulary file in common with {own} ({', '.join(VOCABULARIES)})"
    if any((own / name).read_bytes() == (theirs / name).read_bytes() for name in common):
        return None
    if "tokenizer.json" not in common:
        return f"{common[0]} differs from that of {own}"
    ours, other = _token_ids(own / "tokenizer.json"), _token_ids(theirs / "tokenizer.json")
    for token, number in sorted(ours.items(), key=lambda pair: pair[1]):
        if other.get(token) != number:
            return f"token {token!r} has id {number} in {own} and {other.get(token)} in {theirs}"
    return None


def _token_ids(file: Path) -> dict[str, int]:
    """The id of each token of a tokenizer.json, added tokens included."""
    content: dict[str, Any] = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):  # unigram models list [token, score] by id
        vocab = {entry[0]: number for number, entry in enumerate(vocab)}
    added = {entry["content"]: entry["id"] for entry in content.get("added_tokens", [])}
    return {**vocab, **added}
