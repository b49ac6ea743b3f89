"""The pages say what is there: every command parses, every flag, file and link exists, the reference is the tree's."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from rlpost.cli import main as door
from rlpost.config.flags import fields, flag
from rlpost.config.show import reference
from rlpost.rollout.server_args import server_arg_names

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
# What a reader puts a file of his own in the place of.
PLACEHOLDERS = {"RECIPE": "jobs/recipes/tiny.toml", "PROFILE": "jobs/clusters/local.toml"}
LEFT_OUT_OF_PARSING = {"--help", "-h"}


class Parsed(Exception):
    """A verb has understood its words; it must not act on them."""


def commands(page: Path) -> list[str]:
    """Command lines of a page: those of its blocks, and whatever in a line of text begins like ours."""
    found = []
    for block in BLOCK.findall(page.read_text()):
        lines = block.replace("\\\n", " ").splitlines()
        found += [
            line.removeprefix("$ ").strip() for line in lines if line.strip() and not line.lstrip().startswith("#")
        ]
    text = BLOCK.sub("", page.read_text())
    ours = [code for code in INLINE.findall(text) if re.match(r"(rlpost |python -m |make |sbatch jobs/)", code)]
    return [*found, *(re.sub(r"\[(\w+)\]", r"\1", code) for code in ours)]


CASES = [pytest.param(command, id=f"{page.name}: {command}") for page in PAGES for command in commands(page)]


def parse_verb(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a verb parse its words with its own parser and stop there; settings are loaded as well."""
    words = [PLACEHOLDERS.get(word, word) for word in words]
    if not words or words[0] == "VERB":
        return
    known = {**door.verbs(), "doctor": ""}
    assert words[0] in known, f"no verb {words[0]}"
    if words[0] in ("submit", "check"):
        print_config(words[0], words[1:])
        return
    if words[0] == "doctor":
        return

    def parse_only(self, arguments):
        self.parse_known_args(arguments)[1] and self.error(f"not known: {arguments}")
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    module, _, function = door.VERBS[words[0]][0].partition(":")
    with pytest.raises(Parsed):
        getattr(importlib.import_module(module), function)(words[1:])


def print_config(verb: str, words: list[str]) -> None:
    """Settings are parsed, loaded and validated, and nothing else happens."""
    module, _, function = door.VERBS[verb][0].partition(":")
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as left:
        getattr(importlib.import_module(module), function)([*words, "--print-config"])
    assert left.value.code == 0


@pytest.mark.parametrize("command", CASES)
def test_a_command_of_the_docs_can_be_typed(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert subprocess.run(["bash", "-n"], input=command, text=True).returncode == 0
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        return  # shell beyond words, which bash has parsed
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)  # VARIABLE=value before a command
    if not words or LEFT_OUT_OF_PARSING & set(words):
        return
    if words[0] == "rlpost":
        parse_verb(words[1:], monkeypatch)
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(word in targets for word in words[1:] if "=" not in word)
    elif words[0] == "sbatch":
        files = [word for word in words[1:] if word.endswith(".sbatch")]
        assert all((ROOT / file).exists() for file in files)
    elif Path(words[0]).name.startswith("python"):
        parse_python(words[1:], monkeypatch)


def parse_python(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m MODULE ...`` or ``python FILE ...``: it is there, and ours understands the words."""
    if words[:1] == ["-m"]:
        if words[1] == "rlpost":
            parse_verb(words[2:], monkeypatch)
        elif words[1] == "rlpost.submit":
            parse_verb(["submit", *words[2:]], monkeypatch)
        elif words[1] != "MODULE":
            monkeypatch.syspath_prepend(str(ROOT))
            assert importlib.util.find_spec(words[1]) is not None, f"no module {words[1]}"
    elif words and words[0].endswith(".py"):
        assert (ROOT / words[0]).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.fixture(scope="module")
def flags_of_verbs() -> set[str]:
    """Every option that a verb's help shows."""
    shown = io.StringIO()
    for verb in door.verbs():
        module, _, function = door.VERBS[verb][0].partition(":")
        if verb != "doctor":
            with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
                getattr(importlib.import_module(module), function)(["--help"])
    return set(re.findall(r"--[a-z][a-z-]*", shown.getvalue()))


@pytest.mark.parametrize("name", ["troubleshooting.md", "first-run.md", "install.md"])
def test_flags_that_are_named_exist(name, flags_of_verbs):
    known = {flag(key) for key in fields()} | flags_of_verbs
    engine = {"--sglang-" + arg.replace("_", "-") for arg in server_arg_names() or ()}
    for code in INLINE.findall((ROOT / "docs" / name).read_text()):
        if code.startswith("--"):
            word = code.split()[0]
            assert word in known | engine or (not engine and word.startswith("--sglang-")), f"{name}: {word}"


def test_the_reference_of_settings_is_that_of_the_tree():
    assert (ROOT / "docs/settings.md").read_text() == reference(), "docs/settings.md is old; run make docs"


SYMPTOMS = (
    "Ray workers do not connect",
    "unhandled system error",
    "Out of memory",
    "Long waits between rollouts",
)


def test_every_symptom_has_a_command_that_finds_it():
    """The troubles that users of such systems report most."""
    sections = re.split(r"^## ", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.MULTILINE)
    for symptom in SYMPTOMS:
        section = next(part for part in sections if symptom in part.splitlines()[0])
        assert "`rlpost " in section, symptom
