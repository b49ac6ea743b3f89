"""Parse the part of shell syntax that training scripts use. Nothing is executed. Pure.

Input: the text of a script. Output: a tree of commands, each with its line; words keep their quotes
and variables, which ``shell`` expands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rlpost.errors import ConfigError

_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\[[^]]*\])?(\+?)=")
_KEY = re.compile(r"\[[^]]*\]\+?=")
_OPERATOR = re.compile(r"&>>|&>|&&|\|\||;;&?|;&|<<<|<<-?|>>|>&|<&|\|&|[;&|()<>\n]")
_REDIRECTION = ("<", ">", ">>", "&>", "&>>", ">&", "<&", "<<<")
_PAIRS = {"(": ")", "{": "}"}
MOST_DEPTH = 60
"""Depth of nested quotes, substitutions and blocks."""


@dataclass(frozen=True, slots=True)
class Token:
    """A word with its quotes, or an operator."""

    text: str
    line: int
    is_word: bool = True


@dataclass(frozen=True, slots=True)
class Assignment:
    """``NAME=value``, ``NAME+=value`` or ``NAME=(values)``.

    ``has_keys``: elements by key, ``NAME[key]=value`` or ``NAME=([key]=value)``.
    """

    name: str
    value: str
    elements: tuple[Token, ...] | None
    is_appended: bool
    line: int
    has_keys: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command: assignments before it, and its words."""

    assignments: tuple[Assignment, ...]
    words: tuple[Token, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Branch:
    """``if``, ``&&``, ``||`` and ``!``: pairs of commands that decide and those that follow.

    A group in a subshell, ``(``, decides alone.
    """

    pairs: tuple[tuple[Block, Block], ...]
    otherwise: Block
    line: int
    kind: str = "if"

    @property
    def is_inverted(self) -> bool:
        """Whether the commands follow where the deciding ones fail: ``||``."""
        return self.kind == "||"


@dataclass(frozen=True, slots=True)
class Loop:
    """``for NAME in words``, ``for ((init; condition; step))``, or ``while`` (no words, no header)."""

    name: str
    words: tuple[Token, ...]
    header: str
    body: Block
    line: int


@dataclass(frozen=True, slots=True)
class Case:
    """``case word in``: the bodies by their patterns."""

    word: Token
    arms: tuple[tuple[tuple[Token, ...], Block], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    """A function's name and body."""

    name: str
    body: Block
    line: int


Node = Command | Branch | Loop | Case | Function
Block = tuple[Node, ...]


def parse(text: str) -> Block:
    """Return the commands of a script. Raises ConfigError with the line of a syntax error."""
    parser = _Parser(_tokens(text))
    block = parser.block(())
    if parser.rest:
        raise ConfigError(f"line {parser.rest[0].line}: unexpected {parser.rest[0].text!r}")
    return block


def closing(text: str, start: int, line: int, depth: int = 0) -> int:
    """Return the position behind the bracket that closes the one at ``start``.

    Raises ConfigError if there is none.
    """
    if depth > MOST_DEPTH:
        raise ConfigError(f"line {line}: more than {MOST_DEPTH} nested brackets")
    close, at = _PAIRS[text[start]], start + 1
    is_arithmetic = "((" in text[max(start - 1, 0) : start + 2]
    may_have_documents = close == ")" and not is_arithmetic
    while at < len(text):
        letter = text[at]
        if letter == close:
            return at + 1
        if letter == "#" and close == ")" and text[at - 1] in " \t\n(":
            end = text.find("\n", at)  # a comment in an array or a substitution
            at = len(text) if end < 0 else end
        elif (
            may_have_documents and text.startswith("<<", at) and text[at + 2 : at + 3] not in "< \n"
        ):
            at = _document_end(text, at + 2)
        elif letter in "'\"`":
            at = quote_end(text, at, line, depth + 1)
        elif letter == "\\":
            at += 2
        elif letter == text[start] or text.startswith(("${", "$("), at):
            at = closing(text, at if letter in _PAIRS else at + 1, line, depth + 1)
        else:
            at += 1
    raise ConfigError(f"line {line}: {text[start]!r} without {close!r}")


def quote_end(text: str, start: int, line: int, depth: int = 0) -> int:
    """Return the position behind the quote that ``start`` opens. Raises ConfigError."""
    quote, at = text[start], start + 1
    while at < len(text):
        if text[at] == quote:
            return at + 1
        if text[at] == "\\" and quote != "'":
            at += 2
        elif quote == '"' and text.startswith(("${", "$("), at):
            at = closing(text, at + 1, line, depth + 1)
        else:
            at += 1
    raise ConfigError(f"line {line}: a quote {quote} is not closed")


def _tokens(text: str) -> list[Token]:
    """Return words and operators; comments and here-documents are left out."""
    tokens: list[Token] = []
    documents: list[str] = []
    at, line = 0, 1
    while at < len(text):
        letter = text[at]
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif letter in " \t\r":
            at += 1
        elif letter == "#":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif text.startswith("((", at) and _starts_command(tokens):
            end = closing(text, at, line)
            tokens.append(Token(text[at:end], line))
            line, at = line + text.count("\n", at, end), end
        elif match := _OPERATOR.match(text, at):
            operator = match[0]
            if operator.startswith("<<") and operator != "<<<":
                at = _delimiter(text, match.end(), documents)
                continue
            tokens.append(Token(operator, line, is_word=False))
            at = match.end()
            if operator == "\n":
                line += 1
                for delimiter in documents:
                    at, line = _behind(text, at, line, delimiter)
                documents.clear()
        else:
            end = _word_end(text, at, line)
            tokens.append(Token(text[at:end], line))
            line, at = line + text.count("\n", at, end), end
    return tokens


def _starts_command(tokens: list[Token]) -> bool:
    return (
        not tokens
        or not tokens[-1].is_word
        or tokens[-1].text in ("for", "if", "do", "then", "while")
    )


def _delimiter(text: str, at: int, documents: list[str]) -> int:
    match = re.compile(r"[ \t]*(\S+)").match(text, at)
    if match is None:
        return at
    documents.append(re.sub(r"['\"\\]", "", match[1]))
    return match.end()


def _document_end(text: str, at: int) -> int:
    """Return the position behind a here-document in a substitution, whose words begin at ``at``."""
    delimiters: list[str] = []
    _delimiter(text, at + text.startswith("-", at), delimiters)
    end = text.find("\n", at)
    return len(text) if end < 0 else _behind(text, end + 1, 0, delimiters[0])[0]


def _behind(text: str, at: int, line: int, delimiter: str) -> tuple[int, int]:
    """Return position and line behind a here-document."""
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        row, at, line = text[at:end], end + 1, line + 1
        if row.strip() == delimiter:
            break
    return at, line


def _word_end(text: str, start: int, line: int) -> int:
    at = start
    while at < len(text):
        letter = text[at]
        if letter in " \t\r\n;|<>)" or letter == "&":
            break
        if letter == "(":
            # An array, or a pattern of [[ ]]; otherwise the word ends, as in NAME().
            if at == start or text[at - 1] not in "=$@?*+!":
                break
            at = closing(text, at, line)
        elif letter in "'\"`":
            at = quote_end(text, at, line)
        elif letter == "\\":
            at += 2
        elif text.startswith(("${", "$("), at):
            at = closing(text, at + 1, line)
        else:
            at += 1
    return min(at, len(text)) if at > start else start + 1


@dataclass(slots=True)
class _Parser:
    """A recursive descent over the tokens."""

    rest: list[Token]
    depth: int = 0
    at: int = field(default=0)

    def __post_init__(self) -> None:
        self.rest = self.rest[::-1]

    def peek(self) -> Token | None:
        return self.rest[-1] if self.rest else None

    def take(self) -> Token:
        if not self.rest:
            raise ConfigError("the script ends in the middle of a command")
        return self.rest.pop()

    def expect(self, word: str, line: int) -> None:
        token = self.peek()
        if token is None or token.text != word:
            raise ConfigError(f"line {line}: a block without {word!r}")
        self.take()

    def block(self, ends: tuple[str, ...]) -> Block:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise ConfigError(f"more than {MOST_DEPTH} nested blocks")
        nodes: list[Node] = []
        while (token := self.peek()) is not None and token.text not in ends:
            if not token.is_word and token.text in ("\n", ";", "&", "|", "|&"):
                self.take()
                continue
            nodes += self.and_or()
        self.depth -= 1
        return tuple(nodes)

    def and_or(self) -> Block:
        left = self.redirected()
        while (token := self.peek()) is not None and token.text in ("&&", "||"):
            operator = self.take()
            while (token := self.peek()) is not None and token.text == "\n":
                self.take()
            right = self.redirected()
            left = (Branch(((left, right),), (), operator.line, operator.text),)
        return left

    def redirected(self) -> Block:
        """A command with the redirections behind it, as of a group or a loop."""
        block = self.one()
        while (token := self.peek()) is not None:
            is_number = token.is_word and token.text.isdigit()
            if not is_number and (token.is_word or token.text not in _REDIRECTION):
                break
            self.take()
            if not is_number:
                self.take()
        return block

    def one(self) -> Block:
        token = self.take()
        word, line = token.text, token.line
        if not token.is_word:
            if word == "(":
                body = self.block((")",))
                self.expect(")", line)
                return (Branch(((body, ()),), (), line, "("),)
            raise ConfigError(f"line {line}: unexpected {word!r}")
        if word == "{":
            body = self.block(("}",))
            self.expect("}", line)
            return body
        if word == "!":
            return (Branch(((self.one(), ()),), (), line, "!"),)
        if word == "if":
            return (self.branch(line),)
        if word == "for":
            return (self.loop(line),)
        if word in ("while", "until"):
            self.block(("do",))
            self.expect("do", line)
            body = self.block(("done",))
            self.expect("done", line)
            return (Loop("", (), "", body, line),)
        if word == "case":
            return (self.case(line),)
        if word == "function":
            return (self.function(self.take().text, line),)
        if word == "[[":
            words = [token]
            while (token := self.take()).text != "]]":
                words.append(Token(token.text, token.line))
            return (Command((), tuple(words), line),)
        following = self.peek()
        if following is not None and following.text == "(" and re.fullmatch(r"[\w:.-]+", word):
            return (self.function(word, line),)
        return (self.command(token),)

    def branch(self, line: int) -> Branch:
        pairs = []
        while True:
            decides = self.block(("then",))
            self.expect("then", line)
            pairs.append((decides, self.block(("elif", "else", "fi"))))
            word = self.take().text
            if word != "elif":
                break
        otherwise: Block = ()
        if word == "else":
            otherwise = self.block(("fi",))
            self.expect("fi", line)
        elif word != "fi":
            raise ConfigError(f"line {line}: 'if' without 'fi'")
        return Branch(tuple(pairs), otherwise, line)

    def loop(self, line: int) -> Loop:
        first = self.take()
        words: list[Token] = []
        header = first.text if first.text.startswith("((") else ""
        while (token := self.take()).text != "do":
            if token.is_word and token.text != "in":
                words.append(token)
        body = self.block(("done",))
        self.expect("done", line)
        return Loop("" if header else first.text, tuple(words), header[2:-2], body, line)

    def case(self, line: int) -> Case:
        word = self.take()
        arms: list[tuple[tuple[Token, ...], Block]] = []
        while self.take().text != "in":
            pass
        while True:
            patterns: list[Token] = []
            while (token := self.take()).text != ")":
                if token.text == "esac":
                    return Case(word, tuple(arms), line)
                if token.is_word:
                    patterns.append(token)
            body = self.block((";;", ";&", ";;&", "esac"))
            arms.append((tuple(patterns), body))
            if self.take().text == "esac":
                return Case(word, tuple(arms), line)

    def function(self, name: str, line: int) -> Function:
        while (token := self.peek()) is not None and token.text in ("(", ")", "\n"):
            self.take()
        return Function(name, self.one(), line)

    def command(self, first: Token) -> Command:
        assignments: list[Assignment] = []
        words: list[Token] = []
        token: Token | None = first
        while token is not None:
            if token.is_word:
                one = None if words and words[0].text not in _DECLARE else assignment(token)
                if one is None:
                    words.append(token)
                else:
                    assignments.append(one)
            elif token.text in _REDIRECTION:
                if words and words[-1].text.isdigit():
                    words.pop()
                self.take()
            following = self.peek()
            if following is None or (not following.is_word and following.text not in _REDIRECTION):
                break
            token = self.take()
        return Command(tuple(assignments), tuple(words), first.line)


_DECLARE = ("export", "declare", "local", "readonly", "typeset")


def assignment(token: Token) -> Assignment | None:
    """Return the assignment that a word is, or None."""
    match = _ASSIGNMENT.match(token.text)
    if match is None:
        return None
    value = token.text[match.end() :]
    elements = None
    if value.startswith("(") and value.endswith(")"):
        inner = _tokens(value[1:-1])
        elements = tuple(
            Token(one.text, one.line + token.line - 1) for one in inner if one.text != "\n"
        )
    has_keys = bool(match[2]) or any(_KEY.match(one.text) for one in elements or ())
    return Assignment(match[1], value, elements, bool(match[3]), token.line, has_keys)
