"""Run another call at a chosen bytecode of a function, as if a thread switch happened there.

The interpreter may switch threads between any two bytecodes. Trying each of these points in turn
finds a race reliably, where real threads find it rarely.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def run_interleaved(
    act: Callable[[], object], other: Callable[[], object], *, within: Any, after: int
) -> bool:
    """Call ``act``; call ``other`` once after ``after`` bytecodes of the function ``within``.

    Returns whether ``within`` executed that many bytecodes.
    """
    left = after

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if event == "opcode":
            left -= 1
            if left == -1:
                other()
        return count

    def enter(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not within.__code__:
            return None
        frame.f_trace_opcodes = True
        return count

    earlier = sys.gettrace()
    sys.settrace(enter)
    try:
        act()
    finally:
        sys.settrace(earlier)
    return left < 0
