"""Studies: arms x seeds at an equal budget, and a verdict per claim computed from what they measured.

    studies/policy-gradient-bandit.yaml            what is asked
    OUT/before/STAGE/seed-0/              what the arms of a seed share, made before them: a start, its data
    OUT/runs/ARM/seed-0/                  an ordinary run; finished.json beside its recipe says that it is whole
    OUT/*/replaced/                       runs of another recipe or of other inputs, kept
    OUT/study.json, table.md, picture.*   what came out; rewritten whole each time, from the runs alone

Every run is a stage (`runs/stages.py`), started by the code that `trailmark train` uses. Finished ones are skipped,
half-finished ones resumed and changed ones made again, so a study that was killed gives the same table. A run that
another process is busy with is left to it and waited for, so two processes can work on one study.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from trailmark import __version__, methods
from trailmark.config import Config, RunConfig, Seed, load_recipe, resolve
from trailmark.errors import RecipeError, RunBusy, RunError, TrailmarkError, nearest
from trailmark.evaluate.claims import Claim, parse_claim
from trailmark.evaluate.measures import Budget, Measure, collect
from trailmark.recipe import load_yaml
from trailmark.runs import stages as pipeline
from trailmark.runs.diff import IGNORED
from trailmark.runs.launch import training_stage
from trailmark.runs.store import atomic_write


class Arm(Config):
    """One side of the comparison: a recipe with keys set, or another reading (`episodes`) of the runs of an arm
    (`of`)."""

    recipe: str | None = Field(None, description="file; beside the study, or from here; none: the study's")
    set: dict[str, Any] = Field({}, description="keys of the recipe, dotted or nested")
    extra: NonNegativeInt = Field(0, description="steps beside the budget, such as a stage that only this arm has")
    of: str | None = Field(None, description="no runs of its own: those of this arm")
    episodes: str | None = Field(None, description="the file that measures of episodes read in its runs")
    result: str | None = Field(None, description="its name in results.json; none: the arm's own")

    @model_validator(mode="after")
    def _one(self) -> Arm:
        if self.of is not None and (self.recipe is not None or self.set or self.extra):
            raise ValueError("an arm that is 'of' another has its runs, and takes no recipe, set or extra")
        return self


class Gold(Config):
    """Worked answers of a task, as `trailmark data gold` writes them."""

    task: str = Field(description="a task whose starts carry a gold answer")
    options: dict[str, Any] = Field({}, description="keywords of the task")
    n: PositiveInt = Field(1000, description="rows")
    split: str = Field("train", description="which split")


class Stage(Config):
    """What all arms of a seed start from: a run, or worked answers. `{NAME}` in a value set later is its folder (or
    file)."""

    recipe: str | None = Field(None, description="file; beside the study, or from here")
    set: dict[str, Any] = Field({}, description="keys of the recipe, dotted or nested")
    gold: Gold | None = Field(None, description="no run: answers to imitate, drawn by the seed")

    @model_validator(mode="after")
    def _one(self) -> Stage:
        if (self.recipe is None) == (self.gold is None):
            raise ValueError("a stage has either a recipe or gold")
        return self


class ClaimConfig(Config):
    claim: str = Field(description="such as 'a > b on success'")
    over: Literal["seeds", "starts", "both"] = Field("both", description="what the interval generalises over")
    paired: bool = Field(True, description="whether equal seeds (and starts) are compared with each other")


class StudyConfig(Config):
    """A study file."""

    name: str = Field("", description="for people; none: the name of the file")
    about: str = Field("", description="what is asked, for the page")
    before: dict[str, Stage] = Field({}, description="what the arms of a seed share, in this order")
    recipe: str | None = Field(None, description="of every arm that names none")
    set: dict[str, Any] = Field({}, description="keys set in every arm")
    arms: dict[str, Arm] = Field({}, description="by name")
    sweep: dict[str, list[Any]] = Field({}, description="dotted key: values; each arm times each combination")
    seeds: list[Seed] = Field([0, 1, 2], min_length=1, description="of the runs")
    seed_keys: list[str] = Field(["seed", "model.seed"], description="keys of a recipe that a seed sets")
    budget: Budget = Field(description="equal for all arms: steps, updates, tokens or seconds")
    measures: dict[str, Measure] = Field(min_length=1, description="what is measured, by name")
    claims: list[str | ClaimConfig] = Field([], description="such as 'a > b on success'")

    @field_validator("seeds")
    @classmethod
    def _different(cls, v: list[int]) -> list[int]:
        if len(set(v)) < len(v):
            raise ValueError("a seed stands twice")
        return v


@dataclass(frozen=True)
class Spec:
    """An arm, expanded: what to run, and how to read it."""

    name: str
    recipe: Path
    overrides: tuple[str, ...]
    runs: str  # the folder of its runs
    seed_keys: tuple[str, ...]
    extra: int  # steps beside the budget
    reads: Arm
    shared: tuple[str, ...] = ()  # the stages before it, whose names stand in `overrides` for what they made
    home: str = "runs"

    def folder(self, out: Path, seed: int) -> Path:
        return out / self.home / self.runs / f"seed-{seed}"

    def words(self, out: Path, seed: int) -> list[str]:
        """The overrides with the places of this seed in them."""
        places = {f"{{{name}}}": str(out / "before" / name / f"seed-{seed}") for name in self.shared}
        made = list(self.overrides)
        for name, place in places.items():
            made = [word.replace(name, place) for word in made]
        return made


def find_study(name: str) -> Path:
    """A file, or a name in studies/."""
    if Path(name).is_file():
        return Path(name)
    if name.endswith((".yaml", ".yml")) or "/" in name:
        raise RecipeError(f"{name}: there is no such study.")
    shipped = Path(__file__).parents[3] / "studies"
    places = [Path("studies"), *([shipped] if shipped.is_dir() else [])]
    known = {p.stem: p for place in reversed(places) for p in place.glob("*.yaml")}
    if name not in known:
        raise RecipeError(f"there is no study '{name}' in studies/.{nearest(name, known) if known else ''}")
    return known[name]


def _flat(keys: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys: like files, they merge with the recipe. One that says its `kind` is set whole."""
    out: dict[str, Any] = {}
    for key, value in keys.items():
        if isinstance(value, dict) and value and "kind" not in value:
            out |= _flat(value, f"{above}{key}.")
        else:
            out[above + key] = value
    return out


def _words(keys: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in keys.items())


def _sweep_name(keys: Mapping[str, Any]) -> str:
    shown = lambda v: v if isinstance(v, str) else json.dumps(v)
    return ",".join(f"{k.rsplit('.', 1)[-1]}={shown(v)}" for k, v in keys.items())


def expand(study: StudyConfig, file: Path) -> list[Spec]:
    """Arms times sweep, each with its recipe, its overrides and the folder of its runs."""
    for key, values in study.sweep.items():
        if not values:
            raise RecipeError(f"{file}: key 'sweep.{key}': has no values.")
    points = [dict(zip(study.sweep, combo)) for combo in itertools.product(*study.sweep.values())]
    arms = study.arms or {"": Arm()}
    specs: dict[str, Spec] = {}
    for name, arm in arms.items():
        if arm.of is not None and (arm.of not in arms or arms[arm.of].of is not None):
            raise RecipeError(f"{file}: key 'arms.{name}.of': there is no arm '{arm.of}' with runs of its own.")
        owner = arms[arm.of] if arm.of is not None else arm
        for point in points:
            mark = _sweep_name(point)
            full = ", ".join(filter(None, (name, mark))) or "run"
            folder = re.sub(r"[^A-Za-z0-9_.,=+-]+", "_", ",".join(filter(None, (arm.of or name, mark))) or "run")
            recipe = owner.recipe or study.recipe
            if recipe is None:
                raise RecipeError(f"{file}: key 'arms.{name}': names no recipe, and the study none for all.")
            beside = file.parent / recipe
            words = _words({**_flat(study.set), **_flat(owner.set), **point, **study.budget.keys(owner.extra)})
            specs[full] = Spec(
                full,
                beside if beside.is_file() else Path(recipe),
                words,
                folder,
                tuple(study.seed_keys),
                owner.extra,
                arm,
                tuple(study.before),
            )
    owners: dict[str, Spec] = {}
    for s in specs.values():
        other = owners.setdefault(s.runs, s)
        if (other.recipe, other.overrides) != (s.recipe, s.overrides):
            raise RecipeError(f"{file}: arms '{other.name}' and '{s.name}' would share the folder '{s.runs}'.")
    return list(specs.values())


def stages(study: StudyConfig, file: Path) -> list[tuple[str, Gold | Spec]]:
    """What is made before the arms, in order; each may use what was made before it."""
    out: list[tuple[str, Gold | Spec]] = []
    for name, stage in study.before.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise RecipeError(f"{file}: key 'before.{name}': a name of letters, digits, '-' and '_' is needed.")
        known = tuple(n for n, _ in out)
        if stage.gold is not None:
            out.append((name, stage.gold))
            continue
        beside = file.parent / str(stage.recipe)
        recipe = beside if beside.is_file() else Path(str(stage.recipe))
        words = _words(_flat(stage.set))
        out.append((name, Spec(name, recipe, words, name, tuple(study.seed_keys), 0, Arm(), known, "before")))
    return out


def gold_stage(name: str, gold: Gold, seed: int) -> pipeline.Stage:
    """Worked answers: one file, drawn by the seed."""
    from trailmark.data import gold as answers

    def make(path: Path) -> dict[str, int]:
        path.unlink(missing_ok=True)
        return {"rows": answers.make(gold.task, path, gold.options, gold.n, gold.split, seed)}

    settings = {**gold.model_dump(mode="json"), "seed": seed}
    # A file that an older version made is finished: it was written whole or not at all.
    return pipeline.Stage(name, make, settings, single=True, earlier=lambda path: {} if path.is_file() else None)


def load_study(path: Path, overrides: Sequence[str] = ()) -> tuple[StudyConfig, list[Spec], list[Claim]]:
    study = resolve(load_yaml(path, overrides), StudyConfig)
    study = study.model_copy(update={"name": study.name or path.stem})
    specs = expand(study, path)
    claims = []
    for c in study.claims:
        text, over, paired = (c, "both", True) if isinstance(c, str) else (c.claim, c.over, c.paired)
        for claim in parse_claim(text, [s.name for s in specs], list(study.measures), str(path)):
            claims.append(replace(claim, over=over, paired=paired))
    return study, specs, claims


def resolved(spec: Spec, out: Path, seed: int) -> tuple[Any, RunConfig]:
    """The method and the checked config of one run."""
    where = spec.folder(out, seed)
    more = _words({**dict.fromkeys(spec.seed_keys, seed), "name": f"{spec.name}, seed {seed}", "out": str(where)})
    config = methods.resolve_recipe(load_recipe(spec.recipe, [*spec.words(out, seed), *more]))
    return methods.get_method(config.method), config


def _mark(config: RunConfig) -> bytes:
    """What finished.json of a run of this recipe holds; a run of another recipe is not finished."""
    kept = {k: v for k, v in config.model_dump(mode="json").items() if k not in IGNORED}
    text = json.dumps(kept, sort_keys=True)
    return (json.dumps({"recipe": hashlib.sha256(text.encode()).hexdigest()}) + "\n").encode()


def train_stage(spec: Spec, out: Path, seed: int) -> pipeline.Stage:
    """One run. Of an arm those outputs count that measures read; what follows reads the weights of what was made
    before it."""
    method, config = resolved(spec, out, seed)

    def announced(folder: Path) -> Mapping[str, Any] | None:
        print(f"study: {spec.name}, seed {seed}", file=sys.stderr, flush=True)
        return made.make(folder)

    def earlier(folder: Path) -> dict[str, Any] | None:
        marker = folder / "finished.json"
        return {} if marker.is_file() and marker.read_bytes() == _mark(config) else None

    used = [name for name in spec.shared if any(f"{{{name}}}" in word for word in spec.overrides)]
    inputs = {name: out / "before" / name / f"seed-{seed}" for name in used}
    outputs = None if spec.home == "before" else ("recipe.yaml", "metrics.jsonl", "evaluation", "results.json")
    made = training_stage(spec.runs, method, config, out, inputs, outputs=outputs, grows=("steps",), earlier=earlier)
    return replace(made, make=announced)


def bring(stage: pipeline.Stage, home: Path, seed: int, title: str) -> bool:
    """Bring one stage to its end; False when another process is at it."""
    record = f"{{name}}/seed-{seed}.json" if stage.single else f"{{name}}/seed-{seed}/finished.json"
    layout = pipeline.Layout(f"{{name}}/seed-{seed}", record, f"{{name}}/seed-{seed}.begun.json")
    try:
        pipeline.run_stages(home, [stage], layout=layout)
    except RunBusy:
        return False
    except TrailmarkError as e:
        raise RunError(f"{title}, seed {seed}: {e}") from e
    gc.collect()  # the models of one arm must not be in the way of the next
    return True


def train_one(spec: Spec, out: Path, seed: int) -> bool:
    title = f"stage '{spec.name}'" if spec.home == "before" else f"arm '{spec.name}'"
    return bring(train_stage(spec, out, seed), out / spec.home, seed, title)


def prepare(shared: Sequence[tuple[str, Gold | Spec]], out: Path, seed: int, poll: float) -> None:
    """Make what the arms of a seed share, or wait for whoever is at it."""
    for name, stage in shared:
        while not (
            bring(gold_stage(name, stage, seed), out / "before", seed, f"stage '{name}'")
            if isinstance(stage, Gold)
            else train_one(stage, out, seed)
        ):
            time.sleep(poll)


def run_study(
    path: Path, overrides: Sequence[str] = (), out: Path | None = None, resume: bool = True, poll: float = 1.0
) -> tuple[dict[str, Any], Path]:
    """Run what is not finished, measure, judge, write. The result, and the folder that holds it."""
    from trailmark.evaluate.pages import draw
    from trailmark.evaluate.tables import study_markdown

    study, specs, claims = load_study(path, overrides)
    out = out or Path("runs/studies") / study.name
    if not resume and out.is_dir() and any(out.iterdir()):
        raise RunError(f"{out} is not empty: go on with --resume, or choose another directory with --out DIR.")
    shared = stages(study, path)
    jobs = [(s, seed) for seed in study.seeds for s in specs if s.reads.of is None]
    for spec, seed in [*((s, seed) for _, s in shared if isinstance(s, Spec) for seed in study.seeds), *jobs]:
        resolved(spec, out, seed)  # a mistake in the last arm is found before the first one runs
    prepared: set[int] = set()
    busy = []
    for spec, seed in jobs:
        if seed not in prepared:
            prepare(shared, out, seed, poll)
            prepared.add(seed)
        if not train_one(spec, out, seed):
            busy.append((spec, seed))
    for spec, seed in busy:
        print(
            f"study: {spec.name}, seed {seed}: another process trains it; waiting for that", file=sys.stderr, flush=True
        )
        while not train_one(spec, out, seed):
            time.sleep(poll)
    result = {
        "name": study.name, "about": study.about, "file": path.name, "overrides": list(overrides),
        "trailmark": __version__, "seeds": study.seeds, "budget": study.budget.model_dump(exclude_none=True),
        **collect(study.measures, study.budget, specs, claims, study.seeds, out),
    }  # fmt: skip
    atomic_write(out / "study.json", (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
    atomic_write(out / "table.md", study_markdown(result).encode())
    draw(result, out)
    return result, out
