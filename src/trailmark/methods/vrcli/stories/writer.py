"""Who writes summaries, facts and character sheets: rules, or a model behind a server.

    synopsis(header, text)             what happens in one chapter
    summary(text, tokens)              the chapter-tagged synopses of a story so far, made shorter
    facts(name, question, text)        sentences about a character in one chapter
    simpler(sentence)                  a sentence split into simple ones
    rate(statement, text)              1 to 5: how well a chapter supports a statement
    sheet(name, text, tokens)          the facts about a character, made shorter

`Rules` copies from the text. A synopsis by rules consists of pieces of at most `PIECE` words, because a synopsis is
shown before the chapter it comes from: longer pieces would be leaks. Summaries of the whole story have the same
source.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from trailmark.ask.client import Client
from trailmark.methods.vrcli.stories.sentences import salient, sentences
from trailmark.methods.vrcli.words import SPACELESS, up_to_word

# CHIRON's four kinds of questions about a character, eight in all.
QUESTIONS = {
    "physical": ("description", "What does {name} look like, and how does {name} move and speak?"),
    "personality": ("description", "What personality does {name} show?"),
    "dialogue": ("dialogue", "How does {name} talk, and what is said about {name} in dialogue?"),
    "known": ("knowledge", "What facts about {name} are given?"),
    "learned": ("knowledge", "What does {name} learn?"),
    "goals": ("goals", "What goals does {name} gain?"),
    "completed": ("goals", "What goals does {name} reach or give up?"),
    "motivation": ("goals", "How does what drives {name} change?"),
}
PIECE = 7  # most words of a piece of a synopsis by rules: one less than a run of the leak rule
PIECES = 8  # most pieces
ANSWER, SPLIT, SYNOPSIS = 300, 50, 400  # most tokens of an answer about a character, a split sentence, a synopsis

# Words that show what a sentence is about, for the rules.
CUES = {
    "physical": "eyes hair face tall thin voice hand hands looked dressed figure features pale dark handsome beautiful",
    "personality": "always never proud kind honest temper nature clever quiet brave cold warm gentle fond character",
    "dialogue": "said asked replied cried answered exclaimed whispered returned remarked",
    "known": "was had been lived father mother brother sister son daughter friend years name called",
    "learned": "heard learned learnt found discovered knew understood saw noticed told realized realised",
    "goals": "wanted wished hoped meant intended must decided determined resolved try tried promise promised",
    "completed": "finally last succeeded failed gave lost won escaped reached done finished",
    "motivation": "because felt feeling afraid loved hated longed now longer changed began thought",
}


class Writer(Protocol):
    name: str
    at_once: int

    async def synopsis(self, header: str, text: str) -> str: ...

    async def summary(self, text: str, tokens: int) -> str: ...

    async def facts(self, name: str, question: str, text: str) -> list[str]: ...

    async def simpler(self, sentence: str) -> list[str]: ...

    async def rate(self, statement: str, text: str) -> int: ...

    async def sheet(self, name: str, text: str, tokens: int) -> str: ...

    def settle(self) -> None: ...


class Rules:
    """Copies sentences. `count` counts tokens."""

    name = "offline"
    at_once = 1

    def __init__(self, count: Callable[[str], int]):
        self.count = count

    async def synopsis(self, header: str, text: str) -> str:
        found = sentences(text)
        begun = [" ".join(found[k].split()[:PIECE]) for k in salient(text, PIECES)]
        begun = [up_to_word(b, PIECE) if SPACELESS.search(b) else b for b in begun]
        pieces = [b.strip(" ,;:—“”‘’\"'.!?，。；：！？") for b in begun]
        return " … ".join(p for p in pieces if p) + " …"

    async def summary(self, text: str, tokens: int) -> str:
        """Every line loses pieces from its end, the longest line first, until all of them fit. Then the oldest lines
        go."""
        lines = [line.split(" … ") for line in text.split("\n")]
        sizes = [[self.count(f" … {piece}") for piece in line] for line in lines]
        joined = lambda: "\n".join(" … ".join(line) for line in lines)
        total = sum(map(sum, sizes))  # counting each piece once is faster than counting the whole again and again
        while len(lines) > 1 and (total > tokens or self.count(joined()) > tokens):
            k = max(range(len(lines)), key=lambda k: (len(lines[k]), -k))
            if len(lines[k]) > 1:
                lines[k].pop()
                total -= sizes[k].pop()
            else:
                lines.pop(0)
                total -= sum(sizes.pop(0))
        return joined()

    async def facts(self, name: str, question: str, text: str) -> list[str]:
        cues = set(CUES[question].split())
        about = [s for s in sentences(text) if re.search(rf"\b{re.escape(name)}\b", s) and len(s.split()) <= 40]
        hits = [(len(cues & set(re.findall(r"\w+", s.lower()))), s) for s in about]
        best = max(hits, key=lambda h: h[0], default=(0, ""))
        return [best[1]] if best[0] else []

    async def simpler(self, sentence: str) -> list[str]:
        return [sentence]

    async def rate(self, statement: str, text: str) -> int:
        return 5 if statement in " ".join(text.split()) else 1

    async def sheet(self, name: str, text: str, tokens: int) -> str:
        """The newest sentences that fit."""
        lines = text.split("\n")
        while len(lines) > 1 and self.count("\n".join(lines)) > tokens:
            lines.pop(0)
        return "\n".join(lines)

    def settle(self) -> None:
        pass


class Model:
    """Asks a server. Its answers are stored, so nothing is asked twice."""

    def __init__(self, client: Client):
        self.client, self.name, self.at_once, self.settle = client, client.name, client.at_once, client.settle

    async def ask(self, text: str, tokens: int, **how: Any) -> str:
        return (await self.client.ask(text, tokens, **how)).text.strip()

    async def synopsis(self, header: str, text: str) -> str:
        return await self.ask(
            f"This is a chapter of a novel.\n\n{header}\n\n{text}\n\nTell in one paragraph, in your own words and in "
            "the order of the chapter, what happens in it. Do not quote it.",
            SYNOPSIS,
        )

    async def summary(self, text: str, tokens: int) -> str:
        return await self.ask(
            f"These are summaries of the chapters of a story, in their order.\n\n{text}\n\nWrite a shorter summary of "
            "them. Keep the order of events and say which chapters they are from. The story may go on after these "
            "chapters, so do not call the summary complete.",
            tokens,
        )

    async def facts(self, name: str, question: str, text: str) -> list[str]:
        asked = QUESTIONS[question][1].format(name=name)
        said = await self.ask(
            f"{text}\n\nThis was a chapter of a novel. {asked} Answer from this chapter alone, with at most ten short "
            "sentences in one line. If the chapter does not say, answer: None.",
            ANSWER,
            stops=["\n"],
        )
        return [] if said.strip(". ").lower() == "none" else sentences(said)

    async def simpler(self, sentence: str) -> list[str]:
        said = await self.ask(
            "Split a sentence into simple sentences, in one line, and change as few words as you can.\n\n"
            "Sentence: Ann, who was tall, wanted to leave the town.\n"
            "Split: Ann was tall. Ann wanted to leave the town.\n\n"
            f"Sentence: {sentence}\nSplit:",
            SPLIT,
            stops=["\n"],
        )
        return sentences(said)

    async def rate(self, statement: str, text: str) -> int:
        said = await self.ask(
            f"{text}\n\nThis was a chapter of a novel. A statement about it: {statement}\nRate from 1 to 5 how "
            "accurate and useful the statement is. Answer with the number alone.",
            1,
            law=replace(self.client.law, temperature=0.0),
        )
        return int(said[0]) if said[:1] in ("1", "2", "3", "4", "5") else 1

    async def sheet(self, name: str, text: str, tokens: int) -> str:
        return await self.ask(
            f"These are facts about {name}, a character of a novel, in the order in which they are told.\n\n{text}\n\n"
            f"Write a character sheet of {name} from them: appearance, personality, knowledge, goals. Later facts "
            "replace earlier ones that they contradict. Add nothing.",
            tokens,
        )
