"""A stop request is a file; its reason is what people read."""

import pytest

from rlpost.errors import Preempted
from rlpost.orchestration.preemption import StopRequest


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"reason": "signal USR2 to the batch script"}', "signal USR2 to the batch script"),
        ("by hand", "by hand"),
        ("", "no reason given"),
        ("[1]", r"\[1\]"),
    ],
)
def test_a_request_is_raised_with_its_reason_in_words(tmp_path, text, reason):
    stop = StopRequest(tmp_path / "STOP")
    stop.check()
    (tmp_path / "STOP").write_text(text)
    with pytest.raises(Preempted, match=f"^stop requested: {reason}$"):
        stop.check()
