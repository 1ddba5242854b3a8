"""The nouns of a title: NOUN and PROPN tokens in lower case, with repeats, as a tagger finds them.

The original asks spaCy (`en_core_web_lg`), which we do not bring. The default "words" takes each word of a title that
has a letter and is no function word: titles of shops are mostly nouns. A tagger of your own is a function from a title
to a list of words, "my_module:nouns"; or a JSON file of {title: [noun, …]}, for the titles that it names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from trailmark.errors import DataError, TaskError
from trailmark.plain_files import read_json
from trailmark.tasks import load_object

Tagger = Callable[[str], Sequence[str]]
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_FUNCTION_WORDS = """
    a an the this that these those and or but nor so yet of in on at by for with from to into onto over under up down
    out off about against between through during before after above below as than per via without within is are was
    were be been being am do does did has have had can could will would may might must shall should i you he she it
    we they me him her us them my your his its our their mine yours who whom whose which what when where why how all
    any both each few more most other some such no not only own same too very just if while because until upon w x
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())


def words(title: str) -> list[str]:
    """The default tagger."""
    return [w for w in _WORD.findall(title.lower()) if w not in FUNCTION_WORDS and any(c.isalpha() for c in w)]


def get_tagger(name: str) -> Tagger:
    """The tagger of a name, a file or a function; each title is tagged once."""
    if name == "words":
        return _remembered(words)
    if name.endswith(".json"):
        return _remembered(_from_file(Path(name)))
    if ":" not in name:
        raise TaskError(f"webshop has no tagger '{name}': it is words, a file.json of titles, or my_module:function.")
    return _remembered(_checked(load_object(name, f"tagger '{name}'"), name))


def _from_file(path: Path) -> Tagger:
    try:
        table = read_json(path)
    except (OSError, ValueError) as problem:
        raise DataError(f"cannot be read: {problem}.", path) from None
    if not isinstance(table, dict):
        raise DataError("must be an object of titles and their nouns.", path)
    for title, nouns in table.items():
        if not isinstance(nouns, list) or not all(isinstance(n, str) for n in nouns):
            raise DataError("must be a list of words.", path, key=title)

    def nouns(title: str) -> list[str]:
        if title not in table:
            raise DataError("is not among its titles: add the nouns of this title.", path, key=title)
        return [n.lower() for n in table[title]]

    return nouns


def _checked(tag: Callable[..., object], name: str) -> Tagger:
    def nouns(title: str) -> list[str]:
        try:
            found = tag(title)
        except Exception as problem:  # the user's function may raise anything
            what = f"{type(problem).__name__} for '{title:.60}': {problem}"
            raise TaskError(f"tagger '{name}' raised {what}") from problem
        if isinstance(found, str) or not isinstance(found, Sequence) or not all(isinstance(n, str) for n in found):
            raise TaskError(f"tagger '{name}' must give a list of words, not {found!r:.60}.")
        return [n.lower() for n in found]

    return nouns


def _remembered(tag: Tagger, most: int = 1 << 15) -> Tagger:
    kept: dict[str, Sequence[str]] = {}

    def nouns(title: str) -> Sequence[str]:
        if (found := kept.get(title)) is None:
            if len(kept) >= most:
                kept.clear()
            found = kept[title] = tuple(tag(title))
        return found

    return nouns
