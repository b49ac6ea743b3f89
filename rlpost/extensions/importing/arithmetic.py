"""Calculate an arithmetic expression of a shell script. Pure.

Input: the text, and a function that returns the value of a name. Output: a whole number, or None
for an expression that is not supported.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

MOST_LETTERS, LARGEST = 1_000, 2**63
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: int(left / right) if abs(left) < 2**53 else left // right,
    ast.Mod: lambda left, right: left - right * int(left / right),
}
_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def calculate(text: str, number: Callable[[str], int]) -> int | None:
    """Return the value of ``text``; division truncates towards 0, as in the shell.

    >>> calculate("2 * (a + 3) / 4", {"a": 7}.get)
    5
    """
    if len(text) > MOST_LETTERS:
        return None
    python = re.sub(r"(?<![/])/(?!/)", "//", text.replace("&&", " and ").replace("||", " or "))
    python = re.sub(r"!(?!=)", " not ", python)
    try:
        tree = ast.parse(python.strip() or "0", mode="eval")
        result = _value(tree.body, number)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return None if abs(result) >= LARGEST else result


def _value(node: ast.expr, number: Callable[[str], int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return number(node.id)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left, number), _value(node.right, number)
        if max(abs(left), abs(right)) >= LARGEST:
            raise ValueError("too large")
        return _BINARY[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand, number)
        if isinstance(node.op, ast.Not):
            return int(not value)
        if isinstance(node.op, ast.USub):
            return -value
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        left, right = _value(node.left, number), _value(node.comparators[0], number)
        return int(_COMPARE[type(node.ops[0])](left, right))
    if isinstance(node, ast.BoolOp):
        values = [bool(_value(one, number)) for one in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    raise ValueError("not supported")
