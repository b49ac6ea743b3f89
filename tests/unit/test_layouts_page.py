"""docs/layouts.md: every recommended layout fits, and models have their published sizes."""

import json
import shlex

import pytest

from rlpost.extensions.planning import plan_verb as plan
from tools.pages.layouts import EXAMPLES, NUM_SHOWN, STARTS, layouts_page, planned, search_command

# Billions of parameters, as the models' cards say.
PUBLISHED = {
    "qwen2_5_7b": 7.61, "glm4_9b": 9.4, "qwen3_30b_a3b": 30.5, "qwen2_5_32b": 32.5, "llama3_1_70b": 70.6,
    "qwen3_235b_a22b": 235.0, "glm45_355b": 355.0,
    "glm47_flash": 30.0, "deepseek_v3": 671.0, "kimi_k2": 1026.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def page() -> str:
    """The text of the page; the searches for its examples take seconds."""
    return layouts_page()


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.model)
def test_a_recommended_layout_fits(start):
    made = planned(start)
    assert made.problems == ()
    assert made.layout.world == 8 * start.nodes
    assert made.shape.parameters.total / 1e9 == pytest.approx(PUBLISHED[start.model], rel=0.01)


@pytest.mark.slow
def test_every_recommended_model_has_a_row(page):
    assert all(f"[{start.title}]" in page for start in STARTS)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.model)
def test_the_commands_of_the_page_print_the_output_that_it_shows(example, page, capsys):
    command = search_command(example)
    assert command in page
    program, verb, *words = shlex.split(command.replace("\\\n", " "))
    assert (program, verb) == ("rlpost", "plan")
    assert plan.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["suggestions"]
    shown = page.split(command)[1].split("```text\n")[1].split("\n```")[0]
    lines = [f"{one['layout']}\n    {one['reasons']}" for one in found[:NUM_SHOWN]]
    assert shown == "\n".join(lines) and len(lines) == NUM_SHOWN
