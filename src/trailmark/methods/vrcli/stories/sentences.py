"""Sentences, names and salient sentences of a text, by rules: what the offline writer knows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

# A point after these ends no sentence.
SHORT = frozenset({
    "mr", "mrs", "ms", "dr", "st", "prof", "sir", "capt", "col", "gen", "lieut", "rev", "hon", "messrs", "no", "vol",
    "etc", "viz", "vs", "jr", "sr",
})  # fmt: skip
TITLES = frozenset({"Mr", "Mrs", "Miss", "Ms", "Dr", "Sir", "Lady", "Lord", "Captain", "Colonel", "Monsieur", "Madame",
                    "Master", "Inspector", "Aunt", "Uncle", "Professor"})  # fmt: skip
# Words that begin sentences or name no person.
_COMMON = """
    a about after again ah all also although always am an and another any anyhow are as at away back be
    because before besides both but by can chapter come could day dear did do does down each even ever every
    everybody everything except few first for from french german english england london paris god go good
    great had has have he heaven hello her here hers him his how however i if in indeed instead into is it its
    just last later let like look many may me meanwhile monday tuesday wednesday thursday friday saturday
    sunday january february march april june july august september october november december more moreover
    most much must my nay neither never nevertheless next no nobody none nonsense nor not nothing now o of off
    oh on once one only or other our out over part perhaps please poor presently quite rather really right
    round say see she should since so some somebody somehow something sometimes soon still such suddenly sure
    surely than thank that the their them then there therefore these they this those though three through till
    to today together tomorrow too two under until up upon us very was we well were what whatever when where
    whether which while who whom whose why will with without would yes yet you young your street road house
    park hall
    america american boston york europe france germany
"""
COMMON = frozenset(_COMMON.split())
# Marks before a space end a sentence if no small letter follows. Those of other scripts always do.
_END = re.compile(r"[.!?…]+[”’\"')\]]*(?=\s+[“‘\"'(\[]*(\w))|[。！？｡।॥؟۔]+[”’』」）\"')\]]*|\n\s*\n")
_NAME = re.compile(r"\b[A-Z][a-zà-ÿ]+(?:[’'][A-Z][a-z]+)?\b")


def sentences(text: str) -> list[str]:
    """The sentences of a text, without line breaks. A paragraph ends one, and the point of "Mr." does not."""
    return list(_sentences(text))


@lru_cache(16)  # a chapter is asked about many times in a row
def _sentences(text: str) -> tuple[str, ...]:
    found, start = [], 0
    for m in _END.finditer(text):
        if (then := m.group(1)) and not (then.isdigit() or (then.isalpha() and not then.islower())):
            continue
        before = text[start : m.start()].rsplit(None, 1)
        word = before[-1].strip("“‘\"'([").lower() if before else ""
        if m.group() == "." and (word in SHORT or (len(word) == 1 and word.isalpha() and word != "i")):
            continue
        found.append(text[start : m.end()])
        start = m.end()
    found.append(text[start:])
    return tuple(" ".join(s.split()) for s in found if s.strip())


def names(text: str) -> Counter[str]:
    """Words that look like the names of people, with how often they occur. A word counts if it has a capital inside of
    sentences, and is never in lower case."""
    lower = set(re.findall(r"\b[a-zà-ÿ]+\b", text))
    inside: Counter[str] = Counter()
    for s in sentences(text):
        for m in _NAME.finditer(s):
            word = m.group()
            first = not s[: m.start()].strip("“‘\"'([— ")
            if not first and word.lower() not in COMMON and word.lower() not in lower and word not in TITLES:
                inside[word] += 1
    return inside


def main_names(texts: Sequence[str], n: int) -> list[str]:
    """The `n` names that occur most often, in the most chapters; ties are broken by the alphabet. A name that mostly
    stands beside a chosen one (a surname after a first name) is not taken again."""
    if n < 1:
        return []
    total: Counter[str] = Counter()
    chapters: Counter[str] = Counter()
    for text in texts:
        found = names(text)
        total += found
        chapters.update(found.keys())
    whole, chosen = " ".join(texts), []
    for name, _ in sorted(total.items(), key=lambda x: (-x[1] * chapters[x[0]], x[0])):
        beside = sum(
            len(re.findall(rf"\b(?:{a}\s+{b}|{b}\s+{a})\b", whole)) for a in chosen for b in (re.escape(name),)
        )
        if beside * 2 < total[name]:
            chosen.append(name)
        if len(chosen) == n:
            break
    return chosen


def salient(text: str, n: int) -> list[int]:
    """The numbers of the `n` most salient sentences, in order: the first one, and those whose words are frequent in the
    text. No two neighbours, so that no long run of the text is copied."""
    found = sentences(text)
    words = [[w for w in re.findall(r"\w+", s.lower()) if w not in COMMON and len(w) > 3] for s in found]
    often = Counter(w for some in words for w in set(some))
    worth = lambda k: sum(often[w] for w in set(words[k])) / (5 + len(words[k]))
    chosen: set[int] = set()
    for k in [0, *sorted(range(1, len(found)), key=lambda k: (-worth(k), k))] if found else []:
        if len(chosen) == n:
            break
        if not chosen & {k - 1, k, k + 1}:
            chosen.add(k)
    return sorted(chosen)


def common_run(a: str, b: str) -> int:
    """The length of the longest common substring."""
    best, row = 0, [0] * (len(b) + 1)
    for x in a:
        new = [0] * (len(b) + 1)
        for j, y in enumerate(b):
            if x == y:
                new[j + 1] = row[j] + 1
        best, row = max(best, *new), new
    return best
