"""``from rlpost import ...``: names, types and weight of the package."""

import subprocess
import sys
from pathlib import Path

import pytest

import rlpost
from tools.pages.api import public_names
from tools.pages.stub import extensions_stub, public_stub

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", public_names())
def test_a_public_name_is_the_object_of_its_module_and_on_the_page(name):
    found = getattr(rlpost, name)
    assert found.__name__ == name and found is getattr(sys.modules[found.__module__], name)
    assert (
        f"`{name}`" in (ROOT / "docs/api.md").read_text()
        or f" {name}" in (ROOT / "docs/api.md").read_text()
    )


def test_the_types_of_the_package_are_those_of_its_names(tmp_path):
    core = (ROOT / "rlpost/__init__.pyi").read_text()
    added = (ROOT / "rlpost/extensions/__init__.pyi").read_text()
    assert (core, added) == (public_stub(), extensions_stub()), "run make docs"
    assert "extensions." not in core
    lines = [f"reveal_type(rlpost.{name})" for name in public_names()]
    (tmp_path / "names.py").write_text("\n".join(["import rlpost", *lines]))
    checker = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(tmp_path / "names.py")]
    done = subprocess.run(checker, capture_output=True, text=True, cwd=ROOT)
    types = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert done.returncode == 0 and len(types) == len(lines), done.stdout
    assert '"Any"' not in done.stdout


def test_another_name_is_an_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rlpost.nothing


def test_the_package_loads_nothing_by_itself():
    code = "import sys, rlpost; print(sorted(name for name in sys.modules if name.startswith('rlpost')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "['rlpost']", done.stderr
