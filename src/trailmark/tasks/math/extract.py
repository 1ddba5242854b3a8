r"""Find the answer in a text. Markers are searched in this order, and the first kind that occurs is used:

    final answer is $…$. I hope   the text between the dollar signs
    \boxed{…}, \fbox{…}, \boxed 2 the last one; several joined by "and", "or" or commas are one answer of several items
    #### …                        the last such line (before the boxes if the task asks for this marker)
    the answer is …               the text after the last one, to the end of the sentence
    ```output … ```               the last block
    a text that is one formula    the whole text
    a number                      the last one

A "-" is a sign only where a number can be negative: "pages 2-5" ends in 5 and not in -5.
"""

from __future__ import annotations

import re
from typing import Literal

Marker = Literal["boxed", "hash"]
LONGEST = 100_000  # only so many characters at the end of a text are searched
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
HASH = re.compile(r"^[ \t]*####[ \t]*(\S[^\n]*)$", re.MULTILINE)
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
WORD = re.compile(r"[^\s$\\{}.,]+")
NUMBER = re.compile(
    r"(?:(?<![\w.,)\]}])[+-])?(?<![\w.^])(?:(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)(?:\.\d++)?|\.\d++)"
    r"(?:/\d++(?!\.\d))?(?:\\?%)?(?!\w)"
    r"(?:[ ~](?:hundred|thousand|million|billion|trillion|dozen)(?!\w))?"
)
# A subscript or superscript of a box; it belongs to the answer.
SCRIPT = re.compile(r"\s*(?:_(?:\{[^{}]*\}|\w+)|\^(?:\{\s*-?\d+\s*\}|\d))")
JOINED = re.compile(r"[\s$,;]*(?:\\text\{)?\s*(?:and|or)?\s*\}?[\s$,;]*(?:\\?[A-Za-z]+(?:_\{?\w\}?)?\s*=)?[\s$]*")


def final_answer(text: str, marker: Marker = "boxed") -> str | None:
    """The answer that a text gives, or None. It is not judged here: see `strict.py`."""
    text = text[-LONGEST:]
    if found := _between(text, "final answer is $", "$. I hope"):
        return found
    order = (_hash, boxed) if marker == "hash" else (boxed, _hash)
    for read in (*order, _answer_is, _fenced, _formula, _last_number):
        found = read(text)
        if found is not None:
            return found.strip() or None
    return None


def boxed(text: str) -> str | None:
    """The content of the last box, or the items of the last boxes if one phrase joins them. An unclosed box is
    ignored."""
    boxes = boxed_spans(text)
    if not boxes:
        return None
    items: list[str] = []
    after = boxes[-1][0]
    for start, end, content in reversed(boxes):
        between = text[end:after]
        if items and ("\n" in between or len(between) > 60 or not JOINED.fullmatch(between)):
            break
        script = SCRIPT.match(text, end)
        items.append(content + (script[0].strip() if script else ""))
        after = start
    return ", ".join(dict.fromkeys(reversed(items)))


def boxed_spans(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of every closed box. A box inside a box belongs to the outer one."""
    out: list[tuple[int, int, str]] = []
    braces = pairs(text)
    for m in BOX.finditer(text):
        if out and m.start() < out[-1][1]:
            continue
        at = m.end()
        while at < len(text) and text[at] == " ":
            at += 1
        if text[at : at + 1] == "{":
            if at in braces:
                out.append((m.start(), braces[at] + 1, text[at + 1 : braces[at]]))
        elif word := WORD.match(text, at):  # \boxed 2
            out.append((m.start(), word.end(), word[0]))
    return out


def pairs(text: str) -> dict[int, int]:
    """Opening brace -> closing brace, as positions in the text. Escaped braces are ignored."""
    found: dict[int, int] = {}
    open_: list[int] = []
    for m in BRACE.finditer(text):
        if m[0] == "{":
            open_.append(m.start())
        elif m[0] == "}" and open_:
            found[open_.pop()] = m.start()
    return found


def _between(text: str, left: str, right: str) -> str | None:
    _, found, tail = text.rpartition(left)
    body, ends, _ = tail.partition(right)
    return body.strip() or None if found and ends else None


def _hash(text: str) -> str | None:
    found = HASH.findall(text)
    return found[-1].strip() if found else None


def _answer_is(text: str) -> str | None:
    _, found, tail = text.rpartition("he answer is")
    if not found:
        return None
    line = tail.lstrip(" :\n").split("\n", 1)[0]
    if m := re.match(r"\$([^$]+)\$|\\\((.+?)\\\)", line):
        return m[1] or m[2]
    return re.split(r"\.(?:\s|$)", line, maxsplit=1)[0].rstrip(" ./")


def _fenced(text: str) -> str | None:
    found = re.findall(r"```output\n(.*?)(?:```|\Z)", text, re.DOTALL)
    lines = found[-1].strip().split("\n") if found else [""]
    return lines[-1].strip() or None


def _formula(text: str) -> str | None:
    """A text without words is itself the answer."""
    text = text.strip()
    if not text or len(text) > 200 or "\n" in text:
        return None
    bare = re.sub(r"\\(?:text|mathrm|mbox)\{[^{}]*\}|\\[A-Za-z]+|sqrt|pi|inf(?:ty|inity)?", " ", text)
    return None if re.search(r"[A-Za-z]{2,}", bare) else text.rstrip(". ")


def _last_number(text: str) -> str | None:
    last = None
    for m in NUMBER.finditer(text):
        last = m[0]
    return last
