"""The prompts of VR-CLI. All of them are made of the same pieces. So scoring with and without a plan, reasoning and
writing differ only in the plan and in the instruction:

    information     which inputs follow, then the inputs: plan of the story, summary, sheets, previous chapter,
                    synopsis, header. In a talk it is the user's last message.
    plan            nothing, or a heading with the plan
    instruction     what to do

    reasoning              information                   + reason
    baseline               information                   + write
    with_plan              information + heading + plan  + write_from_plan
    baseline_generation    information                   + write, at least so many words
    plan_generation        information + heading + plan  + write_from_plan, at least so many words

An empty plan has no heading. `CONTEXT`, `PLAN` and `EMPTY` are the same prompts as templates of the likelihood judge.
`Show.system_role` is one switch for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trailmark.tasks.stories.rows import AnyRow, StoryRow, TalkRow

Messages = list[dict[str, str]]
VERSION = 1  # of the wording below
END = "<END_OF_CHAPTER>"
MARKER = "In summary:"
SYSTEM = "You are an expert in storytelling who helps authors to plan and to write."
CONTEXT = "{information}{write}"
PLAN = "{information}{plan_heading}{answer}{write_from_plan}"
EMPTY = "{information}{write_from_plan}"

STEPS = (
    "Write pairs of <citation>…</citation> and <reasoning>…</reasoning>. A citation names one of the sources above and "
    "what it says. The reasoning after it says what follows. Correct earlier steps if later ones contradict them. Then "
    f'close with one detailed paragraph that begins with "{MARKER}"'
)
REASON = (
    "Reason step by step about what the next chapter should contain. Do not write the chapter itself. "
    f"{STEPS} and tells what happens in the chapter."
)
REASON_TALK = (
    "Do not answer yet. First reason step by step about what a good answer should contain. "
    f"{STEPS} and tells what the answer should contain."
)
WRITE = "Write the next chapter from the information above. Begin with the header."
WRITE_FROM_PLAN = (
    "Write the next chapter from the information above and from the preliminary thoughts about it. "
    "Begin with the header."
)


@dataclass(frozen=True, slots=True)
class Show:
    """What the prompts show. `identical`: scoring with a plan has the instruction of scoring without one, so an empty
    plan changes nothing."""

    prior_plot_summary: bool = True
    high_level_plot_summary: bool = True
    character_sheets: bool = True
    next_chapter_synopsis: bool = True
    last_n_chapters: bool = True
    system_role: bool = True
    identical: bool = False
    instruction: str | None = None  # of reasoning prompts, in place of ours; empty: none


@dataclass(frozen=True, slots=True)
class Pieces:
    """The parts of a row's prompts. `before` are the messages before the last one."""

    before: tuple[dict[str, str], ...]
    information: str
    plan_heading: str
    reason: str
    write: str
    write_from_plan: str

    def message(self, *parts: str) -> Messages:
        return [*(dict(m) for m in self.before), {"role": "user", "content": "".join(parts)}]

    def fields(self) -> dict[str, str]:
        """What the judge's templates need, besides the answer."""
        names = ("information", "plan_heading", "write", "write_from_plan")
        return {name: getattr(self, name) for name in names}


def pieces(row: AnyRow, show: Show = Show()) -> Pieces:
    return _talk_pieces(row, show) if isinstance(row, TalkRow) else _story_pieces(row, show)


def reasoning(p: Pieces) -> Messages:
    """The prompt of the policy."""
    return p.message(p.information, p.reason)


def baseline(p: Pieces) -> Messages:
    return p.message(p.information, p.write)


def with_plan(p: Pieces, plan: str) -> Messages:
    return p.message(p.information, _plan(p, plan), p.write_from_plan)


def baseline_generation(p: Pieces, words: int | None) -> Messages:
    return p.message(p.information, p.write, wish(words))


def plan_generation(p: Pieces, plan: str, words: int | None) -> Messages:
    return p.message(p.information, _plan(p, plan), p.write_from_plan, wish(words))


def _plan(p: Pieces, plan: str) -> str:
    return p.plan_heading + plan if plan else ""


def wish(words: int | None) -> str:
    """How long a new chapter should be, and how it ends."""
    return f" Write at least {words} words, and finish with {END}." if words else f" Finish with {END}."


def _section(heading: str, text: str) -> str:
    return f"\n\n### {heading} ###\n{text}"


def _talk_pieces(row: TalkRow, show: Show) -> Pieces:
    *before, last = (dict(m) for m in row.context)
    kept = tuple(m for m in before if show.system_role or m["role"] != "system")
    heading = _section("Detailed Plan", "")
    return Pieces(kept, last["content"], heading, _instruction(show, REASON_TALK), "", "")


def _instruction(show: Show, ours: str) -> str:
    said = ours if show.instruction is None else show.instruction
    return _section("Instruction", said) if said else ""


def _story_pieces(row: StoryRow, show: Show) -> Pieces:
    system = ({"role": "system", "content": SYSTEM},) if show.system_role else ()
    last = last_chapters(row.last_n_chapters) if show.last_n_chapters and row.story_text.strip() else None
    plan = row.high_level_plot_summary.strip() if show.high_level_plot_summary else ""
    so_far = row.prior_plot_summary.strip() if show.prior_plot_summary else ""
    sheets = {n: t.strip() for n, t in row.character_sheets.items() if t.strip()} if show.character_sheets else {}
    synopsis = row.next_chapter_synopsis.strip() if show.next_chapter_synopsis else ""
    phrases = [
        *([f"the {last[0]}"] if last else []),
        *(["a plan of the whole story"] if plan else []),
        *(["a summary of the story so far"] if so_far else []),
        *(["character sheets"] if sheets else []),
        *(["a synopsis of the next chapter"] if synopsis else []),
    ]
    header = "the header of the next chapter, with which the chapter begins."
    first = f"You are given {_listed(phrases)}. At the end stands {header}" if phrases else f"You are given {header}"
    parts = [
        *([_section("Plan of the Whole Story", plan)] if plan else []),
        *([_section("Summary of the Story So Far", so_far)] if so_far else []),
        *([_section("Character Sheets", "\n".join(f"## {n} ##\n{t}" for n, t in sheets.items()))] if sheets else []),
        *([_section(last[1], row.story_text.strip())] if last else []),
        *([_section("Synopsis of the Next Chapter", synopsis)] if synopsis else []),
        _section("Header of the Next Chapter", row.header),
    ]
    write = _section("Instruction", WRITE)
    from_plan = write if show.identical else _section("Instruction", WRITE_FROM_PLAN)
    heading = _section("Detailed Plan", "")
    return Pieces(system, first + "".join(parts), heading, _instruction(show, REASON), write, from_plan)


def last_chapters(n: Any) -> tuple[str, str] | None:
    """How the previous text is called, in a sentence and as a heading; None if it is not shown."""
    if n is None:
        return None
    if isinstance(n, int) and not isinstance(n, bool) and n >= 1:
        return (
            ("most recent chapter", "Most Recent Chapter") if n == 1 else (f"last {n} chapters", f"Last {n} Chapters")
        )
    return "entire story so far", "Entire Story So Far"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
