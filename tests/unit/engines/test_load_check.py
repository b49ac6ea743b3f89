"""The check of what engines load: one comparison for equal engines, and none ends a run by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlpost.engines import load_check
from rlpost.engines.load_check import LoadCheck
from rlpost.errors import WeightError
from tests.unit.engines.test_shard_mover import ALL, UNITS, Engine, receivers, rows


class Checked(Engine):
    """An engine in a session, whose ranks answer with ``text`` if it is given."""

    text: str | None = None
    in_session = False

    async def has_shard_loader(self) -> bool:
        return True

    async def begin_weight_update(self) -> None:
        self.in_session = True

    async def end_weight_update(self) -> None:
        self.in_session = False

    async def send_to_loader(self, payloads: Sequence[str], *, version: int | None = None) -> None:
        await super().send_to_loader(payloads, version=version)
        if self.text is not None:
            for message in self.messages[-1][0]:
                Path(message["answer"]).write_text(self.text)


def test_engines_that_answer_alike_are_compared_once_in_the_life_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    complete = load_check.check_complete
    monkeypatch.setattr(
        load_check,
        "check_complete",
        lambda units, one: compared.extend(one) or complete(units, one),
    )
    check = LoadCheck(UNITS, tmp_path)
    halves, same, whole = Checked([rows(0), rows(1)]), Checked([rows(0), rows(1)]), Checked([ALL])

    async def whole_run() -> None:
        await check.check(receivers(halves, same), in_session=False)
        await check.check(receivers(same, whole), in_session=False)  # another connection
        with pytest.raises(WeightError, match="the ranks of engine http://e1 load nothing"):
            await check.check(receivers(same, Checked([ALL[:2]])), in_session=False)

    asyncio.run(whole_run())
    assert compared == ["http://e0", "http://e1", "http://e1"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"boxes": [[1]]}), json.dumps({"boxes": 3})])
def test_an_answer_that_cannot_be_read_is_named_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """Engines elsewhere may run another version."""
    check, engine = LoadCheck(UNITS, tmp_path), Checked([ALL])
    engine.text = text

    async def twice() -> None:
        for _ in range(2):
            await check.check(receivers(engine), in_session=False)

    asyncio.run(twice())
    assert caplog.text.count("http://e0: whether its model loads every tensor") == 1
    assert not engine.in_session
