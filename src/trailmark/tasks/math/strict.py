r"""Whether two answers are the same by strict rules. Structure is compared here; only formulas go to the workers.

    lists    1, 2 and 2, 1 and \{1, 2\}       in any order, none missing, none too many
    tuples   (1, 2)                           in order, with the same brackets: (1,2] is not (1,2)
    unions   (0,1) \cup (2,3)                 in any order
    ranges   x \ge 2 and [2, \infty)
    matrices by element
    names    x = 5 and 5; but not x = 5 and y = 5
    units    5 cm and 5; but not 5 cm and 5 m
    words    in any case
    letters  r is not R: one problem may have both, such as the radii of two circles, so 3R^2 is not 3r^2
    sums     a unit stands behind the whole answer: 864 inches^2, but not (864 inches^2-3)+3, which adds 3 to an area

An empty answer equals nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from trailmark.tasks.math.normalise import clean, split_top, tight
from trailmark.tasks.math.numbers import read_number, same_number
from trailmark.tasks.math.units import compatible, split_unit

Formulas = Callable[[str, str], bool]  # whether two formulas are equal
LONGEST = 2000  # a longer answer is compared only by its spelling
MOST = 50  # most items of a list
COMPARISONS = 2000  # most comparisons of parts in one answer
MATRIX = re.compile(r"^\\begin\{([pbvBV]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\}$", re.DOTALL)
NAME = re.compile(r"^(?:\\?[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\([A-Za-z, ]*\))?|\([A-Za-z](?:, ?[A-Za-z])*\))$")
AND = (",", ";", r"\text{ and }", r"\text{and}", r"\text{ or }", r"\text{or}", r"\text{, and }", " and ", " or ")
RANGE = re.compile(r"(<=|>=|<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z]))")
UNDER = re.compile(r"[\d.]\s*\}?\s*_")  # a number with a subscript
BASE = re.compile(r"\{?([0-9A-Fa-f]+)\}?_(?:(\d+)|\{(?:\\text\{)?(\w+)\}?\}|\\text\{(\w+)\})")
COUNTED = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
           "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
DOLLARS = re.compile(r"\$?\\\$\s*[\d.]|\$\s*[\d.][^$]*$")
FLIP = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


class TooMany(Exception):
    """The answer has too many parts to compare."""


class Ask:
    """Compares formulas and counts all comparisons."""

    def __init__(self, formulas: Formulas):
        self.formulas, self.left = formulas, COMPARISONS

    def __call__(self, gold: str, answer: str) -> bool:
        return self.formulas(gold, answer)

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise TooMany


def same(gold: str, answer: str, formulas: Formulas) -> bool:
    """Compare two answers as they were written. Raises `TooMany` or `RecursionError` if it cannot be decided."""
    if max(len(gold), len(answer)) > LONGEST:
        return bool(gold.strip()) and gold.strip() == answer.strip()
    one, two = clean(gold), clean(answer)
    for money, other in ((gold, two), (answer, one)):
        if DOLLARS.match(money.strip()) and split_unit(other)[1] not in ("", "?", "$"):
            return False  # cleaning removes the sign
    return _same(one, two, Ask(formulas))


def _same(gold: str, answer: str, ask: Ask) -> bool:
    ask.count()
    if not gold or not answer:
        return False
    if gold == answer or tight(gold) == tight(answer):
        return True
    a, b = read_number(gold), read_number(answer)
    if a and b:
        return same_number(a, b)
    words = _words(gold), _words(answer)
    if all(words):
        return words[0] == words[1]
    for word, number in zip(words, (b, a)):
        if number and (count := _counted(word)) is not None:
            return number.value == count
    (g, gold_unit), (x, answer_unit) = split_unit(gold), split_unit(answer)
    if gold_unit or answer_unit:
        return compatible(gold_unit, answer_unit) and _same(g, x, ask)
    for rule in (_unions, _matrices, _ranges, _lists, _brackets, _equations, _bases):
        found = rule(gold, answer, ask)
        if found is not None:
            return found
    if gold.casefold() == answer.casefold() or any(len(w) > 1 for w in words):
        return False  # a single letter is a name, so its case matters; words are not formulas
    if re.search(r"\d\s*:\s*\d", gold + "|" + answer):
        return False  # a ratio or a time has only one spelling
    return ask(gold, answer)


def _words(text: str) -> str:
    """A text answer in one spelling, or "" if it may be a formula."""
    bare = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip()
    if m := re.fullmatch(r"\(?([A-Za-z])\)?\.?", bare):
        return m[1]
    if re.search(r"[\\{}^_=<>+*/]|\d", bare):
        return ""
    letters = bare.strip("\"'`. ")
    return (
        letters.casefold()
        if re.fullmatch(r"[^\W\d_]{2,}(?:[\s,'-]+[^\W\d_]+)*", letters) and "," not in letters
        else ""
    )


def _counted(word: str) -> int | None:
    """The number of a word such as seven or forty-two."""
    if word in COUNTED:
        return COUNTED.index(word)
    ten, _, one = word.replace(" ", "-").partition("-")
    if ten not in TENS or (one and one not in COUNTED[1:10]):
        return None
    return 20 + 10 * TENS.index(ten) + (COUNTED.index(one) if one else 0)


def _each(gold: Sequence[str], answer: Sequence[str], ask: Ask) -> bool:
    """Every item of each side is an item of the other. Repeated or equal items count once."""
    if not gold or not answer or max(len(gold), len(answer)) > MOST:
        return not gold and not answer
    met: set[int] = set()
    for item in gold:
        found = {i for i, other in enumerate(answer) if _same(item, other, ask)}
        if not found:
            return False
        met |= found
    return len(met) == len(answer)


def _distinct(items: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(tight(x) if not _words(x) else x for x in items if x))


def _unions(gold: str, answer: str, ask: Ask) -> bool | None:
    if "\\cup" not in gold and "\\cup" not in answer:
        return None
    parts = [
        [_as_interval(_member(p)) or _member(p) for p in split_top(_named(t), "\\cup", " or ", "\\text{ or }")]
        for t in (gold, answer)
    ]
    return _each(parts[0], parts[1], ask)


def _matrices(gold: str, answer: str, ask: Ask) -> bool | None:
    a, b = MATRIX.match(gold), MATRIX.match(answer)
    if not a and not b:
        return None
    if not a or not b or ("v" in a[1].lower()) != ("v" in b[1].lower()):
        return False
    one, two = (
        [[clean(x) for x in split_top(row, "&")] for row in re.split(r"\\\\", m[2].strip()) if row.strip()]
        for m in (a, b)
    )
    return [len(r) for r in one] == [len(r) for r in two] and all(
        _same(x, y, ask) for r, s in zip(one, two) for x, y in zip(r, s)
    )


def _member(text: str) -> str:
    return re.sub(r"^[A-Za-z](?:_\w)?\s*\\in(?![A-Za-z])\s*", "", text)


def _named(text: str) -> str:
    """Remove the name of a set: x \\in, D =."""
    name, equals, rest = text.partition("=")
    return (
        rest.strip() if equals and NAME.match(name.strip()) and rest.strip()[:1] in ("[", "(", "\\") else _member(text)
    )


def _ranges(gold: str, answer: str, ask: Ask) -> bool | None:
    """Compare an interval with an inequality, both as intervals."""
    gold, answer = _member(gold), _member(answer)
    g, a = _as_interval(gold), _as_interval(answer)
    if (g is None) == (a is None):
        return None if g is None else _brackets(g or "", a or "", ask)
    shown = _brackets_of(answer if g is not None else gold)
    return None if shown is None else _brackets(g or gold, a or answer, ask)


def _as_interval(text: str) -> str | None:
    """x > 2 as (2,\\infty); 1 \\le x < 3 as [1,3). None for anything else."""
    parts = [p.strip() for p in RANGE.split(text.replace("<=", "\\le").replace(">=", "\\ge"))]
    if len(parts) == 3:
        left, sign, right = parts
        if not re.fullmatch(r"[A-Za-z]", left):
            left, sign, right = right, FLIP[sign], left
        if not re.fullmatch(r"[A-Za-z]", left) or re.search(r"(?<!\\)\b[A-Za-z]\b", right):
            return None
        if sign in ("<", r"\le"):
            return rf"(-\infty ,{right}" + ("]" if sign == r"\le" else ")")
        return ("[" if sign == r"\ge" else "(") + rf"{right},\infty )"
    if len(parts) == 5 and re.fullmatch(r"[A-Za-z]", parts[2]):
        low, one, _, two, high = parts
        if {one, two} <= {">", r"\ge"}:
            low, one, two, high = high, FLIP[two], FLIP[one], low
        if {one, two} <= {"<", r"\le"}:
            return ("[" if one == r"\le" else "(") + f"{low},{high}" + ("]" if two == r"\le" else ")")
    return None


def _items(text: str) -> list[str]:
    """The items of a list. If commas are followed by blanks, a comma without a blank belongs to a number."""
    spaced = re.sub(r",(?=\d{3}(?!\d))", "\x01", text) if ", " in text else text
    return [p.replace("\x01", ",") for p in split_top(spaced, *AND)]


def _lists(gold: str, answer: str, ask: Ask) -> bool | None:
    if any(re.fullmatch(r"\d{1,3}(?:,\d{3})+\s*_.+", text.strip()) for text in (gold, answer)):
        return None  # one number with a subscript, not a list
    one, two = _listed(gold), _listed(answer)
    if one is None and two is None:
        return None
    if one is None or two is None:
        other = answer if two is None else gold
        if _brackets_of(other) or MATRIX.match(other):
            return False
        single = [other.strip()]
        if "," in other and read_number(other):  # 100,200 may be two numbers
            single = other.split(",")
        one, two = (one, single) if two is None else (single, two or [])
    return _each(_distinct(one or []), _distinct(two or []), ask)


def _listed(text: str) -> list[str] | None:
    """The items if the text is a list, a set, or a value with plus-minus."""
    name, equals, rest = text.partition("=")
    if equals and "=" not in rest and NAME.match(name.strip()):
        text = rest.strip()  # x = 1, 2
    if text.startswith("\\{") and text.endswith("\\}") and len(split_top(text, "\\cup")) == 1:
        inner = text[2:-2].strip()
        return _items(inner) if inner else []
    if read_number(text):
        return None
    parts = [p for p in _items(text) if p]
    if any("=" in p for p in parts[1:]) and all("=" in p for p in parts):
        parts = _assigned(parts)
    grown = [s for p in parts for s in _plus_minus(p)]
    return grown if len(grown) > 1 else None


def _assigned(parts: list[str]) -> list[str]:
    """x = 1, x = 2 is a list of values of one name; x = 1, y = 2 stays as it is."""
    names = {p.partition("=")[0].strip() for p in parts}
    return [p.partition("=")[2].strip() for p in parts] if len(names) == 1 else parts


def _plus_minus(text: str) -> list[str]:
    if text.count("\\pm") != 1 or _brackets_of(text):
        return [text]
    left, right = (s.strip() for s in text.split("\\pm"))
    return [f"{left}+{right}" if left else right, f"{left}-{right}"]


def _brackets_of(text: str) -> tuple[str, list[str], str] | None:
    """(left, items, right) if brackets hold the whole text and several items are in them."""
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]":
        return None
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "([") - (c in ")]")
        if depth == 0 and i < len(text) - 1:
            return None
    items = _items(text[1:-1])
    return (text[0], items, text[-1]) if len(items) > 1 else None


def _brackets(gold: str, answer: str, ask: Ask) -> bool | None:
    a, b = _brackets_of(_named(gold)), _brackets_of(_named(answer))
    if not a and not b:
        return None
    if not a or not b:
        return False
    return (a[0], a[2], len(a[1])) == (b[0], b[2], len(b[1])) and all(_same(x, y, ask) for x, y in zip(a[1], b[1]))


def _equations(gold: str, answer: str, ask: Ask) -> bool | None:
    one, two = (split_top(t, "=") for t in (gold, answer))
    if RANGE.search(gold + answer) or (len(one) == 1 and len(two) == 1):
        return None
    if len(one) > 1 and len(two) > 1:
        if NAME.match(one[0]) and NAME.match(two[0]):
            return one[0].replace(" ", "") == two[0].replace(" ", "") and _same(one[-1], two[-1], ask)
        return None
    parts, single = (one, two[0]) if len(one) > 1 else (two, one[0])
    if len(parts) == 2 and re.fullmatch(r"[A-Za-z]", parts[1]) and not NAME.match(parts[0]):
        parts = parts[::-1]  # 5 = x
    if not NAME.match(parts[0]) and not (len(two) > 1 and read_number(parts[-1])):
        return False
    return _same(parts[-1], single, ask) if len(one) > 1 else _same(single, parts[-1], ask)


def _bases(gold: str, answer: str, ask: Ask) -> bool | None:
    """1010_2: an answer may leave out the base, but must not name another. If the gold answer names none, it is
    decimal. The workers cannot read other subscripts of a number."""
    found = [BASE.fullmatch(t.replace(" ", "")) for t in (gold, answer)]
    if not any(found):
        return False if UNDER.search(gold) or UNDER.search(answer) else None
    one, two = (None if m is None else _based(m) for m in found)
    if found[0] and found[1]:
        return one is not None and two is not None and one[1] == two[1] and one[0] == two[0]
    if found[0]:
        return one is not None and found[0][1].upper() == answer.replace(" ", "").upper()  # a_1 is a name
    number = read_number(gold)
    return two is not None and number is not None and number.value == two[0]


def _based(m: re.Match[str]) -> tuple[int, int] | None:
    """(value, base)"""
    name = m[2] or m[3] or m[4]
    base = int(name) if name.isdigit() else _counted(name.casefold())
    if base is None or not 2 <= base <= 36:
        return None
    try:
        return int(m[1], base), base
    except ValueError:  # the base does not have this digit
        return None
