"""Determine the interface of a custom function: rlpost's or slime's. Pure.

Input: the purpose of the function, and its signature, from the source (login node) or from the
object (nodes). Output: the name of the interface, or a message with the required signature.

The number of arguments distinguishes most interfaces. For the others the argument names decide: the
first argument of slime's functions is ``args``.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Literal

Interface = Literal["rlpost", "slime"]
Kind = Literal[
    "filter",
    "buffer filter",
    "reward",
    "group reward",
    "generate",
    "advantage",
    "loss",
    "reward post-process",
]


@dataclass(frozen=True, slots=True)
class Forms:
    """Positional arguments by interface; ``slimes`` is None if slime's is not supported."""

    ours: tuple[str, ...]
    slimes: tuple[str, ...] | None = None


FORMS: dict[Kind, Forms] = {
    "filter": Forms(("group",), ("args", "samples")),
    "buffer filter": Forms(
        ("waiting", "num_groups"), ("args", "rollout_id", "buffer", "num_samples")
    ),
    "reward": Forms(("prompt", "sample"), ("args", "sample")),
    "group reward": Forms(("prompt", "samples"), ("args", "samples")),
    "generate": Forms(("builder", "prompt", "sampling"), ("args", "sample", "sampling_params")),
    "advantage": Forms(("groups", "penalties")),
    "loss": Forms(("tokens", "settings")),
    "reward post-process": Forms(("args", "samples"), ("args", "samples")),  # only slime's exists
}
EVALUATION = "evaluation"
"""The argument that tells a generate function whether it answers held-out prompts."""
ENGINES = "engines"
"""The argument that gets the clients of the run's groups of engines, by name."""
_TAKE_ENGINES = ("reward", "group reward")
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def interface(kind: Kind, signature: Signature) -> Interface | None:
    """Return the interface of ``signature``, or None if it matches neither."""
    forms = FORMS[kind]
    also = (ENGINES,) if kind in _TAKE_ENGINES else ()
    if _takes(signature, len(forms.ours), also) and not _is_named_as_slimes(kind, signature):
        return "rlpost"
    if forms.slimes is None or not _takes(signature, len(forms.slimes)):
        return None
    names = {each.name for each in _positional(signature)[1:]}
    return "slime" if _begins_with_args(signature) or names & {*forms.slimes} else None


def problem(kind: Kind, name: str, signature: Signature) -> str | None:
    """Return the problem of a signature with the accepted signatures, or None."""
    found = interface(kind, signature)
    if found is None:
        return f"{name}{_shown(signature)} cannot be called; {needed(kind)}"
    if found == "slime" and kind in ("reward", "group reward"):
        return _wrong_number(kind, name, signature)
    return None


def needed(kind: Kind) -> str:
    """Return the accepted signatures of a kind, as text."""
    ours, slimes = FORMS[kind].ours, FORMS[kind].slimes
    if slimes is None or slimes == ours:
        return f"use ({', '.join(ours)})"
    optional = ("evaluation=False",) if kind == "generate" else ()
    return f"use ({', '.join(ours)}), or slime's ({', '.join((*slimes, *optional, '**kwargs'))})"


def takes_engines(kind: Kind, signature: Signature) -> bool:
    """Whether a function of rlpost's interface takes ``engines``."""
    return (
        kind in _TAKE_ENGINES
        and ENGINES in signature.parameters
        and interface(kind, signature) == "rlpost"
    )


def not_async(name: str) -> str:
    """Return the problem of a function that takes ``engines`` and is not asynchronous."""
    return (
        f"{name} takes engines, whose calls are awaited, and is not async; write async def {name}, "
        "and await engines['NAME'].chat(...)"
    )


def takes_evaluation(signature: Signature) -> bool:
    """Whether a generate function of slime takes ``evaluation``."""
    return EVALUATION in signature.parameters


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
    """Return the signature of a function in a syntax tree; default values are placeholders."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    parameters = []
    for at, argument in enumerate(positional):
        kind = _POSITIONAL[0] if at < len(arguments.posonlyargs) else _POSITIONAL[1]
        parameters.append(_parameter(argument, kind, has_default=at >= first_default))
    if arguments.vararg is not None:
        parameters.append(_parameter(arguments.vararg, Parameter.VAR_POSITIONAL, has_default=False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(
            _parameter(argument, Parameter.KEYWORD_ONLY, has_default=default is not None)
        )
    if arguments.kwarg is not None:
        parameters.append(_parameter(arguments.kwarg, Parameter.VAR_KEYWORD, has_default=False))
    return Signature(parameters)


def signature_of_object(function: object) -> Signature | None:
    """Return the signature of a loaded function; None for built-ins without one."""
    try:
        return inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _parameter(argument: ast.arg, kind: inspect._ParameterKind, *, has_default: bool) -> Parameter:
    annotation = (
        Parameter.empty if argument.annotation is None else ast.unparse(argument.annotation)
    )
    return Parameter(
        argument.arg, kind, default=... if has_default else Parameter.empty, annotation=annotation
    )


def _takes(signature: Signature, count: int, also: Sequence[str] = ()) -> bool:
    """Whether a function takes ``count`` positional arguments, and optionally ``evaluation``.

    ``also``: names of further arguments that it may take.
    """
    first = list(signature.parameters)[:count]
    optional = (EVALUATION, *also)
    named = {name: False for name in optional if name in signature.parameters and name not in first}
    try:
        signature.bind(*range(count), **named)
    except TypeError:
        return False
    return True


def _is_named_as_slimes(kind: Kind, signature: Signature) -> bool:
    """Whether the argument names are slime's; decides where both interfaces take as many."""
    second = [each.name for each in _positional(signature)[1:2]]
    return _begins_with_args(signature) or (kind == "generate" and second == ["sample"])


def _begins_with_args(signature: Signature) -> bool:
    first = _positional(signature)[:1]
    if not first:
        return False
    annotation = getattr(first[0].annotation, "__name__", first[0].annotation)
    return first[0].name.strip("_") == "args" or str(annotation).split(".")[-1] == "Namespace"


def _positional(signature: Signature) -> list[Parameter]:
    return [each for each in signature.parameters.values() if each.kind in _POSITIONAL]


def _wrong_number(kind: Kind, name: str, signature: Signature) -> str | None:
    """Return a problem if the name of an argument contradicts --group-rm: one answer or several."""
    second = _positional(signature)[1:2]
    named = second[0].name if second else ""
    if kind == "reward" and named == "samples":
        return f"{name}{_shown(signature)} takes the answers to a prompt at once; add --group-rm, or {needed(kind)}"
    if kind == "group reward" and named == "sample":
        return (
            f"{name}{_shown(signature)} takes one answer; leave out --group-rm, or {needed(kind)}"
        )
    return None


def _shown(signature: Signature) -> str:
    """Return the signature as text without annotations and values of defaults."""
    bare = [each.replace(annotation=Parameter.empty) for each in signature.parameters.values()]
    return str(Signature(bare)).replace("=Ellipsis", "=...")
