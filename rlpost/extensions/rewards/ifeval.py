"""The reward ``ifeval``: the response follows all format instructions of its prompt.

Input: a response and, in the metadata, ``instruction_id_list`` and ``kwargs`` as in IFEval's data
set (arXiv 2311.07911): names such as ``punctuation:no_comma`` and the arguments of each. Output: 1
if all are followed, else 0. The conditions are IFEval's strict ones; sentences are counted by their
end marks (IFEval uses nltk).

Call it only in a process with a time limit (``rlpost.tasks.reward.pool``), because it matches patterns
from the data against the model's output.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import langdetect

from rlpost.errors import DataError, suggestion
from rlpost.tasks.reward.answer_extraction import after_thinking

langdetect.DetectorFactory.seed = 0  # makes the result of a text deterministic

Check = Callable[..., bool]
FIXED_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def ifeval(response: str, label: str | None, metadata: Mapping[str, object]) -> float:
    """Return 1 if all instructions are followed, else 0; an empty answer follows none.

    Raises:
        DataError: the metadata holds no instructions, or an unknown one.
    """
    names, arguments = instructions(metadata)
    text = after_thinking(response)
    followed = (CHECKS[name](text, **given) for name, given in zip(names, arguments, strict=True))
    return float(bool(text.strip()) and all(followed))


def instructions(metadata: Mapping[str, Any]) -> tuple[list[str], list[dict[str, object]]]:
    """Return names and arguments of the instructions of a prompt, without arguments that are None.

    Raises:
        DataError: see ``ifeval``.
    """
    names = [str(name) for name in metadata.get("instruction_id_list") or ()]
    arguments = metadata.get("kwargs") or [{} for _ in names]
    if isinstance(arguments, Mapping):
        arguments = [arguments] * len(names)
    if not names or len(arguments) != len(names):
        raise DataError(
            f"ifeval: the metadata must hold 'instruction_id_list' and 'kwargs' of equal length, got {len(names)} and "
            f"{len(arguments)}; set --metadata-key to the key that holds them"
        )
    for name in names:
        if name not in CHECKS:
            raise DataError(f"ifeval: instruction {name!r} is not known{suggestion(name, CHECKS)}")
    return names, [_without_none(each or {}) for each in arguments]


def _without_none(arguments: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in arguments.items() if value is not None}


def _compare(count: int, relation: str, wanted: int) -> bool:
    """Compare by one of IFEval's two relations, or those of similar data sets."""
    if relation == "less than":
        return count < wanted
    if relation == "at most":
        return count <= wanted
    if relation == "exactly":
        return count == wanted
    if relation == "at least":
        return count >= wanted
    raise DataError(
        f"ifeval: relation {relation!r}; it must be 'less than', 'at least', 'at most' or 'exactly'"
    )


def _pattern(word: str) -> str:
    """Return a keyword as a pattern, as in IFEval; invalid ones, such as C++, match literally."""
    try:
        re.compile(word)
    except re.error:
        return re.escape(word)
    return word


def _keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(re.search(_pattern(word), text, re.IGNORECASE) for word in keywords)


def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return _compare(
        len(re.findall(_pattern(keyword.strip()), text, re.IGNORECASE)), relation, frequency
    )


def _forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(
        re.search(rf"\b{_pattern(word)}\b", text, re.IGNORECASE) for word in forbidden_words
    )


def _letter_frequency(
    text: str, letter: str, let_frequency: int, let_relation: str = "at least"
) -> bool:
    return _compare(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def _language_of(text: str) -> str | None:
    """Return an ISO 639-1 code, or None for a text without letters."""
    try:
        return langdetect.detect(text)
    except langdetect.LangDetectException:
        return None


def _response_language(text: str, language: str) -> bool:
    return _language_of(text) in (language, None)


def _upper(text: str) -> bool:
    return text.isupper() and _language_of(text.lower()) in ("en", None)


def _lower(text: str) -> bool:
    return text.islower() and _language_of(text) in ("en", None)


def _sentences(text: str, num_sentences: int, relation: str = "at least") -> bool:
    ends = re.sub(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e)\.", "", text)
    found = [part for part in re.split(r"[.!?]+[\"')\]]*(?:\s+|$)", ends) if part.strip()]
    return _compare(len(found), relation, num_sentences)


def _words(text: str, num_words: int, relation: str = "at least") -> bool:
    return _compare(len(re.findall(r"\w+", text)), relation, num_words)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    if not all(parts[1:-1]):
        return False
    return sum(map(bool, parts)) == num_paragraphs


def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if nth_paragraph > count or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return count == num_paragraphs and re.split("[.,?!'\"]", word)[0].lower() == first_word.lower()


def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str = "P.S.") -> bool:
    marker = postscript_marker.strip()
    pattern = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(
        marker, re.escape(marker.lower())
    )
    return re.search(pattern, text.lower()) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    stars = re.findall(r"^\s*\*[^*].*$", text, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE)) == num_bullets


def _highlights(text: str, num_highlights: int) -> bool:
    single = [word for word in re.findall(r"\*[^\n*]*\*", text) if word.strip("*").strip()]
    double = [word for word in re.findall(r"\*\*[^\n*]*\*\*", text) if word[2:-2].strip()]
    return len(single) + len(double) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{section_spliter.strip()}\s?\d+", text)) >= num_sections


def _json(text: str) -> bool:
    text = re.sub(r"^```(?:json|Json|JSON)?|```$", "", text.strip())
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    given = [part for part in parts if part]
    return all(parts[1:-1]) and len(given) == 2 and given[0] != given[1]


def _capital_words(text: str, capital_frequency: int, capital_relation: str = "at least") -> bool:
    words = re.findall(r"[\w]+(?:[-'][\w]+)*", text)
    return _compare(
        Counter(word.isupper() for word in words)[True], capital_relation, capital_frequency
    )


def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: dict[str, Check] = {
    "keywords:existence": _keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _response_language,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_words": _words,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda text: any(
        answer in text for answer in FIXED_ANSWERS
    ),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda text: any(
        title.strip("<>").strip() for title in re.findall(r"<<[^\n]+>>", text)
    ),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": _upper,
    "change_case:english_lowercase": _lower,
    "punctuation:no_comma": lambda text: "," not in text,
}
