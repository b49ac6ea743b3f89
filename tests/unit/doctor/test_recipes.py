"""What needs TransformerEngine in an image follows from the recipe."""

from __future__ import annotations

from rlpost.cli.main import main
from rlpost.config.load import JOBS

GROUPED = "--moe-grouped-gemm true"


def test_the_doctor_of_an_image_looks_for_what_the_recipe_needs(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("RLPOST_IMAGE", "/i.sqsh")
    monkeypatch.setenv("RLPOST_ASSETS", "/a")
    site = ["--cluster", "site", "--dry-run"]
    for name, wanted in (("glm45_355b", f"--te-for={GROUPED}"), ("qwen3_4b", None)):
        assert main(["doctor", "--image", str(JOBS / f"recipes/{name}.toml"), *site]) == 0
        script = capfd.readouterr().out
        assert (f" '{wanted}'" in script) if wanted else ("--te-for" not in script)
    assert main(["doctor", "--image", *site]) == 0
    assert "--te-for" not in capfd.readouterr().out


def test_the_doctor_inside_the_image_does_too(capfd):
    assert main(["doctor", "--image", str(JOBS / "recipes/glm45_355b.toml")]) == 1
    (row,) = [line for line in capfd.readouterr().out.splitlines() if "TransformerEngine" in line]
    assert row.startswith("FATAL_CONFIG") and GROUPED in row
