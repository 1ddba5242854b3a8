"""How much plans lower the perplexity of the gold texts: percent improvement, and what could explain it besides
reasoning.

    score_plans    for each plan: perplexity without and with it, improvement
    beside         for each plan: what the plan of another row, random words and no plan improve in its place
    summary        mean with its interval, percentiles, and beside them: share of plans that help, correlation of length
                   and improvement, share of the plan's trigrams copied from the prompt
    score_reader   the same numbers for another model that reads the gold texts without a plan, such as a fine-tuned one
    control        plans that need no model: the gold text (it says everything), nothing, the synopsis, and the
                   gold text of another row (a plan that is about something else)

Rows are those of `trailmark data stories`. Baseline and plan go through one code path, the one of the reward.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trailmark.errors import DataError, TrailmarkError
from trailmark.methods.vrcli.baselines import BaselineFile, BaselineRow
from trailmark.methods.vrcli.plan_controls import not_about_the_row, own_gain, plans_of_others, words_at_random
from trailmark.methods.vrcli.words import copied_share, correlation, words_of
from trailmark.score.likelihood import Rule, TextScorer, gold_row, improvement
from trailmark.stats.intervals import mean_of
from trailmark.tasks.prompts import read_prompts
from trailmark.tasks.stories.plans import MARKERS, has_marker, plan_of
from trailmark.tasks.stories.prompts import CONTEXT, EMPTY, PLAN, wish

CONTROLS = ("empty", "gold", "synopsis", "other")
NEEDED = ("gold", "information", "plan_heading", "write", "write_from_plan")
AT_ONCE = 8  # rows whose texts are scored together


def read_scored_rows(path: Path) -> dict[str, Mapping[str, Any]]:
    """Rows of `trailmark data stories` by id."""
    found = {t.id: t.data for t in read_prompts(path)}
    for name, row in found.items():
        if missing := next((k for k in NEEDED if not isinstance(row.get(k), str)), None):
            raise DataError(f"row '{name}' has no '{missing}': make the file with `trailmark data stories`.", path)
        if not isinstance(row["prompt"], list):
            raise DataError(f"the prompt of row '{name}' is no list of messages: use `trailmark data stories`.", path)
    return found


def context(row: Mapping[str, Any], plan: str | None) -> list[dict[str, str]]:
    """The messages before the gold text: without a plan (None), or with it."""
    template = CONTEXT if plan is None else PLAN if plan else EMPTY
    pieces = {k: row[k] for k in NEEDED}
    return [*row["prompt"][:-1], {"role": "user", "content": template.format(answer=plan, **pieces)}]


def writing(row: Mapping[str, Any], plan: str | None, words: int | None) -> list[dict[str, str]]:
    """The messages that ask for the text itself: those of scoring and, for a story, how long it should be and how it
    ends. (They are `baseline_generation` and `plan_generation` of `tasks/stories/prompts.py`.)"""
    *before, last = context(row, plan)
    return [*before, {**last, "content": last["content"] + (wish(words) if "header" in row else "")}]


def store_baselines(
    path: Path, scorer: TextScorer, rows: Mapping[str, Mapping[str, Any]], rule: Rule = "turn"
) -> BaselineFile:
    """The baselines of all rows, in a file that a training run may use (`reward.baselines`)."""
    file = BaselineFile(path, scorer, rule)
    asked = [BaselineRow(i, context(row, None), row["gold"]) for i, row in rows.items()]
    file.check(asked)
    for start in range(0, len(asked), AT_ONCE):
        file.get(asked[start : start + AT_ONCE])
    return file


def score_plans(
    scorer: TextScorer,
    rows: Mapping[str, Mapping[str, Any]],
    plans: Sequence[tuple[str, str]],
    rule: Rule = "turn",
    baselines: BaselineFile | None = None,
) -> list[dict[str, Any]]:
    """A record for each (row, plan), in order. An improvement that is no number is None. Baselines are taken from the
    file if there is one."""
    found = []
    for start in range(0, len(plans), AT_ONCE):
        some = plans[start : start + AT_ONCE]
        pairs = [(context(rows[i], p), rows[i]["gold"]) for i, plan in some for p in (None, plan)]
        names = [i for i, _ in some for _ in range(2)]
        if baselines is None:
            scores = scorer.likelihoods(pairs, rule, names)
            bases, nows = scores[::2], scores[1::2]
        else:
            bases = baselines.get([BaselineRow(i, *pair) for (i, _), pair in zip(some, pairs[::2])])
            nows = scorer.likelihoods(pairs[1::2], rule, names[1::2])
            read = [k for k, now in enumerate(nows) if not math.isnan(now.logp)]
            baselines.must_match([names[2 * k] for k in read], [bases[k] for k in read], [nows[k] for k in read])
        for (i, plan), base, now in zip(some, bases, nows):
            if math.isnan(base.logp + now.logp):  # a request that may fail
                continue
            percent = improvement(base, now)
            made = {"id": i, "plan": plan, "baseline_ppl": base.perplexity, "ppl": now.perplexity}
            found.append({**made, "tokens": base.tokens, "improvement": percent if math.isfinite(percent) else None})
    return found


def beside(
    scorer: TextScorer,
    rows: Mapping[str, Mapping[str, Any]],
    scores: Sequence[Mapping[str, Any]],
    rule: Rule = "turn",
    baselines: BaselineFile | None = None,
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """What other texts in the place of scored plans improve (`score/plan_controls.py`): the means and the gain of a
    row's own plan, with a warning if plans are not shown to be about their rows; and the records by name."""
    names, plans = [s["id"] for s in scores], [s["plan"] for s in scores]
    if len(set(names)) < 2:
        return {}, {}
    size = lambda plan: len(words_of(plan))
    texts = {
        "other_plan": plans_of_others(names, plans, 0),
        "random_words": [words_at_random(rows[i]["information"], size(p), 0, i) for i, p in zip(names, plans)],
        "empty": [""] * len(plans),
    }
    fits = lambda i, text: scorer.fits(context(rows[i], text), rows[i]["gold"], rule)  # another row's plan may be long
    given = {k: [(i, text) for i, text in zip(names, some) if fits(i, text)] for k, some in texts.items()}
    made = {k: score_plans(scorer, rows, some, rule, baselines) for k, some in given.items()}
    gains = {k: _good(found) for k, found in {"": scores, **made}.items()}
    means = {f"{k}_improvement".strip("_"): float(np.mean(g)) for k, g in gains.items() if len(g)}
    own, other = _by_row(scores), _by_row(made["other_plan"])
    both = [i for i in own if i in other]
    means |= own_gain([own[i] for i in both], [other[i] for i in both])
    warning = not_about_the_row(means)
    means.pop("improvement", None)  # `summary` has it, with its interval
    return {**means, **({"warning": warning} if warning else {})}, made


def _good(scores: Sequence[Mapping[str, Any]]) -> list[float]:
    return [s["improvement"] for s in scores if s["improvement"] is not None]


def _by_row(scores: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean improvement of each row that has one."""
    found: dict[str, list[float]] = {}
    for s in scores:
        if s["improvement"] is not None:
            found.setdefault(s["id"], []).append(s["improvement"])
    return {i: math.fsum(values) / len(values) for i, values in found.items()}


def score_reader(
    scorer: TextScorer, reader: TextScorer, rows: Mapping[str, Mapping[str, Any]], rule: Rule = "turn"
) -> list[dict[str, Any]]:
    """A record for each row: the perplexity of its gold text under another model, in place of one with a plan. Both
    models must read the same tokens: otherwise their perplexities cannot be compared."""
    found, names = [], list(rows)
    for start in range(0, len(names), AT_ONCE):
        some = names[start : start + AT_ONCE]
        pairs = [(context(rows[i], None), rows[i]["gold"]) for i in some]
        for i, (said, gold) in zip(some, pairs):
            if gold_row(scorer.lm.tokenizer, said, gold, rule) != gold_row(reader.lm.tokenizer, said, gold, rule):
                raise DataError(
                    f"{reader.lm.name} reads row '{i}' in other tokens than {scorer.lm.name}, so their perplexities "
                    "cannot be compared: choose a reader with the same tokenizer and chat template."
                )
        bases, nows = scorer.likelihoods(pairs, rule, some), reader.likelihoods(pairs, rule, some)
        for i, base, now in zip(some, bases, nows):
            if math.isnan(base.logp + now.logp):
                continue
            percent = improvement(base, now)
            made = {"id": i, "plan": "", "baseline_ppl": base.perplexity, "ppl": now.perplexity}
            found.append({**made, "tokens": base.tokens, "improvement": percent if math.isfinite(percent) else None})
    return found


def markers_of(recipe: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The markers of a run's likelihood reward; without any, the whole answer is the plan. None: there is no such
    reward."""
    task = recipe.get("task")
    options = task.get("options") if isinstance(task, Mapping) else None
    reward = options.get("reward") if isinstance(options, Mapping) else None
    if not isinstance(reward, Mapping) or reward.get("kind") != "likelihood":
        return None
    return tuple(map(str, reward.get("markers") or ()))


def markers_beside(file: Path) -> tuple[str, ...] | None:
    """The markers of the run that holds a file of episodes (RUN/evaluation/NAME.jsonl), if it is in one."""
    from trailmark.runs.store import read_recipe

    run = file.parent.parent
    return markers_of(read_recipe(run)) if (run / "recipe.yaml").is_file() else None


def given_markers(words: Sequence[str] | None) -> tuple[str, ...] | None:
    """The markers of an option; None if there are none."""
    if any(not m.strip() for m in words or ()):
        raise TrailmarkError("--marker: a marker is a text that an answer may hold, and this one is empty.")
    return tuple(words) if words else None


def plans_of(
    answers: Iterable[tuple[str, str]], markers: Sequence[str] = MARKERS
) -> tuple[list[tuple[str, str]], float | None]:
    """The plans of answers, and the share of answers with a marker."""
    read = list(answers)
    share = sum(has_marker(a, markers) for _, a in read) / len(read) if read and markers else None
    return [(i, plan_of(a, markers)) for i, a in read], share


def control(rows: Mapping[str, Mapping[str, Any]], kind: str, seed: int = 0) -> list[tuple[str, str]]:
    """A plan for each row. "other" takes the gold text of a row of another book, or of another row if there is one
    book."""
    if kind == "empty":
        return [(i, "") for i in rows]
    if kind == "gold":
        return [(i, row["gold"]) for i, row in rows.items()]
    if kind == "synopsis":
        if missing := next((i for i, row in rows.items() if not row.get("synopsis")), None):
            raise DataError(f"control 'synopsis': row '{missing}' has none.")
        return [(i, row["synopsis"]) for i, row in rows.items()]
    if kind != "other":
        raise DataError(f"control '{kind}' is not known: {', '.join(CONTROLS)}.")
    draw, made = random.Random(f"other {seed}"), []
    for i, row in rows.items():
        away = [j for j in rows if rows[j].get("story_id") != row.get("story_id")] or [j for j in rows if j != i]
        if not away:
            raise DataError("control 'other' needs two rows.")
        made.append((i, rows[draw.choice(away)]["gold"]))
    return made


def summary(found: Sequence[Mapping[str, Any]], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    good = [r for r in found if r["improvement"] is not None]
    about: dict[str, Any] = {"plans": len(found), "invalid": len(found) - len(good)}
    if not good:
        return about
    values = np.array([r["improvement"] for r in good])
    sizes = np.array([len(r["plan"].split()) for r in good], float)
    about["improvement"] = mean_of(values, [r["id"] for r in good]).plain()
    about["percentiles"] = {str(q): float(np.percentile(values, q)) for q in (5, 25, 50, 75, 95)}
    about["helps"] = float((values > 0).mean())
    about["plan_words"] = float(sizes.mean())
    about["length_correlation"] = correlation(sizes.tolist(), values.tolist())
    copied = [c for r in good if (c := copied_share(r["plan"], rows[r["id"]]["information"])) is not None]
    about["copied"] = float(np.mean(copied)) if copied else None
    return about
