"""A file of baselines: how likely each row's gold text is without an answer, by the row's id.

    {"id": null, "about": {"model": …, "dtype": …, "tokenizer": …, "chat template": …, "rule of scored tokens": …}}
    {"id": "b7", "baseline_nll": 2.31, "baseline_ppl": 10.1, "n_scored_tokens": 212, "logp": …, "gold": …, …}

It is of one model and one set of rows. Another model, dtype, tokenizer, chat template or scored-token rule is refused,
and so is a row that has changed since: its gold text, its system message or its prompt. Their order does not matter.
New rows are computed and added at the end, so a command that was stopped goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.ask.store import Store
from trailmark.errors import DataError, JudgeGone
from trailmark.score.base import digest
from trailmark.score.likelihood import NEAR, Context, Likelihood, Rule, TextScorer
from trailmark.score.model_server import same_model

HINT = "use the one that it was made with, or name another file of baselines."


@dataclass(frozen=True, slots=True)
class BaselineRow:
    """A row's id, the context without an answer, and the gold text."""

    id: str
    context: Context
    gold: str

    @property
    def system(self) -> bool:
        """Whether the context begins with a system message."""
        return not isinstance(self.context, str) and self.context[0].get("role") == "system"

    def marks(self) -> dict[str, Any]:
        """What the row's baseline depends on."""
        said = self.context if isinstance(self.context, str) else [dict(m) for m in self.context]
        return {"gold": digest(self.gold), "system": self.system, "prompt": digest(json.dumps(said))}


class BaselineFile:
    def __init__(self, path: str | Path, scorer: TextScorer, rule: Rule = "turn"):
        self.path, self.scorer, self.rule, self.computed = Path(path), scorer, rule, 0
        self.cache = Store(path, "id")
        now = about(scorer, rule)
        if None not in self.cache:
            if len(self.cache):
                raise DataError("is no file of baselines: it does not begin with what they are of.", path)
            self.cache.add(None, {"about": now})
        self._check_numbers()
        then = self.cache[None].get("about")
        then = then if isinstance(then, Mapping) else {}
        for what in now:
            before, after = then.get(what), now[what]
            if what == "probe" and same_model(before, after):
                continue
            if before != after:
                change = "" if what == "probe" else f" ({before}, now {after})"
                what_differs = f"model served as '{scorer.lm.name}'" if what == "probe" else what
                raise DataError(f"these baselines are of another {what_differs}{change}: {HINT}", path)

    def check(self, rows: Sequence[BaselineRow]) -> None:
        """Refuse rows that are not what they were when their baselines were computed."""
        last: BaselineRow | None = None
        for row in rows:
            if row.id not in self.cache or row == last:  # the plays of a row follow each other
                continue
            last = row
            then, now = self.cache[row.id], row.marks()
            if then.get("gold") != now["gold"]:
                why = "has another gold text than the row of this id had: the data set is another one"
            elif then.get("system") != now["system"]:
                had = ("without", "with") if then.get("system") else ("with", "without")
                why = f"is {had[0]} a system message, and its baseline was computed {had[1]} one"
            elif then.get("prompt") != now["prompt"]:
                why = "has another prompt than when its baseline was computed (other data, or reward.context)"
            else:
                continue
            raise DataError(f"row '{row.id}' {why}: {HINT}", self.path)

    def get(self, rows: Sequence[BaselineRow]) -> list[Likelihood]:
        """The baseline of each row. Those that are missing are computed and stored."""
        self.check(rows)
        new = list({row.id: row for row in rows if row.id not in self.cache}.values())
        server = self.scorer.server
        size = len(new) if server is None else server.concurrency
        for k in range(0, len(new), max(1, size)):
            some = new[k : k + size]
            gone: JudgeGone | None = None
            try:
                read = self.scorer.fresh([(r.context, r.gold) for r in some], self.rule, [r.id for r in some])
            except JudgeGone as problem:
                gone, read = problem, list(problem.made)
            for row, found in zip(some, read):
                if found is None:
                    continue
                numbers = {"baseline_nll": found.nll, "baseline_ppl": found.perplexity, "n_scored_tokens": found.tokens}
                self.cache.add(row.id, {**numbers, "logp": found.logp, **row.marks()})
                self.computed += 1
            if gone is not None:
                raise gone
        stored = [self.cache[row.id] for row in rows]
        return [Likelihood(float(r["logp"]), int(r["n_scored_tokens"])) for r in stored]

    def _check_numbers(self) -> None:
        """Refuse a line whose numbers cannot be: somebody else wrote it, or changed it."""
        if self.cache.twice:
            name, line = self.cache.twice[0]
            why = f"says something else of row '{name}' than an earlier line: remove one of them."
            raise DataError(why, self.path, line)
        for name in self.cache:
            if name is not None and (why := _impossible(name, self.cache[name])):
                problem = f"row '{name}': {why}. Remove the line, and it is computed again."
                raise DataError(problem, self.path, self.cache.lines.get(name))

    def must_match(self, names: Sequence[str], then: Sequence[Likelihood], now: Sequence[Likelihood]) -> None:
        """Refuse baselines of other tokens than those that are scored now: the two could not be compared."""
        for name, before, after in zip(names, then, now):
            if before.tokens != after.tokens:
                raise DataError(
                    f"the baseline of row '{name}' is over {before.tokens} tokens, and its gold text now has "
                    f"{after.tokens}: {HINT}",
                    self.path,
                )


def _impossible(name: Any, row: Mapping[str, Any]) -> str:
    """What is wrong with the numbers of a line; "" if nothing is."""
    if not isinstance(name, str):
        return "its id must be a text"
    number = lambda x: isinstance(x, int | float) and not isinstance(x, bool)
    keys = ("logp", "baseline_nll", "baseline_ppl", "n_scored_tokens")
    if bad := next((k for k in keys if not number(row.get(k)) or math.isnan(row[k])), None):
        return f"'{bad}' must be a number, not {row.get(bad)!r}"
    logp, nll, ppl, n = (row[k] for k in keys)
    if not isinstance(n, int) or n < 1:
        return f"'n_scored_tokens' must be a whole number from 1 on, not {n!r}"
    if not -math.inf < logp <= NEAR * n:
        return f"'logp' is {logp!r}: the log-probability of a text is finite and not above 0"
    if not math.isclose(nll, -logp / n, rel_tol=NEAR, abs_tol=NEAR):
        return f"'baseline_nll' is {nll!r}, and -logp / n_scored_tokens is {-logp / n:g}"
    want = math.exp(nll) if nll < 700 else math.inf
    if not math.isclose(ppl, want, rel_tol=NEAR):
        return f"'baseline_ppl' is {ppl!r}, and the perplexity of 'baseline_nll' is {want:g}"
    return ""


def about(scorer: TextScorer, rule: Rule) -> dict[str, Any]:
    """What all baselines of a file depend on, in words that an error can use."""
    lm, tokenizer = scorer.lm, scorer.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    dtype = str(getattr(lm, "dtype", "the server's")).removeprefix("torch.")
    made = {"model": lm.fingerprint()[:48], "dtype": dtype, "tokenizer": digest(vocabulary)}
    made |= {"chat template": digest(str(tokenizer.chat_template)), "rule of scored tokens": rule}
    probe = getattr(lm, "probe", None)
    return made if probe is None else {**made, "probe": list(probe)}
