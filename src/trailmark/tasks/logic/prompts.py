"""How a question is shown to a model. The words must be the same in training, sampling and evaluation.

    instruction, blank line, [example, blank line], Context: Question: Options:, ending

The ending is one of three:

    thought   "Thought 1:"     (the default) a solution begins with a blank and the first thought
    space     "Thought 1: "    as published configurations have it: many tokenizers would join the blank with the word
                               behind it, so training and sampling then see different tokens
    none      nothing          a solution begins with "Thought 1:" itself; conversations are always so

`join` puts a stored solution, or the beginning of one, behind a prompt: prompt(state) = prompt + state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from trailmark.answers import LETTERS
from trailmark.errors import TaskError, nearest

Style = Literal["react", "plain"]
Ending = Literal["thought", "space", "none"]
ENDINGS = {"thought": "Thought 1:", "space": "Thought 1: ", "none": ""}

REACT = (
    "Below are a context, a question about it and the options. Work on the question in numbered steps, one step on a "
    "line: Thought, Action and Observation, each followed by its number and a colon. Nobody else answers, so write the "
    "observations yourself. Your last action names the letter of exactly one option, in the form "
    "Finish[The answer is X.]"
)
PLAIN = (
    "Below are a context, a question about it and the options. Think step by step. Then write one last line of the "
    "form Finish[The answer is X.] with the letter of exactly one option."
)
EXAMPLE = """Context:
A florist sells tulips only in spring. On every day on which tulips are sold, the shop window is decorated. Last \
Monday the window was bare.

Question:
Which one of the following must be true?

Options:
A. Last Monday was not a day in spring.
B. No tulips were sold last Monday.
C. The window is decorated only in spring.
D. Tulips are sold on every day of spring.

Thought 1: I collect what the context says and compare each option with it.
Action 1: Write down the rules.
Observation 1: Tulips are sold only in spring; if tulips are sold, the window is decorated; on Monday it was bare.
Thought 2: The second rule, read backwards, says something about Monday.
Action 2: Turn the second rule around.
Observation 2: If the window is bare, no tulips are sold on that day. So on Monday no tulips were sold, which is B.
Thought 3: I make sure that the other options do not follow.
Action 3: Check A, C and D.
Observation 3: A day of spring may pass without tulips, so A and D do not follow; the window may be decorated in other \
seasons too, so C does not follow.
Thought 4: Only B must be true.
Action 4: Finish[The answer is B.]"""


def ending_of(ending: str, style: str) -> str:
    if style not in get_args(Style):
        raise TaskError(f"logic has no prompt style '{style}'.{nearest(str(style), get_args(Style))}")
    if ending not in ENDINGS:
        raise TaskError(f"logic has no ending '{ending}'.{nearest(str(ending), ENDINGS)}")
    return ENDINGS[ending] if style == "react" else ""


def options_text(options: Sequence[str]) -> str:
    """The options as lines "A. text"."""
    return "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, options))


def prompt(
    context: str,
    question: str,
    options: Sequence[str],
    style: Style = "react",
    ending: Ending = "thought",
    shots: int = 0,
    bare: bool = False,
    instruction: str | None = None,
) -> str:
    """The whole prompt. `instruction` stands in the place of ours; `bare` (or an empty one) leaves it out."""
    end = ending_of(ending, style)
    said = (REACT if style == "react" else PLAIN) if instruction is None else instruction
    parts = [] if bare or not said else [said]
    parts += [EXAMPLE] if shots else []
    parts += [f"Context:\n{context}"] if context else []
    parts += [f"Question:\n{question}", f"Options:\n{options_text(options)}", end]
    return "\n\n".join(parts)


def join(prompt: str, solution: str) -> str:
    """The prompt with a solution, or the beginning of one, behind it; the blank after a colon is put in if missing."""
    gap = " " if prompt.endswith(":") and solution and not solution[0].isspace() else ""
    return prompt + gap + solution


def after(ending: Ending, style: Style, solution: str) -> str:
    """A solution that begins with "Thought 1: ", as it is written behind this ending."""
    end = ending_of(ending, style)
    if not end or not solution.startswith(ENDINGS["thought"]):
        return solution
    return solution[len(end) :]
