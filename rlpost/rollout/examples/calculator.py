"""An example tool: when the model writes "=", a calculator appends the value of the expression.

    --custom-generate-function-path rlpost.rollout.examples.calculator.generate

Input: a response builder. Output: the finished answer. The model reads the numbers of the tool;
they are masked out of the loss, so the model learns when to call the tool.
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
    """Generate turns, with a result after each call (at most MAX_CALLS), until the answer ends."""
    return await with_results(builder, prompt, calls=(CALL,))


async def with_results(builder: ResponseBuilder, prompt: Prompt, *, calls: Sequence[str]) -> Sample:
    """Like ``generate``, for a model that calls the tool by any of the strings ``calls``."""
    for _ in range(MAX_CALLS):
        await builder.write(stop=tuple(calls))
        if builder.stopped_at not in calls:
            return builder.sample()
        builder.insert(result(prompt.text + builder.text))
    await builder.write()
    return builder.sample()


def result(text: str) -> str:
    """Return the value of the expression at the end of ``text``; "?" without a valid one."""
    found = EXPRESSION.search(text[-LONGEST:])
    if found is None:
        return "?"
    # Accept leading zeros ("07"), which Python rejects.
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
