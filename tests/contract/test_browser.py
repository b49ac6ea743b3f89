"""The report in a real browser.

It draws, filters and shows tooltips, without console errors and without network requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpost.cli.main import main
from rlpost.extensions.watching.report.write import write_report
from tests.browser import PROGRAMS, Browser, find_browser
from tests.unit.watching.report.runs import HOSTILE, make_run

WIDTHS = (1280, 400)

# [name, contrast] of each visible text: its colour against the colour behind it, by the formula of
# WCAG 2.2.
CONTRASTS = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = rgb(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("h1, h2, h3, span, p, td, th, b, pre, code, text, a, summary, label")]
    .filter((node) => node.textContent.trim() && node.getClientRects().length)
    .map((node) => {
      const style = getComputedStyle(node);
      const [a, b] = [light(rgb(node.tagName === "text" ? style.fill : style.color)), light(behind(node))];
      return [node.tagName + " " + node.textContent.slice(0, 30), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
    });
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_run(tmp_path_factory.mktemp("runs") / "seven-b"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip(
            f"no browser: none of {', '.join(PROGRAMS)}; tools/install_system.sh installs Debian's chromium"
        )
    with Browser(program) as browser:
        yield browser


def shown(browser: Browser, name: str) -> int:
    return browser.value(f'document.querySelectorAll("#{name} [data-row]:not([hidden])").length')


def count(browser: Browser, name: str) -> str:
    return browser.value(f"""document.querySelector('[data-filters="{name}"] output').value""")


def type_into(browser: Browser, name: str, text: str) -> None:
    field = f"""document.querySelector('[data-filters="{name}"] input[type=search]')"""
    browser.value(
        f"{field}.value = {text!r}; {field}.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )


def test_a_faulty_page_is_detected(browser, tmp_path):
    """The tests below rely on this.

    Script errors, requests, a page that is too wide and text of low contrast are found.
    """
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<p style="width:3000px;color:#aaa">x</p><img src="http://127.0.0.1:9/x.png"><script>nobody()</script>'
    )
    browser.open(bad, width=400)
    assert any("nobody is not defined" in complaint for complaint in browser.complaints)
    assert "http://127.0.0.1:9/x.png" in browser.requests
    assert browser.value("document.documentElement.scrollWidth > innerWidth")
    assert browser.value(CONTRASTS) == [["P x", pytest.approx(2.32, abs=0.01)]]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_is_readable_at_any_width_light_and_dark(browser, page, width, dark):
    """Nothing overflows sideways, text has enough contrast, and letters in plots are not tiny."""
    browser.open(page, width=width, dark=dark)
    assert browser.complaints == []
    assert browser.requests == [page.as_uri()]
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    contrasts = browser.value(CONTRASTS)
    assert len(contrasts) > 100
    assert [found for found in contrasts if found[1] < 4.5] == []
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 384) == dark
    scale = "Math.min(...[...document.querySelectorAll('svg.plot text')].map((t) => t.getBoundingClientRect().height))"
    assert browser.value(scale) >= 9
    assert browser.value("document.querySelectorAll('svg.plot path.line').length") > 20


def test_answers_are_filtered_by_their_words(browser, page):
    browser.open(page)
    assert (shown(browser, "answers"), count(browser, "answers")) == (8, "120 of 120")
    browser.value("document.querySelector('section#samples button').click()")
    assert shown(browser, "answers") == 120
    type_into(browser, "answers", "onerror quoted")
    assert (shown(browser, "answers"), count(browser, "answers")) == (1, "1 of 120")
    assert HOSTILE in browser.value(
        "document.querySelector('#answers [data-row]:not([hidden])').textContent"
    )
    type_into(browser, "answers", "no such words")
    assert shown(browser, "answers") == 0
    assert browser.complaints == []


def test_filters_are_kept_in_the_address(browser, page):
    browser.open(page, fragment="#answers=boxed&reward=worst&settings=num_rollout")
    assert count(browser, "answers") == "60 of 120"
    assert shown(browser, "settings") == 1
    type_into(browser, "settings", "")
    assert "settings" not in browser.value("location.hash") and "reward=worst" in browser.value(
        "location.hash"
    )


def test_settings_at_their_defaults_are_shown_on_request(browser, page):
    browser.open(page)
    differing = shown(browser, "settings")
    browser.value("document.querySelector('[data-filters=settings] input[type=checkbox]').click()")
    assert 0 < differing < 10 < 100 < shown(browser, "settings")


def test_a_plot_shows_the_values_under_the_pointer(browser, page):
    """With the pointer and with the arrow keys."""
    browser.open(page)
    place = "document.querySelector('svg.plot[aria-label=Reward]')"
    browser.value(f"{place}.scrollIntoView()")
    x, y = browser.value(
        f"(({{x, y, width, height}}) => [x + width * 0.55, y + height / 2])({place}.getBoundingClientRect())"
    )
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    text = browser.value("document.querySelector('.tip').textContent")
    assert text.startswith("step 1") and "rollout, mean 0." in text and "aime 0." in text
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert browser.value("document.querySelector('.tip')") is None
    browser.value(f"{place}.focus()")
    browser.ask("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft", code="ArrowLeft")
    step = int(text.removeprefix("step ")[:3])
    assert browser.value("document.querySelector('.tip').textContent").startswith(
        f"step {step - 1}"
    )
    assert browser.complaints == []


REWARD = "document.querySelector('svg.plot[aria-label=Reward]')"


def axis_texts(browser: Browser, anchor: str) -> list[str]:
    return browser.value(
        f"[...{REWARD}.querySelectorAll('text[text-anchor={anchor}]')].map((t) => t.textContent)"
    )


def set_view(browser: Browser, name: str, value: str | bool) -> None:
    browser.value(
        f"(() => {{ const f = document.querySelector('#view [name={name}]');"
        f" f[f.type === 'checkbox' ? 'checked' : 'value'] = {json.dumps(value)};"
        " f.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


def test_the_script_draws_what_python_drew(browser, page):
    """Curves and axes are the same, so the page looks the same with and without the script."""
    browser.open(page)
    path = f"{REWARD}.querySelector('path.line.c0').getAttribute('d')"
    before = (browser.value(path), axis_texts(browser, "end"), axis_texts(browser, "middle"))
    browser.value("redraw()")
    after = (browser.value(path), axis_texts(browser, "end"), axis_texts(browser, "middle"))
    assert after[1:] == before[1:]
    numbers = [
        [float(word) for word in text[1:].replace("L", " ").split()]
        for text in (before[0], after[0])
    ]
    assert numbers[1] == pytest.approx(numbers[0], abs=0.11)
    assert browser.complaints == []


def test_plots_can_be_zoomed_logarithmic_and_over_hours(browser, page):
    browser.open(page)
    set_view(browser, "from", "100")
    set_view(browser, "to", "140")
    assert axis_texts(browser, "middle") == ["100", "110", "120", "130", "140"]
    set_view(browser, "log", True)
    assert axis_texts(browser, "end") == ["0.1", "1"]
    loss = "[...document.querySelectorAll('svg.plot[aria-label=Loss] text[text-anchor=end]')]"
    # a plot with negative values stays linear
    assert browser.value(f"{loss}.some((t) => t.textContent.startsWith('-'))")
    assert {"from=100", "to=140", "log=1"} <= set(browser.value("location.hash")[1:].split("&"))
    set_view(browser, "axis", "hours")
    assert axis_texts(browser, "middle") == ["2 h", "4 h", "6 h"]
    browser.open(page, fragment="#axis=hours&from=2&to=4")
    assert axis_texts(browser, "middle") == ["2 h", "2.5 h", "3 h", "3.5 h", "4 h"]
    browser.value("document.querySelector('#view button').click()")
    assert axis_texts(browser, "middle") == ["2 h", "4 h", "6 h"]
    assert browser.complaints == []


def test_a_drag_over_one_plot_zooms_all(browser, page):
    browser.open(page)
    browser.value(f"{REWARD}.scrollIntoView()")
    x, y, width = browser.value(
        f"(({{x, y, width, height}}) => [x, y + height / 2, width])({REWARD}.getBoundingClientRect())"
    )
    for kind, at in (("mousePressed", 0.4), ("mouseMoved", 0.6), ("mouseReleased", 0.6)):
        held = {"button": "left", "buttons": 1, "clickCount": 1}
        browser.ask("Input.dispatchMouseEvent", type=kind, x=x + width * at, y=y, **held)
    low, high = browser.value("[view.from, view.to]")
    assert 60 < low < 90 and 130 < high < 160
    entropy = "document.querySelector('svg.plot[aria-label=Entropy]')"
    shown = browser.value(
        f"[...{entropy}.querySelectorAll('text[text-anchor=middle]')].map((t) => Number(t.textContent))"
    )
    assert shown and all(low <= step <= high for step in shown)
    assert browser.complaints == []


def test_a_comparison_is_readable(browser, page, tmp_path, capsys):
    other = make_run(tmp_path / "longer", num_steps=300, preempted_at=(), seed=3)
    assert (
        main(
            ["compare", str(page.parents[1]), str(other.root), "--out", str(tmp_path / "two.html")]
        )
        == 0
    )
    for width in WIDTHS:
        browser.open(tmp_path / "two.html", width=width)
        assert browser.complaints == []
        assert browser.requests == [(tmp_path / "two.html").as_uri()]
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        assert browser.value("document.querySelectorAll('svg.plot').length") > 8
