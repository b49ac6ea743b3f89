"""What may become part of a batch script."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from slurm.batch.options import OptionError, Options, parse, split_groups, words
from slurm.errors import SpecError
from slurm.render import render_sbatch
from tests.settings import a_job

HOSTILE = "a'; touch x"


def options(script: str) -> list[str]:
    """Options of sbatch in the script."""
    lines = [
        line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")
    ]
    return [word for line in lines for word in shlex.split(line)]


@pytest.mark.parametrize(
    "field",
    [
        "job_name",
        "partition",
        "account",
        "time",
        "home",
        "python",
        "run_folder",
        "output",
        "driver_args",
        "agent_args",
    ],
)
@pytest.mark.parametrize("text", ["/a\n#SBATCH --wrap=x", "/a\0", "/a\r", "/a\x1b[2J", "/a\u2028b"])
def test_no_value_can_begin_a_new_line(field: str, text: str) -> None:
    """A line break or control character in any value is refused, and the field is named."""
    value: Any = ("ok", text) if field.endswith("_args") else text
    with pytest.raises(SpecError, match=f"^{field}: "):
        a_job(**{field: value})


@pytest.mark.parametrize("field", ["job_name", "partition", "account"])
@pytest.mark.parametrize("text", ["", "--wrap=x", "-p", HOSTILE, "a b", "a$b", "ä", "../x"])
def test_names_that_slurm_reads_hold_safe_characters_only(field: str, text: str) -> None:
    with pytest.raises(SpecError, match=f"^{field}: "):
        a_job(**{field: text})


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("nodes", 0, "from 1"),
        ("nodes", True, "from 1"),
        ("num_gpus_per_node", 0, "from 1"),
        ("signal_lead_s", 70000, "65535"),
        ("gpu_request", "gpu", "gres"),
        ("home", "relative", "absolute"),
        ("home", "/a:b", "PYTHONPATH"),
        ("run_folder", "/a\\b", "backslash"),
        ("segment", 2, "segment: 2 does not divide the 1 nodes"),
        ("run_folder", "/runs/%j", "choose another path"),
        ("agent_args", ("--", "x"), "driver_args"),
        ("time", "1", "--signal-lead-s 120"),
        ("time", "soon", "D-H"),
        ("time", "1:2:3:4", "D-H"),
        ("output", " ", "omit it"),
    ],
)
def test_a_refusal_names_the_field_and_what_it_takes(field: str, value: Any, part: str) -> None:
    with pytest.raises(SpecError, match=f"^{field}: ") as refusal:
        a_job(**{field: value})
    assert part in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10", 600),
        ("10:30", 630),
        ("01:00:05", 3605),
        ("1-0", 86400),
        ("1-2:30", 95400),
        ("2-00:00:01", 172801),
    ],
)
def test_a_time_limit_is_read_in_every_form_of_sbatch(text: str, seconds: int) -> None:
    assert a_job(time=text).time_limit_s == seconds


def test_hostile_paths_and_arguments_stay_one_word() -> None:
    """The shell parses the script back into the values of the spec."""
    arguments = (HOSTILE, "$(touch x)", "`x`", '"', "", "#", "*")
    spec = a_job(
        driver_args=arguments, agent_args=(HOSTILE,), home=f"/{HOSTILE}", output=f"/{HOSTILE}.out"
    )
    script = render_sbatch(spec)
    words = shlex.split(script[script.index("exec python3") :].replace("\\\n", " "))
    options, agent, driver, _ = split_groups(words[5:], 4)
    assert tuple(driver) == arguments and agent == [HOSTILE]
    assert parse(options).name == "rlpost"
    home = next(line for line in script.splitlines() if line.startswith("home="))
    assert shlex.split(home) == [f"home=/{HOSTILE}"]


def test_the_batch_host_reads_the_options_that_were_rendered() -> None:
    """``parse`` is the inverse of ``words`` for every option, whatever its characters."""
    hostile = Options(
        name="a=b", mount=("/a", "$X/b:/c:ro"), environment=("A=b c=d",), exclude=("n[1-3]", "m")
    )
    assert parse(words(hostile)) == hostile and words(Options()) == []
    every = {name: _other(value) for name, value in Options()._asdict().items()}
    assert parse(words(Options(**every))) == Options(**every)
    for wrong in ("--nothing=1", "name=x", "--nodes=two", "--name"):
        with pytest.raises(OptionError, match=wrong):
            parse([wrong])


def _other(value: Any) -> Any:
    """A value of the same type that is not the default."""
    if isinstance(value, tuple):
        return (HOSTILE, "$(touch x)")
    return value + 1 if isinstance(value, int) else f"{value}{HOSTILE}"
