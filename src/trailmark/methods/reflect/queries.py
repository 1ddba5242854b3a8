"""Questions from the file's own authors: sentences of docstrings, paragraphs of documentation.

A query is a sentence that describes something without naming it, so a player has to read files to find it. In Python
files it is the first sentence of a docstring, if it does not hold the symbol's own name. In text files it is a
paragraph of prose: not a heading, list, table, directive or example. Markup is removed.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

FileKind = Literal["code", "shell", "text", "data"]
SHORTEST, LONGEST, FEWEST_WORDS = 40, 260, 6


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A file of a repository: its whole `text`, and the `window` of it that a model is shown."""

    repo: str
    path: str
    kind: FileKind
    text: str
    window: str


def queries(excerpt: Excerpt) -> list[tuple[str, str]]:
    """(query, answer) pairs of a file, in its order; none for files without prose."""
    found = _docstrings(excerpt) if excerpt.path.endswith(".py") else ()
    if excerpt.path.endswith((".md", ".rst", ".txt")):
        found = ((p, f"{excerpt.path} says so.") for p in _paragraphs(excerpt.text))
    return [(query, answer) for query, answer in found if _usable(query)]


def plain_text(text: str) -> str:
    """Text without markup and line ends, in the form of a query: used to find a query in a file."""
    text = re.sub(r":[\w:.+-]+:`~?\.?([^`<]+?)(?:\s*<[^`>]*>)?`", r"\1", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`{1,2}([^`<]+?)(?:\s*<[^`>]*>)?`{1,2}_{0,2}", r"\1", text)
    text = re.sub(r"\*{1,2}([^*\n]+)\*{1,2}", r"\1", text)
    return " ".join(text.split())


def _usable(query: str) -> bool:
    left_over = re.search(r"`|(?:^|\s):\w", query)  # rest of markup
    sized = SHORTEST <= len(query) <= LONGEST and len(query.split()) >= FEWEST_WORDS
    return sized and query.isascii() and not left_over


def _docstrings(excerpt: Excerpt) -> Iterator[tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(excerpt.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            sentence = _first_sentence(ast.get_docstring(node) or "")
            if sentence and not re.search(rf"(?i)(?<!\w){re.escape(node.name)}(?!\w)", sentence):
                yield sentence, f"It is {node.name} in {excerpt.path}."


def _first_sentence(doc: str) -> str:
    """The first sentence; empty if a docstring does not begin with prose."""
    first = doc.strip().split("\n\n")[0]
    if re.match(r"\W", first) or re.search(r"^\s*(:\w|>>>|\.\. |@\w|-{3})|::\s*$", first, re.MULTILINE):
        return ""
    text = plain_text(first)
    end = re.search(r"(?<![ .]\w)(?<!e\.g)(?<!i\.e)(?<!etc)[.!?](?=\s+[A-Z]|$)", text)
    return text[: end.end()] if end else text


def _paragraphs(text: str) -> Iterator[str]:
    fenced = False
    for block in re.split(r"\n[ \t]*\n", text.replace("\r\n", "\n")):
        fences = len(re.findall(r"^\s*(?:```|~~~)", block, re.MULTILINE))
        inside, fenced = fenced or fences > 0, fenced ^ (fences % 2 == 1)
        lines = block.strip("\n").split("\n")
        if inside or not all(_is_prose(line) for line in lines):
            continue
        prose = plain_text(block)
        if prose.endswith((".", "!", "?")) and re.match(r"[A-Z]", prose) and not re.search(r"[|{}<>]|https?:", prose):
            yield prose


def _is_prose(line: str) -> bool:
    if line[:1].isspace() or not line or re.fullmatch(r"(\W)\1{2,}\s*", line):
        return False
    return not re.match(r"[-+*#|>=~:.!$%@]|\d+[.)] |\[\w", line) or line.startswith(
        ("**", ":class:", ":meth:", ":func:")
    )
