"""Compiled kernels of nodes with a shared home folder are on each node's disk."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from common import jit_caches
from common.files import own_folder
from common.jit_caches import (
    BASE,
    FOLDERS,
    IN_TMP,
    cache_variables,
    jit_cache_environment,
    needs_local_caches,
)

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
auto.home /home autofs rw 0 0
filer:/home/ann /home/ann nfs4 rw,local_lock=none 0 0
scratch@tcp:/fs /lustre lustre rw 0 0
sshfs /remote fuse.sshfs rw 0 0
fuse-overlayfs /image fuse.fuse-overlayfs rw 0 0
squashfuse_ll /squashed fuse.squashfuse_ll ro 0 0
"""


@pytest.mark.parametrize("home", ["/home/ann", "/home/ann/deeper", "/lustre/ann", "/remote"])
def test_a_home_folder_on_a_network_needs_other_caches(home):
    assert needs_local_caches(home, MOUNTS)


@pytest.mark.parametrize(
    "home", ["/root", "/home/bob", "/lustrefs", "/image/root", "/squashed/root"]
)
def test_a_local_home_folder_keeps_its_caches(home):
    """That of a container is the image's, which may hold compiled kernels."""
    assert not needs_local_caches(home, MOUNTS)


def test_a_value_of_the_user_stays():
    given = {"TRITON_CACHE_DIR": "/scratch/triton"}
    assert cache_variables(given, Path("/disk")).keys() == FOLDERS.keys() - given.keys()


def test_inductor_s_folder_is_never_the_one_that_anyone_can_make(tmp_path):
    """By default torch's is /tmp/torchinductor_USER, and it loads code from there."""
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    made = jit_cache_environment({"HOME": str(home)}, disk=tmp_path)
    assert made == {"TORCHINDUCTOR_CACHE_DIR": f"{home}/.cache/sglang/inductor"}
    given = {"HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": "/scratch/warm"}
    assert jit_cache_environment(given, disk=tmp_path) == {}
    home.chmod(0o777)  # as a container whose HOME is /tmp
    made = jit_cache_environment({"HOME": str(home)}, disk=tmp_path)
    assert made.keys() == FOLDERS.keys()
    assert {Path(made[BASE]).parent, Path(made["TORCHINDUCTOR_CACHE_DIR"]).parents[1]} == {tmp_path}


READ_ONLY = """\
mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || { echo no mounts; exit; }
exec "$2" -c 'import sys; from pathlib import Path; from common.jit_caches import BASE, jit_cache_environment
print(jit_cache_environment({"HOME": sys.argv[1]}, disk=Path(sys.argv[2]))[BASE])' "$1" "$3"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_read_only_home_folder_has_its_caches_on_the_disk_of_the_node(tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    command = ["unshare", "-m", "bash", "-c", READ_ONLY, "_", home, sys.executable, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    if "no mounts" in done.stdout or "unshare failed" in done.stderr:
        pytest.skip("no mount namespaces here")
    assert Path(done.stdout.strip()).parent == tmp_path, done.stderr


def test_a_home_folder_that_the_node_lacks_has_its_caches_on_the_disk(tmp_path):
    made = jit_cache_environment({"HOME": str(tmp_path / "missing")}, disk=tmp_path)
    assert made.keys() == FOLDERS.keys() and Path(made[BASE]).parent == tmp_path


def test_a_new_folder_is_private_and_is_used_again(tmp_path):
    folder = own_folder(tmp_path / "jit")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "kernel").touch()
    assert own_folder(tmp_path / "jit") == folder and (folder / "kernel").exists()


@pytest.mark.parametrize("kind", ["link", "file", "open"])
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, kind):
    path, theirs = tmp_path / "jit", tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    if kind == "link":
        path.symlink_to(theirs)
    elif kind == "file":
        path.touch(mode=0o600)
    else:
        path.mkdir()
        path.chmod(0o770)
    folder = own_folder(path)
    assert folder not in (path, theirs) and folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make another user's folder")
def test_a_folder_of_another_user_is_not_used(tmp_path):
    path = tmp_path / "jit"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    assert own_folder(path) != path


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file system is one of a network."""
    monkeypatch.setattr(jit_caches, "mount_of", lambda path, mounts: "nfs4")


def test_all_caches_are_below_one_private_folder_of_the_disk(tmp_path, remote):
    made = jit_cache_environment({"HOME": "/home/ann"}, disk=tmp_path)
    (folder,) = tmp_path.iterdir()
    assert made == cache_variables({}, folder) and made[BASE] == str(folder)
    assert jit_cache_environment({"HOME": "/home/ann"}, disk=tmp_path) == made


@pytest.mark.parametrize("kind", ["nfs4", "overlay"])
def test_the_user_s_folder_for_sglang_is_that_of_all_caches(tmp_path, monkeypatch, kind):
    """Also beside a home on a local disk, which in a container goes with the attempt."""
    monkeypatch.setattr(jit_caches, "mount_of", lambda path, mounts: kind)
    (tmp_path / "home").mkdir(mode=0o700)
    given = {"HOME": str(tmp_path / "home"), BASE: "/scratch/warm"}
    made = jit_cache_environment(given, disk=tmp_path)
    assert made == cache_variables(given, Path("/scratch/warm")) and BASE not in made
    assert list(tmp_path.iterdir()) == [tmp_path / "home"]


def test_a_disk_that_cannot_be_written_leaves_the_caches_in_the_home_folder(tmp_path, remote):
    assert jit_cache_environment({"HOME": "/home/ann"}, disk=tmp_path / "missing") == {}


def test_without_a_network_file_system_nothing_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(jit_caches, "mount_of", lambda path, mounts: "ext4")
    made = jit_cache_environment({"HOME": str(tmp_path)}, disk=tmp_path / "disk")
    assert made.keys() == set(IN_TMP)
    assert list(tmp_path.iterdir()) == []
