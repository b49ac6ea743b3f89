"""Expand the variables of a shell script without running it.

Input: the file of a script. Output: its commands with all words expanded. What is only known where
the script runs (output of programs, variables of the caller, files) becomes a mark in the word;
``reasons`` says what and where. Files that a script sources are read; nothing else is.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlpost.errors import ConfigError
from rlpost.extensions.importing.arithmetic import calculate
from rlpost.extensions.importing.shell_braces import braces
from rlpost.extensions.importing.shell_syntax import (
    Assignment,
    Block,
    Branch,
    Case,
    Command,
    Function,
    Loop,
    Token,
    closing,
    parse,
    quote_end,
)
from rlpost.extensions.importing.shell_words import (
    OTHER_HARDWARE,
    Builder,
    Value,
    Word,
    decide,
    formatted,
    joined,
    printed_by,
    shortened,
    texts_of,
    trimmed,
)
from rlpost.extensions.importing.text_file import read_text

MOST_STEPS, MOST_LETTERS, MOST_FILES, MOST_CALLS = 100_000, 1_000_000, 20, 20
_MARK = re.compile("\ue000(\\d+)\ue001")
_ELEMENTS = re.compile(r"\$@|\$\{@[^}]*\}|\$\{\w+\[@\][^}]*\}")
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9@*#?$!-])(\[[^]]*\])?(.*)", re.DOTALL)


@dataclass(slots=True)
class Shell:
    """Variables and commands of a script that is read.

    Attributes:
        path: the script.
        variables: those that are known; the caller's may be given.
        commands: the words of each command, in order.
        reasons: what a mark in a word stands for.
        problems: a line for each file that is sourced and cannot be read.
        undecided: why the newest condition could not be decided.
    """

    path: Path
    variables: dict[str, Value]
    commands: list[list[Word]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    functions: dict[str, Block] = field(default_factory=dict)
    arguments: list[list[Word]] = field(default_factory=lambda: [[]])
    given: frozenset[str] = frozenset()
    steps: int = 0
    files: int = 0
    depth: int = 0
    undecided: str = ""

    def mark(self, reason: str) -> str:
        """Return a mark for a text that is not known, with the reason."""
        self.reasons.append(reason)
        return f"\ue000{len(self.reasons) - 1}\ue001"

    def unknown(self, text: str) -> str | None:
        """Return the reason of the first mark in a text, or None if all of it is known."""
        match = _MARK.search(text)
        return self.reasons[int(match[1])] if match else None

    def plain(self, text: str) -> str:
        """Return a text with ``?`` for each mark."""
        return _MARK.sub("?", text)

    def run(self, block: Block) -> bool | None:
        """Read commands; return whether the last one succeeds, None if that is not known."""
        status: bool | None = True
        for node in block:
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise ConfigError(f"line {node.line}: more than {MOST_STEPS:,} commands in loops")
            if isinstance(node, Command):
                status = self._command(node)
            elif isinstance(node, Branch):
                status = self._branch(node)
            elif isinstance(node, Loop):
                self._loop(node)
            elif isinstance(node, Case):
                self._case(node)
            else:
                assert isinstance(node, Function)
                self.functions[node.name] = node.body
        return status

    def _branch(self, node: Branch) -> bool | None:
        if node.kind == "(":
            before = dict(self.variables)
            status = self.run(node.pairs[0][0])
            self.variables = before  # those of a subshell end with it
            return status
        bodies: list[Block] = []
        self.undecided = ""
        for decides, body in node.pairs:
            status = self.run(decides)
            if status is not None and status == node.is_inverted:
                continue
            bodies.append(body)
            if status is not None:
                result = self._any_of(bodies, node.line)
                return False if node.kind == "!" else result
        if not bodies:
            # Nothing follows: "a && b" has failed, "a || b" and "if" without "else" have not.
            return self.run(node.otherwise) if node.kind == "if" else node.kind != "&&"
        bodies.append(node.otherwise)
        return self._any_of(bodies, node.line)

    def _any_of(self, bodies: Sequence[Block], line: int) -> bool | None:
        """Read bodies of which one runs: a variable that they set differently is not known."""
        if len(bodies) == 1:
            return self.run(bodies[0])
        before, ends = dict(self.variables), []
        arguments, choices_of_arguments = self.arguments[-1], []
        for body in bodies:
            self.variables, self.arguments[-1] = dict(before), arguments
            self.run(body)
            ends.append(self.variables)
            choices_of_arguments.append(self.arguments[-1])
        if any(texts_of(one) != texts_of(arguments) for one in choices_of_arguments):
            why = f"$@ depends on a condition of line {line}; {self.undecided or 'write its words'}"
            self.arguments[-1] = [Word(self.mark(why), line)]
        names = {name for end in ends for name in end}
        self.variables = {}
        for name in names:
            values = [end.get(name) for end in ends]
            if all(texts_of(value) == texts_of(values[0]) for value in values):
                self.variables[name] = next(value for value in values if value is not None)
            else:
                choices = [repr(shortened(self.plain(joined(value)))) for value in values]
                remedy = self.undecided or f"give {name}=VALUE behind the file"
                self.variables[name] = self.mark(
                    f"{name} depends on a condition of line {line} "
                    f"({' or '.join(dict.fromkeys(choices))}); {remedy}"
                )
        return None

    def _loop(self, node: Loop) -> None:
        if node.header:
            first, condition, step = (*node.header.split(";"), "", "")[:3]
            self._calculate(first, node.line)
            while self._calculate(condition or "1", node.line):
                self.run(node.body)
                self._calculate(step, node.line)
                self.steps += 1
                if self.steps > MOST_STEPS:
                    raise ConfigError(
                        f"line {node.line}: more than {MOST_STEPS:,} rounds of a loop"
                    )
            return
        if node.name:
            for word in [one for token in node.words for one in self.expand(token)]:
                self.variables[node.name] = word.text
                self.run(node.body)
            return
        self._any_of([(), node.body], node.line)  # while: any number of times

    def _case(self, node: Case) -> None:
        subject = self.text(node.word.text, node.line)
        if reason := self.unknown(subject):
            self.undecided = reason
            self._any_of([(), *(body for _, body in node.arms)], node.line)
            return
        for patterns, body in node.arms:
            if any(fnmatch.fnmatchcase(subject, self.text(one.text, one.line)) for one in patterns):
                self.run(body)
                return

    def _calculate(self, text: str, line: int) -> int:
        """Return the value of an arithmetic expression, 0 if it is not known; may set a variable."""
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(\+\+|--|[-+*/]?=(?!=))(.*)", text, re.DOTALL)
        if match is None:
            value = self.arithmetic(text, line)
            return value if isinstance(value, int) else 0
        name, operator, rest = match.groups()
        if operator in ("++", "--"):
            operator, rest = operator[0] + "=", "1"
        expression = rest if operator == "=" else f"({name}){operator[0]}({rest})"
        value = self.arithmetic(expression, line)
        self.variables[name] = value if isinstance(value, str) else str(value)
        return value if isinstance(value, int) else 0

    def arithmetic(self, text: str, line: int) -> int | str:
        """Return the value of an expression, or a mark if it is not known."""
        expression = self.text(text, line) if "$" in text or "`" in text else text
        if reason := self.unknown(expression):
            return self.mark(reason)
        reasons: list[str] = []

        def number(name: str) -> int:
            value = self.variables.get(name, "0")
            if not isinstance(value, str):
                value = value[0].text if value else "0"
            if reason := self.unknown(value):
                reasons.append(reason)
                return 1
            return int(value) if re.fullmatch(r"-?\d{1,18}", value) else 0

        result = calculate(expression, number)
        if reasons:
            return self.mark(reasons[0])
        if result is None:
            return self.mark(f"line {line}: $(({text.strip()})) is not read")
        return result

    def _command(self, node: Command) -> bool | None:
        if node.words and node.words[0].text.startswith("(("):
            value = self.arithmetic(node.words[0].text[2:-2], node.line)
            if isinstance(value, str):
                return None
            self._calculate(node.words[0].text[2:-2], node.line)
            return value != 0
        name = node.words[0].text if node.words else ""
        if not node.words or name in _DECLARE:
            for one in node.assignments:
                self._assign(one)
            return True
        words = [word for token in node.words for word in self.expand(token)]
        if not words:
            return True
        return self._builtin(words, node.line)

    def _builtin(self, words: list[Word], line: int) -> bool | None:
        name, *_ = texts = [word.text for word in words]
        if name in ("[", "[[", "test"):
            inner = [text for text in texts[1:] if text not in ("]", "]]")]
            reasons = [why for text in inner if (why := self.unknown(text))]
            self.undecided = reasons[0] if reasons else self.undecided
            return None if reasons else decide(inner)
        if name in ("true", ":", "false"):
            return name != "false"
        if name in ("source", ".") and len(texts) > 1:
            self._source(texts[1], line)
        elif name == "printf" and texts[1:2] == ["-v"] and len(texts) > 3:
            self.variables[texts[2]] = formatted(texts[3], texts[4:])
        elif name in ("read", "mapfile", "readarray"):
            for text in texts[1:]:
                if re.fullmatch(r"[A-Za-z_]\w*", text):
                    self.variables[text] = self.mark(f"line {line}: {text} is read from input")
        elif (
            name == "set" and len(texts) > 1 and (texts[1][0:1] not in ("-", "+") or "--" in texts)
        ):
            self.arguments[-1] = words[texts.index("--") + 1 if "--" in texts else 1 :]
        elif name == "shift":
            self.arguments[-1] = self.arguments[-1][
                int(texts[1]) if texts[1:] and texts[1].isdigit() else 1 :
            ]
        elif name in self.functions:
            return self._call(name, words[1:], line)
        elif name == "eval":
            return self._nested(" ".join(texts[1:]), line)
        elif "-c" in texts and any(
            text in ("bash", "sh", "/bin/bash", "/bin/sh") for text in texts
        ):
            return self._nested("".join(texts[texts.index("-c") + 1 :][:1]), line)
        elif any(probe in text for probe in OTHER_HARDWARE for text in texts):
            return False
        else:
            self.commands.append(words)
            return True if name in ("echo", "cd", "mkdir") else None
        return True

    def _call(self, name: str, arguments: list[Word], line: int) -> bool | None:
        if len(self.arguments) > MOST_CALLS:
            raise ConfigError(f"line {line}: {name} calls itself more than {MOST_CALLS} times")
        self.arguments.append(arguments)
        try:
            return self.run(self.functions[name])
        finally:
            self.arguments.pop()

    def _nested(self, text: str, line: int) -> bool | None:
        if len(self.arguments) > MOST_CALLS:
            raise ConfigError(f"line {line}: more than {MOST_CALLS} nested shells")
        self.arguments.append([])
        status = self.run(parse(text))
        self.arguments.pop()
        return status

    def _source(self, text: str, line: int) -> None:
        if reason := self.unknown(text):
            self.problems.append(f"line {line}: source {self.plain(text)} is not read: {reason}")
            return
        # A relative path is one below the folder where the script is started: its own or one above.
        folders = [Path()] if Path(text).is_absolute() else list(self.path.absolute().parents)[:3]
        path = next((one / text for one in folders if (one / text).is_file()), folders[0] / text)
        self.files += 1
        if self.files > MOST_FILES:
            raise ConfigError(f"line {line}: more than {MOST_FILES} files are sourced")
        try:
            block = parse(read_text(path))
        except ConfigError as error:
            self.problems.append(f"line {line}: source {text}: {error}")
            return
        outer, self.path = self.path, path
        self.run(block)
        self.path = outer

    def _assign(self, one: Assignment) -> None:
        if one.name in self.given:
            return
        if one.has_keys:
            why = f"line {one.line}: {one.name} has elements by key, which are not read"
            self.variables[one.name] = self.mark(why)
            return
        before = self.variables.get(one.name) if one.is_appended else None
        value: Value
        if one.elements is None and not isinstance(before, list):
            value = (before or "") + self.text(one.value, one.line)
        else:
            if one.elements is None:
                words = [Word(self.text(one.value, one.line), one.line)]
            else:
                words = [word for token in one.elements for word in self.expand(token)]
            value = [*(before if isinstance(before, list) else []), *words]
        size = len(value) if isinstance(value, str) else sum(len(word.text) for word in value)
        if size > MOST_LETTERS:
            raise ConfigError(f"line {one.line}: {one.name} has more than {MOST_LETTERS:,} letters")
        self.variables[one.name] = value

    def text(self, raw: str, line: int) -> str:
        """Return the text of a word that is not split, as on the right of an assignment."""
        return " ".join(word.text for word in self.expand(Token(raw, line), is_split=False))

    def expand(self, token: Token, *, is_split: bool = True) -> list[Word]:
        """Return the words that a word becomes."""
        self.depth += 1
        if self.depth > 2 * MOST_CALLS:
            raise ConfigError(f"line {token.line}: a value refers to itself too deeply")
        try:
            done: list[Word] = []
            for raw in braces(token.text, token.line) if is_split else [token.text]:
                builder = Builder(token.line, is_split)
                self._expand(raw, builder, is_quoted=False)
                done += builder.words()
            return done
        finally:
            self.depth -= 1

    def _expand(self, raw: str, out: Builder, *, is_quoted: bool) -> None:
        at, line = 0, out.line
        while at < len(raw):
            letter = raw[at]
            if letter == "\\":
                following = raw[at + 1 : at + 2]
                is_kept = is_quoted and following not in '"\\$`\n'
                out.add("\\" + following if is_kept else following.replace("\n", ""))
                at += 2
            elif letter == "'" and not is_quoted:
                end = quote_end(raw, at, line)
                out.add(raw[at + 1 : end - 1])
                at = end
            elif letter == '"' and not is_quoted:
                end = quote_end(raw, at, line)
                if not _ELEMENTS.fullmatch(raw[at + 1 : end - 1]):  # no elements are no word
                    out.add("")
                self._expand(raw[at + 1 : end - 1], out, is_quoted=True)
                at = end
            elif letter == "`":
                end = quote_end(raw, at, line)
                out.value(self._substitute(raw[at + 1 : end - 1], line), is_quoted=is_quoted)
                at = end
            elif letter == "$":
                at = self._dollar(raw, at, out, is_quoted=is_quoted)
            else:
                out.add(letter)
                at += 1

    def _dollar(self, raw: str, at: int, out: Builder, *, is_quoted: bool) -> int:
        line = out.line
        if raw.startswith("$((", at):
            end = closing(raw, at + 1, line)
            value = self.arithmetic(raw[at + 3 : end - 2], line)
            out.add(str(value))
            return end
        if raw.startswith("$(", at):
            end = closing(raw, at + 1, line)
            out.value(self._substitute(raw[at + 2 : end - 1], line), is_quoted=is_quoted)
            return end
        if raw.startswith("${", at):
            end = closing(raw, at + 1, line)
            out.value(self._parameter(raw[at + 2 : end - 1], line), is_quoted=is_quoted)
            return end
        if raw.startswith("$'", at) and not is_quoted:
            end = quote_end(raw, at + 1, line)
            out.add(raw[at + 2 : end - 1].replace("\\n", "\n").replace("\\t", "\t"))
            return end
        match = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!])").match(raw, at)
        if match is None:
            out.add("$")
            return at + 1
        out.value(self._parameter(match[1], line), is_quoted=is_quoted)
        return match.end()

    def _parameter(self, text: str, line: int) -> Value:
        """Return the value of ``${text}``."""
        if text.startswith("#") and len(text) > 1:
            return str(len(self.variables.get(text[1:].partition("[")[0], "")))
        match = _PARAMETER.fullmatch(text)
        if match is None:
            return self.mark(f"line {line}: ${{{text[:40]}}} is not read")
        name, index, rest = match[1], match[2] or "", match[3]
        value = self._lookup(name, index, line)
        operator = re.match(r":?[-=?+]", rest)
        if operator is not None:
            default = rest[operator.end() :]
            is_empty = value is None or (operator[0][0] == ":" and value in ("", []))
            if operator[0][-1] == "+":
                return "" if is_empty else self.text(default, line)
            if not is_empty:
                assert value is not None
                return value
            if operator[0][-1] == "?":
                return self._absent(name, line)
            chosen = self.text(default, line)
            if operator[0][-1] == "=" and name not in self.given:
                self.variables[name] = chosen
            return chosen
        if value is None:
            return [] if index == "[@]" and name not in self.given else self._absent(name, line)
        return value if not rest else self._edited(value, rest, text, line)

    def _absent(self, name: str, line: int) -> str:
        return self.mark(
            f"line {line}: {name} is not set in the script; give {name}=VALUE behind the file"
        )

    def _lookup(self, name: str, index: str, line: int) -> Value | None:
        if name in ("@", "*"):
            return self.arguments[-1]
        if name in ("0", "BASH_SOURCE"):
            return str(self.path)
        if name.isdigit():
            words = self.arguments[-1]
            return words[int(name) - 1].text if int(name) <= len(words) else None
        if name in ("#", "?", "$", "!", "-", "RANDOM", "SECONDS"):
            return self.mark(f"line {line}: ${name} is known only where the script runs")
        value = self.variables.get(name)
        if isinstance(value, list):
            if index == "[*]":
                separator = self.variables.get("IFS", " ")
                return str(separator)[:1].join(word.text for word in value)
            if index != "[@]":
                position = self.arithmetic(index[1:-1] or "0", line)
                is_there = isinstance(position, int) and -len(value) <= position < len(value)
                return value[int(position)].text if is_there else None
        return value

    def _edited(self, value: Value, rest: str, whole: str, line: int) -> Value:
        text = value if isinstance(value, str) else " ".join(word.text for word in value)
        if self.unknown(text):
            return text
        match = re.fullmatch(r"(##?|%%?)(.*)", rest, re.DOTALL)
        if match is not None:
            return trimmed(text, match[1], self.text(match[2], line))
        match = re.fullmatch(r"//?([^/]+)/?(.*)", rest, re.DOTALL)
        if match is not None and not set("*?[") & set(match[1]):
            count = -1 if rest.startswith("//") else 1
            return text.replace(self.text(match[1], line), self.text(match[2], line), count)
        return self.mark(f"line {line}: ${{{whole[:40]}}} is not read")

    def _substitute(self, text: str, line: int) -> str:
        """Return what a command prints, or a mark: only words and names of folders are known."""
        inner = Shell(self.path, dict(self.variables), reasons=self.reasons, depth=self.depth + 1)
        if inner.depth > MOST_CALLS:
            raise ConfigError(f"line {line}: more than {MOST_CALLS} nested substitutions")
        inner.run(parse(text))
        commands = [[word.text for word in words] for words in inner.commands]
        output = printed_by(commands, str(self.path.parent), self.unknown)
        if output is None:
            shown = self.plain(" ".join(text.split()))[:50]
            return self.mark(f"line {line}: what `{shown}` prints is not known")
        return output
