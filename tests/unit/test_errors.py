"""Every exception class of rlpost can be made from its text alone.

``trainer/outcomes.py`` raises the class of one rank's error with its text on all ranks, and pickle
makes an exception from the arguments that its base class got. The other packages cannot import rlpost,
and have no such class.
"""

from __future__ import annotations

import ast
import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path

from rlpost.errors import RlpostError

ROOT = Path(__file__).parents[2]


def class_bases() -> Iterator[tuple[str, str, set[str]]]:
    """Yield the module, the name and the names of the bases of each class."""
    for path in (ROOT / "rlpost").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield module, node.name, {ast.unparse(base).split(".")[-1] for base in node.bases}


def subclasses(kind: type[RlpostError]) -> Iterator[type[RlpostError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from subclasses(each)


def test_each_exception_is_made_from_one_text_and_survives_pickle():
    classes, names = list(class_bases()), {"RlpostError"}
    while new := {name for _, name, bases in classes if bases & names} - names:
        names |= new
    for module in {module for module, _, bases in classes if bases & names}:
        importlib.import_module(module)
    kinds = [kind for kind in set(subclasses(RlpostError)) if kind.__module__.startswith("rlpost.")]
    assert {kind.__name__ for kind in kinds} == names
    for kind in kinds:
        error = kind("--flag 3: too much")
        assert str(error) == "--flag 3: too much", kind
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (kind, str(error))
