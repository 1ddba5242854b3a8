"""`trailmark quickstart`: a small example of a whole method, from training to a table and a page.

A method is shown if `QUICKSTARTS` (at the end) names a function of `(out, seed, resume, quiet)`. It trains under `out`
and ends with `finish`, which writes the table, the report and what to read next.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from trailmark import MOST_SEED, stopping
from trailmark.errors import RecipeError, RunError, nearest

SUMS = 4000  # worked ones that OREO's first model imitates
# The numbers are those of docs/studies/oreo-arith.md.
OREO_NOTE = (
    "What this shows: OREO and rejection sampling learn much from answers of SFT. It does not show which is better: "
    "over three seeds they cannot be told apart (-0.033 [-0.085, +0.018]). Nor is a beam by OREO's value better than "
    "OREO's greedy answer, because after training little is left to choose (-0.013 [-0.077, +0.050]). A value is for "
    "policies that still waver: drawn answers of SFT are right in 0.687, and in 0.793 with a beam of 3."
)


def quickstart(
    method: Annotated[str, typer.Option(help="The method to show: reflect, oreo, lpr or vrcli.")] = "reflect",
    out: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Random seed.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted quickstart.")] = False,
    quiet: Annotated[bool, typer.Option("--json", help="Print only the JSON line of results.")] = False,
) -> None:
    """Run a whole method at a small size, on two cores, in minutes, and show the results."""
    if method not in QUICKSTARTS:
        raise RecipeError(f"there is no quickstart for method '{method}' yet.{nearest(method, QUICKSTARTS)}")
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file: choose another directory with --out DIR.")
    if out.exists() and any(out.iterdir()) and not resume:
        raise RunError(f"{out} is not empty: go on with --resume, or choose another directory with --out DIR.")
    words = ["trailmark", "quickstart", "--method", method, "--out", str(out), "--seed", str(seed), "--resume"]
    with stopping.noting(lambda: f"go on with: {shlex.join(words)}"):
        QUICKSTARTS[method](out, seed, resume, quiet)


def reflect(out: Path, seed: int, resume: bool, quiet: bool) -> None:
    """Reflect-RL on taxi `pickup`, and what it is compared with, each over all 300 starts."""
    from trailmark.config import resolve
    from trailmark.methods import get_method
    from trailmark.methods.reflect import ReflectRecipe, evaluate_advice
    from trailmark.models.tiny import tiny_tokenizer
    from trailmark.rollout.reference_players import random_player
    from trailmark.runs.launch import launch
    from trailmark.runs.store import Run
    from trailmark.tasks import get_task

    say = (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr, flush=True))
    recipe = Path(__file__).parent.parent / "recipes" / "reflect-taxi.yaml"
    both: dict[str, Run] = {}
    for name, reflecting in (("plain", False), ("reflect", True)):
        say("Reflect-RL: a reflector learns a teacher's words, a policy learns to act on them" if reflecting
            else "SFT, then RL, of a policy alone")  # fmt: skip
        raw = _recipe(recipe, out / name, seed, reflecting)
        config = resolve(raw, ReflectRecipe)
        launch(get_method("reflect"), config, resume)
        both[name] = Run.open(config.out)
    source = get_task(raw["task"]["name"], **raw["task"]["options"])
    both["reflect"].keep_evaluation("random", random_player(source, seed + 1, tiny_tokenizer()))
    evaluate_advice(both["reflect"], config, seed)
    files = {
        "random": both["reflect"].path / "evaluation/random.jsonl",
        "SFT only": both["plain"].path / "evaluation/plain-sft.jsonl",
        "SFT + RL, no reflection": both["plain"].path / "evaluation/plain-rl.jsonl",
        "SFT only, with reflection": both["reflect"].path / "evaluation/reflect-sft.jsonl",
        "Reflect-RL": both["reflect"].path / "evaluation/reflect-rl.jsonl",
        "Reflect-RL, advice off": both["reflect"].path / "evaluation/advice-off.jsonl",
        "Reflect-RL, advice shuffled": both["reflect"].path / "evaluation/advice-shuffled.jsonl",
    }
    finish(
        out,
        files,
        both["reflect"].path,
        quiet,
        title="taxi, pickup: all 300 starts, one sampled play each, 95 % intervals",
        main="Reflect-RL",
    )


def vrcli(out: Path, seed: int, resume: bool, quiet: bool) -> None:
    """VR-CLI on rows with a planted hint: a tiny reader learns to follow plans, a policy learns to write useful ones,
    and what could explain the improvement otherwise stands beside it."""
    from trailmark.data.stories.hints import Hints, write
    from trailmark.seats.locate import newest_checkpoint

    say = (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr, flush=True))
    rows, file, trained = out / "rows", _file, partial(_trained, out, seed, resume)
    if not (rows / "tokenizer" / "tokenizer.json").is_file():  # written last
        rows.mkdir(parents=True, exist_ok=True)
        write(rows, Hints(seed=seed))
    say("a tiny model learns to write about any guest, and to follow a plan")
    reader = trained("vrcli-hint-scorer", "reader", file("data", rows / "lessons.jsonl"),
                     file("model.tokenizer", rows / "tokenizer"))  # fmt: skip
    start = file("model.name", newest_checkpoint(reader) / "policy")
    say("SFT: a copy of it imitates the gold texts")
    sft = trained("vrcli-hint-sft", "sft", file("data", rows / "sft_train.jsonl"),
                  file("eval_data", rows / "sft_val.jsonl"), start)  # fmt: skip
    say("VR-CLI: a copy of it writes plans, and is paid if they make the gold texts likelier to the frozen reader")
    run = trained("vrcli-hint", "vrcli", file("data", rows / "train.jsonl"),
                  file("task.options.val", rows / "val.jsonl"), start, file("final.readers.sft", sft))  # fmt: skip
    files = {
        "random words of the prompt": run / "evaluation/random-words.jsonl",
        "VR-CLI's plan for another row": run / "evaluation/other-plan.jsonl",
        "before training": run / "evaluation/start.jsonl",
        "VR-CLI": run / "evaluation/trained.jsonl",
        "SFT, no plan": run / "evaluation/sft.jsonl",
    }
    finish(
        out,
        files,
        run,
        quiet,
        title="64 held-out rows; reward is the improvement of perplexity (0.25: 25 %), 95 % intervals",
        main="VR-CLI",
        metrics=("reward",),
        read_next="docs/vrcli.md, docs/studies/vrcli-laptop.md",
    )


def oreo(out: Path, seed: int, resume: bool, quiet: bool) -> None:
    """OREO on sums: a model imitates a teacher who forgets carries, its answers are kept, right or wrong, and a policy
    and a value learn from them. Rejection sampling learns from the same answers."""
    from trailmark.data import gold
    from trailmark.runs.store import segments
    from trailmark.seats.locate import newest_checkpoint

    say = (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr, flush=True))
    lessons, trained = out / "arith.jsonl", partial(_trained, out, seed, resume)
    if not lessons.exists():
        out.mkdir(parents=True, exist_ok=True)
        gold.make("arith", lessons, {"level": 2, "careless": 0.7}, SUMS, "train", seed)
    say("a tiny model imitates a teacher who forgets seven of ten carries")
    sft = trained("arith-sft", "sft", _file("data", lessons), "steps=700")
    start = _file("model.name", newest_checkpoint(sft) / "policy")
    say("it answers 1,000 questions eight times; all answers are kept, right or wrong")
    answers = _file("data", segments(trained("oreo-arith-data", "data", start) / "episodes")[-1])
    say("rejection sampling: it imitates the right ones")
    imitates = ("objective=rejection", "beta=null", "learner.optim.lr=3e-4", "final.start=true")
    other = trained("preference-arith", "rejection", start, answers, *imitates)
    say("OREO: a policy and a value learn from all of them")
    run = trained("oreo-arith", "oreo", start, answers, "final.search=[beam:3]")
    files = {
        "SFT": other / "evaluation/start.jsonl",
        "rejection sampling": segments(other / "evaluation")[-1],
        "OREO": segments(run / "evaluation")[-1],
        "OREO, beam of 3 at temperature 1": run / "evaluation/beam-3.jsonl",
    }
    finish(
        out,
        files,
        run,
        quiet,
        title="200 sums such as 7-2+9, 95 % intervals",
        main="OREO",
        metrics=("success",),
        read_next="docs/oreo.md, docs/studies/oreo-arith.md",
        note=OREO_NOTE,
    )


def _trained(out: Path, seed: int, resume: bool, name: str, folder: str, *words: str) -> Path:
    """A run of a packaged recipe in a folder of the quickstart."""
    from trailmark.methods import get_method, resolve_recipe
    from trailmark.recipe import load_recipe
    from trailmark.runs.launch import launch

    where = out / folder
    given = [*words, *_further(folder), f"seed={seed}", f"model.seed={seed}", _file("out", where), f"name={folder}"]
    config = resolve_recipe(load_recipe(Path(__file__).parent.parent / "recipes" / f"{name}.yaml", given))
    launch(get_method(config.method), config, resume and where.exists())
    return where


def _file(key: str, path: Path) -> str:
    return f"{key}={json.dumps(str(path))}"


def _further(folder: str) -> list[str]:
    """Further keys of a run's recipe. A test makes the runs shorter here."""
    return []


def _recipe(file: Path, out: Path, seed: int, reflecting: bool) -> dict[str, Any]:
    from trailmark.recipe import load_recipe

    raw = dict(load_recipe(file).raw)
    return {**raw, "out": str(out), "name": out.name, "seed": seed, "reflect": reflecting,
            "model": {**raw["model"], "seed": seed}}  # fmt: skip


def finish(
    out: Path,
    files: Mapping[str, Path],
    shown: Path,
    quiet: bool,
    title: str,
    main: str,
    metrics: Sequence[str] = ("success", "reward"),
    read_next: str = "",
    note: str = "",
) -> None:
    """Write the table for people, the page of the run `shown`, and one JSON line for programs. Each row of the table is
    a file of episodes. `main` is the row whose command is printed, `read_next` names the pages that say more, and
    `note` says what the table shows and what it does not."""
    from trailmark.evaluate.output import finish as show
    from trailmark.evaluate.run import summarise
    from trailmark.evaluate.tables import table, warnings
    from trailmark.report import write_report
    from trailmark.runs.store import atomic_write, read_segment

    rows = [summarise(read_segment(path), name) for name, path in files.items()]
    page = write_report(shown)
    listed = {name: str(path) for name, path in files.items()}
    result = {"command": "quickstart", "rows": rows, "files": listed, "report": str(page)}
    atomic_write(out / "quickstart.json", (json.dumps(result, indent=1) + "\n").encode())
    short = [{**r, "metrics": {k: v for k, v in r["metrics"].items() if k in metrics}} for r in rows]
    words = [
        *([note] if note else []),
        f"The same numbers from the episodes: trailmark eval --episodes {files[main]}",
        f"What happened, and why: {page}",
        *([f"Read next: {read_next}"] if read_next else []),
    ]
    show(result, quiet, lambda width: [table(short, title, width), *warnings(rows), *words])


def lpr(out: Path, seed: int, resume: bool, quiet: bool) -> None:
    """LPR on order puzzles: imitation, Monte-Carlo values, a process reward model, ranked pairs, pDPO."""
    from trailmark.config import resolve
    from trailmark.methods import get_method
    from trailmark.methods.lpr import LprMethod
    from trailmark.runs.launch import launch
    from trailmark.runs.store import segments

    if not quiet:
        print("LPR: imitation, values of states, a reward model of steps, pDPO", file=sys.stderr, flush=True)
    config = resolve(_lpr_recipe(Path(__file__).parent.parent / "recipes" / "lpr-puzzle.yaml", out / "lpr", seed),
                     LprMethod.Config)  # fmt: skip
    launch(get_method("lpr"), config, resume)
    trained = out / "lpr" / "policy-1"
    files = {
        "SFT, one answer": trained / "evaluation/single.jsonl",
        "SFT, most votes of 8": trained / "evaluation/vote.jsonl",
        "SFT, best of 8 by the reward model": trained / "evaluation/best.jsonl",
        "SFT, a right one of 8 (the ceiling)": trained / "evaluation/any.jsonl",
        "pDPO, one answer": segments(trained / "evaluation")[-1],
    }
    finish(
        out,
        files,
        trained,
        quiet,
        title="order puzzles, 200 questions, temperature 1, 95 % intervals; sound: share of true steps",
        main="pDPO, one answer",
        metrics=("success", "sound"),
        read_next="docs/lpr.md, and docs/studies/lpr-puzzle-notes.md",
    )


def _lpr_recipe(file: Path, out: Path, seed: int) -> dict[str, Any]:
    from trailmark.recipe import load_recipe

    raw = dict(load_recipe(file).raw)
    final = {"choose": 8, "value": str(out / "prm-1")}
    return {**raw, "out": str(out), "name": out.name, "seed": seed, "model": {**raw["model"], "seed": seed},
            "preference": {**raw["preference"], "final": final}}  # fmt: skip


# A new method is one more line here.
QUICKSTARTS: dict[str, Callable[[Path, int, bool, bool], None]] = {
    "reflect": reflect,
    "oreo": oreo,
    "lpr": lpr,
    "vrcli": vrcli,
}
