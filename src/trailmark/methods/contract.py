"""What imitation and play agree on, checked before anything is trained or written.

A prompt that is imitated on is built by the functions that build it in play (`reflect_play.Talk`). Here is counted what would not
fit: reflections longer than `thought`, states that would lose their middle, lists of actions that leave no room. Nothing of that
is cut in a lesson; the recipe is refused with how many lessons it concerns, the first of them, and the keys to raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from trailmark.data.lessons import Lesson
from trailmark.errors import RecipeError, TaskError
from trailmark.methods.reflect_play import ACTION, ANALYZE, CUT, Talk
from trailmark.rollout.bos import prompt_ids
from trailmark.rollout.encode import encode

STARTS = 16  # of a world that cannot list its menus, so many first ones are looked at


@dataclass(frozen=True)
class Room:
    """What a sequence may take: `limit` tokens here; `asked` is what the recipe says (engine.max_len), `context` what the
    model holds, `made` whether a model of any context could be made (model.shape)."""

    limit: int
    asked: int | None
    context: int
    made: bool

    def raised(self, needed: int) -> str:
        """The keys that make room for `needed` tokens."""
        keys = [f"engine.max_len={needed}"]
        if self.context < needed:
            keys.append(f"model.shape.context={needed}" if self.made else "a model with a longer context")
        return " and ".join(keys)


def check_lessons(
    lessons: Sequence[Lesson], talk: Talk, tokenizers: dict[str, Any], room: Room, imitates: Sequence[str]
) -> None:
    """Refuse lessons of which something would have to be cut. `imitates` names the players that learn from them."""
    thought, problems = talk.thought, []
    if "reflector" in imitates:
        long = [n for x in lessons if (n := len(encode(tokenizers["reflector"], x.reflection)) + 1) > talk.thought]
        if long:
            thought = max(long)
            first = next(
                x for x in lessons if len(encode(tokenizers["reflector"], x.reflection)) + 1 > talk.thought
            )
            problems.append(
                f"{len(long)} of {len(lessons)} lessons have reflections longer than thought={talk.thought} tokens, up to "
                f"{thought} with their end: set thought={thought}. The first: {_brief(first.reflection)}"
            )
    needs = [_needed(x, talk, tokenizers, thought, imitates) for x in lessons]
    long = [n for n in needs if n > room.limit]
    if long:
        first = lessons[next(k for k, n in enumerate(needs) if n > room.limit)]
        problems.append(
            f"{len(long)} of {len(lessons)} lessons need up to {max(long)} tokens for prompt and answer, and {room.limit} fit: "
            f"set {room.raised(max(long))}, or make shorter states. The first: {_brief(first.state)}"
        )
    if problems:
        raise RecipeError("nothing of a lesson is cut. " + " ".join(problems))


def _needed(lesson: Lesson, talk: Talk, tokenizers: dict[str, Any], thought: int, imitates: Sequence[str]) -> int:
    """Tokens of the longest sequence that play may make of a lesson's moment, a reflection of full length included."""
    sizes = []
    before = talk.instruction if talk.reflect else ""
    if "reflector" in imitates:
        sizes.append(len(prompt_ids(tokenizers["reflector"], before + lesson.state + ANALYZE)) + thought)
    if "policy" in imitates:
        rest = ANALYZE + lesson.menu + ACTION if talk.reflect else lesson.menu + ACTION
        said = thought if talk.reflect else 0
        sizes.append(len(prompt_ids(tokenizers["policy"], before + lesson.state + rest)) + said + 1)
    return max(sizes)


def check_menus(source: Any, split: str, talk: Talk, tokenizer: Any, room: Room) -> None:
    """Refuse a world with a list of actions that leaves a prompt no room for the state."""
    worst, bad, seen, first = 0, 0, 0, ""
    for where, menu in menus(source, split):
        rest = CUT + ANALYZE + menu + ACTION if talk.reflect else CUT + menu + ACTION
        needed = len(prompt_ids(tokenizer, rest)) + (talk.thought if talk.reflect else 0) + 3
        seen, worst = seen + 1, max(worst, needed)
        if needed > room.limit:
            bad, first = bad + 1, first or where
    if bad:
        raise RecipeError(
            f"{bad} of {seen} lists of actions of task '{source.name}' do not fit a prompt (the first: {first}): with a "
            f"reflection they take up to {worst} tokens, and {room.limit} fit: set {room.raised(worst)}."
        )


def menus(source: Any, split: str) -> Iterator[tuple[str, str]]:
    """(where, menu): every list of actions of a world that can say them (`menus`), else those of some first moments."""
    if (listed := source.menus()) is not None:
        yield from listed
        return
    for part in dict.fromkeys(("train", split)):
        try:
            tasks: Iterable[Any] = source.tasks(part, STARTS, 0)
        except TaskError:
            continue
        for task in islice(tasks, STARTS):
            yield f"start '{task.id}'", source.make().reset(task).menu


def _brief(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "…") + "."
