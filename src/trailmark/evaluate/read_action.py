"""Which of the listed actions a reply in words chooses.

A reply that is not understood counts as a miss. A reply that is misread would be a wrong action that nobody notices. So
a doubtful reply is a miss. Replies are read in this order. The first place that says anything decides, even if it
cannot be read:

    marked      the last "Action: …", <action>…</action> or {"action": …}; then with answer, choice, command, label
    a line      one that holds a command of the menu, a label, or both ("B) go to shelf 1"), and nothing else
    a sentence  that says what will be done: "I will go to shelf 1.", "My choice is B."

Command texts come before labels. A command must be whole: "go to shelf 1" is not found in "go to shelf 10", nor "cat a"
in "cat a.py". A label must be the whole text, or follow a word such as "label" or "choose" with only punctuation after
it: "I am not sure" is not label I, and "2 walls" is not label 2. A label with the command of another label, or two
actions in one place, choose nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

_QUOTES = "\"'`*“”‘’«»\\"
_DROPPED = str.maketrans("", "", _QUOTES)
_OPEN, _CLOSE = r"[\s(\[{<#_~]*", r"[)\]}>_~]*"
_KINDS = ("action", "command|choice|answer|label|option|decision|move")  # the first kind that occurs decides
_ENDS = re.compile(r"(?:<\|[\w ]{1,40}\|>|</s>|<eos>|<end_of_turn>)+\s*\Z")  # control tokens that a server left
_THOUGHT = re.compile(r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
# What may follow a command. Other words might be an argument that makes it another command.
_AFTER = re.compile(
    r"\s*$|\s*\n|[.,:!?]+(?=\s|$)|\s+(?:[-–—]+|=>|->|→)\s|\s*[(\[]|"
    r"\s+(?:the|because|since|so|as|then|which|that|while|now|next|first|again|here|in order to|"
    r"(?:to|and|for) (?:find|look|see|check|get|search|explore|reach|read|learn|then|continue))\b"
)
_AFTER_LABEL = re.compile(r"\s*$|\s*\n|[.,:!?]+(?=\s|$)|\s+(?:[-–—]+|=>|->|→)\s|\s*[(\[]|\s+(?:because|since)\b")
_ALONE = re.compile(r"\s*[.,:;!?]*\s*$")
_BEFORE = re.compile(  # words before the choice itself, without apostrophes
    r"(?:i|we|you|let us|lets|let me|ill|well|id|im|will|would|should|must|shall|want to|need to|have to|am going to|"
    r"going to|now|next|so|then|therefore|finally|please|just|to|try|choose|choosing|pick|select|selecting|take|use|do|"
    r"run|execute|perform|type|go with|go|move|head|drive|turn|walk|the|my|best|final|chosen|option|label|number|no\.|"
    r"choice|action|command|answer|is|it is|would be|will be)"
    r"(?![\w/])[\s:,=#]*"
)
_NOT = re.compile(  # a sentence that does not say what will be done
    r"\b(?:not|never|cannot|avoid|instead of|rather than|unless|without|unsure|already|if|whether|could|might|"
    r"(?:after|before|when) (?:i|we|you|it|the)|last|previous|previously|was|were|failed|tried|either)\b|n['’]t\b",
    re.IGNORECASE,
)
_MEANT = re.compile(
    r"\b(?:i['’]ll|i would|i['’]d|i need|i want|let['’]s|let us|let me|should|must|will|going to|choose|choosing|"
    r"choice|pick|"
    r"select|best|option|action|answer|next|try|now|so|therefore|then)\b",
    re.IGNORECASE,
)
_POINT = (  # words right before a label in a sentence
    r"(?:action|option|choice|label|number|answer|choose|choosing|pick|select|take|go with|go)"
    r"(?:\s+(?:is|would be|will be|should be|number|label|option|action|the|to))*[\s:=#]*"
)
_STEER = r"(?:move|head|drive|turn|go|travel)\s+(?:to\s+)?(?:the\s+)?"  # words right before a command of one word
_MOST = 20_000  # most characters of a reply that are read, from its end
_LABEL = re.compile(
    rf"(?<!\w){_POINT}{_OPEN}(\w+){_CLOSE}(?=[.,:;!?]+(?:\s|$)|\s*$|\s+because\b|\s+since\b)", re.IGNORECASE
)
_LISTED = re.compile(r"^\s*(?:[-*•]\s+)?(?:action\s+)?[(\[]?(\w+)[)\].:]+\s+", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


def read_reply(text: str, labels: Sequence[str], actions: Sequence[str] = ()) -> str | None:
    """The label that a reply means, or None if it names no action or more than one."""
    return Menu(tuple(labels), tuple(actions)).read(text)


@dataclass(frozen=True)
class Menu:
    labels: tuple[str, ...]
    actions: tuple[str, ...]

    def read(self, text: str) -> str | None:
        text = _ENDS.sub("", text.replace("：", ":"))
        text = self._without_menu(_THOUGHT.sub("\n", text)[-_MOST:])
        for phrase in _marked(text, self.labels):
            return self._phrase(phrase) or self._prose(phrase)
        lines = {found for line in text.splitlines() if (found := self._whole(line)) is not None}
        if lines:
            return lines.pop() if len(lines) == 1 else None
        return self._prose(text)

    @cached_property
    def _commands(self) -> list[tuple[str, str, str]]:
        """(folded text, text, label), longest first."""
        rows = [(_fold(a), a, x) for x, a in zip(self.labels, self.actions) if _fold(a)]
        return sorted(rows, key=lambda r: -len(r[0]))

    def _without_menu(self, text: str) -> str:
        """A reply may repeat the menu before it chooses, so two or more lines of the menu are ignored."""
        menu = {_fold(f"{x} {a}") for x, a in zip(self.labels, self.actions)}
        plain = lambda line: _fold(_LISTED.sub(r"\1 ", line))
        lines = text.splitlines()
        listed = [i for i, line in enumerate(lines) if plain(line) in menu]
        if len({plain(lines[i]) for i in listed}) < 2:
            return text
        return "\n".join(line for i, line in enumerate(lines) if i not in set(listed))

    # --- a phrase: the text after a mark, or a line

    def _phrase(self, text: str) -> str | None:
        """The action that a phrase begins with, after words such as "I will". The rest is a reason."""
        return self._start(text, _AFTER, _AFTER_LABEL)

    def _whole(self, text: str) -> str | None:
        """The action of a line that holds nothing else but punctuation."""
        return self._start(text, _ALONE, _ALONE)

    def _start(self, text: str, after: re.Pattern[str], after_label: re.Pattern[str]) -> str | None:
        rest = re.sub(r"^[\s>•+$-]+(?=\S)", "", text[:1000].translate(_DROPPED)).strip()
        for _ in range(12):  # "I choose option B": remove word after word until an action begins
            found = self._command(rest, after) or self._label(rest, after_label)
            if found is not None:
                return found
            rest = re.sub(f"^{_OPEN}", "", rest)
            if word := _BEFORE.match(_lower(rest)):
                rest = rest[word.end() :]
        return None

    def _command(self, text: str, after: re.Pattern[str]) -> str | None:
        """The longest command that a phrase begins with."""
        text = re.sub(f"^{_OPEN}", "", text)
        folded = _lower(re.sub(r"[ \t]+", " ", text))
        for size in dict.fromkeys(len(c) for c, _, _ in self._commands):
            same = [(a, x) for c, a, x in self._commands if len(c) == size and folded.startswith(c)]
            rest = re.sub(f"^{_CLOSE}", "", folded[size:])
            if same and after.match(rest):
                return _one(same, re.sub(r"[ \t]+", " ", text)[:size])
        return None

    def _label(self, text: str, after: re.Pattern[str]) -> str | None:
        """The label that a phrase begins with. If a command follows, it must be the label's own."""
        word = re.match(rf"{_OPEN}(\w+){_CLOSE}(.*)", text, re.DOTALL)
        label = word and self._known(word[1])
        if not word or label is None:
            return None
        rest = re.sub(r"^[\s.:,)\]=>–—-]+", "", word[2])
        named = self._command(rest, _AFTER) if rest else None
        if named is not None:
            return label if label in self._twins(named) else None
        other = re.match(r"(\w+)\s*(?:$|[.,;)\n]|or\b|and\b)", rest)
        if after.match(_lower(word[2])) is None or (other and self._known(other[1]) is not None):
            return None
        if label in ("I", "a", "A") and word[2].startswith(","):  # "I, for one, do not know"
            return None
        return label

    def _twins(self, label: str) -> set[str]:
        """The labels with the same command."""
        mine = dict(zip(self.labels, self.actions))[label]
        return {x for x, a in zip(self.labels, self.actions) if a == mine}

    def _known(self, word: str) -> str | None:
        if word in self.labels:
            return word
        close = [x for x in self.labels if x.lower() == word.lower()]
        return close[0] if len(close) == 1 else None

    # --- sentences

    def _prose(self, text: str) -> str | None:
        """The one action that the sentences of a text say will be done."""
        found: set[str] = set()
        for sentence in _SENTENCE.split(text):
            if not _NOT.search(sentence):
                found |= set(self._mentioned(sentence))
        return found.pop() if len(found) == 1 else None

    def _mentioned(self, sentence: str) -> Iterator[str]:
        plain = re.sub(r"[ \t]+", " ", sentence.translate(_DROPPED))
        low, meant = _lower(plain), bool(_MEANT.search(sentence))
        for command, _, _ in self._commands:
            if command not in low:
                continue
            # A command of one word is an everyday word, so it must be the object of a verb.
            lead = r"(?<![\w./-])" if " " in command else rf"(?<!\w)(?:{_POINT}(?:{_STEER})?|{_STEER})"
            for at in re.finditer(rf"{lead}({re.escape(command)})(?![\w/-])(?!\.\w)", low):
                same = [(a, x) for c, a, x in self._commands if c == command]
                if meant or " " not in command:
                    whole = _AFTER.match(re.sub(f"^{_CLOSE}", "", low[at.end(1) :]))
                    if whole and (label := _one(same, plain[at.start(1) : at.end(1)])) is not None:
                        yield label
                # A longer command hides those inside it.
                low = low[: at.start(1)] + "\0" * len(command) + low[at.end(1) :]
        for at in _LABEL.finditer(plain):
            if (label := self._known(at[1])) is not None and "\0" not in low[at.start(1) : at.end(1)]:
                yield label


def _marked(text: str, labels: Sequence[str]) -> Iterator[str]:
    """The text after the last mark of the first kind that occurs."""
    for kind in _KINDS:
        found: list[tuple[int, str]] = []
        for m in re.finditer(rf"""["'](?:{kind})["']\s*:\s*("(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[\w.-]+)""", text, re.I):
            found.append((m.start(), _unquoted(m[1])))
        for m in re.finditer(rf"<({kind})>(.*?)(?:</|$)", text, re.I | re.DOTALL):
            found.append((m.start(), m[2]))
        noun = r"(?:\s+(?:is|taken|chosen|label|choice|number|to take))?\s*(?:\([^)\n]{0,30}\))?"
        for m in re.finditer(
            rf"(?<![\w\"'])(?:{kind})\b{noun}[*_`]*\s*(?::|=>?|->|→|\s[-–—](?=\s))[*_`]*(.*)", text, re.I
        ):
            below = (x for x in text[m.end() :].splitlines() if x.strip(" \t*_`") and not x.lstrip().startswith("```"))
            after = m[1] if m[1].strip(" \t*_`\"'") else next(below, "")
            found.append((m.start(), after))
        boxed = [] if kind == "action" else re.finditer(r"\\boxed\{([^}\n]*)\}", text)
        found += [(m.start(), m[1]) for m in boxed]
        if kind == "action":  # "Action 5: go to shelf 1", as in a menu
            for m in re.finditer(r"(?<![\w])action\s+[\"'`*(]*(\w+)[\"'`*)]*\s*[:.)](?=\s)(.*)", text, re.I):
                if m[1] in labels:
                    found.append((m.start(), f"{m[1]}: {m[2]}"))
        if found := [(at, phrase) for at, phrase in found if phrase.strip()]:
            yield max(found)[1]
            return


def _unquoted(word: str) -> str:
    if word.startswith('"'):
        try:
            return str(json.loads(word))
        except ValueError:
            pass
    return word.strip("\"'")


def _lower(text: str) -> str:
    """Lower case, letter for letter: a few letters become two in lower case, but positions must not change."""
    return "".join(low if len(low := c.lower()) == 1 else c for c in text)


def _fold(text: str) -> str:
    return _lower(" ".join(text.translate(_DROPPED).split()))


def _one(same: Sequence[tuple[str, str]], written: str) -> str | None:
    """The label of the written command. If several differ only in case or quotes, the one written exactly so."""
    if len({a for a, _ in same}) > 1:
        same = [(a, x) for a, x in same if a.translate(_DROPPED) == written]
    return same[0][1] if len({a for a, _ in same}) == 1 else None
