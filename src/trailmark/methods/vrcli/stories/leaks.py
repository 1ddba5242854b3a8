"""How much of a gold text stands in a prompt.

The header is in both by design, so it is removed from the gold text first. What is left is compared by runs of eight
words: the share of its runs that stand in the prompt. Names and stock phrases make a share of some per mille. A gold
text of less than eight words has no such run: it leaks if all of it stands in the prompt. One or two words may stand
anywhere by chance: they leak if they are a line of the prompt. In scripts without spaces a character is a word.
"""

from __future__ import annotations

from collections.abc import Sequence

from trailmark.methods.vrcli.words import words_of
from trailmark.tasks.stories.prompts import Messages

N = 8
MOST = 0.02


def runs(words: Sequence[str], n: int = N) -> list[tuple[str, ...]]:
    return [tuple(words[k : k + n]) for k in range(len(words) - n + 1)]


def without_header(gold: str, header: str) -> str:
    """The gold text after its header."""
    text, header = gold.lstrip(), header.strip()
    return text[len(header) :] if header and text.startswith(header) else gold


def leaked(gold: str, header: str, prompt: Messages, n: int = N) -> float:
    """The share of the gold text's runs of `n` words that stand in the prompt."""
    body = words_of(without_header(gold, header))
    if 3 <= len(body) < n:
        return float(any(tuple(body) in runs(words_of(m["content"]), len(body)) for m in prompt))
    if len(body) < n:
        lines = {tuple(words_of(line)) for m in prompt for line in m["content"].split("\n")}
        return float(bool(body) and tuple(body) in lines)
    prompt_runs = {run for m in prompt for run in runs(words_of(m["content"]), n)}
    mine = runs(body, n)
    return sum(run in prompt_runs for run in mine) / len(mine)
