"""Commands as text, and text as commands.

A reply is split into words by the quoting rules of a shell. Nothing else is like a shell: nothing is expanded, joined
or run, and `;`, `|`, `$(…)`, `*` and `~` are letters of a name. A command is one of six words with its arguments.
"""

from __future__ import annotations

import shlex
from typing import NamedTuple

VERBS = ("cd", "ls", "cat", "head", "tail", "id")
LONGEST = 4096  # letters of a reply that are read as a command
HEAD_LINES = 10


class Offer(NamedTuple):
    """A command in the menu: its text, its verb and its path."""

    text: str
    verb: str
    path: str


class Wrong(Exception):
    """A command that cannot be carried out. Its text is the answer that the actor gets."""


def quote(name: str) -> str:
    """A name as one word of a command: plain, in double quotes, or (if it holds quotes itself) in single quotes."""
    try:
        if shlex.split(name) == [name]:
            return name
    except ValueError:
        pass
    return f'"{name}"' if '"' not in name and "\\" not in name else shlex.quote(name)


def resolve(cwd: str, path: str) -> str:
    """The path from the root that `path` means in folder `cwd`. It is not checked whether it exists."""
    if "\0" in path or "\n" in path:
        raise Wrong("Error: a path is one line of plain letters.")
    if path.startswith(("/", "~", "\\")) or path[1:2] == ":":
        raise Wrong("Error: paths are relative to the current folder; others are not allowed.")
    parts = cwd.split("/") if cwd else []
    for part in path.split("/"):
        if part == "..":
            if not parts:
                raise Wrong("Error: that leads out of the repository, which is not allowed.")
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def split(reply: str) -> list[str] | None:
    """The words of a reply that begins with one of VERBS; None if the reply is not a command."""
    reply = reply.strip()
    if reply.split(None, 1)[:1] and reply.split(None, 1)[0] not in VERBS:
        return None
    if not reply or len(reply) > LONGEST:
        return None
    if not reply.isprintable():
        raise Wrong("Error: a command is one line of plain letters.")
    try:
        return shlex.split(reply)
    except ValueError:
        raise Wrong("Error: a quotation mark is not closed.") from None


def head_arguments(words: list[str]) -> tuple[int, list[str]]:
    """The number of lines and the other words of `-n 5 FILE`, `-5 FILE` or `FILE`."""
    if words[:1] == ["-n"] and len(words) > 1:
        number, rest = words[1], words[2:]
    elif words and words[0].startswith("-") and words[0][1:].isdecimal():
        number, rest = words[0][1:], words[1:]
    else:
        return HEAD_LINES, words
    if not (number.isascii() and number.isdecimal() and len(number) < 9):
        raise Wrong(f"Error: {number[:40]!r} is not a number of lines.")
    return int(number), rest


def one_path(verb: str, words: list[str], default: str | None = None) -> str:
    if not words and default is not None:
        return default
    if len(words) != 1:
        raise Wrong(f"Error: {verb} takes one path, not {len(words)}.")
    return words[0]


def way_to(path: str) -> list[str]:
    """The shortest commands from the root that look at a file and identify it: cd …, cat, id."""
    *folders, name = path.split("/")
    return [*(f"cd {quote(f)}" for f in folders), f"cat {quote(name)}", f"id {quote(name)}"]
