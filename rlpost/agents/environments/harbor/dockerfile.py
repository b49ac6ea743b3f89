"""The part of Dockerfiles that a sandbox can follow. Pure.

Input: the text of a Dockerfile. Output: a ``Recipe``: the base image, and steps in order, each with
the folder and the variables that hold for it.

    FROM (one stage)   ARG   ENV   WORKDIR   COPY and ADD of local files   RUN   SHELL
    here-documents of RUN and COPY   USER root   ``$NAME``, ``${NAME}``, ``${NAME:-DEFAULT}``

CMD, EXPOSE, HEALTHCHECK, LABEL, MAINTAINER, STOPSIGNAL and VOLUME change no file and are ignored:
the verifier and the agent run their own commands. Anything else raises ``NotSupported`` with the line.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlpost.errors import DataError

HOME = "/root"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IGNORED = frozenset(("CMD", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME"))
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".txz", ".tbz2")
_HEREDOC = re.compile(r"(?:^|(?<=\s))\d*<<(-?)(['\"]?)([A-Za-z_][\w.]*)\2")
_REFERENCE = re.compile(r"\\\$|\$(?:(\w+)|\{(\w+)(?:(:?[-+])([^}]*))?\})")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S+))?\s+")


class NotSupported(DataError):
    """A Dockerfile does something that cannot be done without Docker."""


@dataclass(frozen=True)
class Run:
    """A command. ``argv`` is complete."""

    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    line: int


@dataclass(frozen=True)
class Copy:
    """Files of the context, by names or patterns relative to it, to an absolute path."""

    sources: tuple[str, ...]
    target: str
    is_folder: bool
    """The target is a folder, also if it does not exist yet."""
    mode: int | None
    line: int


@dataclass(frozen=True)
class Write:
    """A file with a text: a here-document of COPY."""

    target: str
    content: str
    line: int


@dataclass(frozen=True)
class MakeFolder:
    """The folder that WORKDIR names."""

    path: str
    line: int


Step = Run | Copy | Write | MakeFolder


@dataclass(frozen=True)
class Recipe:
    """What a Dockerfile describes."""

    base: str
    steps: tuple[Step, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"


@dataclass
class _Line:
    number: int
    word: str
    rest: str
    documents: dict[str, str] = field(default_factory=dict)
    """Texts of here-documents by their delimiter."""


@dataclass
class _State:
    base: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    steps: list[Step] = field(default_factory=list)

    @property
    def known(self) -> dict[str, str]:
        """Variables that a line may name; ENV wins over ARG."""
        return {"PATH": PATH, "HOME": HOME, **self.arguments, **self.env}


def parse_dockerfile(text: str, env: Mapping[str, str] | None = None, workdir: str = "/") -> Recipe:
    """Return the recipe of a Dockerfile. Raises NotSupported.

    ``env`` and ``workdir``: those of the base image.
    """
    state = _State(env=dict(env or {}), workdir=workdir)
    for line in _lines(text):
        _take(state, line)
    if state.base is None:
        raise NotSupported("the Dockerfile has no FROM")
    return Recipe(state.base, tuple(state.steps), dict(state.env), state.workdir)


def _lines(text: str) -> Iterator[_Line]:
    """Yield instructions: continuation lines joined, comments dropped, here-documents attached."""
    source = enumerate(text.splitlines(), 1)
    for number, raw in source:
        if not raw.strip() or raw.lstrip().startswith("#"):
            continue
        joined = raw.strip()
        while joined.endswith("\\"):
            following = next(((n, s) for n, s in source if not _is_skipped(s)), None)
            joined = joined[:-1] + (following[1].rstrip() if following else "")
            if following is None:
                break
        word, _, rest = joined.partition(" ")
        line = _Line(number, word.upper(), rest.strip())
        if line.word in ("RUN", "COPY", "ADD"):
            for dash, _, mark in _HEREDOC.findall(line.rest):
                line.documents[mark] = _document(source, mark, strips=bool(dash))
        yield line


def _is_skipped(text: str) -> bool:
    """Whether a line within a continued instruction is a comment or empty."""
    return not text.strip() or text.lstrip().startswith("#")


def _document(source: Iterator[tuple[int, str]], mark: str, *, strips: bool) -> str:
    lines = list[str]()
    for _, text in source:
        text = text.lstrip("\t") if strips else text
        if text.strip() == mark:
            return "".join(f"{each}\n" for each in lines)
        lines.append(text)
    raise NotSupported(f"the here-document {mark} has no end")


def _take(state: _State, line: _Line) -> None:
    """Apply one instruction. Raises NotSupported."""
    if line.word in IGNORED:
        return
    if line.word == "FROM":
        _from(state, line)
        return
    if line.word == "ARG":
        _argument(state, line)
        return
    if state.base is None:
        raise NotSupported(f"line {line.number}: {line.word} before FROM")
    match line.word:
        case "ENV":
            state.env |= _pairs(expand(line.rest, state.known), line)
        case "WORKDIR":
            path = _unquoted(expand(line.rest, state.known))
            state.workdir = _absolute(path, state.workdir)
            state.steps.append(MakeFolder(state.workdir, line.number))
        case "RUN":
            state.steps.append(_run(state, line))
        case "COPY" | "ADD":
            state.steps.append(_copy(state, line))
        case "SHELL":
            state.shell = _json_words(line)
        case "USER":
            user = expand(line.rest, state.known).partition(":")[0]
            if user not in ("root", "0"):
                raise NotSupported(f"line {line.number}: USER {user}; a sandbox has one user")
        case _:
            raise NotSupported(f"line {line.number}: {line.word} is not supported without Docker")


def _from(state: _State, line: _Line) -> None:
    if state.base is not None:
        raise NotSupported(f"line {line.number}: more than one FROM (a build of several stages)")
    words = [word for word in line.rest.split() if not word.startswith("--")]
    if not words:
        raise NotSupported(f"line {line.number}: FROM names no image")
    state.base = expand(words[0], state.arguments)


def _argument(state: _State, line: _Line) -> None:
    name, equals, value = line.rest.partition("=")
    if equals:
        state.arguments[name] = _unquoted(expand(value, state.known))


def _pairs(text: str, line: _Line) -> dict[str, str]:
    """Return the variables of ENV, in the form ``A=1 B="2 3"`` or ``A the rest``."""
    name, _, value = text.partition(" ")
    if "=" not in name:
        return {name: value.strip()}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise NotSupported(f"line {line.number}: ENV: {error}") from None
    return dict(word.split("=", 1) for word in words if "=" in word)


def _flags(line: _Line) -> tuple[dict[str, str], str]:
    flags, rest = {}, line.rest
    while match := _FLAG.match(rest):
        flags[match[1]] = match[2] or ""
        rest = rest[match.end() :]
    return flags, rest


def _run(state: _State, line: _Line) -> Run:
    flags, command = _flags(line)
    unknown = flags.keys() - {"mount", "network"}
    mount = flags.get("mount", "type=cache").split(",")[0]
    if unknown or mount not in ("type=cache", "type=tmpfs"):
        what = " ".join(f"--{name}={value}" for name, value in sorted(flags.items()))
        raise NotSupported(f"line {line.number}: RUN {what}")
    env = state.known
    with contextlib.suppress(NotSupported):  # else a test of the shell, [ -e FILE ]
        if command.startswith("["):
            argv = _json_words(_Line(line.number, line.word, command))
            return Run(argv, state.workdir, env, line.number)
    shell = state.shell
    bare = _HEREDOC.fullmatch(command)
    if bare:  # the here-document is the script
        command = line.documents[bare[3]]
        if command.startswith("#!"):
            shell = (*command.partition("\n")[0].removeprefix("#!").split(), "-c")
    else:
        bodies = [f"{text}{mark}" for mark, text in line.documents.items()]
        command = "\n".join([command, *bodies])
    return Run((*shell, command), state.workdir, env, line.number)


def _copy(state: _State, line: _Line) -> Step:
    flags, rest = _flags(line)
    unknown = flags.keys() - {"chown", "chmod", "link"}
    if unknown:
        raise NotSupported(
            f"line {line.number}: {line.word} --{' --'.join(sorted(unknown))} takes files of "
            "another image or place"
        )
    if rest.startswith("["):
        words: Sequence[str] = _json_words(_Line(line.number, line.word, rest))
        words = [expand(word, state.known) for word in words]
    else:
        words = _split(expand(rest, state.known), line)
    if len(words) < 2:
        raise NotSupported(f"line {line.number}: {line.word} names no target")
    *sources, target = words
    absolute = _absolute(target, state.workdir)
    if line.documents:
        (mark, content), *more = line.documents.items()
        if more or len(sources) != 1:
            raise NotSupported(f"line {line.number}: more than one here-document")
        path = f"{absolute}/{mark}" if target.endswith("/") else absolute
        return Write(path, content, line.number)
    for source in sources:
        if "://" in source or source.startswith("git@"):
            raise NotSupported(f"line {line.number}: ADD {source} needs the network")
        if line.word == "ADD" and source.endswith(ARCHIVES):
            raise NotSupported(f"line {line.number}: ADD {source} unpacks an archive")
    mode = int(flags["chmod"], 8) if re.fullmatch(r"[0-7]+", flags.get("chmod", "")) else None
    is_folder = (
        target.endswith("/") or posixpath.basename(target) in (".", "..") or len(sources) > 1
    )
    return Copy(tuple(sources), absolute, is_folder, mode, line.number)


def _split(text: str, line: _Line) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise NotSupported(f"line {line.number}: {error}") from None


def _json_words(line: _Line) -> tuple[str, ...]:
    try:
        words = json.loads(line.rest)
    except (ValueError, RecursionError) as error:
        raise NotSupported(f"line {line.number}: {line.word} {line.rest}: {error}") from None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise NotSupported(f"line {line.number}: {line.word} takes a list of texts")
    return tuple(words)


def _absolute(path: str, workdir: str) -> str:
    return posixpath.normpath(posixpath.join(workdir, path))


def _unquoted(text: str) -> str:
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def expand(text: str, known: Mapping[str, str]) -> str:
    """Replace variables as Docker does outside of RUN; an unknown one is empty.

    >>> expand("$A/${B:-x}/${C}", {"A": "a"})
    'a/x/'
    """

    def value_of(match: re.Match[str]) -> str:
        if match[0].startswith("\\"):
            return "$"
        value = known.get(match[1] or match[2], "")
        if match[3] in ("-", ":-"):
            return value or match[4]
        if match[3] in ("+", ":+"):
            return match[4] if value else ""
        return value

    return _REFERENCE.sub(value_of, text)
