"""The command of any container runtime that is a prefix: its template, and its faults. Pure.

Input: a template such as ``apptainer exec --nv --bind={source}:{target}:{mode} {image}``. Output:
the words before a node's command. Words are split as a shell does, and nothing else is expanded: no
variables, no patterns. A word with ``{source}`` or ``{target}`` is repeated for each mount, with
the option before it if it is the value of one (``--bind {source}:{target}``); ``{{`` and ``}}`` are
braces. Python 3.6.
"""

import shlex
from string import Formatter
from typing import List, NamedTuple, Sequence, Set

FIELDS = ("image", "source", "target", "mode")
OF_MOUNTS = {"source", "target", "mode"}
EXAMPLE = "apptainer exec --nv --bind={source}:{target}:{mode} {image}"


class Mount(NamedTuple):
    """A folder of the node inside the container; ``mode``: ro or rw."""

    source: str
    target: str
    mode: str = "rw"


def template_problem(
    template: str, *, read_only: Sequence[str] = (), has_mounts: bool = False
) -> str:
    """What is wrong with a template, with the remedy; empty if nothing.

    Args:
        read_only: mounts that must not be writable.
        has_mounts: the settings have mounts beside the run folder and the code.

    >>> template_problem("ch-run --write --bind={source}:{target} {image} --")
    ''
    >>> template_problem("apptainer exec {img}")
    'has no field {img}; use {image}, {source}, {target}, {mode}, and {{ or }} for a brace'
    """
    if not template.strip():
        return f"is not set; give the words before a command, for instance '{EXAMPLE}'"
    try:
        words = shlex.split(template)
        fields = [_fields(word) for word in words]
    except ValueError as error:
        return f"cannot be read ({error}); close each quote, and write {{{{ or }}}} for a brace"
    known: Set[str] = set().union(*fields)
    unknown = sorted(known - set(FIELDS))
    if unknown:
        return (
            f"has no field {{{unknown[0]}}}; use {{image}}, {{source}}, {{target}}, {{mode}}, and "
            "{{ or }} for a brace"
        )
    if fields[0]:
        return f"must begin with the program, not with {words[0]}"
    if "image" not in known:
        return f"has no {{image}}; put it where the runtime expects the image, as in '{EXAMPLE}'"
    halves = [word for word in words if _fields(word) & OF_MOUNTS and not _has_both(word)]
    if halves:
        return (
            f"has the word {halves[0]}, which needs both {{source}} and {{target}}: it is repeated "
            "for each mount"
        )
    for index, word in enumerate(words[1:]):
        before = words[index]
        if _fields(word) & OF_MOUNTS and not (_is_option(word) or _takes_value(before)):
            return (
                f"has the word {word} after {before}, which takes no value, so a second mount would "
                f"be taken for the image; put the option of mounts before it, such as --bind={word}"
            )
    if has_mounts and "source" not in known:
        return (
            "has no word with {source} and {target}, so --container-mounts would have no effect; "
            "add one, such as --bind={source}:{target}"
        )
    if read_only and "mode" not in known:
        return (
            f"has no {{mode}}, so {read_only[0]} would be writable; add it "
            "(--bind={source}:{target}:{mode}), or leave out :ro where the runtime has no "
            "read-only mounts"
        )
    return ""


def program_of(template: str) -> str:
    """The program of a valid template."""
    return shlex.split(template)[0]


def command_words(template: str, image: str, mounts: Sequence[Mount]) -> List[str]:
    """The words of a valid template for this image and these mounts.

    >>> mounts = [Mount("/a", "/b"), Mount("/c", "/c")]
    >>> command_words("ch-run -b {source}:{target} {image} --", "/i", mounts)
    ['ch-run', '-b', '/a:/b', '-b', '/c:/c', '/i', '--']
    """
    words: List[str] = []
    for group in _grouped(shlex.split(template)):
        repeated = mounts if _fields(group[-1]) & OF_MOUNTS else [Mount("", "")]
        for mount in repeated:
            words += [word.format(image=image, **mount._asdict()) for word in group]
    return words


def _grouped(words: Sequence[str]) -> List[List[str]]:
    """Each word alone, or with the option before it whose value is a mount."""
    groups: List[List[str]] = []
    for word in words:
        is_value = _fields(word) & OF_MOUNTS and not _is_option(word)
        has_option = is_value and bool(groups) and _takes_value(groups[-1][-1])
        groups.append([*groups.pop(), word] if has_option else [word])
    return groups


def _is_option(word: str) -> bool:
    return word.startswith("-")


def _takes_value(word: str) -> bool:
    """Whether the next word may be the value of this one: ``--bind``, not ``--bind=A:B``."""
    return _is_option(word) and word.strip("-") != "" and "=" not in word


def _has_both(word: str) -> bool:
    return {"source", "target"} <= _fields(word)


def _fields(word: str) -> Set[str]:
    """Names in a word, in braces. Raises ValueError: an unmatched brace, a conversion, a format."""
    names = set()
    for _, name, form, conversion in Formatter().parse(word):
        if name is None:
            continue
        if form or conversion:
            raise ValueError(f"{word} has more than a name in braces")
        names.add(name)
    return names
