"""Load user functions that are named in the settings.

Input: ``module.function`` or ``FILE.py:function``. Output: the function. A file is loaded once per
process, under a name derived from its path. It need not be in a package, and can import modules in
its folder. Errors in the function's code (a TypeError, a missing import) are errors of the
settings, because a restart does not help.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rlpost.algorithm.signatures import (
    FORMS,
    Interface,
    Kind,
    interface,
    problem,
    signature_of_object,
)
from rlpost.errors import ConfigError

WRONG_CODE = (TypeError, ImportError)
"""Exceptions that indicate an error in the function's code or signature."""


class Adapters:
    """Runs functions that have slime's interface.

    This base runs none: it is in use where the extension of slime is missing.
    """

    module: str | None = None
    """The module whose ``register`` registers these adapters, also in a grading process."""

    def prepare_imports(self) -> None:
        """Make slime's modules importable; called before a user's module is imported."""

    def refusal(self, kind: Kind) -> str | None:
        """Return why a function of this kind cannot run here, or None."""
        ours = ", ".join(FORMS[kind].ours)
        return f"this installation has no extension for slime's interface; use ({ours})"

    def arguments(self, settings: Mapping[str, object]) -> object:
        """Return the ``args`` of slime's functions for the settings of a run."""

    def connected(self, args: object, url: str, api_key: str) -> None:
        """Set the address and API key of the engines in ``args``."""

    def adapt(
        self, kind: Kind, function: Callable[..., Any], args: object, **options: object
    ) -> Callable[..., Any]:
        """Return ``function`` with rlpost's interface; ``args`` are those of ``arguments``."""
        raise ConfigError(str(self.refusal(kind)))

    def grader(self, grader: object, wanted: object) -> Any:
        """Return a grader with what the group filter ``wanted`` needs of gradings."""
        return grader


_registered = [Adapters()]


def register(adapters: Adapters) -> None:
    """Use ``adapters`` for functions with slime's interface in this process."""
    _registered[:] = [adapters]


def adapter_modules() -> list[str]:
    """Return the modules to register in a process that runs functions for this one."""
    return [each.module for each in _registered if each.module is not None]


def register_modules(names: Sequence[str]) -> None:
    """Register the adapters of ``adapter_modules`` of another process."""
    for name in names:
        importlib.import_module(name).register()


def foreign_adapters() -> Adapters:
    """Return the registered adapters of functions with slime's interface."""
    return _registered[0]


def load_function(path: str, *, key: str) -> Callable[..., Any]:
    """Load the function that ``path`` names.

    Raises: ConfigError: its module cannot be imported, or has no such function; names the setting
        ``key``.
    """
    foreign_adapters().prepare_imports()
    is_file = ":" in path
    file, _, name = path.rpartition(":" if is_file else ".")
    try:
        module = _from_file(Path(file)) if is_file else importlib.import_module(file)
    except Exception as error:  # the import of a user's module can raise anything
        raise ConfigError(
            f"{key} = {path}: cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        public = ", ".join(
            word for word, value in vars(module).items() if callable(value) and word[0] != "_"
        )
        raise ConfigError(
            f"{key} = {path}: {file} has no function {name}; it has {public or 'none'}"
        )
    return function


@contextmanager
def blamed_on(path: str, *, key: str) -> Iterator[None]:
    """Context in which errors in the code of ``path`` become a ConfigError with file and line."""
    try:
        yield
    except WRONG_CODE as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == path.rpartition(":")[0]]
        last = (own or frames)[-1]
        raise ConfigError(
            f"{key} = {path}: {type(error).__name__}: {error} "
            f"({last.filename}, line {last.lineno}); correct the function"
        ) from error


def blaming(function: Callable[..., object], path: str, *, key: str) -> Callable[..., object]:
    """Wrap a function, async or not, with ``blamed_on``."""

    @functools.wraps(function)
    def call_blamed(*args: object, **kwargs: object) -> object:
        with blamed_on(path, key=key):
            returned = function(*args, **kwargs)
        return await_blamed(returned) if inspect.isawaitable(returned) else returned

    async def await_blamed(returned: Awaitable[object]) -> object:
        with blamed_on(path, key=key):
            return await returned

    return call_blamed


def checked_interface(
    kind: Kind, function: Callable[..., object], *, key: str, path: str
) -> Interface:
    """Return whether a function has the interface of rlpost or of slime.

    Raises:
        ConfigError: it has neither.
    """
    signature = signature_of_object(function)
    if signature is None:
        return "rlpost"  # a built-in; checked when it is called
    if why := problem(kind, path.rpartition(":" if ":" in path else ".")[2], signature):
        raise ConfigError(f"{key} = {path}: {why}")
    interface_name = interface(kind, signature)
    if interface_name == "slime" and (why := foreign_adapters().refusal(kind)):
        raise ConfigError(f"{key} = {path}: {why}")
    return interface_name or "rlpost"


def _from_file(file: Path) -> ModuleType:
    name = f"rlpost_plugin_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        # last: the file can import its neighbours without hiding other modules
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
