"""A solver of arith that errs with a known probability, up or down by one: two mistakes may cancel.

Behind all operations a state is worth 1 or 0. Before the last one a sound state is worth 1 - WRONG, and one that is off
by one WRONG / 2.
"""

import re

WRONG = 0.4


def careless(prompt, draw):
    """Goes on with a solution: one operation a line, then the answer."""
    question, *done = prompt.split("\n")
    first, *operations = re.findall(r"[+-]?\d+", question.removesuffix("=?"))
    lines = [line for line in done if line]
    value, new = int(lines[-1].split("=")[1]) if lines else int(first), []
    for operation in operations[len(lines) :]:
        now = value + int(operation) + (draw.random() < WRONG) * draw.choice((-1, 1))
        new.append(f"{value}{operation}={now}")
        value = now
    return "\n".join([*new, f"#### {value}"])


def worse(prompt, draw):
    """Spoils a solution, whatever it is told."""
    return "1+1=2\n#### 99"
