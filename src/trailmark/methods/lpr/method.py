"""LPR: process rewards from nothing but outcomes, a model of them, and what it teaches.

A solution tau of question x has steps. A state is its beginning up to the end of a step. r_f(tau) is 1 if the final
answer is right, else 0.

    written          solutions of the seat `teacher`, if there is one
    lessons, sft     the right ones of these, or of the task's own, in steps, and a policy that imitates them
    solutions-1      the policy writes n solutions of each question
    cleaned-1        those that can be used, cut into steps
    states-1         states of them, drawn at random, in shards
    completions-1    k completions of each state; the state's own tokens are computed once
    values-1         r_e(state) = sum_i r_f(completion i): how many of them are right
    examples-1       what the reward model learns: states with r_e, whole solutions with k r_f, as classes 0, ..., k
    prm-1            the process reward model f, a run of method `reward_model`: L = -log f(r_e | x, state)
    scores-1         what it says of every step of every solution
    rewritten-1      right solutions, written again by the seat `worsener` (where the recipe has `worsen`)
    worsened-1       those that can be used, and that say something else
    pairs-1          r_p(tau) = prod_t f(class >= C | x, steps 1..t), and the pairs of each question
                         D_o = {(a, b): r_f(a) > r_f(b)}, of the `best_of` and `max_wrong` best
                         D_p = {(a, b): r_f(a) = r_f(b) = 1, r_p(a) - r_p(b) > margin}
    policy-1         DPO on D_o + D_p, a run of method `preference`:
                         L = -log sigmoid(beta (log pi(a)/ref(a) - log pi(b)/ref(b)))
    rl-1             reinforcement with what steps earn, a run of method `step_rl` (where the recipe has `rl`)
    solutions-2      the next round, from the policy of the last one

The paper's equations, and where they are:

    r_f(tau), the outcome                              `episodes.py:won` (of letters: `answers.py:leaf_value`)
    r_e(state) = sum_i r_f(completion i)               `methods/lpr/states.py:state_values`
    L_PRM = -log f(r_e | x, state)                     `objectives/classify.py:Classify.terms`
    r_p(tau) = prod_t f(class >= C | x, steps 1..t)    `methods/lpr/pairs.py:solution_rewards`
    D_o and D_p                                        `methods/lpr/pairs.py:question_pairs`
    L_DPO on D_o + D_p                                 `objectives/pairwise.py:Pairwise.terms`
    votes of n answers; the best of n by r_p           `evaluate/choices.py:vote`, `evaluate/choices.py:best_of`
    step PPO: rewards at the ends of steps             `methods/step_rl.py:on_tokens`
      less the KL to the reference; GAE                `methods/step_rl.py:ppo_credit`
      its losses   `objectives/clipped.py:Clipped.terms`, `objectives/value.py:Value.terms`
    step GRPO      `methods/step_rl.py:against_group`, `methods/step_rl.py:grpo_credit`
    ReMax          `methods/step_rl.py:remax_credit`

Each is a stage. The lists below say what each reads: keys of the recipe, stages before it, files from elsewhere. It is
done once and made again when one of these changes. Stages that ask a model do nothing else, so another way to clean its
answers (`clean`) does not ask again. Stages that nothing needs are left out: pairs by outcome need no reward model.
`given` puts a file from elsewhere in the place of a stage (`given.py`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trailmark import formats
from trailmark.data.gold import worked
from trailmark.episodes import by_group, won
from trailmark.errors import DataError, RecipeError
from trailmark.formats.rows import read_lines, write_lines
from trailmark.memory import need_rows
from trailmark.methods.base import Method, name_in_run
from trailmark.methods.collect import collect_starts
from trailmark.methods.lpr import given
from trailmark.methods.lpr import pairs as lpr_pairs
from trailmark.methods.lpr import states as lpr_states
from trailmark.methods.lpr.config import LprRecipe
from trailmark.methods.lpr.round import SEAT, Made, Round, because, prompt_of, seats_of, shard_name
from trailmark.methods.lpr.trainings import preference, prm, reinforcement, sft
from trailmark.methods.pipeline import Pipeline
from trailmark.methods.reward_model import HEAD
from trailmark.methods.value_model import load_frozen
from trailmark.models.load import load_model
from trailmark.rollout.branch import branch_starts
from trailmark.rollout.play import Desk, Start, start_all
from trailmark.runs.annotations import write_notes
from trailmark.runs.stages import Stage
from trailmark.runs.store import Run, read_segment
from trailmark.score.classes import check_classes, output_notes, step_outputs
from trailmark.score.tokens import source_of
from trailmark.score.value_models import locate_value
from trailmark.seats.config import AnyKind
from trailmark.seats.open_seats import check_servers
from trailmark.seats.pinned_models import pin_models
from trailmark.tasks.base import draw_tasks
from trailmark.types import Episode, Failed


class LprMethod(Pipeline):
    Config = LprRecipe
    staged, asked_seats = tuple(LprRecipe.model_fields), ("policy", "teacher", "worsener")

    @classmethod
    def stages(cls, config: LprRecipe, run: Run) -> list[Stage]:
        """All stages in their order."""
        rounds = [Round(config, run, k) for k in range(config.steps + 1)]
        return [*first_policy(rounds[0]), *(stage for r in rounds[1:] for stage in one_round(r))]

    @classmethod
    def seats_of(cls, config: LprRecipe) -> dict[str, AnyKind]:
        return seats_of(config)

    @classmethod
    def learns_from(cls, config: LprRecipe) -> str:
        return config.sample.split

    @classmethod
    def ready(cls, config: LprRecipe) -> None:
        if cls.only is None:
            learns_between_rounds(config)
        check_servers(seats_of(config))

    @classmethod
    def check(cls, config: LprRecipe) -> list[str]:
        learns_between_rounds(config)
        return [f"stages: {', '.join(s.name for s in cls.stages(config, Run(config.out)))}"]

    @classmethod
    def trainings(cls, config: LprRecipe) -> list[tuple[str, type[Method], Any]]:
        raise RecipeError(
            "a plan needs the data, which the stages of lpr make themselves: plan its trainings as methods "
            "reward_model, preference and step_rl, with their data"
        )


def learns_between_rounds(config: LprRecipe) -> None:
    """A server or a model of its own is not trained, so a second round would ask the same model again."""
    seat: Any = config.seats.get(SEAT)
    if config.steps == 1 or getattr(seat, "model", None) is None:
        return
    what, advice = "a model of its own", "set seats.policy.trained=true in place of its model."
    if seat.kind == "http":
        last = f"{config.out}/{Round(config, Run(config.out), 1).ends_with}"
        what, advice = "a server", (
            f"make the stages one by one, and after round 1 serve {last} at its address (trailmark stages RECIPE "
            "--only solutions-2)."
        )
    raise RecipeError(
        f"steps is {config.steps}, and the seat policy is {what}, which learns nothing: round 2 would ask the same "
        f"model again. Set steps=1; or {advice}"
    )


# --- the stages, and what each reads ---------------------------------------------------------------------------------


def first_policy(r: Round) -> Iterator[Stage]:
    """Before the first round: a policy that imitates right solutions of a teacher, or of the task itself."""
    c, drawn, cleans = r.config, ["task", "sample.split", "seed"], ["clean", "task", r.words]
    if c.teacher.gold:
        yield r.stage("lessons", worked_lessons, ["teacher.gold", "teacher.prompts", *drawn, *cleans])
    elif r.taught:
        asked = ["teacher", "-teacher.replay", *r.answer_keys("teacher", c.teacher.sampling)]
        yield r.stage("written", written, [*asked, *drawn])
        yield r.stage("lessons", written_lessons, ["teacher.options", *cleans], ["written"])
    if r.taught:
        yield sft(r)


def one_round(r: Round) -> Iterator[Stage]:
    c, g = r.config, r.files
    if g.pairs and not g.solutions and not r.pays_steps():
        yield given_pairs(r)
        yield preference(r)
        if c.rl is not None:
            yield reinforcement(r)
        return

    if g.solutions or g.states:
        keys = ["task", "sample.split", "sample.prompts", "seed", r.words]
        yield r.stage("solutions", given.solutions, keys, files=g.solutions or g.states)
    else:
        models = [m for m in c.sample.models if Path(m).exists()]
        keys = ["task", "sample", "seed", *r.answer_keys(SEAT, c.sample.sampling)]
        yield r.stage("solutions", solutions, keys, r.answer_stages(SEAT), models)
    yield r.stage("cleaned", cleaned, ["clean", "task", r.words], ["solutions"])

    learns = r.needs_prm() and (not g.scores or r.pays_steps())  # given scores need no model
    completes = learns and r.learns_values()
    by_steps, by_values = (not g.pairs and x is not None for x in (c.pairs.steps, c.pairs.values))
    if completes or by_steps or by_values:
        if g.states:
            yield r.stage("states", given.states, [], ["cleaned"], g.states)
        else:
            yield r.stage("states", states, ["states", "seed"], ["cleaned"])
        if g.completions:
            yield r.stage("completions", given.completions, ["task"], ["states", "cleaned"], g.completions)
        else:
            keys = ["task", "seed", "complete.n", "complete.sampling", *r.shard_keys]
            keys += r.answer_keys(SEAT, c.complete.sampling)
            yield r.stage("completions", completions, keys, ["states", "cleaned", *r.answer_stages(SEAT)])
    if completes or by_values:
        keys = ["complete.n", "complete.duplicates", "complete.min_chars", *r.shard_keys]
        yield r.stage("values", values, keys, ["completions", "states", "cleaned"])
    if completes:
        again, before = c.labels.replay_data if c.labels.replay else [], earlier_examples(r)
        keys = ["labels", "complete.n", *(["seed"] if again or before or c.labels.balance else [])]
        keys += [] if again or before else ["-labels.replay", "-labels.replay_data"]
        yield r.stage("examples", examples, keys, ["values", "states", "cleaned", *before], again)
    if learns:
        yield prm(r)
    if g.scores and r.needs_prm():
        yield r.stage("scores", given.scores, [], ["cleaned"], g.scores)
    elif r.needs_prm():
        if c.pairs.steps is not None and c.pairs.steps.by == "score":
            keys = ["pairs.steps.by", "clean.split"]
            yield r.stage("scores", partial(scores, steps=True), keys, ["prm", "cleaned", "completions"])
        else:
            yield r.stage("scores", scores, [], ["prm", "cleaned"])

    if c.preference is not None:
        if c.worsen is not None and not g.pairs:
            keys = ["worsen", "seed", "task", *r.answer_keys("worsener", c.worsen.sampling)]
            yield r.stage("rewritten", rewritten, keys, ["cleaned"])
            yield r.stage("worsened", worsened, ["clean", "task", r.words], ["rewritten", "cleaned"])
        yield given_pairs(r) if g.pairs else ranked_pairs(r)
        yield preference(r)
    if c.rl is not None:
        yield reinforcement(r)


def given_pairs(r: Round) -> Stage:
    keys = ["task", "sample.split", "sample.prompts", "seed", r.words]
    return r.stage("pairs", given.pairs, keys, files=r.files.pairs)


def ranked_pairs(r: Round) -> Stage:
    p, after = r.config.pairs, ["cleaned"]
    whole = p.steps is None and p.values is None  # pairs of whole answers
    unread = [] if p.process and whole else ["max_wrong", "margin", "margins", "right_pairs", "up_sampling"]
    unread += [] if whole else ["min_wrong_steps"]
    unread += [] if p.process and r.needs_prm() else ["best_of"]
    unread += [] if p.states is not None else ["seed"]
    keys = ["pairs", *(f"-pairs.{key}" for key in unread)]
    if r.needs_prm():
        keys += r.read_keys
        after.append("scores")
    if p.steps is not None:
        keys.append("clean.split")
        after.append("completions")
    if p.values is not None:
        after.append("values")
        if p.values.same is not None:  # a model says which steps are alike
            keys += ["complete.n", *(r.policy_keys if p.values.encoder is None else ["model", "-model.name"])]
            after += r.policy_stages if p.values.encoder is None else []
    if p.exclude is not None:
        keys += ["task", "sample.split", "sample.prompts", "seed"]
    if r.config.worsen is not None:
        after.append("worsened")
    return r.stage("pairs", pairs, keys, after)


# --- solutions -------------------------------------------------------------------------------------------------------


def worked_lessons(r: Round, folder: Path) -> Made:
    source = r.source()
    tasks = lesson_tasks(r, source)
    with_gold = [task for task in tasks if isinstance(task.meta.get("gold"), str)] or tasks[:1]
    made = [worked(source, task, r.tokenizer, SEAT) for task in with_gold]
    return right_ones(r, folder, made, source, {"without a worked solution": len(tasks) - len(made)})


def written(r: Round, folder: Path) -> Made:
    c = r.config
    taught = r.source(c.teacher.options)
    seat = r.seat("teacher", c.model, c.teacher.sampling, taught)
    starts = start_all(lesson_tasks(r, r.source()), c.teacher.n, c.seed, "0:")
    made = collect_starts(folder / "all.jsonl", taught, starts, [seat], failures=c.failures)
    bad = sum(isinstance(e.outcome, Failed) for e in made)
    return {"solutions": len(made) - bad}, {"failed": bad}


def written_lessons(r: Round, folder: Path) -> Made:
    made = read_segment(r.at("written") / "all.jsonl")
    made = [without_prompts(e) for e in made] if r.config.teacher.options else made
    return right_ones(r, folder, made, r.source(judge=False), {})


def lesson_tasks(r: Round, source: Any) -> Any:
    return draw_tasks(source, r.config.sample.split, r.config.teacher.prompts, r.config.seed * 1_000_003)


def right_ones(r: Round, folder: Path, made: list[Episode], source: Any, lost: Mapping[str, int]) -> Made:
    """Keep the solutions that are clean and right: r_f = 1."""
    good, out = r.usable(made, source)
    right = [e for e in good if won(e)]
    out["wrong"] += len(good) - len(right)
    out.update(lost)
    if not right:
        raise DataError(f"stage 'lessons': none of {len(made)} solutions is right and clean: {because(out)}.")
    formats.write("episodes", folder / "all.jsonl", right, None)
    return {"solutions": len(right), "written": len(made)}, out


def solutions(r: Round, folder: Path) -> Made:
    """tau_1, ..., tau_n of each question x."""
    c, source, made, failed = r.config, r.source(), 0, 0
    tasks = r.asked(source)
    need_rows(len(tasks) * c.sample.n, "sample.prompts * sample.n")
    others = [c.model.model_copy(update={"name": name, "lora": None}) for name in c.sample.models]
    for j, model in enumerate([r.policy(), *others]):
        path, prefix = folder / f"{j:03d}.jsonl", f"{r.k}:" if j == 0 else f"{r.k}:{j}:"
        starts = [replace(s, group=f"{r.k}:{s.task.id}") for s in start_all(tasks, c.sample.n, c.seed, prefix)]
        if not path.exists():  # a model whose file is whole is not loaded again
            seat = r.seat(SEAT, model, c.sample.sampling, source)
            collect_starts(path, source, starts, [seat], failures=c.failures)
        bad = sum(isinstance(e.outcome, Failed) for e in read_segment(path))
        made, failed = made + len(starts) - bad, failed + bad
    odd = getattr(source, "left_out", {}).get(c.sample.split, {})  # what the task says of its files
    return {"solutions": made, "questions": len(tasks), **dict(sorted(odd.items()))}, {"failed": failed}


def cleaned(r: Round, folder: Path) -> Made:
    files = sorted(r.at("solutions").glob("[0-9]*.jsonl"))
    made = [e for file in files if ".annotations" not in file.name for e in read_segment(file)]
    good, out = r.usable(made, r.source(judge=False))
    if not good:
        raise DataError(f"stage '{r.name('cleaned')}': none of {len(made)} solutions can be used: {because(out)}.")
    formats.write("episodes", folder / "all.jsonl", good, None)
    steps = sum(len(t.steps) for e in good for t in e.turns)
    summary = {"solutions": len(good), "right": sum(map(won, good)), "steps": steps}
    return {**summary, **lpr_states.unread_answers(good)}, out


# --- states and their values -----------------------------------------------------------------------------------------


def states(r: Round, folder: Path) -> Made:
    shards = lpr_states.sample_states(r.solved(), r.config.states, r.tokenizer, SEAT, r.config.seed)
    for i, shard in enumerate(shards):
        write_lines(folder / shard_name(i, len(shards)), shard)
    types = Counter(s["type"] or "step" for shard in shards for s in shard)
    return {"states": sum(map(len, shards)), **{f"of type {t}": n for t, n in sorted(types.items())}}, {}


def completions(r: Round, folder: Path) -> Made:
    """Completions 1, ..., k of each state, by the policy itself."""
    c, source, wanted = r.config, r.source(), r.shard(r.annotated())
    points = lpr_states.points_of(wanted, r.solved())
    seat = r.seat(SEAT, r.policy(), c.complete.sampling, source)
    lpr_states.must_be_shown(points, source, r.tokenizer)
    if seat.hears_messages:
        starts, protocol = lpr_states.told_starts(points, c.complete.n, c.seed + 1, source, seat.name, r.tokenizer)
    else:
        starts, protocol = branch_starts(points, c.complete.n, c.seed + 1), None
    made = collect_starts(folder / "all.jsonl", source, starts, [seat], protocol, failures=c.failures)
    bad = sum(isinstance(e.outcome, Failed) for e in made)
    return {"completions": len(made) - bad, "right": sum(map(won, made)), "states": len(wanted)}, {"failed": bad}


def values(r: Round, folder: Path) -> Made:
    """r_e(state) = sum over its k completions of r_f(completion)."""
    c, wanted, episodes = r.config.complete, r.shard(r.annotated()), r.solved()
    found, out = lpr_states.state_values(wanted, episodes, r.completed(), c, r.tokenizer)  # r_e
    if not found:
        raise DataError(f"stage '{r.name('values')}': no state of {len(wanted)} has a value: {because(out)}.")
    write_notes(folder / "values.jsonl", lpr_states.value_notes(found, episodes, SEAT))
    spread = Counter(found.values())
    return {"states": len(found), **{f"value {v}": spread[v] for v in range(c.n + 1)}}, out


# --- the process reward model ----------------------------------------------------------------------------------------


def earlier_examples(r: Round) -> list[str]:
    """The stages of earlier rounds whose examples are learnt again."""
    earlier = [Round(r.config, r.run, j) for j in range(1, r.k)]
    return [e.name("examples") for e in earlier if r.config.labels.replay and e.learns_values()]


def examples(r: Round, folder: Path) -> Made:
    """(x, state) with the class r_e, and (x, tau) with the class k r_f(tau)."""
    c, episodes, notes = r.config, r.solved(), r.valued()
    dev = {s["episode"] for s in r.shard(c.labels.dev_shards)} if c.labels.dev_shards else set()
    held = {e.group for e in episodes if e.id in dev}
    out, summary = Counter[str](), dict[str, Any]()
    annotated = {a.episode for a in notes}
    valued = {e.group for e in episodes if e.id in annotated}  # questions without a value are not learnt from
    for name in ("train", "dev") if c.labels.dev_shards else ("train",):
        mine = [e for e in episodes if e.group in valued and (e.group in held) == (name == "dev")]
        found, lost = lpr_states.examples(mine, notes, c.complete.n, c.labels, r.tokenizer, SEAT, c.seed)
        used, labels = lpr_states.label_notes(found, mine)
        out.update(lost)
        spread = Counter(x.label for x in found)
        summary |= {f"{name} examples": len(found), **{f"{name} class {v}": n for v, n in sorted(spread.items())}}
        for j, path in enumerate(replayed_files(r) if name == "train" else ()):
            old = formats.read("episodes", path, None)
            draw = random.Random(f"replay {c.seed} {r.k} {j}")
            more, kept, n = lpr_states.replayed(old.episodes, old.annotations, c.labels.replay, draw, f"replay {j}:")
            used, labels, summary["replayed"] = [*used, *more], [*labels, *kept], summary.get("replayed", 0) + n
        if not labels:
            where = f"in labels.dev_shards {c.labels.dev_shards}" if name == "dev" else "to learn from"
            raise DataError(f"stage '{r.name('examples')}': there is no example {where}: {because(lost)}.")
        formats.write("episodes", folder / f"{name}.jsonl", used, None, annotations=labels)
    return summary, out


def replayed_files(r: Round) -> list[Path]:
    own = [Path(file) for file in r.config.labels.replay_data if r.config.labels.replay]
    return [*own, *(r.root / name / "train.jsonl" for name in earlier_examples(r))]


def scores(r: Round, folder: Path, steps: bool = False) -> Made:
    """f(. | x, steps 1..t) for every step t of every tau, in one pass over it. With `steps`, also for the steps of
    completions."""
    place = r.at("prm")
    lm = load_frozen(r.config.model, locate_value(place), r.tokenizer, str(place))
    check_classes(lm, HEAD, r.read().classes)  # those >= C
    lm.name = name_in_run(lm.name, r.run)
    every = [*r.solved(), *(r.steps_of_completions() if steps else [])]
    write_notes(folder / "scores.jsonl", output_notes(step_outputs(lm, every, HEAD, SEAT), source_of(lm)))
    return {"solutions": len(every), "steps": sum(len(t.steps) for e in every for t in e.turns)}, {}


# --- pairs -----------------------------------------------------------------------------------------------------------


def rewritten(r: Round, folder: Path) -> Made:
    """Right solutions, as the worsener writes them again."""
    c, worsen, source, chosen = r.config, r.config.worsen, r.source(), list[Episode]()
    assert worsen is not None
    for group in by_group(r.solved()).values():
        chosen += [e for e in group if won(e)][: worsen.most]
    if not chosen:
        raise DataError(f"stage '{r.name('rewritten')}': no solution is right, so that none can be made worse.")
    versions_of = {f"{e.id}~{j}": e for e in chosen for j in range(worsen.n)}
    seat = r.seat("worsener", c.model, worsen.sampling, source)

    async def worse(desk: Desk) -> None:
        e = versions_of[desk.start.id]
        turn = await desk.ask(seat.name, text=f"{worsen.instruction}\n\n{prompt_of(source, e)}{e.turns[-1].text}\n\n")
        await desk.act(turn.text)

    starts = [Start(e.task, e.group, name, c.seed) for name, e in versions_of.items()]
    made = collect_starts(folder / "all.jsonl", source, starts, [seat], worse, failures=c.failures)
    bad = sum(isinstance(e.outcome, Failed) for e in made)
    return {"versions": len(made) - bad, "of": len(chosen)}, {"failed": bad}


def worsened(r: Round, folder: Path) -> Made:
    """The worse versions that can be used. One that says the same as before is left out."""
    known, made = {e.id: e for e in r.solved()}, read_segment(r.at("rewritten") / "all.jsonl")
    before = {e.id: known[e.id.rpartition("~")[0]] for e in made}
    good, out = r.usable([without_prompts(e) for e in made], r.source(judge=False))
    other = [e for e in good if e.turns[-1].text.strip() != before[e.id].turns[-1].text.strip()]
    out["the same as before"] += len(good) - len(other)
    if not other:
        why = f"none of {len(made)} worse versions can be used: {because(out)}."
        raise DataError(f"stage '{r.name('worsened')}': {why}")
    write_lines(folder / "versions.jsonl", [{"id": e.id, "of": before[e.id].id} for e in other])
    formats.write("episodes", folder / "all.jsonl", other, None)
    of = len({e.id for e in before.values()})
    return {"versions": len(other), "of": of, "still right": sum(map(won, other))}, out


def pairs(r: Round, folder: Path) -> Made:
    """r_p(tau) = prod_t P(class >= C); D_o: right above wrong; D_p: right above right, where r_p is larger by more than
    the margin."""
    c, episodes = r.config, r.solved()
    rewards, outputs = r.rewards(episodes)  # r_p, and f at every step
    completed = None if c.pairs.steps is None else r.steps_of_completions()
    valued = [] if c.pairs.values is None else r.valued()
    if c.pairs.values is not None and c.pairs.values.same is not None:
        other = {"name": c.pairs.values.encoder, "lora": None, "shape": None, "tokenizer": None}
        model = r.policy() if c.pairs.values.encoder is None else c.model.model_copy(update=other)
        lm = load_model(pin_models(model)).freeze()
        alike = lpr_pairs.alike_steps(lm, episodes, r.tokenizer, c.pairs.values.same)
        valued = lpr_pairs.shared_values(episodes, valued, alike, c.complete.n)
    excluded = given.excluded(r, episodes)
    made, best, summary = lpr_pairs.all_pairs(  # D_o and D_p
        episodes, completed, valued, rewards, outputs, c.pairs, r.read(), r.tokenizer, excluded
    )
    if c.worsen is not None:
        known, versions = {e.id: e for e in episodes}, read_lines(r.at("worsened") / "versions.jsonl")
        spoilt = lpr_pairs.worse_pairs([(known[v["of"]], v["id"]) for v in versions])
        made, summary = [*made, *spoilt], {**summary, "pairs": len(made) + len(spoilt), "worse pairs": len(spoilt)}
    if not made:
        raise DataError(f"stage '{r.name('pairs')}': {no_pair(episodes, completed)}")
    write_lines(folder / "pairs.jsonl", [p.line() for p in made])
    formats.write("episodes", folder / "chosen.jsonl", best, None)
    return summary, {}


def no_pair(episodes: list[Episode], completed: list[Episode] | None) -> str:
    blind = sum(not e.turns[-1].prompt for e in completed or ())
    why = (
        f" {blind} of {len(completed or ())} completions are of a server that answers messages, as text alone, and "
        "pairs of steps (pairs.steps) need the tokens behind a state: complete them with the model here, or with a "
        "server that goes on with a text (seats.policy.speaks=text)."
    )
    right = sum(map(won, episodes))
    return f"no pair can be made of {len(episodes)} solutions, of which {right} are right.{why * bool(blind)}"


def without_prompts(e: Episode) -> Episode:
    """The episode without the prompts that its author was shown: its answer is encoded behind the policy's."""
    return replace(e, turns=tuple(replace(t, prompt=()) for t in e.turns))
