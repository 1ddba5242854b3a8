"""From rows to files to train on.

    DIR/train.jsonl, val.jsonl, test.jsonl    rows of `tasks/prompts.py`: the reasoning prompt, the gold text beside it,
                                              and what the templates of the likelihood judge need
    DIR/sft_train.jsonl, sft_val.jsonl,       conversations of which the gold text is the answer, to imitate
      sft_test.jsonl
    DIR/statistics.json                       tokens of prompts and gold texts, and the largest leak, by split

Filters are VR-CLI's for stories, with words counted between single spaces. Talks are filtered only if it is asked for.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trailmark.data.stages import Counts
from trailmark.errors import DataError
from trailmark.methods.vrcli.stories.leaks import MOST, N, leaked
from trailmark.runs.atomic_files import atomic_write
from trailmark.runs.fingerprints import as_json
from trailmark.tasks.stories.lengths import fit
from trailmark.tasks.stories.prompts import VERSION, Messages, Pieces, Show, baseline, pieces, reasoning
from trailmark.tasks.stories.rows import AnyRow, StoryRow, content_id, read_rows

SPLITS = ("train", "val", "test")
By = Literal["book", "row", "given"]


@dataclass(frozen=True, slots=True)
class Filters:
    """Rows outside of these bounds are left out. None: no bound."""

    first: int | None = 2  # smallest index of a chapter, from 0
    over: int | None = 200  # a gold text has more words than this
    under: int | None = 5000  # and fewer than this
    previous: int | None = 5000  # the previous text has fewer words than this
    prompt: int | None = 10000  # the prompt has fewer words than this

    def refuses(self, row: AnyRow, shown: Messages) -> str:
        """Why a row is left out; empty if it is kept."""
        size = spaced_words(row.gold)
        if self.first is not None and row.chapter_index is not None and row.chapter_index < self.first:
            return f"before chapter {self.first}"
        if self.over is not None and size <= self.over:
            return f"with a gold text of {self.over} words or fewer"
        if self.under is not None and size >= self.under:
            return f"with a gold text of {self.under} words or more"
        if isinstance(row, StoryRow) and self.previous is not None and spaced_words(row.story_text) >= self.previous:
            return f"with a previous text of {self.previous} words or more"
        if self.prompt is not None and sum(spaced_words(m["content"]) for m in shown) >= self.prompt:
            return f"with a prompt of {self.prompt} words or more"
        return ""


NO_FILTERS = Filters(None, None, None, None, None)


@dataclass(frozen=True, slots=True)
class Setup:
    """How the files are made. `shares` are those of val and test. `most` is the limit of a prompt in tokens; longer
    ones are cut, or left out (`drop_long`). `leak` is the largest share of a gold text that may stand in a prompt; rows
    with more are an error, or left out (`drop_leaks`). `gold_words`: only so many first words of a gold text are kept,
    after the filters."""

    show: Show = Show()
    filters: Filters = Filters()
    by: By = "book"
    shares: tuple[float, float] = (0.1, 0.1)
    seed: int = 0
    most: int | None = 12000
    drop_long: bool = False
    leak: float = MOST
    drop_leaks: bool = False
    gold_words: int | None = None
    drop_duplicates: bool = False  # leave out rows that repeat another one


@dataclass(frozen=True, slots=True)
class Made:
    """A row with its prompt and the share of its gold text that leaks into it."""

    row: AnyRow
    parts: Pieces
    prompt: Messages
    leak: float


def spaced_words(text: str) -> int:
    """Words as VR-CLI counts them: pieces between single spaces."""
    return len(text.split(" "))


def first_words(text: str, n: int) -> str:
    """The text up to the end of its n-th word, with its line breaks."""
    words = re.finditer(r"\S+", text)
    ends = [m.end() for m in itertools.islice(words, n)]
    return text[: ends[-1]] if len(ends) == n and next(words, None) else text


def make(
    path: Path, out: Path, plan: Setup, tokenizer: Any = None, ready: Mapping[str, Path] | None = None
) -> Counts:
    """Read rows, and write all files into `out`. Without a tokenizer, four bytes count as a token. `ready` has the
    files of whole splits; `path` is then the rest."""
    ready, counts = ready or {}, Counts()
    rows = read_all(path, ready, plan.drop_duplicates, counts)
    kept = _kept(rows, path, plan, counter(tokenizer), counts)
    if not kept:
        why = "; ".join(f"{n} {reason}" for reason, n in sorted(counts.left_out.items()))
        raise DataError(f"no row is left (left out: {why}).", path)
    _leaks(kept, len(rows), path, plan, counts)
    kept = [m for m in kept if m.leak <= plan.leak]
    parts = _ready(kept, ready, plan, path) if ready else split_rows([m.row for m in kept], plan, path)
    named = {m.row.id: m for m in kept}
    tokens, about = counter(tokenizer), {}
    for split in SPLITS:
        made = [named[row.id] for row in parts[split]]
        write_lines(out / f"{split}.jsonl", [prompt_row(m, split) for m in made])
        write_lines(out / f"sft_{split}.jsonl", [sft_row(m) for m in made])
        counts.kept[f"{split} rows"] = len(made)
        about[split] = {
            "rows": len(made), "books": len({m.row.story_id for m in made if m.row.story_id}),
            "prompt": spread([tokens(m.prompt) for m in made]),
            "gold": spread([tokens([{"role": "assistant", "content": m.row.gold}]) for m in made]),
            "leak": max(m.leak for m in made),
        }  # fmt: skip
    how = {"tokens": "of the tokenizer, with its chat template" if tokenizer else "four bytes each", "prompts": VERSION}
    atomic_write(out / "statistics.json", as_json({**about, **how}), "statistics")
    return counts


def read_all(path: Path, ready: Mapping[str, Path], drop: bool, counts: Counts) -> list[AnyRow]:
    """The rows of all files. Of rows that are in several, those of test and val are kept."""
    rows: dict[str, AnyRow] = {}
    known: dict[str, str] = {}
    for split in reversed(SPLITS):
        file = ready.get(split) if split != "train" else path
        if file is None:
            continue
        repeated: list[AnyRow] = []
        for row in read_rows(file, repeated if drop else None):
            if ready:
                row = replace(row, split=split if split in ready else "", where=f"{file}: {row.where}")
            if drop and row.content() in known:
                repeated.append(row)
                continue
            if row.id in rows:
                raise DataError(
                    f"{row.where} and {rows[row.id].where} have the same id '{row.id}', so one row would be in two "
                    "splits: remove one, or use --drop-duplicates, which keeps equal rows out of train."
                )
            rows[row.id], known[row.content()] = row, split
        if repeated:
            counts.left_out["that repeat another row"] += len(repeated)
    return list(rows.values())


def _ready(kept: Sequence[Made], ready: Mapping[str, Path], plan: Setup, path: Path) -> dict[str, list[AnyRow]]:
    """Splits that have files of their own, as they are. A split without one is drawn from the rest."""
    parts = {split: [m.row for m in kept if m.row.split == split] for split in SPLITS}
    rest = [m.row for m in kept if not m.row.split]
    name = (lambda r: r.story_id) if plan.by == "book" else (lambda r: content_id(r.gold))
    for split, share in zip(("val", "test"), plan.shares):
        if split not in ready:
            groups = sorted({name(r) for r in rest})
            random.Random(f"stories {plan.seed}").shuffle(groups)
            held = set(groups[: max(1, round(share * len(groups)))])
            parts[split] = [r for r in rest if name(r) in held]
            rest = [r for r in rest if name(r) not in held]
    parts["train"] = rest
    if empty := next((s for s in SPLITS if not parts[s]), None):
        raise DataError(f"no row is left for split '{empty}' after the filters.", ready.get(empty, path))
    return parts


def _kept(
    rows: Sequence[AnyRow], path: Path, plan: Setup, tokens: Callable[[Messages], int], counts: Counts
) -> list[Made]:
    kept = []
    for row in rows:
        parts = pieces(row, plan.show)
        prompt = reasoning(parts)
        if why := plan.filters.refuses(row, prompt):
            counts.left_out[why] += 1
            continue
        if plan.gold_words is not None and (short := first_words(row.gold, plan.gold_words)) != row.gold:
            row = row.with_gold(short)
            counts.kept["gold texts cut"] += 1
        if plan.most is not None and tokens(prompt) > plan.most:
            if plan.drop_long:
                counts.left_out[f"with a prompt of more than {plan.most} tokens"] += 1
                continue
            try:
                row = fit(row, plan.show, plan.most, tokens)
            except DataError as problem:
                raise DataError(f"{problem} (--drop-long leaves such rows out)", path) from None
            counts.kept["prompts cut"] += 1
            parts = pieces(row, plan.show)
            prompt = reasoning(parts)
        kept.append(Made(row, parts, prompt, leaked(row.gold, row.header, prompt)))
    return kept


def _leaks(kept: Sequence[Made], total: int, path: Path, plan: Setup, counts: Counts) -> None:
    """Count the rows that leak, or refuse them."""
    bad = [m for m in kept if m.leak > plan.leak]
    if not bad:
        return
    if not plan.drop_leaks or len(bad) == len(kept):
        worst = max(bad, key=lambda m: m.leak)
        raise DataError(
            f"{worst.row.where} (id '{worst.row.id}'): {100 * worst.leak:.1f} % of the gold text's runs of {N} words "
            f"stand in its prompt, and {100 * plan.leak:g} % are allowed; so it is in {len(bad)} of {total} rows. "
            "Rewrite them, leave them out (--drop-leaks) or allow more (--leak).",
            path,
        )
    counts.left_out[f"with more than {100 * plan.leak:g} % of the gold text in the prompt"] += len(bad)


def prompt_row(m: Made, split: str) -> dict[str, Any]:
    """A row of `tasks/prompts.py`. The gold text is beside the prompt, never in it."""
    about = {"story_id": m.row.story_id, "chapter_index": m.row.chapter_index}
    about = {k: v for k, v in about.items() if v not in ("", None)}
    row = {"id": m.row.id, "split": split, "prompt": m.prompt, "gold": m.row.gold, **m.parts.fields(), **about}
    if isinstance(m.row, StoryRow):
        row |= {"header": m.row.header, "synopsis": m.row.next_chapter_synopsis}
    return {**row, **m.row.more}


def sft_row(m: Made) -> dict[str, Any]:
    """The baseline's prompt with the gold text as its answer."""
    return {"id": m.row.id, "messages": [*baseline(m.parts), {"role": "assistant", "content": m.row.gold}]}


def split_rows(rows: Sequence[AnyRow], plan: Setup, path: Path) -> dict[str, list[AnyRow]]:
    """Rows by split. A book, or rows with the same gold text, are never in two splits. The same seed gives the same
    splits, whatever the order of the rows."""
    if plan.by == "given":
        return _given(rows, plan, path)
    if plan.by == "book" and (lone := next((r for r in rows if not r.story_id), None)):
        raise DataError(
            f"{lone.where} (id '{lone.id}') has no story_id, the name of its book: add it, or use --by row.",
            path,
        )
    name = (lambda r: r.story_id) if plan.by == "book" else (lambda r: content_id(r.gold))
    split_of = _drawn([name(r) for r in rows], plan.shares, plan.seed)
    if split_of is None:
        what = "books" if plan.by == "book" else "different rows"
        hint = " Split with --by row, or add books." if plan.by == "book" else " Add rows."
        raise DataError(
            f"has {len(set(map(name, rows)))} {what} after the filters, and each of the three splits needs one.{hint}",
            path,
        )
    return {split: [r for r in rows if split_of[name(r)] == split] for split in SPLITS}


def _drawn(names: Sequence[str], shares: tuple[float, float], seed: int) -> dict[str, str] | None:
    """A split for each name; None if there are too few. Each split gets at least one."""
    groups = sorted(set(names))
    if len(groups) < 3:
        return None
    random.Random(f"stories {seed}").shuffle(groups)
    val, test = (max(1, round(share * len(groups))) for share in shares)
    while val + test >= len(groups):
        val, test = (val - 1, test) if val >= test else (val, test - 1)
    return {g: "val" if k < val else "test" if k < val + test else "train" for k, g in enumerate(groups)}


def _given(rows: Sequence[AnyRow], plan: Setup, path: Path) -> dict[str, list[AnyRow]]:
    """The splits that the rows name. If no row is in val, some books of train are."""
    split_of = {r.id: _split_name(r, path) for r in rows}
    parts = {split: [r for r in rows if split_of[r.id] == split] for split in SPLITS}
    if not parts["val"]:
        books = sorted({r.story_id for r in parts["train"]})
        if len(books) > 1 and all(books):
            random.Random(f"stories {plan.seed}").shuffle(books)
            held = set(books[: max(1, min(len(books) - 1, round(plan.shares[0] * len(books))))])
            parts["val"] = [r for r in parts["train"] if r.story_id in held]
            parts["train"] = [r for r in parts["train"] if r.story_id not in held]
    if empty := next((s for s in SPLITS if not parts[s]), None):
        raise DataError(f"no row is in split '{empty}': name one, or let --by book or --by row draw the splits.", path)
    where: dict[str, str] = {}
    for split in SPLITS:
        for r in parts[split]:
            if r.story_id and where.setdefault(r.story_id, split) != split:
                raise DataError(f"book '{r.story_id}' is in {where[r.story_id]} and in {split} ({r.where}).", path)
    return parts


def _split_name(row: AnyRow, path: Path) -> str:
    name = row.split
    found = "val" if name.startswith("val") else "test" if name.endswith("test") else name
    if found not in SPLITS:
        raise DataError(
            f"{row.where} (id '{row.id}') has split '{name}', and --by given needs train, val or test in each row.",
            path,
        )
    return found


def counter(tokenizer: Any) -> Callable[[Messages], int]:
    """Counts the tokens of messages, with the chat template of the tokenizer if it has one."""
    if tokenizer is None:
        return lambda messages: sum(len(m["content"].encode()) for m in messages) // 4
    from trailmark.chat import render
    from trailmark.texts import encode

    def count(messages: Messages) -> int:
        if not tokenizer.chat_template or messages[-1]["role"] == "assistant":
            return sum(len(encode(tokenizer, m["content"])) for m in messages)
        return len(render(tokenizer, messages, generation_prompt=True).tokens)

    return count


def spread(values: Sequence[int]) -> dict[str, float]:
    return {"max": max(values), "min": min(values), "mean": round(statistics.fmean(values), 2),
            "std": round(statistics.pstdev(values), 2)}  # fmt: skip


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    atomic_write(path, text.encode(), "stories")


def report(about: dict[str, Any]) -> list[str]:
    """statistics.json as lines to print."""
    lines = [f"tokens: {about['tokens']}"]
    for split in SPLITS:
        a = about[split]
        lengths = [f"{what} {a[what]['min']}–{a[what]['max']}, mean {a[what]['mean']:g} ± {a[what]['std']:g}"
                for what in ("prompt", "gold")]  # fmt: skip
        books = f" of {a['books']} books" if a["books"] else ""
        lines.append(f"{split}: {a['rows']} rows{books}; {'; '.join(lengths)}; largest leak {100 * a['leak']:.2f} %")
    return lines
