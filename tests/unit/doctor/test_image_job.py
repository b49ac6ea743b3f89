"""The job that checks an image: what it sends to Slurm, and what it prints."""

import pytest

from rlpost.cli.main import main
from rlpost.config.keys import KEYS
from rlpost.extensions.doctor import image_job


def test_a_look_into_an_image_leaves_no_key_with_slurm(tmp_path, monkeypatch, capsys):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        f"#!/bin/sh\nenv > {tmp_path}/seen\necho 7\necho fine > {tmp_path}/findings\n"
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in KEYS:
        monkeypatch.setenv(name, "hf_secret")
    assert image_job._submit("#!/bin/sh\n", tmp_path) == 0
    assert capsys.readouterr().out == "fine\n"
    assert "hf_secret" not in (tmp_path / "seen").read_text()


@pytest.mark.parametrize(("findings", "code"), [("[]\n", 0), (None, 1)])
def test_standard_output_of_a_look_has_the_findings_alone(
    tmp_path, monkeypatch, capsys, findings, code
):
    """Not what enroot and setup commands said; where nothing was found out, those are shown as
    messages.
    """
    made = f"echo '{findings.strip()}' >{tmp_path}/findings" if findings else ":"
    logs = f"echo '[INFO] Extracting squashfs filesystem...' >{tmp_path}/n01.log; echo no image >{tmp_path}/job.out"
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho 7\n{logs}\n{made}\nexit {code}\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert image_job._submit("#!/bin/sh\n", tmp_path) == code
    said = capsys.readouterr()
    assert said.out == (findings or "")
    assert ("no image\n[INFO] Extracting" in said.err) == (findings is None)


def test_a_folder_whose_name_slurm_would_change_is_refused_for_the_log_of_a_look(tmp_path, capsys):
    (tmp_path / "site.toml").write_text(f"[cluster]\nruns_dir = '{tmp_path}/a%jb'\n")
    assert main(["doctor", "--image", "--cluster", str(tmp_path / "site.toml"), "--dry-run"]) == 2
    assert "choose another path" in capsys.readouterr().err
