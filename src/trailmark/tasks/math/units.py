"""Units after a number. One side may leave its unit out, but 5 cm are not 5 m.

A known unit has one name for all its spellings. An unknown unit ("apples") is only a word, and equals any other word.
"""

from __future__ import annotations

import re

_SPELLINGS = {
    "cm": "centimeter centimetre cms", "mm": "millimeter millimetre", "m": "meter metre",
    "km": "kilometer kilometre kms",
    "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile", "g": "gram", "kg": "kilogram kilo",
    "mg": "milligram", "lb": "pound lbs", "oz": "ounce", "ton": "tonne", "s": "second sec secs", "min": "minute mins",
    "h": "hour hr hrs", "day": "day", "week": "week", "month": "month", "year": "year yr yrs", "l": "liter litre",
    "ml": "milliliter millilitre", "gal": "gallon", "$": "dollar usd", "cent": "cent ¢", "€": "euro",
    "°": "degree deg", "mph": "mph", "am": "a.m. a.m", "pm": "p.m. p.m",
    "rad": "radian",
}  # fmt: skip
KNOWN = {name: unit for unit, names in _SPELLINGS.items() for name in (unit, *names.split())}
POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3, "cu": 3}
_WORD = r"[A-Za-z€¢°][A-Za-z.'-]*+"
_TEXT = r"\\text\s*\{[^{}]*\}"
_TAIL = re.compile(
    r"^(?P<body>.*?[\d}%)]|.*?\\[A-Za-z]+(?=\s*\\text))\s*"
    rf"(?P<unit>(?:{_TEXT}|{_WORD})(?:\s*{_TEXT}|[\s/]+{_WORD}|/\s*{_WORD})*)"
    r"\s*(?:\^\s*\{?(?P<power>[23])\}?)?$"
)
_ASIDE = re.compile(r"^(?P<body>.*\d)\s*\([^()\d,=<>\\^]{2,}\)$")  # 9 (apples)
_SYMBOL = re.compile(r"^[$€£]\s*(?P<body>[\d.].*)$")


def split_unit(text: str) -> tuple[str, str]:
    """(text before the unit, name of the unit). The name is "" if there is no unit, "?" if it is unknown. A single
    letter is a unit only after a number and a blank (5 m); the m of 5m is a name. The word "units" fits any unit."""
    if m := _ASIDE.match(text):
        return m["body"], "?"
    if m := _SYMBOL.match(text):
        return m["body"], "$"
    m = _TAIL.match(text)
    if not m:
        return text, ""
    written = m["unit"]
    spoken = "\\text" in written
    words = re.sub(r"\\text\s*\{|\}", " ", written).split()
    bare = [w for w in words if w.strip(".").lower() not in KNOWN]
    apart = re.search(r"[\d}%)]\s", text) is not None
    if not words or (not spoken and not apart and (bare or len(words[0]) < 2)):
        return text, ""
    if not spoken and len(words[0]) < 2 and (bare or not m["body"][-1].isdigit()):
        return text, ""
    if bare and re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", m["body"])):
        return text, ""  # there are words before it: this is a sentence
    return m["body"].strip(), _name(words, m["power"])


def _name(words: list[str], power: str | None) -> str:
    exponent, names = int(power or 1), []
    for word in words:
        low = word.lower().rstrip(",")
        if low in POWERS:
            exponent = POWERS[low]
        elif low == "per" or low == "/":
            names.append("/")
        else:
            low = low if low in KNOWN else low.strip(".")
            names.append(KNOWN.get(low) or KNOWN.get(low.removesuffix("s")) or "?")
    if "?" in names or not names:
        return "?"
    return "".join(names) + ("" if exponent == 1 else f"^{exponent}")


def compatible(a: str, b: str) -> bool:
    return a == b or "" in (a, b) or "?" in (a, b)
