"""Finds the answer in a text, and writes its numbers as math-verify reads them. docs/data-and-rewards.md has examples,
which tests/reward/test_builtin_graders.py grades. Imports only the standard library."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

NOTHING = re.compile(r"\s*[-+]?nan\s*", re.IGNORECASE)  # not equal to anything
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
WIDE = {wide: chr(wide - 0xFEE0) for wide in range(0xFF01, 0xFF5F)}
WIDE |= {ord("。"): ". ", ord("、"): ", ", ord("，"): ", ", ord("："): ": ", ord("−"): "-"}
CJK = "\u2e80-\u9fff\uac00-\ud7af→≈"
NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?\\?%?"
# Units, left out after a number. Any other word is part of the answer: `3 quarters`, `12 million`, `2 theta`.
SYMBOLS = (
    "nm|mm|cm|dm|km|mg|kg|m[lL]|dL|in|ft|yd|mi|oz|lbs?|hrs?|mins?|secs?|mph|k[mp]h|rpm|mol|[kMG]?Hz|k?J|kWh?|MW|k?Pa|"
    "[kKMGT]B|°[CF]|m/s|USD|EUR|CNY|RMB"
)
NAMES = (
    "(?:kilo|centi|milli)?(?:met(?:er|re)|lit(?:er|re)|gram)|inch(?:es)?|foot|feet|yard|mile|gallon|ounce|pound|tonn?e?|acre|"
    "hectare|second|minute|hour|day|week|month|year|degree|radian|mole|joule|watt|volt|newton|bit|byte|dollar|cent|"
    "euro|rupee|yen|yuan|unit|piece|item|person|people|man|men|woman|women|child|children|student|page|book|ticket|"
    "coin|apple|ball"
)
UNIT = rf"(?:(?:sq|square|cubic) )?(?:{SYMBOLS}|(?i:{NAMES})s?)(?![A-Za-z])(?:\^?[23])?"
RATE = rf"(?:\s?{UNIT}(?:(?:/| per )(?:{UNIT}|[hsgmL]\b))?){{1,3}}"
SUFFIX = rf"(?:{RATE}|[°€£¥₹])?"  # after a number
VALUE = re.compile(rf"[$€£¥₹]?\s*({NUMBER}|[-+]?\.\d+)(?:\s*(percent)|{RATE}|°)?\.?")
WORDS = re.compile(r"(?!sqrt|.*infinity)[A-Za-z]{4,}(?: [A-Za-z]+)*\.?")
SAID = re.compile(r"^(?!sqrt|sin|cos|tan|log|ln|exp|minus|negative)[A-Za-z]{2,}[ ,:]|\b(?:is|are|equals)\b")
COUNT = re.compile(r"\d +(?!sqrt)[A-Za-z]{2}|\b(?:is|are|equals)\b")  # words around a number
HEDGED = re.compile(rf"{NUMBER}\W{{0,4}}? or \W{{0,4}}?{NUMBER}\D*\Z")
LAST = re.compile(r"(?:^|\n)[ \t]*####[ \t]*((?![A-Za-z]{2})\S[^\n]*)\Z")  # `#### answer`; a heading begins with a word
REPLACEMENTS = [  # (pattern, replacement), applied in this order
    (BOX, r"\\boxed{"),
    (re.compile("答案"), " answer "),  # math-verify first tries what follows this word
    (re.compile(rf"(?<=[{CJK}#])(?=[-+]?[$€£¥]?\.?\d)|(?<=[\d%])(?=[{CJK}])|(?<=[A-Za-z]:)(?=[-+]?[$€£¥]?\d)"), " "),
    (re.compile("[¼-¾⅐-⅞]"), lambda m: " " + unicodedata.normalize("NFKC", m[0]).replace("\u2044", "/")),
    (re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?[eE][-+]?\d{1,2}(?!\w)"), lambda m: f"{Decimal(m[0]):f}"),
    (
        re.compile(r"(?<![\w.,/^])[1-9]\d{0,2}(?:(?:[ \u00a0\u2009\u202f~]|\\[ ,;:!]|\{,\})\d{3})+(?!\d)"),
        lambda m: re.sub(r"\D", "", m[0]),
    ),
    (re.compile(r"(?<![\w.,/^})])(\d{1,9})(?:[ ~]|\\[ ,;])+(\d{1,9})/(\d{1,9})(?!\d|/|\.\d)"), lambda m: _mixed(m)),
    (re.compile(rf"""(?<!\w)[`"'“‘]{{1,3}}([-+$€£¥.]*\d[-+\d.,/^()\\% ]*{SUFFIX})[`"'”’]{{1,3}}(?!\w)"""), r" \1 "),
    (re.compile(rf"(?<![\w*\\\])}}^])[*_]{{1,3}}({NUMBER}{SUFFIX})[*_]{{1,3}}(?![\w*])"), r" \1 "),
    (re.compile(rf"((?:^|\n)[ \t]*|(?:is|are|equals|[aA]nswer:?|=) ?)\[({NUMBER})\](?!\w)"), r"\1 \2 "),
]


def graded_part(response: str) -> str | None:
    """The part of a response that math-verify is to read. None: the last box in this part is not closed; the
    last <answer> is empty, or is not closed though an earlier one is; or there is no closed <answer>, no box and no
    last line with ####, and `or` joins the last two numbers."""
    text = response.rpartition("</think>")[2].strip() or response
    before, tag, inside = text.rpartition("<answer>")
    if "</answer>" in inside:
        said = inside.partition("</answer>")[0].strip()
        return _said(said, SAID) if said and not _cut(said) else None
    if _cut(text) or (tag and "</answer>" in before):
        return None
    if not BOX.search(text) and (last := LAST.search(text.rstrip())):
        return _said(last[1], COUNT)
    if not BOX.search(text) and HEDGED.search(text):
        return None
    return _plain(text)


def _said(text: str, prose: re.Pattern[str]) -> str:
    """The text for math-verify. If it is prose, math-verify searches for the number in it."""
    return _plain(text) if prose.search(text) and re.search(r"\d", text) else expression(text)


def is_number(answer: str) -> bool:
    """Whether an answer is a number, maybe with a currency or a unit, which every grader can read."""
    return len(answer) < 100 and VALUE.fullmatch(answer) is not None


def expression(answer: str) -> str:
    """Puts an answer in a box, unless it has LaTeX marks: without both math-verify takes only its first number."""
    text = _plain(answer).strip()
    marked = any(mark in text for mark in ("\\boxed", "$", "\\(", "\\["))
    if VALUE.fullmatch(text) is None and marked:
        return text
    return f"\\boxed{{{_value(text)}}}"


def _plain(text: str) -> str:
    """The text without marks (quotes, emphasis, separators) around or inside its numbers."""
    text = text.translate(WIDE)
    for pattern, put in REPLACEMENTS:
        text = pattern.sub(put, text)
    text = re.sub(rf"\$({NUMBER}){RATE}\$", r"$\1$", text)
    return re.sub(r"\\boxed\{([^{}\\]+)\}", lambda m: f"\\boxed{{{_value(m[1].strip())}}}", text)


def _value(text: str) -> str:
    """A number without its unit; words stay words, and are not read as products of letters."""
    if found := VALUE.fullmatch(text):
        return found[1] + ("%" if found[2] else "")
    return f"\\text{{{text}}}" if WORDS.fullmatch(text) else text


def _mixed(number: re.Match[str]) -> str:
    whole, over, under = map(int, number.groups())
    return f"{whole * under + over}/{under}" if over < under else number[0]


def _cut(text: str) -> bool:
    """Whether the last box is not closed."""
    boxes, depth = [*BOX.finditer(text)], 0
    for brace in re.finditer(r"(?<!\\)[{}]", text[boxes[-1].start() :] if boxes else ""):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return False
    return bool(boxes)
