"""The global FP8 state; FP8 is always off."""

from contextlib import nullcontext


class FP8GlobalStateManager:
    """Reports that FP8 is off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Always False."""
        return False


def fp8_autocast(**_: object) -> nullcontext:
    """Return a context manager that does nothing."""
    return nullcontext()
