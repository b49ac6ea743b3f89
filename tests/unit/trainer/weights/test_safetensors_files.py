"""Weight files as safetensors and transformers write them: defects are reported before a job
starts.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file

from rlpost.errors import WeightError
from rlpost.trainer.weights.safetensors_files import (
    BITS,
    INDEX,
    SINGLE,
    WRITTEN,
    TensorFile,
    file_problems,
    tensor_files,
)

TENSORS = {"a": torch.arange(24.0).reshape(4, 6), "b.c": torch.ones(3, dtype=torch.bfloat16)}


@pytest.fixture
def single(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE, {"format": "pt"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    for number, name in enumerate(TENSORS):
        save_file({name: TENSORS[name]}, tmp_path / f"model-{number}.safetensors")
    weight_map = {name: f"model-{number}.safetensors" for number, name in enumerate(TENSORS)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_tensors_are_found_in_a_single_file(single):
    assert tensor_files(single) == {"a": SINGLE, "b.c": SINGLE} and file_problems(single) == []


def test_tensors_are_found_by_an_index(sharded):
    assert tensor_files(sharded) == {"a": "model-0.safetensors", "b.c": "model-1.safetensors"}
    assert file_problems(sharded) == []


def test_an_incomplete_copy_is_reported_with_its_missing_files(sharded):
    (sharded / "model-0.safetensors").unlink()
    file = sharded / "model-1.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    missing, short = file_problems(sharded)
    assert (
        "1 of 2 files of weights are missing, model-0.safetensors first; fetch the model again"
        in missing
    )
    assert (
        short
        == f"{file}: has {len(whole) - 1} bytes instead of {len(whole)} (by its header); fetch the model again"
    )


def test_a_tensor_of_the_index_that_its_file_lacks_is_reported(sharded):
    """As merged and quantised uploads have it."""
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["a.scale"] = "model-0.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    (problem,) = file_problems(sharded)
    assert problem.startswith(
        f"{sharded / INDEX}: names 1 tensor that model-0.safetensors does not have, a.scale first; "
    )


def test_shards_without_an_index_are_refused(sharded):
    (sharded / INDEX).unlink()
    (problem,) = file_problems(sharded)
    assert f"has neither {SINGLE} nor {INDEX}" in problem


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8, b"version https://git-lfs"])
def test_a_file_that_is_not_safetensors_is_reported(single, content):
    """Empty, truncated in its header, or a Git LFS pointer instead of the file."""
    (single / SINGLE).write_bytes(content)
    (problem,) = file_problems(single)
    assert problem.startswith(f"{single / SINGLE}: is not a safetensors file")


OUTSIDE = [json.dumps({"weight_map": {"a": name}}) for name in ("../x", "/etc/passwd", "a/../../x")]


@pytest.mark.parametrize("index", [*("{", "[]", "{}", '{"weight_map": 3}', "[" * 9999), *OUTSIDE])
def test_a_malformed_index_is_reported(sharded, index):
    (sharded / INDEX).write_text(index)
    with pytest.raises(WeightError, match="is not a weight index"):
        tensor_files(sharded)


def test_a_folder_without_weights_is_reported(tmp_path):
    (problem,) = file_problems(tmp_path)
    assert "has neither model.safetensors nor model.safetensors.index.json" in problem


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_an_unreadable_file_is_reported_with_the_permission_to_request():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        save_file(TENSORS, folder / SINGLE)
        (folder / SINGLE).chmod(0o600)
        ours, theirs = os.pipe()
        if os.fork() == 0:
            try:
                os.setuid(65534)
                os.write(theirs, "".join(file_problems(folder)).encode())
            finally:
                os._exit(0)
        os.close(theirs)
        with open(ours) as said:
            assert (
                said.read()
                == f"{folder / SINGLE}: cannot be read: Permission denied; ask its owner for chmod a+r"
            )
        os.wait()


def test_the_check_of_weight_files_imports_no_heavy_package():
    heavy = "{'torch', 'safetensors'}"
    program = f"import sys, rlpost.trainer.weights.safetensors_files; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_pointer_of_git_lfs_is_named_with_its_remedy(tmp_path):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n"
    (tmp_path / "model.safetensors").write_text(text)
    (problem,) = file_problems(tmp_path)
    assert "model.safetensors: is a pointer of git LFS" in problem and "git lfs pull" in problem


def test_a_file_written_tensor_by_tensor_has_the_bytes_of_the_librarys(tmp_path):
    """In any order; it appears once all tensors are written."""
    tensors = {
        f'{shape}.{dtype}.é"': torch.randn(shape).to(getattr(torch, dtype))
        for dtype in reversed(WRITTEN)
        for shape in ((3, 5), (), (7,), (0, 2))
    }
    path = tmp_path / SINGLE
    described = {
        name: (tuple(one.shape), str(one.dtype).removeprefix("torch."))
        for name, one in tensors.items()
    }
    unfinished = TensorFile(path, described)
    unfinished.close()
    assert not path.exists()
    file = TensorFile(path, described)
    for name, one in tensors.items():
        file.write(name, memoryview(one.flatten().view(torch.uint8).numpy()))
    file.close()
    assert path.read_bytes() == save(tensors, {"format": "pt"})


def entry(shape: list[int], first: int, last: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ({"a": entry([4], 0, 16), "b": entry([4], 0, 16), "c": entry([12], 16, 64)}, "b"),
        ({"a": entry([4], 0, 16), "c": entry([4], 48, 64)}, "c"),
        ({"a": entry([400], 0, 64)}, "a"),
        ({"a": entry([16], -64, 64)}, "a"),
        ({"a": entry([16], 0, 64, "BF16")}, "a"),
    ],
)
def test_tensors_that_do_not_follow_one_another_are_refused_as_on_the_ranks(tmp_path, header, name):
    text = json.dumps(header).encode()
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    with pytest.raises(SafetensorError):
        load_file(tmp_path / SINGLE)
    (problem,) = file_problems(tmp_path)
    assert f"{SINGLE}: by its header, tensor {name} overlaps another" in problem


def test_a_header_that_is_nested_too_deep_is_refused(tmp_path):
    text = b"[" * 200_000
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text)
    (problem,) = file_problems(tmp_path)
    assert "is not a safetensors file" in problem


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_bits_are_those_of_the_library(tmp_path, dtype):
    size = BITS[dtype]  # of 8 elements
    text = json.dumps({"a": entry([8], 0, size, dtype), "b": entry([0], size, size)}).encode()
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    assert file_problems(tmp_path) == []
    with safe_open(tmp_path / SINGLE, "np") as file:
        assert list(file.keys()) == ["a", "b"]
