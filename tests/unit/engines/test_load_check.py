"""The check of what engines load: one comparison for equal engines, and none ends a run by itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlpost.config.plan.shard_plan import SentTensor, Unit
from rlpost.config.plan.weight_update import read_units, write_units
from rlpost.engines import load_check
from rlpost.engines.load_check import LoadCheck
from rlpost.errors import WeightError
from rlpost.models.regions import Region
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
    check = LoadCheck()
    halves, same, whole = Checked([rows(0), rows(1)]), Checked([rows(0), rows(1)]), Checked([ALL])

    async def whole_run() -> None:
        await check.check(receivers(halves, same), UNITS, tmp_path, in_session=False)
        # another connection
        await check.check(receivers(same, whole), UNITS, tmp_path, in_session=False)
        with pytest.raises(WeightError, match="the ranks of engine http://e1 load nothing"):
            await check.check(
                receivers(same, Checked([ALL[:2]])), UNITS, tmp_path, in_session=False
            )

    asyncio.run(whole_run())
    assert compared == ["http://e0", "http://e1", "http://e1"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"boxes": [[1]]}), json.dumps({"boxes": 3})])
def test_an_answer_that_cannot_be_read_is_named_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """Engines elsewhere may run another version."""
    check, engine = LoadCheck(), Checked([ALL])
    engine.text = text

    async def twice() -> None:
        for _ in range(2):
            await check.check(receivers(engine), UNITS, tmp_path, in_session=False)

    asyncio.run(twice())
    assert caplog.text.count("http://e0: whether its model loads every tensor") == 1
    assert not engine.in_session


def test_engines_that_read_a_folder_are_checked_by_the_list_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tensor that engines may skip, and one beside the list, are not looked for."""
    extra = Unit(1, (SentTensor("mtp", (2,), "float32"),), is_divisible=False, is_optional=True)
    weights = tmp_path / "version-1"
    weights.mkdir()
    check, missing = LoadCheck(), receivers(Checked([ALL[:2]]))

    async def whole_run() -> None:
        await check.check_folder(missing, weights)
        write_units(weights, [*UNITS, extra])
        assert read_units(weights) == [*UNITS, extra]
        await check.check_folder(receivers(Checked([ALL])), weights)
        with pytest.raises(WeightError, match="t2: the ranks of engine http://e0 load nothing"):
            await check.check_folder(missing, weights)

    asyncio.run(whole_run())
    assert caplog.text.count("cannot be checked: [Errno 2] No such file") == 1
    assert list(tmp_path.iterdir()) == [weights]


@pytest.mark.parametrize("skipped", ALL, ids=[one.tensor for one in ALL])
def test_a_rank_that_skips_its_copy_of_a_tensor_is_named(tmp_path: Path, skipped: Region) -> None:
    """The ranks together load all of it: the other one has a copy, too."""
    lacking = [one for one in ALL if one != skipped]
    check = LoadCheck()
    asyncio.run(check.check(receivers(Checked([ALL, ALL])), UNITS, tmp_path, in_session=False))
    expected = f"{skipped.tensor}: rank 1 of engine http://e0 has a parameter of_{skipped.tensor} "
    with pytest.raises(WeightError, match=expected):
        asyncio.run(
            check.check(receivers(Checked([ALL, lacking])), UNITS, tmp_path, in_session=False)
        )


E1, E2, SHARED = "l.0.experts.1.w", "l.0.experts.2.w", "l.0.gate"


@pytest.mark.parametrize(
    ("ranks", "reasons", "problem"),
    [
        ([{"w": [E1], "g": [SHARED]}, {"w": [E2], "g": [SHARED]}], (), None),  # expert parallelism
        ([{"w": [E1], "g": [SHARED]}, {"w": [E2], "g": []}], (), SHARED),
        ([{"w": [E1, E2]}, {"w": [E2]}], (), E1),
        ([{"w": [E1, E2]}, {"w": [E2, E2]}], (), None),  # two copies of an expert on one rank
        ([{"w": [E1, E1]}, {"w": [E2]}], (), None),
        ([{"w": [E1], "g": [SHARED]}, {"w": [E2]}], (), None),  # the rank has no such parameter
        ([{"scale": []}, {"scale": []}], (), None),  # a constant of all ranks
        ([{"g": [SHARED]}, {"g": []}], [SHARED], None),  # loaded by name, unseen
    ],
)
def test_ranks_fill_a_parameter_with_as_many_tensors_of_each_kind(
    ranks: list[dict[str, list[str]]], reasons: Sequence[str], problem: str | None
) -> None:
    names = [E1, E2, SHARED]
    answers = [
        {
            "filled": {
                f"0:{key}": [names.index(one) for one in of_it] for key, of_it in rank.items()
            },
            "reasons": dict.fromkeys(reasons, "its values are read"),
        }
        for rank in ranks
    ]
    expected = pytest.raises(WeightError, match=f"^{problem}: rank 1 of engine http://e")
    with contextlib.nullcontext() if problem is None else expected:
        load_check.check_ranks("http://e", answers, names)
