r"""One spelling for each notation: LaTeX that means the same becomes the same text.

Only the spelling changes. `numbers.py` and the formula workers compare values (2+3 and 5).
"""

from __future__ import annotations

import re
from fractions import Fraction

from trailmark.tasks.math.extract import pairs

LETTERS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ",
    "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "°": "", "∈": r"\in ", "±": r"\pm ",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "²": "^2", "³": "^3", "\u00a0": " ", "\u2009": " ", "\x00": "",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "≈": r"\approx ",
}  # fmt: skip
WIDE = {i: chr(i - 0xFEE0) for i in range(0xFF01, 0xFF5F)}  # the full-width forms of ASCII
NAMES = {
    r"\\(?:d|t|c)frac(?![A-Za-z])": r"\\frac", r"\\(?:leqslant|leq)(?![A-Za-z])": r"\\le",
    r"\\(?:geqslant|geq)(?![A-Za-z])": r"\\ge", r"\\neq(?![A-Za-z])": r"\\ne", r"\\lt(?![A-Za-z])": "<",
    r"\\gt(?![A-Za-z])": ">", r"\\(?:lbrace)(?![A-Za-z])": r"\\{", r"\\(?:rbrace)(?![A-Za-z])": r"\\}",
    r"\\(?:land|wedge)(?![A-Za-z])": r"\\text{ and }", r"\\lor(?![A-Za-z])": r"\\text{ or }",
    r"\\bigcup(?![A-Za-z])": r"\\cup", r"\\lvert(?![A-Za-z])": "|", r"\\rvert(?![A-Za-z])": "|",
    r"\\ast(?![A-Za-z])": r"\\cdot",
    r"\\emptyset(?![A-Za-z])": r"\\varnothing", r"\\imath(?![A-Za-z])": "i",
}  # fmt: skip
SPACES = re.compile(r"(?<!\\)\\(?:[,;:! ]|quad|qquad|thinspace|space)(?![A-Za-z])|(?<!\\)~")
SIZES = re.compile(r"\\(?:left|right|[bB]ig{1,2}[lrm]?|displaystyle|textstyle|limits|boldsymbol)(?![A-Za-z])\s*")
FONTS = re.compile(
    r"\\(?:mathbf|mathrm|mathsf|mathit|mathcal|textbf|textit|textrm|textnormal|mbox|operatorname\*?|bold|rm|bf)"
    r"(?![A-Za-z])\s*"
)
DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![A-Za-z])|\\circ(?![A-Za-z])")
UNBRACED = re.compile(r"\\frac\s*(?:(\d)|\{([^{}]*)\})\s*(?:(\d)|\{([^{}]*)\})")
ROOT = re.compile(r"\\sqrt\s*(\d|[A-Za-z])(?![A-Za-z])")
INFINITY = re.compile(r"(?<![A-Za-z\\])\+?(?:infinity|infty|inf|oo)(?![A-Za-z])|\+?\\infty", re.IGNORECASE)
SPACED = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?")  # 12 345
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
SCALED = re.compile(
    r"^([+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,15})(?:\.\d{1,12})?)\s*(?:\\text\s*\{\s*)?"
    rf"({'|'.join(SCALES)})(?![A-Za-z])(.*)$",
    re.IGNORECASE,
)
THOUSANDS = re.compile(r"(?<![\d,.])(\d{1,3}(?:\{,\}\d{3})+)")
BASES = r"(\d{1,2}|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|sixteen)"
BASED = (  # a base written after a number instead of as a subscript: 40\text{ (base nine)}, 40\text{_9}, 40 base 9
    re.compile(
        rf"(?<=\d)\s*\\text\s*\{{\s*(?:_|,?\s*(\()?\s*(?:in\s+)?base[\s-]*){BASES}\s*(?(1)\))\s*\}}\s*$", re.IGNORECASE
    ),
    re.compile(
        r"(?<=\d)\s*,?\s*(\()?\s*(?:in\s+base|base|\\text\s*\{\s*(?:in\s+)?base\s*\})[\s-]*"
        rf"{BASES}\s*(?(1)\))\s*$",
        re.IGNORECASE,
    ),
)


def clean(text: str) -> str:
    """`text` in one spelling. Brackets, words and values stay."""
    for letter, plain in LETTERS.items():
        if letter in text:
            text = text.replace(letter, plain)
    if not text.isascii():  # digits of any script become ASCII, but 2² keeps its square
        text = re.sub(r"\d", lambda m: str(int(m[0])), text.translate(WIDE))
    text = _undollared(text.strip())
    text = re.sub(r"\\\$|\$", "", text)
    text = THOUSANDS.sub(lambda m: m[0].replace("{,}", ","), text).replace("{,}", ",")
    text = re.sub(r"(?<=\d),\\!(?=\d{3})", ",", text)
    text = re.sub(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))", "", text)
    for name, plain in NAMES.items():
        text = re.sub(name, plain, text)
    text = SIZES.sub("", SPACES.sub(" ", text)).replace("\\%", "%")
    text = DEGREES.sub("", text)
    text = FONTS.sub(r"\\text", text)
    text = re.sub(r"\\text(?![A-Za-z{])\s*", "", text)
    text = re.sub(r"\\text\s*\{\s*i\s*\}", "i", text)  # the imaginary unit in roman type
    for said in BASED:
        text = said.sub(r"_{\2}", text)
    text = re.sub(r"^\s*\\(?:approx|simeq)(?![A-Za-z])", "", text)
    for _ in range(3):  # fractions may be nested
        text = UNBRACED.sub(lambda m: rf"\frac{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}", text)
    text = ROOT.sub(r"\\sqrt{\1}", text)
    text = INFINITY.sub(r"\\infty ", text)
    text = _ascii(text)
    text = re.sub(r"\s+", " ", text).strip()
    text = _unwrapped(text.rstrip(" .,;").removesuffix("\\").strip())
    text = text.replace(" ", "") if SPACED.fullmatch(text) else text
    return SCALED.sub(_scaled, text)


def _scaled(m: re.Match[str]) -> str:
    """5.2 million as 5200000."""
    value = Fraction(m[1].replace(",", "")) * SCALES[m[2].lower()]
    plain = str(value) if value.denominator == 1 else f"{float(value)}"
    return plain + m[3].replace("}", "", m[0].count("{") - m[3].count("{")) if "e" not in plain else m[0]


def _undollared(text: str) -> str:
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            return text[len(left) : -len(right)].strip()
    return text


def _ascii(text: str) -> str:
    """Turn what people type without LaTeX into LaTeX: sqrt(2), pi, **, *, x^10."""
    text = text.replace("**", "^")
    text = re.sub(r"\*", r"\\cdot ", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi ", text)
    text = re.sub(r"\^\s*(\d+)\^\s*(\d+)", r"^{\1^{\2}}", text)
    text = re.sub(r"\^\s*(-?\d{2,}|-\d)", r"^{\1}", text)
    text = re.sub(r"\^\{(\w)\}", r"^\1", text)
    text = re.sub(r"_\{(\w)\}", r"_\1", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt(?=[({])", r"\\sqrt", text)
    while (at := text.find("\\sqrt(")) >= 0 and (end := _round(text, at + 5)) is not None:
        text = f"{text[:at]}\\sqrt{{{text[at + 6 : end]}}}{text[end + 1 :]}"
    return text


def _round(text: str, at: int) -> int | None:
    """The position where the round bracket that opens at `at` closes."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return None


def _unwrapped(text: str) -> str:
    """Remove braces, or \\text{…}, around the whole text."""
    for _ in range(10):
        start = next((p for p in ("\\text{", "{") if text.startswith(p)), None)
        if start is None or pairs(text).get(len(start) - 1) != len(text) - 1:
            break
        text = text[len(start) : -1].strip()
    return text


def tight(text: str) -> str:
    """Remove blanks, except between two numbers."""
    return re.sub(r"(?<=\d) (?=\d)", "\x02", text).replace(" ", "")


def split_top(text: str, *marks: str) -> list[str]:
    """`text` split at every mark outside brackets, the longest mark first."""
    ordered = sorted(marks, key=len, reverse=True)
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        mark = next((m for m in ordered if text.startswith(m, i)), None) if depth == 0 else None
        if mark is not None:
            parts.append(text[start:i])
            i = start = i + len(mark)
            continue
        if text[i] == "\\" and text[i + 1 : i + 2] in ("{", "}", "\\"):
            depth += {"{": 1, "}": -1}.get(text[i + 1], 0)
            i += 2
            continue
        depth += (text[i] in "([{") - (text[i] in ")]}")
        i += 1
    parts.append(text[start:])
    return [p.strip() for p in parts]
