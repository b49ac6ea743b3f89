"""Modes outside the run folder: the user's umask, the parent's setgid bit and default ACL."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from common.modes import (
    DEFAULT_ACL,
    PRIVATE,
    USER_UMASK,
    acl_mode,
    become_private,
    follow_umask,
    user_umask,
)

NO_ID = 0xFFFFFFFF


def default_acl(user: int, group: int, mask: int | None, other: int) -> bytes:
    """A default ACL as the kernel's xattr; with a mask there is one more user, of id 1."""
    entries = [(0x01, user, NO_ID), (0x04, group, NO_ID), (0x20, other, NO_ID)]
    if mask is not None:
        entries[1:1] = [(0x02, 7, 1)]
        entries[3:3] = [(0x10, mask, NO_ID)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@pytest.mark.parametrize(
    ("acl", "mode"), [((7, 5, None, 0), 0o750), ((7, 5, 7, 0), 0o770), ((6, 4, 4, 4), 0o644)]
)
def test_the_mode_of_a_default_acl_has_its_mask_in_place_of_the_group(acl, mode) -> None:
    assert acl_mode(default_acl(*acl)) == mode


def test_a_private_process_remembers_the_umask_of_the_user(monkeypatch) -> None:
    monkeypatch.setenv(USER_UMASK, "")  # restores what become_private sets
    monkeypatch.delenv(USER_UMASK)
    before = os.umask(0o027)
    try:
        assert user_umask() == 0o027
        become_private()
        become_private()  # the agent of a job after its batch script
        assert os.umask(0o022) == PRIVATE and user_umask() == 0o027
    finally:
        os.umask(before)


def test_files_get_what_the_default_acl_of_their_folder_gives(tmp_path: Path, monkeypatch) -> None:
    """As the kernel creates them, where the file system has ACLs."""
    monkeypatch.setenv(USER_UMASK, "022")
    acl = default_acl(7, 5, 7, 0)
    try:
        os.setxattr(tmp_path, DEFAULT_ACL, acl)
    except OSError:
        pytest.skip("the file system has no ACLs")
    late, created = tmp_path / "late", tmp_path / "created"
    created.mkdir()
    (created / "file").touch()
    late.mkdir(mode=0o700)
    os.close(os.open(late / "file", os.O_CREAT, 0o600))
    follow_umask(late)
    for name in ("", "file"):
        assert (late / name).stat().st_mode == (created / name).stat().st_mode
        attribute = "system.posix_acl_access"
        assert os.getxattr(late / name, attribute) == os.getxattr(created / name, attribute)
    assert late.stat().st_mode & 0o777 == 0o770
