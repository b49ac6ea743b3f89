"""Labelled texts for the detector of repetition loops: regular ones, and real loops.

A regular text may be as uniform as a loop, but it ends. A loop goes on until a limit ends it.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

PROSE = (
    "The committee met on Tuesday to discuss the state of the bridge. Its report described rust in "
    "eleven of the forty cables and recommended that traffic be limited to light vehicles until "
    "spring. Several members objected that the cost of a detour had not been considered; the "
    "engineer replied that a fall into the river would cost more. A vote was postponed. In the "
    "afternoon the mayor received a delegation of shopkeepers, who asked for compensation, and "
    "promised an answer within the month. Nobody believed him, but the coffee was good. "
)
WORDS = PROSE.lower().replace(".", "").replace(",", "").replace(";", "").split()
PROBLEM = "Let me solve this step by step. A triangle has sides 3, 4 and 5; we must find its area. "


def _decimals(numerator: int, denominator: int, count: int) -> str:
    digits = ""
    for _ in range(count):
        numerator *= 10
        digits += str(numerator // denominator)
        numerator %= denominator
    return "0." + digits


def _hex_dump(data: bytes) -> str:
    rows = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        rows.append(f"{start:08x}: {row.hex(' ')}  {shown}")
    return "\n".join(rows)


def _sentences(count: int) -> str:
    source = random.Random(1)
    sentences = [" ".join(source.choices(WORDS, k=source.randint(6, 16))) for _ in range(count)]
    return ". ".join(sentences)


def _records(*, vary: bool) -> str:
    source = random.Random(2)
    return json.dumps(
        [
            {"id": n, "name": source.choice(WORDS) if vary else "x", "score": vary * n, "ok": True}
            for n in range(60)
        ],
        indent=1,
    )


REGULAR = {
    "table of zeros": "\n".join("0 " * 16 for _ in range(50)),
    "table of floats": "\n".join("  ".join(["0.000"] * 8) for _ in range(40)),
    "identity matrix": "\n".join(
        " ".join("1" if row == column else "0" for column in range(24)) for row in range(24)
    ),
    "Markdown table of zeros": "| a | b | c |\n|---|---|---|\n" + "| 0 | 0 | 0 |\n" * 40,
    "HTML table of zeros": "<table>\n" + ("<tr>" + "<td>0</td>" * 8 + "</tr>\n") * 12 + "</table>",
    "multiplication table": "\n".join(
        " ".join(f"{row * column:4d}" for column in range(1, 13)) for row in range(1, 13)
    ),
    "hex dump of zeros": _hex_dump(bytes(512)),
    "hex dump of text": _hex_dump(PROSE.encode()),
    "1/7": _decimals(1, 7, 600),
    "1/13": _decimals(1, 13, 800),
    "1/97": _decimals(1, 97, 900),
    "2^900 in binary": f"{2**900:b}",
    "10^600": str(10**600),
    "2^3000": str(2**3000),
    "700!": str(math.factorial(700)),
    "triangle of stars": "\n".join("*" * row for row in range(1, 40)),
    "pyramid": "\n".join(" " * (30 - row) + "*" * (2 * row + 1) for row in range(30)),
    "chess board": "\n".join(("# . ", ". # ")[row % 2] * 8 for row in range(16)),
    "game of life": "\n".join("." * 18 + ("###" if row == 9 else "...") + "." * 19
                              for row in range(30)),
    "code": (Path(__file__).parents[3] / "rlpost/algorithm/loss.py").read_text()[:4000],
    "assertions": "\n".join(f"assert square({n}) == {n * n}" for n in range(60)),
    "SQL": "\n".join(
        f"INSERT INTO cells (row, col, value) VALUES ({n // 8}, {n % 8}, 0);" for n in range(64)
    ),
    "CSV": "\n".join(f"{n},true,true,false" for n in range(120)),
    "prose": PROSE,
    "long prose": _sentences(80),
    "chorus": "Row, row, row your boat, gently down the stream. Life is but a dream.\n" * 6,
    "song with a counter": "\n".join(
        f"{n} bottles of beer on the wall, {n} bottles of beer. Take one down, pass it around, "
        f"{n - 1} bottles of beer on the wall." for n in range(40, 0, -1)
    ),
    "JSON records": _records(vary=True),
    "JSON records of equal values": _records(vary=False),
    "JSON zeros": json.dumps([[0] * 10] * 40),
    "steps of an induction": "\n".join(
        f"Step {n}: from a_{n - 1} = {3 * n - 2} we get a_{n} = a_{n - 1} + 3 = {3 * n + 1}."
        for n in range(1, 60)
    ),
    "cases": "\n".join(
        f"If n = {n} (mod 40), then n^2 = {n * n % 40} (mod 40), so it is not 3." for n in range(40)
    ),
    "numbers": ", ".join(map(str, range(1, 401))),
    "table of contents": "\n".join(f"Chapter {n} {'.' * 50} {12 * n}" for n in range(1, 30)),
    "Base64 of zeros": "A" * 600 + "==",
    "ruler": "=" * 300 + "\nEnd of report",
}  # fmt: skip
"""Right answers that end by themselves."""


def _variations(count: int) -> str:
    source = random.Random(3)
    starts, checks = ("Wait", "Hmm", "Actually", "But wait"), ("check", "verify", "reconsider")
    return "".join(
        f"{source.choice(starts)}, let me {source.choice(checks)} that again. The area is one half "
        "of the base times the height, which is 6. "
        for _ in range(count)
    )


LOOPS = {
    "a word": "the " * 500,
    "a word, short": "wait " * 140,
    "a phrase": "so it goes. " * 100,
    "a sentence": "Wait, let me check that again. " * 70,
    "a sentence, short": "The answer is 6. " * 35,
    "two sentences": "Therefore the answer is 42. But we should double check it to be sure. " * 45,
    "a Chinese sentence": "我们需要重新考虑这个问题。" * 110,
    "a letter": "a" * 2000,
    "exclamation marks": "!" * 3000,
    "zeros": "0." + "0" * 3000,
    "digits": "x = 0." + "3" * 6000,
    "line breaks": "\n" * 3000,
    "spaces": " " * 3000,
    "emoji": "\U0001f600" * 1500,
    "a list of numbers": "1, 2, 3, 4, 5, " * 300,
    "a box": "\\boxed{6} " * 150,
    "a final answer": "**Final Answer**\n\n\\[ \\boxed{6} \\]\n\n" * 80,
    "a line of code": "    x = x + 1\n" * 200,
    "a JSON record": '{"id": 1, "name": "a"}, ' * 125,
    "an address": "https://www." * 170,
    "a row of a table": "| 0 | 0 | 0 |\n" * 500,
    "a paragraph": PROSE * 10,
    "a paragraph with a counter": "".join(
        f"Attempt {n}: Let me try another approach. Suppose the first number is x and the second "
        "is y. Then x + y = 10 and x y = 21, so the numbers are 3 and 7. That does not match.\n"
        for n in range(1, 25)
    ),
    "a paragraph with other words": _variations(40),
    "a sentence with a counter": "".join(
        f"Let me check the case n = {n} again and see whether it works. " for n in range(1, 70)
    ),
    "a short line with a counter": "".join(f"{n}. The answer is 42.\n" for n in range(1, 150)),
}
"""What followed the beginning of a solution until the limit."""
