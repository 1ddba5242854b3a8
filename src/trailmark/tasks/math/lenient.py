r"""The published reference's rules for reading and comparing answers, as they are described, with their false
positives.

1800 is right where 18 is expected, because numbers also count as percentages. An empty answer is right if the gold
solution's box cannot be read. "2-5" is read as -5. Only the last items of a list count. Numbers 0.0009 apart are equal.
Use these rules to compare with published numbers, and `strict.py` for everything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from trailmark.tasks.math.extract import pairs
from trailmark.tasks.math.normalise import split_top

Ask = Callable[[str, str], bool]
Compare = Callable[[Ask], bool]
NUMBER = re.compile(r"-?\d*\.?\d+")
CLOSE = 1e-3
LONGEST = 2000
MOST = 50  # most boxes that are read
UNITS = ("cm", "mm", "p.m.", "km", "units", "dollars")


def extract(text: str, question: str = "", single: bool = False) -> list[str]:
    """Every item of the text's answer; only the last one if a `single` answer is wanted."""
    items = [x for raw in _found(text[-100_000:]) for x in _split(normal(_trimmed(raw)), question)]
    return items[-1:] if single else items


def gold_items(gold: str, question: str = "") -> list[str]:
    return _split(normal(gold), question)


def _found(text: str) -> list[str]:
    if "final answer is $" in text and "$. I hope" in text:
        return [text.split("final answer is $", 1)[1].split("$. I hope", 1)[0]]
    if "boxed" in text:
        braces = pairs(text)
        starts = [m.end() for m in re.finditer(r"boxed\{", text)][-MOST:]
        return [text[at : braces.get(at - 1, at + LONGEST)] for at in starts]
    if "he answer is" in text:
        return [text.rsplit("he answer is", 1)[1]]
    if blocks := re.findall(r"```output\n(.*?)(?:```|\Z)", text, re.DOTALL):
        return [blocks[-1].strip()]
    return NUMBER.findall(text.replace(",", "")[-LONGEST:])[-1:]


def _trimmed(raw: str) -> str:
    lines = raw.strip().split("\n")
    return lines[0].lstrip(":").rstrip("./").strip() if lines else ""


def _split(text: str, question: str) -> list[str]:
    if "separated by commas" in question and not any(c in text for c in "()[]"):
        return [x for x in text.split(",") if x]
    if r"\text{and}" in text:
        return [x for x in text.split(r"\text{and}") if x]
    return [text] if text else []


def normal(text: str) -> str:
    text = text.replace("\n", "").replace("\\!", "")
    text = re.sub(r"\\(left|right)(?![A-Za-z])", "", text)
    text = re.sub(r"\^\{?\\circ\}?|\\\$|\$|\\mathbf|\\mathrm|\\mbox\{[^{}]*\}|\\cdot", "", text)
    without = re.sub(r"\\text\{[^{}]*\}$", "", text.strip())
    text = without if without.strip() else text
    for unit in UNITS:
        text = re.sub(rf"(?<=[\d ]){re.escape(unit)}\s*$", "", text)
    text = re.sub(r"\\[tdc]frac", r"\\frac", text).replace("\\%", "%")
    text = re.sub(r"^\.", "0.", text.strip())
    text = re.sub(r"\.0+(?!\d)", "", text)
    text = re.sub(r"(?<![A-Za-z\\])(?:infinity|inf)(?![A-Za-z])", r"\\infty", text)
    text = text if "i" in text else re.sub(r"(?<![A-Za-z\\])j(?![A-Za-z])", "i", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"^(-?\d+)/(\d+)$", r"\\frac{\1}{\2}", text.replace(" ", ""))
    return text.rstrip("\\,. ")


def equal(gold: Sequence[str], found: Sequence[str], ask: Ask) -> bool:
    """Compare lists: the last |gold| predictions, each equal to some gold item, and each gold item to one of them."""
    right = list(dict.fromkeys(gold))
    said = list(dict.fromkeys(found))[-len(right) :] if right else list(dict.fromkeys(found))
    return all(any(_same(g, p, ask) for g in right) for p in said) and all(
        any(_same(g, p, ask) for p in said) for g in right
    )


def _same(gold: str, answer: str, ask: Ask) -> bool:
    if "\\cup" in gold and "\\cup" in answer:
        return equal(gold.split("\\cup"), answer.split("\\cup"), ask)
    if gold == answer:
        return True
    a, b = _number(gold), _number(answer)
    if a is not None and b is not None:
        return any(abs(b - x) < CLOSE for x in (a, a / 100, a * 100))
    if max(len(gold), len(answer)) > LONGEST:
        return False
    if gold[:1] in ("(", "[") and answer[:1] in ("(", "["):
        one, two = (split_top(t[1:-1], ",") for t in (gold, answer))
        if len(one) > 1 or len(two) > 1:
            return len(one) == len(two) and all(_same(x, y, ask) for x, y in zip(one, two))
    if (one := _rows(gold)) and (two := _rows(answer)):
        return len(one) == len(two) and all(_same(x, y, ask) for x, y in zip(one, two))
    left, right = gold.split("="), answer.split("=")
    if len(left) == 2 and len(right) == 2:
        difference = f"({left[0]})-({left[1]})"
        return ask(difference, f"({right[0]})-({right[1]})") or ask(difference, f"({right[1]})-({right[0]})")
    for one, other in ((left, answer), (right, gold)):
        if len(one) == 2 and len(one[0]) <= 2 and "=" not in other:
            return _same(gold if one is right else one[1], one[1] if one is right else answer, ask)
    return bool(gold and answer) and ask(gold, answer)


def _number(text: str) -> float | None:
    plain = text.replace(",", "")
    if not re.fullmatch(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?%?", plain):
        return None
    value = float(plain.rstrip("%"))
    return value / 100 if plain.endswith("%") else value


def _rows(text: str) -> list[str]:
    m = re.fullmatch(r"\\begin\{([pb])matrix\}(.*)\\end\{\1matrix\}", text, re.DOTALL)
    return [x for row in m[2].split("\\\\") if row.strip() for x in row.split("&")] if m else []
