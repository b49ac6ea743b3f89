"""Invariant: two environments have the same fingerprint exactly if the same versions of the same
packages are installed.
"""

from __future__ import annotations

from pathlib import Path

from bootstrap.agent.rendezvous import package_fingerprint


def environment(folder: Path, *distributions: str) -> str:
    for name in distributions:
        (folder / f"{name}.dist-info").mkdir(parents=True)
    return str(folder)


def test_another_version_is_another_fingerprint_and_the_place_means_nothing(tmp_path: Path) -> None:
    here = environment(tmp_path / "a", "ray-2.60.0", "torch-2.13.0")
    there = environment(tmp_path / "b", "torch-2.13.0", "ray-2.60.0")
    other = environment(tmp_path / "c", "torch-2.13.0", "ray-2.59.0")
    assert package_fingerprint([here]) == package_fingerprint(["/no/such/folder", there])
    assert package_fingerprint([here]) != package_fingerprint([other])


def test_this_environment_has_one() -> None:
    assert package_fingerprint() == package_fingerprint() != package_fingerprint([])
