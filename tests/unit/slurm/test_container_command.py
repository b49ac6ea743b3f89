"""Templates of container runtimes that are a prefix of the command, and what is rendered from them."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from rlpost.cli.job import job_spec
from rlpost.config.load import load
from rlpost.errors import ConfigError
from rlpost.extensions.attach.job_step import Inside, step_argv
from slurm.batch.options import parse
from slurm.batch.place import Place, find_place
from slurm.batch.steps import command_prefix, in_container
from slurm.container import Container
from slurm.container_command import command_words, template_problem
from slurm.errors import SpecError
from slurm.render import render_sbatch
from tests.settings import a_job

ROOT = Path(__file__).parents[3]
APPTAINER = "apptainer exec --nv --bind={source}:{target}:{mode} {image}"
PLACE = Place(
    "/code", "/run", "python3", "command", "/i.sif", "rlpost_7_0", ("/a", "/b:/c:ro"), APPTAINER
)


def documented() -> dict[str, str]:
    """The templates of docs/containers.md, by program."""
    page = (ROOT / "docs/containers.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("container_command = ")]
    templates = [line.partition(" = ")[2].strip('"') for line in lines]
    return {template.split()[0]: template for template in templates}


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            "apptainer",
            "--bind=/run:/run:rw --bind=/code:/code:rw --bind=/a:/a:rw --bind=/b:/c:ro /i.sif",
        ),
        ("ch-run", "--bind=/run:/run --bind=/code:/code --bind=/a:/a --bind=/b:/c /i.sif --"),
        (
            "podman-hpc",
            "--volume=/run:/run:rw --volume=/code:/code:rw --volume=/a:/a:rw --volume=/b:/c:ro /i.sif",
        ),
    ],
)
def test_each_documented_template_gives_the_command_line_of_its_runtime(
    program: str, words: str
) -> None:
    template = documented()[program]
    assert template_problem(template, has_mounts=True) == ""
    prefix = command_prefix(PLACE._replace(command=template))
    assert prefix[0] == program and words in " ".join(prefix)
    assert prefix[-1] == words.split()[-1] and not any("{" in word for word in prefix)


def test_a_word_is_one_argument_whatever_it_holds() -> None:
    """Quotes group as in a shell; braces may be escaped; a word without mounts is not repeated."""
    template = "wrap --label='a b {{x}}' --mount={source},{target} {image}"
    assert command_words(template, "docker://r/a:1", []) == [
        "wrap",
        "--label=a b {x}",
        "docker://r/a:1",
    ]
    shell = shlex.quote('module load apptainer && exec apptainer exec {image} "$@"')
    assert command_words(f"bash -lc {shell} bash", "/i", [])[2:] == [
        'module load apptainer && exec apptainer exec /i "$@"',
        "bash",
    ]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("", "is not set; give the words before a command, for instance 'apptainer exec"),
        ("  ", "is not set"),
        ("apptainer exec --nv", "has no {image}; put it where"),
        ("apptainer exec {img}", "has no field {img}; use {image}, {source}"),
        ("apptainer exec {} {image}", "has no field {}"),
        ("apptainer exec {0} {image}", "has no field {0}"),
        ("apptainer exec {image.__class__}", "has no field {image.__class__}"),
        ("apptainer exec {image!r}", "more than a name in braces"),
        ("apptainer exec {image:>9}", "more than a name in braces"),
        ("apptainer exec {image", "cannot be read"),
        ("apptainer exec 'x {image}", "cannot be read (No closing quotation); close each quote"),
        ("{image} run", "must begin with the program, not with {image}"),
        ("a --bind={source} {image}", "the word --bind={source}, which needs both {source} and"),
        ("a --bind {mode} {image}", "the word {mode}, which needs both {source} and {target}"),
        ("a exec {source}:{target} {image}", "after exec, which takes no value, so a second"),
        ("a --bind=/x {source}:{target} {image}", "after --bind=/x, which takes no value"),
        ("a -- {source}:{target} {image}", "after --, which takes no value"),
    ],
)
def test_a_template_that_cannot_be_rendered_is_refused(template: str, problem: str) -> None:
    assert problem in template_problem(template)
    with pytest.raises(SpecError, match=r"^container_command: "):
        Container("command", "/i.sif", command=template)


@pytest.mark.parametrize("option", ["--bind=", "--bind ", "-B ", "-v", "--mount type=bind,src="])
def test_each_mount_has_its_option(option: str) -> None:
    """Also an option whose value is a separate word: the image stays the first other word."""
    template = f"run exec --nv {option}{{source}}:{{target}} {{image}} --"
    mounts = ["/run:/run", "/code:/code", "/a:/a", "/b:/c"]
    words = " ".join(command_prefix(PLACE._replace(command=template)))
    given = " ".join(f"{option}{mount}" for mount in mounts)
    assert words == f"run exec --nv {given} /i.sif --"


@pytest.mark.parametrize(
    ("image", "is_valid"),
    [
        ("/my images/it's \u00e9.sif", True),
        ("docker://r.io/a,b@sha256:0", True),
        ("$RLPOST_IMAGE", True),
        ("$RLPOST_ASSETS/i.sif", True),
        ("$RLPOST_ASSETS/my i.sif", False),
        ("", False),
        ("~/i.sif", False),
        ("--nv", False),
        ("/i\n.sif", False),
    ],
)
def test_an_image_of_any_runtime_is_one_argument(image: str, is_valid: bool) -> None:
    """Whatever it holds, it reaches the command of the node as one word."""
    if not is_valid:
        with pytest.raises(SpecError, match=r"^container_image: "):
            Container("command", image, command=APPTAINER)
        return
    container = Container("command", image, command=APPTAINER)
    script = render_sbatch(a_job(container=container, home="/h", run_folder="/r", python="/p"))
    words = shlex.split(script.partition("slurm.batch run")[2].replace("\\\n", ""))
    options = parse(words[: words.index("--")])
    assert options.image == image
    assert command_prefix(PLACE._replace(image=options.image))[-1] == image


def test_mounts_that_a_template_cannot_express_are_refused() -> None:
    """They would have no effect, or files that must not change could be written."""
    bare = "site-wrapper {image}"
    assert template_problem(bare) == ""
    with pytest.raises(SpecError, match="--container-mounts would have no effect"):
        Container("command", "/i.sif", ("/a",), command=bare)
    writable = "ch-run --bind={source}:{target} {image} --"
    Container("command", "/i.sif", ("/a",), command=writable)
    with pytest.raises(SpecError, match=r"has no \{mode\}, so /a:ro would be writable"):
        Container("command", "/i.sif", ("/a:ro",), command=writable)


def test_code_below_the_run_folder_is_mounted_with_it() -> None:
    prefix = command_prefix(PLACE._replace(home="/run/code", mounts=()))
    assert [word for word in prefix if "bind" in word] == ["--bind=/run:/run:rw"]


def test_the_batch_file_hands_the_template_to_the_job_as_it_is(tmp_path: Path) -> None:
    template = "apptainer exec --env=A='b c' --bind={source}:{target} {image}"
    container = Container("command", "docker://r/a:1", ("/a",), command=template)
    script = render_sbatch(a_job(container=container, home="/h", run_folder="/r", python="/p"))
    words = shlex.split(script.partition("slurm.batch run")[2].replace("\\\n", ""))
    options = parse(words[: words.index("--")])
    assert options.container_command == template and options.image_cache == ""
    program = tmp_path / "apptainer"
    program.write_text("#!/bin/sh\n")
    environ = {"RLPOST_HOME": "/h", "SLURM_JOB_ID": "7", "PATH": str(tmp_path)}
    with pytest.raises(SpecError, match=r"^--container-command apptainer: not on the PATH of "):
        find_place(options, (), "/r", environ)
    program.chmod(0o755)
    place, _ = find_place(options, (), "/r", environ)
    assert "--env=A=b c" in command_prefix(place) and place.image == "docker://r/a:1"


def test_a_further_step_has_the_words_of_the_agents_step() -> None:
    """So that a command finds the same files; the folder of the code is entered in both."""
    words = in_container(PLACE)
    prefix = tuple(json.loads(json.dumps(command_prefix(PLACE))))
    container = Container("command", "/i.sif", command=APPTAINER)
    inside = Inside(Path("/run"), Path("/code"), container, prefix=prefix)
    argv = step_argv("7", ["id"], nodes=["n1"], inside=inside)
    assert argv[-len(words) - 1 :] == [*words, "id"]
    named = replace(inside, environment=(("A", "x y"),))
    assert step_argv("7", ["id"], nodes=["n1"], inside=named)[-3:] == ["env", "A=x y", "id"]


def test_a_problem_of_the_template_names_its_flag() -> None:
    cluster = {"container": "command", "container_image": "/i.sif", "container_command": "a b"}
    with pytest.raises(SpecError, match=r"^--container-command .*has no \{image\}"):
        job_spec(load([], {"cluster": cluster}).config)


def test_the_template_of_a_profile_does_not_hinder_a_run_without_a_container() -> None:
    config = load([], {"cluster": {"container_command": "a b"}}).config
    assert job_spec(config).container is None


@pytest.mark.parametrize("runtime", ["apptainer", "singularity", "podman-hpc", "charliecloud"])
def test_the_name_of_a_runtime_is_refused_with_what_to_write(runtime: str) -> None:
    with pytest.raises(ConfigError, match='; write --container command and --container-command "'):
        load([], {"cluster": {"container": runtime}})
