"""A calculator in the middle of an answer: when the model writes "=", the tool writes what stands before it comes to.

    --custom-generate-function-path rlpost.rollout.examples.calculator.generate

Input: a response builder. Output: the finished answer. The model reads the numbers that the tool wrote; the loss leaves
them out, so that what is learned is when to ask.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence

from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt, Sample

CALL = "="
MAX_CALLS = 4
LONGEST = 64  # characters of an expression
EXPRESSION = re.compile(r"[0-9(][0-9+\-*/(). ]*$")
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


async def generate(builder: ResponseBuilder, prompt: Prompt, sampling: SamplingParams) -> Sample:
    """Turns of the model with a result after each call, until it ends its answer or has asked often enough."""
    return await with_results(builder, prompt, calls=(CALL,))


async def with_results(builder: ResponseBuilder, prompt: Prompt, *, calls: Sequence[str]) -> Sample:
    """The same for a model that asks by any of ``calls``."""
    for _ in range(MAX_CALLS):
        await builder.write(stop=tuple(calls))
        if builder.stopped_at not in calls:
            return builder.sample()
        builder.insert(result(prompt.text + builder.text))
    await builder.write()
    return builder.sample()


def result(text: str) -> str:
    """What the expression at the end of ``text`` comes to; "?" when there is none or it cannot be computed."""
    found = EXPRESSION.search(text[-LONGEST:])
    if found is None:
        return "?"
    # "07" is a number here, though not in Python.
    expression = re.sub(r"(?<![\d.])0+(?=\d)", "", found[0].strip())
    try:
        value = _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError):
        return "?"
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"not arithmetic: {ast.dump(node)}")
