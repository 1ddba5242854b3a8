"""Written chapters: clean-up, and numbers that need no judge.

    clean        cuts a chapter where it has ended, or where it begins to repeat itself
    measures     words, unique words, paragraphs, trigrams, and ROUGE-L against what the writer was shown

Words are counted between white space. For trigrams and ROUGE-L they are in lower case, without punctuation. ROUGE-L is

    P = LCS(text, source) / words of the text,   R = LCS / words of the source,   F = 2 P R / (P + R)

with LCS the length of the longest common subsequence. The source is the input, not the gold chapter: a high P is a
copy of the input. `unseen_trigrams` is the share of the text's different trigrams that the input does not have.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from trailmark.methods.vrcli.words import trigrams, words_of

ENDS = ("<END_OF_CHAPTER>", "<END OF CHAPTER>", "[END_OF_CHAPTER]", "[END OF CHAPTER]", "END_OF_CHAPTER")
LINE_WORDS, LINE_TIMES = 10, 4  # a line of so many words is cut when it comes for this time
WINDOW, FEW, OFTEN = 20, 10, 10


def clean(text: str, windows: bool = False) -> str:
    """A chapter up to its end marker, to its first repeated paragraph, and to the fourth occurrence of a line of ten
    words or more. `windows`: also up to where 20 words come again with at most ten different ones among them, or come
    for the tenth time."""
    for end in ENDS:
        text = text.partition(end)[0]
    text = _to_repeated_line(_to_repeated_paragraph(text))
    return (_to_repeated_window(text) if windows else text).strip()


def _to_repeated_paragraph(text: str) -> str:
    seen: set[str] = set()
    for m in re.finditer(r"[^\n](?:.|\n(?!\s*\n))*", text):
        paragraph = " ".join(m.group().split())
        if paragraph and paragraph in seen:
            return text[: m.start()]
        seen.add(paragraph)
    return text


def _to_repeated_line(text: str) -> str:
    times: Counter[str] = Counter()
    at = 0
    for line in text.splitlines(keepends=True):
        words = line.split()
        if len(words) >= LINE_WORDS:
            times[" ".join(words)] += 1
            if times[" ".join(words)] == LINE_TIMES:
                return text[:at]
        at += len(line)
    return text


def _to_repeated_window(text: str) -> str:
    found = list(re.finditer(r"\S+", text))
    words = [m.group() for m in found]
    times: Counter[tuple[str, ...]] = Counter()
    for k in range(len(words) - WINDOW + 1):
        window = tuple(words[k : k + WINDOW])
        times[window] += 1
        if times[window] >= OFTEN or (times[window] > 1 and len(set(window)) <= FEW):
            return text[: found[k].start()]
    return text


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the longest common subsequence. A bit of `row` is 0 where the length grows at that word of `a`; one
    addition does the work of a row of the table."""
    places: dict[str, int] = defaultdict(int)
    for k, word in enumerate(a):
        places[word] |= 1 << k
    full = (1 << len(a)) - 1
    row = full
    for word in b:
        hits = row & places.get(word, 0)
        row = ((row + hits) | (row - hits)) & full
    return len(a) - row.bit_count()


def rouge_l(text: str, source: str) -> tuple[float, float, float]:
    """Precision, recall and F of a text against a source."""
    a, b = words_of(text), words_of(source)
    if not a or not b:
        return 0.0, 0.0, 0.0
    common = common_subsequence(a, b)
    p, r = common / len(a), common / len(b)
    return p, r, 2 * p * r / (p + r) if common else 0.0


def measures(text: str, sections: Mapping[str, str]) -> dict[str, float]:
    """The numbers of one text. `sections` are the parts of the input by name; all of them together are the input. A
    text of one or two words has no trigrams, so no shares of them: 0 would mean that all are copied."""
    words, mine = text.split(), trigrams(words_of(text))
    whole = "\n\n".join(sections.values())
    prompt_trigrams = {gram for section in sections.values() for gram in trigrams(words_of(section))}
    different = set(mine)
    share = lambda part, all_: 100 * part / all_ if all_ else None
    paragraphs = [p for p in re.split(r"\n\s*\n", text) if p.strip()]
    p, _, f = rouge_l(text, whole)
    found = {
        "words": len(words),
        "unique_words": len(set(words)),
        "unique_words_percent": share(len(set(words)), len(words)),
        "paragraphs": len(paragraphs),
        "unique_trigrams_percent": share(len(different), len(mine)),
        "unseen_trigrams_percent": share(len(different - prompt_trigrams), len(different)),
        "rouge_l_f": f,
        "rouge_l_p": p,
    }
    for name, section in sections.items():
        p, _, f = rouge_l(text, section)
        found |= {f"{name}_rouge_l_f": f, f"{name}_rouge_l_p": p}
    return {k: float(v) for k, v in found.items() if v is not None}
