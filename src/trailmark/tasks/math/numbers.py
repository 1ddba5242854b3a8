r"""Read numbers as people and LaTeX write them, exactly and without a parser: the fast path of the answer checker.

    18   -3.5   .5   1,234   1/2   \frac{1}{2}   1\frac{1}{2}   2 1/2   3\times10^{-4}   1.5e3   0.\overline{3}   50%

The result is a fraction, so 0.1 + 0.2 has no rounding. Everything else, and any number that is too large, gives None.
So no answer can make this slow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 200  # most characters of a number
LARGEST = 300  # largest power of ten
CLOSE = Fraction(1, 10**6)

_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_PLAIN = rf"(?:{_WHOLE}(?:\.\d*)?|\.\d+)"
_SIGN = r"[+-]?"
_FRACTION = re.compile(
    rf"(?P<sign>{_SIGN})(?:(?P<whole>\d+) ?)?\\frac\{{(?P<top>{_SIGN}{_PLAIN})\}}\{{(?P<low>{_SIGN}{_PLAIN})\}}"
)
_SLASH = re.compile(rf"(?P<sign>{_SIGN})(?:(?P<whole>\d+) )?(?P<top>{_PLAIN})/(?P<low>{_PLAIN})")
_POWER = re.compile(
    rf"(?P<sign>{_SIGN})(?:(?P<many>{_PLAIN}) ?(?:\\times|\\cdot|\*) ?)?"
    rf"10\^(?:\{{(?P<long>{_SIGN}\d{{1,4}})\}}|(?P<short>\d))"
)
_E = re.compile(rf"(?P<sign>{_SIGN})(?P<many>{_PLAIN})[eE](?P<power>{_SIGN}\d{{1,4}})")
_REPEAT = re.compile(rf"(?P<sign>{_SIGN})(?P<whole>\d*)\.(?P<once>\d*)\\overline\{{(?P<again>\d+)\}}")
_DECIMAL = re.compile(rf"{_SIGN}{_PLAIN}")


@dataclass(frozen=True, slots=True)
class Number:
    value: Fraction
    rounded: bool = False  # written with a decimal point, so its last digit may be rounded
    percent: bool = False


def read_number(text: str) -> Number | None:
    """The number that the whole of `text` is, or None."""
    text = text.strip()
    if not text or len(text) > LONGEST:
        return None
    percent = text.endswith("%")
    body = text.removesuffix("%").removesuffix("\\").strip()
    value = _value(body)
    return None if value is None else Number(value, "." in body, percent)


def _value(text: str) -> Fraction | None:
    if not text or text[-1] not in "0123456789.}":
        return None
    if _DECIMAL.fullmatch(text):
        return _plain(text)
    if m := _FRACTION.fullmatch(text) or _SLASH.fullmatch(text):
        low = _plain(m["low"])
        top = _plain(m["top"])
        if low == 0 or (m["whole"] and (top < 0 or low < 0)):
            return None
        return _signed(m["sign"], Fraction(int(m["whole"] or 0)) + top / low)
    if m := _POWER.fullmatch(text):
        return _scaled(m["sign"], m["many"] or "1", m["long"] or m["short"])
    if m := _E.fullmatch(text):
        return _scaled(m["sign"], m["many"], m["power"])
    if m := _REPEAT.fullmatch(text):
        once, again = m["once"], m["again"]
        repeated = Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(once))
        return _signed(m["sign"], Fraction(int(m["whole"] or 0)) + Fraction(int(once or 0), 10 ** len(once)) + repeated)
    return None


def _plain(text: str) -> Fraction:
    sign, body = (text[0], text[1:]) if text[0] in "+-" else ("", text)
    whole, _, part = body.replace(",", "").partition(".")
    return _signed(sign, Fraction(int((whole or "0") + part), 10 ** len(part)))


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def _scaled(sign: str, many: str, power: str) -> Fraction | None:
    return None if abs(int(power)) > LARGEST else _signed(sign, _plain(many) * Fraction(10) ** int(power))


def same_number(gold: Number, answer: Number) -> bool:
    """Whether two numbers are equal: exactly or, if one has a decimal point, to six places. If only one has a percent
    sign, it may be a factor (50% is 0.5) or a unit that the question already names (50% is 50)."""
    if gold.percent == answer.percent:
        return _equal(gold.value, answer.value, gold.rounded or answer.rounded)
    sign, bare = (gold, answer) if gold.percent else (answer, gold)
    rounded = gold.rounded or answer.rounded
    return _equal(sign.value, bare.value, rounded) or _equal(sign.value / 100, bare.value, rounded)


def _equal(a: Fraction, b: Fraction, rounded: bool) -> bool:
    return a == b or (rounded and abs(a - b) < CLOSE)


def canonical(number: Number) -> str:
    """One spelling for equal numbers, used to count votes."""
    value = number.value
    text = str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"
    return text + "%" * number.percent
