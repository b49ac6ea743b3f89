"""``rlpost completion bash|zsh``: a script that completes verbs, flags, recipes and runs.

Input: the help of every verb. Output: a static script, so completing a word starts no Python; print
it again after an upgrade. Names of runs are read from the runs folder when they are completed. zsh
reads the script of bash through its ``bashcompinit``.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from rlpost.cli.main import verb_function, verbs
from rlpost.cli.recipes import JOBS, KINDS, named_files
from rlpost.cli.runs import RUNS_DIR, RUNS_DIR_VARIABLE
from rlpost.config.arguments import Parser
from rlpost.config.flags import fields, flag
from rlpost.config.keys import without_keys

OF_RECIPES = ("submit", "sweep", "check", "plan", "rehearse", "fetch", "convert")
"""Verbs whose first word is a recipe; they have a flag for each setting as well."""
SHELLS = ("bash", "zsh")
OTHER_WORDS: dict[str, Sequence[str]] = {
    "recipes": tuple(KINDS),
    "completion": SHELLS,
    "list": (),
    "doctor": (),
}
"""Verbs whose words are not runs."""
_FLAG = re.compile(r"^ {2}(?:-\w, )?(?P<flag>--[a-z][a-z0-9-]*)(?:, (?P<other>--[a-z-]+))?", re.M)
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT = """\
# Completion of rlpost for bash and zsh, written by `rlpost completion`.
_rlpost() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
  local settings="{settings}"
  local own="" names="" runs="${{{variable}:-{runs_dir}}}"
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{verbs}" -- "$word"))
    return
  fi
  case $previous in
    --model) COMPREPLY=($(compgen -W "{models}" -- "$word") $(compgen -f -- "$word")); return ;;
    --cluster) COMPREPLY=($(compgen -W "{clusters}" -- "$word") $(compgen -f -- "$word")); return ;;
  esac
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  case $word in
    -*) COMPREPLY=($(compgen -W "$own" -- "$word")) ;;
    *) COMPREPLY=($(compgen -W "$names" -- "$word") $(compgen -f -- "$word")) ;;
  esac
}}
complete -o filenames -F _rlpost rlpost
"""


def main(arguments: Sequence[str]) -> int:
    """Print the script of a shell."""
    made = Parser(
        prog="rlpost completion",
        description="Print a script that completes verbs, flags, recipes and runs.",
        epilog="Write it to a file that your shell reads, such as ~/.bashrc: source FILE. For this "
        'shell alone: eval "$(rlpost completion bash)".',
    )
    made.add_argument("shell", choices=SHELLS, help="the shell")
    options = made.parse_args(arguments)
    script = completion_script({verb: flags_of_verb(verb) for verb in verbs()})
    print((_ZSH if options.shell == "zsh" else "") + script, end="")
    return 0


def completion_script(flags: Mapping[str, Sequence[str]]) -> str:
    """Return the script; ``flags`` has those of each verb, without the settings."""
    named = {kind: " ".join(named_files(JOBS / kind)) for kind in KINDS}
    cases = []
    for verb, verb_flags in flags.items():
        words, names = " ".join(verb_flags), '$(ls -- "$runs" 2>/dev/null)'
        if verb in OF_RECIPES:
            words, names = f"{words} $settings", named["recipes"]
        elif verb in OTHER_WORDS:
            names = " ".join(OTHER_WORDS[verb])
        cases.append(f'    {verb}) own="{words}" names="{names}" ;;')
    return _SCRIPT.format(
        settings=" ".join(flag(key) for key in fields()),
        variable=RUNS_DIR_VARIABLE,
        runs_dir=RUNS_DIR,
        verbs=" ".join(flags),
        models=named["models"],
        clusters=named["clusters"],
        cases="\n".join(cases),
    )


def flags_of_verb(verb: str) -> list[str]:
    """Return the flags that ``rlpost VERB --help`` lists."""
    found = _FLAG.finditer(_help(verb))
    return [word for match in found for word in (match["flag"], match["other"]) if word]


def _help(verb: str) -> str:
    if verb == "doctor":  # a separate process in any case
        command = [sys.executable, "-m", "rlpost", verb, "--help"]
        environ = without_keys(os.environ)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        return done.stdout
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        verb_function(verb)(["--help"])
    return shown.getvalue()
