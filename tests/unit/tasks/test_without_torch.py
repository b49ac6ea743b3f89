"""Imports move into the functions that use their names; other modules stay as they are."""

import ast
import sys
from types import ModuleType

import pytest

from rlpost.tasks.without_torch import defer_imports

BLOCK = "if is_torch_available():\n    import heavy\n    from .near import Part as P\n"
USES = '''
def first():
    """Say what it returns."""
    return heavy.answer

class Kind:
    async def second(self) -> "P":
        return [P for _ in heavy.answers]

def third():
    return answer
'''
HEAD = "answer = 1\ndef is_torch_available(): return available\n"


@pytest.fixture
def load(monkeypatch):
    """Run a deferred module in a package where heavy and near exist; count their imports."""
    imported = []

    class Watched(ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            imported.append(f"{self.__name__}.{name}")
            return imported[-1]

    monkeypatch.setitem(sys.modules, "heavy", Watched("heavy"))
    monkeypatch.setitem(sys.modules, "pack.near", Watched("pack.near"))
    monkeypatch.setitem(sys.modules, "pack", ModuleType("pack"))

    def run(source):
        module = ModuleType("pack.module")
        module.__dict__.update(__package__="pack", available=True)
        exec(compile(defer_imports(ast.parse(source)), "module.py", "exec"), module.__dict__)
        return module, imported

    return run


def test_an_import_happens_when_a_function_uses_it(load):
    module, imported = load(HEAD + BLOCK + USES)
    assert module.third() == 1 and not imported
    assert module.first() == "heavy.answer"
    assert module.first.__doc__ == "Say what it returns."
    assert imported == ["pack.near.Part", "heavy.answer"]


def test_the_names_remain_attributes_of_the_module(load):
    module, imported = load(HEAD + BLOCK + USES)
    assert not {"heavy", "P"} & set(vars(module)) and not imported
    assert module.P == "pack.near.Part" and module.heavy is sys.modules["heavy"]
    with pytest.raises(AttributeError, match=r"module 'pack.module' has no attribute 'other'"):
        _ = module.other


def test_what_stands_in_without_torch_is_left_out(load):
    module, _ = load(HEAD + BLOCK + "else:\n    P = None\n" + USES)
    assert module.P == "pack.near.Part"


@pytest.mark.parametrize(
    "source",
    [
        "def third(): pass",
        BLOCK + "ready = heavy.answer",
        BLOCK + "def third(one: heavy.Kind): pass",
        BLOCK + "class Kind(P): pass",
        BLOCK + "def third(one=P): pass",
        BLOCK + "if ready:\n    def third(): return P",
        BLOCK + BLOCK,
        BLOCK + "def third(heavy): return heavy",
        BLOCK + "def third():\n    P = 1\n    return P",
        BLOCK + "def third():\n    global P\n    P = 1",
        BLOCK + "    ready = True",
        BLOCK + "def __getattr__(name): pass",
        "if is_torch_available():\n    import heavy.part",
        "if is_torch_available():\n    from .near import *",
        "if is_torch_available() and ready:\n    import heavy",
    ],
)
def test_a_module_of_another_form_is_unchanged(source):
    before = ast.dump(ast.parse(source))
    assert ast.dump(defer_imports(ast.parse(source))) == before
