"""The records of LPR's reference implementation, stage by stage, as episodes, states and annotations of ours, and back.

    solutions     {text, label, response, pred, id}; `response` and `pred` are lists where there are several
    states        the same with inter_states: [{state, step_id, resp_id, type}]
    completions   the same with ids QUESTION_STATE, where STATE counts the inter_states of the question
    scores        {input, index, response, ending_logits: [[a number for each class] for each step], step_types, reward}
    pairs         {chosen, reject, id}; also chosen_full, reject_full, is_full (does it end there?), chosen_prefix,
                  reject_prefix (what is given and not trained), chosen_reward, reject_reward

Files are JSON lists or JSON lines. Records are tied together by the question's id and, within a question, by the text
of a response. What cannot be tied is left out and counted. What a record says of an answer (`pred`, `label`) is not
believed: the question's own world reads the text (`judged.py`), and where the two differ, it is counted.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trailmark import formats
from trailmark.episodes import won
from trailmark.errors import DataError
from trailmark.formats.rows import Row, each
from trailmark.formats.scored import SIDES, pair_sides
from trailmark.formats.turns import Reader, Starts, episode, plain
from trailmark.methods.lpr.judged import Reads, believes, judged, other_label
from trailmark.methods.lpr.react import is_right, predicted, read_label
from trailmark.runs.store import read_segment
from trailmark.steps import step_types, token_border
from trailmark.types import Annotation, Episode, Invalid, Parent, Scored, Turn

THEIRS = {"chosen": "chosen", "rejected": "reject"}  # our sides, their keys
SHARD = re.compile(r"\.(\d+)-of-(\d+)(?=\.|$)")

# --- read ----------------------------------------------------------------------------------------------------------


def read_solutions(path: str | Path, tokenizer: Any, seat: str) -> list[Episode]:
    """Solutions as episodes: records, or episodes of ours as they are."""
    first = each(path, lambda row: row.value)[0][:1]
    if first and isinstance(first[0], dict) and "turns" in first[0]:
        return [_in_tokens_of(tokenizer, e, path) for e in read_segment(path)]
    made = formats.read("react", path, tokenizer, seat=seat).episodes
    bare = lambda e: {k: v for k, v in e.info.items() if k != "steps"}  # steps are cut anew, as the recipe says
    return [replace(e, turns=tuple(replace(t, steps=()) for t in e.turns), info=bare(e)) for e in made]


def _in_tokens_of(tokenizer: Any, e: Episode, path: str | Path) -> Episode:
    """The episode, if its tokens say its text."""
    for t in e.turns:
        ids = t.forced + t.tokens
        if t.tokens and (max(ids) >= len(tokenizer) or t.text.strip() not in tokenizer.decode(ids)):
            raise DataError(
                f"episode '{e.id}' was written in tokens of another tokenizer than the policy's: give it as records "
                "(trailmark lpr export solutions).",
                path,
            )
    return e


def all_solutions(files: Sequence[str], tokenizer: Any, seat: str) -> list[Episode]:
    """The solutions of one file, or of all shards. Each question must be in one of them."""
    all_shards(files)
    episodes = [e for file in files for e in read_solutions(file, tokenizer, seat)]
    if twice := [name for name, n in Counter(e.id for e in episodes).items() if n > 1]:
        raise DataError(
            f"has solution '{twice[0]}', as another file has: each question must be in one file.", files[-1]
        )
    return episodes


def all_states(
    files: Sequence[str], episodes: Sequence[Episode], tokenizer: Any
) -> tuple[list[list[dict[str, Any]]], Counter[str]]:
    """The states of each file, and how many were left out and why."""
    all_shards(files)
    found = [read_states(file, episodes, tokenizer) for file in files]
    return [shard for shard, _ in found], sum((out for _, out in found), Counter[str]())


def read_states(
    path: str | Path, episodes: Sequence[Episode], tokenizer: Any
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """The states of a file of solutions that are here, by question and number of the response."""
    known = {e.id: e for e in episodes}
    out: Counter[str] = Counter()
    found: list[dict[str, Any]] = []

    def read(row: Row) -> None:
        v = row.fields(row.value, "", ["id", "inter_states"])
        listed = [] if v["inter_states"] is None else v["inter_states"]
        if not isinstance(listed, list):
            raise row.bad(f"must be a list, not {repr(listed)[:60]}.", "inter_states")
        for n, s in enumerate(listed):
            key = f"inter_states[{n}]"
            s = row.fields(s, key, ["state", "resp_id"], ["step_id", "type"])
            e = known.get(f"{v['id']}/{s['resp_id']}")
            if e is None:
                out["states of a solution that is not here"] += 1
                continue
            at = state_at(e, row.text(s["state"], f"{key}.state"), tokenizer)
            if at is None:
                out["states that end inside a step"] += 1
                continue
            step, end = at
            kind = s.get("type") or step_types(e, 0, tokenizer)[step]
            found.append({"episode": e.id, "turn": 0, "token": end, "step": step, "type": kind, "index": n})

    each(path, read)
    return found, out


def state_at(e: Episode, text: str, tokenizer: Any) -> tuple[int, int] | None:
    """The step that a state ends with, and the token at which it ends; blanks at its end do not matter."""
    for step, (_, end) in enumerate(e.turns[0].steps[:-1]):
        if tokenizer.decode(e.turns[0].tokens[:end]).rstrip() == text.rstrip():
            return step, end
    return None


def all_shards(files: Sequence[str]) -> None:
    """Refuse shards (NAME.0-of-4.json) of which one is missing."""
    found = [(file, m) for file in files if (m := SHARD.search(Path(file).name))]
    named = lambda m: (m.string[: m.start()], m[2])
    for file, m in found:
        have = {int(other[1]) for _, other in found if named(other) == named(m)}
        if missing := sorted(set(range(int(m[2]))) - have):
            raise DataError(
                f"is one of {m[2]} shards, and shard {missing[0]} is not among the named files: name them all.",
                file,
            )


def read_completions(
    path: str | Path,
    states: Sequence[Mapping[str, Any]],
    episodes: Sequence[Episode],
    tokenizer: Any,
    seat: str,
    reads: Reads = believes,
) -> tuple[list[Episode], Counter[str]]:
    """Completions of states that are here, each an episode that goes on from its state. `reads` says what they come to;
    if it cannot, `pred` does."""
    known = {e.id: e for e in episodes}
    places = {(question_of(known[s["episode"]]), s["index"]): s for s in states}
    reader, out, made = Reader(tokenizer, seat, Starts()), Counter[str](), list[Episode]()

    def read(row: Row) -> None:
        v = row.fields(row.value, "", ["response", "id", "pred"], ["text", "label"])
        question, _, number = str(v["id"]).rpartition("_")
        state = places.get((question, int(number))) if number.isdecimal() else None
        responses = v["response"] if isinstance(v["response"], list) else [v["response"]]
        preds = v["pred"] if isinstance(v["pred"], list) else [v["pred"]]
        if len(preds) != len(responses):
            raise row.bad(f"has {len(preds)} entries for {len(responses)} responses.", "pred")
        if state is None:
            out["completions of a state that is not here"] += len(responses)
            return
        origin = known[state["episode"]]
        name = f"{origin.id}>{state['turn']}.{state['token']}"
        label = read_label(row, v.get("label", origin.task.meta.get("label")), preds)
        if other_label(label, origin.task):
            out["completions with another label than their question (its own counts)"] += len(responses)
            label = origin.task.meta.get("label", origin.task.data.get("answer"))
        for j, (response, pred) in enumerate(zip(responses, preds)):
            turn = _goes_on(reader, origin, state, row.text(response, "response"))
            says, differs = predicted(turn.text, label, str(pred))
            right = is_right(label, says)
            outcome = Invalid("no label in the file") if right is None else Scored(float(right), right)
            parent = Parent(origin.id, state["turn"], state["token"])
            info = {"pred": str(pred), **differs}
            e = Episode(f"{name}/{j}", origin.task, name, (turn,), {"self": outcome}, True, parent=parent, info=info)
            made.append(judged(e, reads, out))

    each(path, read)
    return made, out


def _goes_on(r: Reader, origin: Episode, state: Mapping[str, Any], response: str) -> Turn:
    was = origin.turns[state["turn"]]
    forced = was.tokens[: state["token"]]
    begun = r.tokenizer.decode(forced)
    tokens: tuple[int, ...] = ()
    if response.strip():
        prompt = r.tokenizer.decode(was.prompt) + begun
        tokens = plain(r, prompt, response).tokens
    return Turn(r.seat, was.prompt, tokens, forced=forced, stop="stopped", text=begun + response)


def read_scores(path: str | Path, episodes: Sequence[Episode]) -> tuple[list[Annotation], Counter[str]]:
    """What a reward model said of every step of solutions that are here (`class_0`, `class_1`, … of each step)."""
    known: dict[tuple[str, str], list[Episode]] = {}
    for e in episodes:
        known.setdefault((question_of(e), e.turns[0].text.strip()), []).append(e)
    out, notes = Counter[str](), dict[str, list[Annotation]]()

    def read(row: Row) -> None:
        v = row.fields(row.value, "", ["index", "response", "ending_logits"], ["input", "step_types", "reward"])
        table = row.listed(v["ending_logits"], "ending_logits")
        width = {len(line) if isinstance(line, list) else 0 for line in table}
        if len(width) > 1 or 0 in width:
            raise row.bad("must be one list of numbers for each step, all of one length.", "ending_logits")
        mine = known.get((str(v["index"]), row.text(v["response"], "response").strip()), [])
        out["scores of a solution that is not here"] += not mine
        for e in mine:
            if len(table) != len(e.turns[0].steps):
                out["scores of other steps than the solution has"] += 1
                continue
            numbers = [[row.number(x, f"ending_logits[{i}]") for x in line] for i, line in enumerate(table)]
            if any(x is None for line in numbers for x in line):
                raise row.bad("must be finite numbers.", "ending_logits")
            out["solutions that are scored twice"] += e.id in notes
            notes[e.id] = [
                Annotation(e.id, f"class_{c}", "step", tuple(float(line[c] or 0.0) for line in numbers), 0, "file")
                for c in range(width.copy().pop())
            ]

    each(path, read)
    return [a for mine in notes.values() for a in mine], out


def read_pairs(
    path: str | Path, prompts: Mapping[str, str], tokenizer: Any, seat: str
) -> tuple[list[Episode], Counter[str]]:
    """Pairs as sides of `preference`. `shown` has the prompt of each question."""
    reader, out = Reader(tokenizer, seat, Starts()), Counter[str]()
    parts = ("_full", "_prefix", "_reward", "_full_rewards")
    more = ["is_full", "val_diff", *(f"{key}{part}" for key in THEIRS.values() for part in parts)]

    def read(row: Row) -> tuple[Episode, Episode] | None:
        v = row.fields(row.value, "", ["chosen", "reject", "id"], more)
        if (prompt := prompts.get(str(v["id"]))) is None:
            out["pairs of a question that is not here"] += 1
            return None
        sides = []
        for side, key in THEIRS.items():
            answer, prefix = row.text(v[key], key), row.text(v.get(f"{key}_prefix", ""), f"{key}_prefix")
            whole = answer if answer.startswith(prefix) else prefix + answer
            if not whole[len(prefix) :].strip():
                raise row.bad("is empty, or is its prefix alone: there is nothing to train.", key)
            full = bool(v.get(f"{key}_full", v.get("is_full", True)))
            turn = plain(reader, prompt, whole, end=full)
            n = token_border(tokenizer, turn.tokens, whole, len(prefix)) if prefix else 0
            turn = replace(turn, forced=turn.tokens[:n], tokens=turn.tokens[n:])
            name = reader.starts.name(None, str(v["id"]))
            sides.append(episode(name, {"prompt": prompt}, [turn], float(side == "chosen"), {}, {"id": v["id"]}))
        if len({(e.turns[0].forced, e.turns[0].tokens) for e in sides}) == 1:
            out["pairs of two equal sides"] += 1
            return None
        return sides[0], sides[1]

    made = [p for p in each(path, read)[0] if p is not None]
    if not made:
        raise DataError(f"holds no pair that can be used: {dict(out)}.", path)
    return pair_sides(made), out


def question_of(e: Episode) -> str:
    return str(e.task.meta.get("id", e.task.id))


# --- many files ----------------------------------------------------------------------------------------------------


def merge_records(files: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Records of several files as one: the responses of a question stand in one record, in the order of the files."""
    found: dict[str, dict[str, Any]] = {}

    def read(row: Row) -> None:
        v = dict(row.fields(row.value, "", ["id", "response"], ["text", "label", "pred"]))
        for key in ("response", "pred"):
            if key in v and not isinstance(v[key], list):
                v[key] = [v[key]]
        mine = found.setdefault(str(v["id"]), v)
        if mine is v:
            return
        if other := next((k for k in ("text", "label") if k in v and k in mine and v[k] != mine[k]), None):
            raise row.bad(f"of question '{v['id']}' is not what an earlier file says.", other)
        if ("pred" in v) != ("pred" in mine):
            raise row.bad(f"of question '{v['id']}' stands in one file and is missing in another.", "pred")
        for key in ("response", "pred"):
            if key in v:
                mine[key] = [*mine[key], *v[key]]

    for file in files:
        each(file, read)
    return list(found.values())


def split_records(
    path: str | Path, share: float, by: str, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of a file in two parts, drawn by the seed, in their order: floor(share N) of the N questions (or rows), and
    the rest. All rows of one question stay together."""
    rows = each(path, lambda row: row.fields(row.value, "", ["id"] if by == "question" else []))[0]
    names = [str(v["id"]) if by == "question" else str(n) for n, v in enumerate(rows)]
    every = list(dict.fromkeys(names))
    taken = set(random.Random(f"split {seed}").sample(every, math.floor(share * len(every))))
    parts = [[v for name, v in zip(names, rows) if (name in taken) is side] for side in (True, False)]
    return parts[0], parts[1]


# --- write ---------------------------------------------------------------------------------------------------------


def solution_records(episodes: Sequence[Episode], tokenizer: Any) -> list[dict[str, Any]]:
    """One record for each question. Where nobody said what an answer came to, `pred` is the label of right ones."""
    records: dict[str, dict[str, Any]] = {}
    for e in episodes:
        label = e.task.meta.get("label", e.task.data.get("answer"))
        v = records.setdefault(
            e.group,
            {"text": prompt_text(e, tokenizer), "label": label, "response": [], "pred": [], "id": question_of(e)},
        )
        v["response"].append(e.turns[-1].text)
        v["pred"].append(e.info.get("pred", str(label) if won(e) else ""))
    return list(records.values())


def state_records(
    episodes: Sequence[Episode], states: Sequence[Mapping[str, Any]], tokenizer: Any
) -> list[dict[str, Any]]:
    rows = solution_records(episodes, tokenizer)
    order: dict[str, list[str]] = {}
    for e in episodes:
        order.setdefault(e.group, []).append(e.id)
    by_id = {e.id: e for e in episodes}
    mine: dict[str, list[dict[str, Any]]] = {}
    for s in states:
        e = by_id[s["episode"]]
        text = tokenizer.decode(e.turns[s["turn"]].tokens[: s["token"]])
        number = order[e.group].index(e.id)
        mine.setdefault(e.group, []).append({"state": text, "step_id": s["step"], "resp_id": number, "type": s["type"]})
    return [{**row, "inter_states": mine.get(group, [])} for group, row in zip(order, rows)]


def completion_records(
    completions: Sequence[Episode], states: Sequence[Mapping[str, Any]], tokenizer: Any
) -> list[dict[str, Any]]:
    places = {(s["episode"], s["turn"], s["token"]): s["index"] for s in states}
    records: dict[str, dict[str, Any]] = {}
    for e in completions:
        assert e.parent is not None
        number = places[e.parent.episode, e.parent.turn, e.parent.token]
        label = e.task.meta.get("label", e.task.data.get("answer"))
        turn = e.turns[-1] if e.turns else None
        begun = tokenizer.decode(turn.forced) if turn else ""
        v = records.setdefault(
            e.group,
            {
                "text": prompt_text(e, tokenizer) + begun,
                "label": label,
                "response": [],
                "pred": [],
                "id": f"{question_of(e)}_{number}",
            },
        )
        v["response"].append(turn.text.removeprefix(begun) if turn else "")
        v["pred"].append(e.info.get("pred", str(label) if won(e) else ""))
    return list(records.values())


def score_records(
    episodes: Sequence[Episode], outputs: Mapping[tuple[str, int], Any], rewards: Mapping[str, float], tokenizer: Any
) -> list[dict[str, Any]]:
    out = []
    for e in episodes:
        if (found := outputs.get((e.id, 0))) is not None:
            table = found[:, None] if found.ndim == 1 else found
            out.append(
                {
                    "input": prompt_text(e, tokenizer),
                    "index": question_of(e),
                    "response": e.turns[0].text,
                    "ending_logits": table.tolist(),
                    "step_types": step_types(e, 0, tokenizer),
                    "reward": rewards.get(e.id),
                }
            )
    return out


def pair_records(
    pairs: Sequence[Mapping[str, Any]], episodes: Sequence[Episode], tokenizer: Any
) -> list[dict[str, Any]]:
    """Lines of a pair file with the texts that they name."""
    known, out = {e.id: e for e in episodes}, []
    for p in pairs:
        row: dict[str, Any] = {"id": question_of(known[p["chosen"]])}
        for side in SIDES:
            e, key = known[p[side]], THEIRS[side]
            t, start, end = e.turns[-1], p.get(f"{side}_prefix", 0), p.get(f"{side}_end")
            whole = end is None and t.ended
            said = t.forced + t.tokens[:end]
            row[key] = tokenizer.decode(said, skip_special_tokens=True) if end is not None or t.forced else t.text
            row[f"{key}_full"] = whole
            if given := tokenizer.decode(t.forced + t.tokens[:start]):
                row[f"{key}_prefix"] = given
            if f"{side}_reward" in p:
                row[f"{key}_reward"] = p[f"{side}_reward"]
        out.append(row)
    return out


def prompt_text(e: Episode, tokenizer: Any) -> str:
    if "format" in e.info and "prompt" in e.task.data:
        return e.task.data["prompt"]
    return tokenizer.decode(e.turns[-1].prompt, skip_special_tokens=True) if e.turns else ""
