"""`trailmark inspect`: episodes in the terminal, one line each, or one episode with every token and its numbers."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from trailmark.errors import DataError, nearest
from trailmark.report.episodes import credit_source, on_tokens, trained, versions
from trailmark.report.pieces import Pieces, named, run_pieces
from trailmark.report.read import LineReader, annotated
from trailmark.runs.annotations import misfits, named_episodes
from trailmark.runs.store import Run, segments
from trailmark.terminal.output import print_whole
from trailmark.types import Annotation, Episode, Failed, Invalid, Scored, Turn

MISFITS = 3  # most warnings per file about annotations that do not fit
FEW = 80  # turns with at most this many written tokens show one line per token
LONG = 2000  # most characters of a prompt that are shown
SEATS = ("cyan", "magenta", "green", "yellow", "blue", "red")
COLD, HOT, SURPRISE, TRAINED = (44, 111, 209), (217, 96, 26), (194, 48, 138), (42, 157, 92)
DEEP = 6.0  # nats at which the colour of surprise is full
STEPS = ((35, 96, 165), (138, 62, 168), (31, 122, 109), (163, 82, 0))


def inspect_file(
    path: Path, wanted: str | None, seat: str | None, by: str, tokens: bool | None, tokenizer: str | None,
    color: bool | None,
) -> None:  # fmt: skip
    console = _console(color)
    files, run = _files(path)
    lines = LineReader()
    listed, held = 0, []  # held: lines that wait until the wanted seat has been seen once
    seats: set[str] = set()
    found: tuple[Episode, Path] | None = None
    ids: list[str] = []
    for file in files:
        episodes = lines.rows(file, Episode)
        _say_misfits(file, episodes)
        for e in episodes:
            ids.append(e.id)
            if wanted is None:
                seats |= {t.seat for t in e.turns}
                held.append(_line(e, seat, _learnt(file)))
                listed += 1
                if seat is None or seat in seats:
                    for line in held:
                        console.print(line, soft_wrap=True)
                    held = []
            elif e.id == wanted and found is None:
                found = e, file
        if found is not None:
            break
        if wanted is None and listed == 1 and len(files) == 1:
            found = episodes[0], file
    for name, n in lines.broken.items():
        print(f"{name}: {n} unreadable or unfinished lines left out", file=sys.stderr)
    if wanted is not None and found is None:
        close = difflib.get_close_matches(wanted, ids, 1)
        hint = f" Did you mean '{close[0]}'?" if close else f" It holds {len(ids)}, such as '{ids[0]}'." if ids else ""
        raise DataError(f"holds no episode '{wanted}'.{hint}", path)
    if not ids:
        raise DataError("holds no episode that can be read.", path)
    if wanted is None and seat is not None and seat not in seats:
        known = nearest(seat, seats) if seats else " No episode has a turn."
        raise DataError(f"no episode has a seat '{seat}'.{known}", path)
    if found is not None:
        e, file = found
        seats = {t.seat for t in e.turns}
        if seat is not None and seat not in seats:
            raise DataError(f"episode '{e.id}' has no seat '{seat}'.{nearest(seat, seats)}", file)
        pieces = Pieces(default=named(tokenizer)) if tokenizer else run_pieces(run) if run else Pieces()
        notes = annotated(file, LineReader()).get(e.id, {})
        _detail(console, e, seat, by, tokens, pieces, credit_source([e], {e.id: notes}), notes, _learnt(file))


def _console(color: bool | None) -> Console:
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", 120))
    if color is None:
        return Console(highlight=False, width=width)
    if color:
        return Console(highlight=False, width=width, force_terminal=True, color_system="truecolor", no_color=False)
    return Console(highlight=False, width=width, color_system=None)


def _files(path: Path) -> tuple[list[Path], Run | None]:
    """The files to read, and the run they belong to, if any."""
    if path.is_file():
        folder = path.parent.parent
        return [path], Run(folder) if (folder / "recipe.yaml").is_file() else None
    if not path.is_dir():
        raise DataError("there is no such file or folder.", path)
    whole = path / "episodes" if (path / "recipe.yaml").is_file() else path
    files = segments(whole) or named_episodes(whole)
    if not files:
        raise DataError("holds no episodes (files that end in .jsonl).", whole)
    return files, Run(whole.parent) if (whole.parent / "recipe.yaml").is_file() else None


def _say_misfits(file: Path, episodes: Sequence[Episode]) -> None:
    """Warn about annotations that are damaged or do not fit the episodes."""
    found = misfits(file, episodes)
    for problem in found[:MISFITS]:
        print(f"warning: {problem}", file=sys.stderr)
    if len(found) > MISFITS:
        print(f"warning: {len(found) - MISFITS} more annotations of {file.name} do not fit", file=sys.stderr)


def _outcome(o: Scored | Invalid | Failed) -> Text:
    if isinstance(o, Scored):
        word, style = (
            ("success", "green") if o.success else ("no success", "red") if o.success is False else ("scored", "")
        )
        parts = ", ".join(f"{name} {value:g}" for name, value in o.parts.items())
        return Text(_plain(f"{word} {o.reward:g}" + (f" ({parts})" if parts else "")), style)
    return Text(_plain(f"invalid: {o.reason}" if isinstance(o, Invalid) else f"failed: {o.error}"), "bold red")


def _few(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


def _learnt(file: Path) -> bool:
    """Whether the learner saw the episodes of this file. Evaluations train nothing."""
    return file.parent.name != "evaluation"


def _line(e: Episode, seat: str | None, learnable: bool) -> Text:
    """One line: id, outcome, turns, tokens by kind."""
    turns = [t for t in e.turns if seat in (None, t.seat)]
    learnt = sum(len(t.tokens) for t in turns if learnable and trained(e, t.seat))
    written = sum(len(t.tokens) for t in turns)
    out = Text.assemble(
        (_plain(e.id), "bold"), "  ", _outcome(e.outcome), f"  {_few(len(turns), 'turn')}  {written} written "
    )
    out.append(f"({learnt} trained on)", "green" if learnt else "dim")
    out.append("  terminated" if e.terminated else "  truncated" if e.truncated else "", "dim")
    return out


def _detail(
    console: Console, e: Episode, only: str | None, by: str, tokens: bool | None, pieces: Pieces, credit: str | None,
    notes: Mapping[str, Sequence[Annotation]], learnable: bool,
) -> None:  # fmt: skip
    order = list(dict.fromkeys(t.seat for t in e.turns))
    console.rule(Text(f"episode {_plain(e.id)}", "bold"))
    console.print(Text.assemble(_plain(f"task {e.task.id}  group {e.group}  "), _outcome(e.outcome)), soft_wrap=True)
    console.print(_legend(by, credit, learnable), soft_wrap=True)
    rows = []  # the shown turns, with the numbers of their tokens
    for i, t in enumerate(e.turns):
        if only in (None, t.seat):
            values = on_tokens(t, i, notes.get("advantage", ())) or [None] * len(t.tokens)
            rows.append((i, t, values))
    most = max((abs(v) for _, _, values in rows for v in values if v is not None), default=0.0)
    for i, t, values in rows:
        colour, on = SEATS[order.index(t.seat) % len(SEATS)], learnable and trained(e, t.seat)
        head = Text.assemble(f"\nturn {i}  ", (t.seat, f"bold {colour}"), f"  {_who(e, t)}")
        for word in (
            f"continues turn {t.continues}" if t.continues is not None else "",
            f"stop: {t.stop}" if t.stop else "",
        ):
            head.append(f"  {word}" if word else "", "dim")
        console.print(head, soft_wrap=True)
        right = pieces.fits(t)
        prompt, forced = (pieces.text(t.seat, ids) if right else None for ids in (t.prompt, t.forced))
        console.print(_block(f"prompt, {_few(len(t.prompt), 'token')}", prompt, "dim"), soft_wrap=True)
        if t.forced:
            console.print(_block(f"forced, {_few(len(t.forced), 'token')}", forced, "italic yellow"), soft_wrap=True)
        parts = pieces.of(t.seat, t.tokens, (t.prompt + t.forced)[-8:]) if right else None
        console.print(_written(t, parts, by, on, values, most), soft_wrap=True)
        if t.action is not None:
            console.print(Text.assemble("  action ", (repr(t.action), "bold"), "  reward ", (f"{t.reward:g}", "bold")))
        if parts is not None and (tokens or (tokens is None and len(t.tokens) <= FEW)):
            others = {n: v for n, these in notes.items() if n != "advantage" and (v := on_tokens(t, i, these))}
            print_whole(_table(t, parts, on, values, most, others), console)


def _who(e: Episode, t: Turn) -> str:
    p = e.players.get(t.seat)
    return f"{p.kind} {p.model} version {versions(t)}".replace("  ", " ") if p else f"version {versions(t)}"


def _legend(by: str, credit: str | None, learnable: bool) -> Text:
    scale = lambda a, b: [(" − ", _bg(COLD, 1)), (f" {a} ", ""), (" + ", _bg(HOT, 1)), (f" {b}", "")]
    if by == "advantage" and credit is None:
        why = "credit was not stored" if learnable else "an evaluation trains nothing, so it has no credit"
        return Text(f"no colours: {why}; the rewards are shown below each turn")
    if by == "advantage":
        return Text.assemble(f"colours: advantage ({credit})  ", *scale("worse", "better"))
    if by in ("logp", "logq"):
        under = "the model" if by == "logp" else "its law"
        return Text.assemble(f"colours: log-prob under {under}  ", (" ", _bg(SURPRISE, 0.1)), " certain ",
                             (" ", _bg(SURPRISE, 1)), f" surprising (-{DEEP:g} or less)")  # fmt: skip
    if by == "mask":
        return Text.assemble("colours: ", ("trained on", _bg(TRAINED, 1)), " ", ("not trained on", "strike dim"))
    return Text.assemble("colours: one for each step; │ between them")


def _bg(rgb: tuple[int, int, int], share: float) -> Style:
    """A background that fades into black for a small share; letters stay white."""
    r, g, b = (round(c * (0.15 + 0.85 * min(1.0, max(0.0, share)))) for c in rgb)
    return Style(bgcolor=f"rgb({r},{g},{b})", color="white")


def _signed(v: float | None, most: float) -> Style:
    return Style() if v is None or not most or v == 0 else _bg(COLD if v < 0 else HOT, abs(v) / most)


def _block(name: str, text: str | None, style: str) -> Text:
    out = Text.assemble((f"  {name}\n", "dim"))
    if text is None:
        return out.append("    (there is no tokenizer: name one with --tokenizer)", "dim")
    cut = (
        text
        if len(text) <= LONG
        else f"{text[: LONG // 2]}\n[… {len(text) - LONG} characters left out …]\n{text[-LONG // 2 :]}"
    )
    return out.append("\n".join("    " + line for line in _plain(cut).split("\n")), style)


def _plain(text: str) -> str:
    """Text that cannot control the terminal: control characters are shown as pictures."""
    return "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else "␡" if 127 <= ord(c) < 160 else c for c in text
    )


def _written(t: Turn, parts: list[str] | None, by: str, on: bool, values: Sequence[float | None], most: float) -> Text:
    out = Text.assemble((f"  written, {_few(len(t.tokens), 'token')}, {'' if on else 'not '}trained on\n    ", "dim"))
    if parts is None:
        return out.append(_plain(t.text).replace("\n", "\n    "), Style())
    starts = {a for a, _ in t.steps}
    for i, piece in enumerate(parts):
        if i and i in starts:
            out.append("│", Style(bold=True, dim=False))
        style: Any = Style()
        if by == "advantage":
            style = _signed(values[i], most)
        elif by in ("logp", "logq"):
            numbers = getattr(t, by)
            style = _bg(SURPRISE, -numbers[i] / DEEP) if numbers else style
        elif by == "mask":
            style = _bg(TRAINED, 1) if on else Style(strike=True, dim=True)
        else:
            k = _step(t, i)
            style = style if k is None else _bg(STEPS[k % len(STEPS)], 1)
        text = _plain(piece).replace("\t", "⇥")
        for n, line in enumerate(text.split("\n")):
            if n:
                out.append("⏎\n    ", Style(dim=True))
            out.append(line, style)
    return out


def _step(t: Turn, token: int) -> int | None:
    return next((k for k, (a, b) in enumerate(t.steps or ((0, len(t.tokens)),)) if a <= token < b), None)


def _table(
    t: Turn, parts: list[str], on: bool, values: Sequence[float | None], most: float, others: Mapping[str, Any]
) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    for name in ("    #", "token", "id", "step", "trained", "log-prob", "law", "advantage", *others):
        table.add_column(name, justify="left" if name == "token" else "right", no_wrap=True)
    number = lambda v: Text("" if v is None else f"{v:.3f}")
    for i, piece in enumerate(parts):
        k = _step(t, i)
        cells = [Text(str(i)), Text(repr(_plain(piece))), Text(str(t.tokens[i])), Text("" if k is None else str(k))]
        cells.append(Text("yes", "green") if on else Text("no", "dim"))
        cells += [number(t.logp[i] if t.logp else None), number(t.logq[i] if t.logq else None)]
        cells.append(Text("" if values[i] is None else f"{values[i]:.3f}", _signed(values[i], most)))
        table.add_row(*cells, *(number(v[i]) for v in others.values()))
    return table
