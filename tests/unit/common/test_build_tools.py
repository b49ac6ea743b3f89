"""Build tools are asked as Triton and FlashInfer ask: by compiling, and by PATH."""

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from common.build_tools import lacking_tools, launcher_problem, with_scripts


def test_a_launcher_compiles_where_compiler_and_headers_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {key: value for key, value in os.environ.items() if key != "CC"}
    assert launcher_problem(environ) == ""
    assert "no C compiler" in (launcher_problem({**environ, "PATH": str(tmp_path)}) or "")
    assert "no-such-cc" in (launcher_problem({**environ, "CC": "no-such-cc"}) or "")
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    assert launcher_problem(environ) == "", "as on a Debian with its own Python"
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    problem = launcher_problem(environ)
    assert problem is not None and "Python.h: No such file" in problem


def test_programs_of_the_environment_are_found_after_those_of_the_system(tmp_path: Path) -> None:
    scripts = Path(shutil.which("python3", path=with_scripts({"PATH": ""})["PATH"]) or "").parent
    bare = {"PATH": str(tmp_path)}
    assert with_scripts(bare)["PATH"] == f"{tmp_path}{os.pathsep}{scripts}"
    assert with_scripts(with_scripts(bare)) == with_scripts(bare)
    assert ("ninja" not in lacking_tools(bare)) == (scripts / "ninja").exists()
    assert (
        "c++" in lacking_tools(bare) and lacking_tools(bare | {"CXX": "/no/g++"})[-1] == "/no/g++"
    )
    (tmp_path / "ninja").write_text("#!/bin/sh\n")
    (tmp_path / "ninja").chmod(0o755)
    assert lacking_tools(bare) == ("c++",)
