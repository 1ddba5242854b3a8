"""Studies: arms x seeds at an equal budget, and a verdict per claim, computed from the measured results.

    studies/policy-gradient-bandit.yaml   the study
    OUT/before/STAGE/seed-0/              what the arms of a seed share and what is made before them: a model, data
    OUT/runs/ARM/seed-0/                  an ordinary run; OUT/stages/runs/ARM/seed-0.json says that it is complete
    OUT/replaced/                         old runs, of another recipe or of other inputs
    OUT/study.json, table.md, picture.*   the results; rewritten each time, from the runs alone

Every run is a stage (`runs/stages.py`), and is started like `trailmark train`. Finished runs are skipped, unfinished
ones resumed, and changed ones made again. So a study that was killed gives the same table. If another process trains a
run, the study waits for it. So two processes can work on one study.
"""

from __future__ import annotations

import gc
import itertools
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, create_model, field_validator, model_validator

from trailmark import __version__, methods, registry
from trailmark.config import Config, RunConfig, Seed, load_recipe, resolve
from trailmark.data.for_studies import StudyData
from trailmark.errors import RecipeError, RunBusy, RunError, TrailmarkError, Unfinished, nearest
from trailmark.evaluate.claims import Claim, parse_claim
from trailmark.evaluate.measures import Budget, Measure, collect
from trailmark.methods.pipeline import training_stage
from trailmark.recipe import load_yaml, shipped
from trailmark.runs import stages as pipeline
from trailmark.runs.atomic_files import atomic_write


class Arm(Config):
    """One side of the comparison: a recipe with keys set, or another reading (`episodes`) of the runs of another arm
    (`of`)."""

    recipe: str | None = Field(
        None, description="recipe file, relative to the study or to the working directory; none: the study's recipe"
    )
    set: dict[str, Any] = Field({}, description="keys of the recipe, dotted or nested")
    extra: NonNegativeInt = Field(0, description="steps outside the budget, such as a stage that only this arm has")
    of: str | None = Field(None, description="use the runs of this other arm")
    episodes: str | None = Field(None, description="the file in its runs that measures of episodes read")
    result: str | None = Field(None, description="its name in results.json; none: the name of the arm")

    @model_validator(mode="after")
    def _one(self) -> Arm:
        if self.of is not None and (self.recipe is not None or self.set or self.extra):
            raise ValueError("an arm with 'of' uses the runs of another arm, so leave out recipe, set and extra")
        return self


class _Stage(Config):
    """What all arms of a seed start from: a run, or data, such as worked answers (`PROVIDES["study_data"]`). In values
    that are set later, `{NAME}` stands for its folder (or file)."""

    recipe: str | None = Field(None, description="recipe file, relative to the study or to the working directory")
    set: dict[str, Any] = Field({}, description="keys of the recipe, dotted or nested")

    @property
    def data(self) -> StudyData | None:
        """The data that it makes in place of a run."""
        return next((d for name in DATA if (d := getattr(self, name)) is not None), None)

    @model_validator(mode="after")
    def _one(self) -> _Stage:
        if (self.recipe is not None) + sum(getattr(self, name) is not None for name in DATA) != 1:
            raise ValueError(f"a stage has either a recipe or {' or '.join(DATA)}")
        return self


DATA = {name: registry.load("study_data", name) for name in registry.names("study_data")}
_DATA_KEY = "in place of a run: data, drawn with the seed"
_KEYS: Any = {name: (kind | None, Field(None, description=_DATA_KEY)) for name, kind in DATA.items()}
Stage = create_model("Stage", __base__=_Stage, **_KEYS)


class ClaimConfig(Config):
    claim: str = Field(description="such as 'a > b on success'")
    over: Literal["seeds", "starts", "both"] = Field("both", description="what the interval generalises over")
    paired: bool = Field(True, description="compare each seed (and start) of one arm with the same one of the other")


class StudyConfig(Config):
    """A study file."""

    name: str = Field("", description="title of the study; none: the name of the file")
    about: str = Field("", description="the question, for the page")
    before: dict[str, Stage] = Field({}, description="stages that the arms of a seed share, in this order")
    recipe: str | None = Field(None, description="recipe file of all arms that have none")
    set: dict[str, Any] = Field({}, description="keys set in every arm")
    arms: dict[str, Arm] = Field({}, description="the arms by name")
    sweep: dict[str, list[Any]] = Field(
        {}, description="dotted keys with lists of values; every arm is run with every combination"
    )
    seeds: list[Seed] = Field([0, 1, 2], min_length=1, description="seeds of the runs")
    seed_keys: list[str] = Field(["seed", "model.seed"], description="recipe keys that the seed sets")
    budget: Budget = Field(description="equal for all arms: steps, updates, tokens or seconds")
    measures: dict[str, Measure] = Field(min_length=1, description="the measures by name")
    claims: list[str | ClaimConfig] = Field([], description="such as 'a > b on success'")
    correct: Literal["none", "holm"] = Field(
        "none", description="holm: all claims together are wrong with a probability of at most 0.05; none: each one is"
    )

    @field_validator("seeds")
    @classmethod
    def _different(cls, v: list[int]) -> list[int]:
        if len(set(v)) < len(v):
            raise ValueError("a seed is listed twice")
        return v


@dataclass(frozen=True)
class Spec:
    """An expanded arm: what to run, and how to read it."""

    name: str
    recipe: Path
    overrides: tuple[str, ...]
    runs: str  # the folder of its runs
    seed_keys: tuple[str, ...]
    extra: int  # steps beside the budget
    reads: Arm
    shared: tuple[str, ...] = ()  # earlier stages; `{NAME}` in `overrides` stands for what they made
    home: str = "runs"

    def folder(self, out: Path, seed: int) -> Path:
        return out / self.home / self.runs / f"seed-{seed}"

    def words(self, out: Path, seed: int) -> list[str]:
        """The overrides, with the paths of this seed filled in."""
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
    known = {p.stem: p for place in (shipped("studies"), Path("studies")) for p in place.glob("*.yaml")}
    if name not in known:
        raise RecipeError(f"there is no study '{name}' in studies/.{nearest(name, known) if known else ''}")
    return known[name]


def _flat(keys: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys, which merge with the recipe as files do. A mapping with a `kind` replaces the old
    one."""
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
    text = lambda v: v if isinstance(v, str) else json.dumps(v)
    return ",".join(f"{k.rsplit('.', 1)[-1]}={text(v)}" for k, v in keys.items())


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
                raise RecipeError(f"{file}: key 'arms.{name}': has no recipe, and neither has the study.")
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


def stages(study: StudyConfig, file: Path) -> list[tuple[str, StudyData | Spec]]:
    """The stages before the arms, in order. Each may use what earlier ones made."""
    out: list[tuple[str, StudyData | Spec]] = []
    for name, stage in study.before.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise RecipeError(f"{file}: key 'before.{name}': a name may only have letters, digits, '-' and '_'.")
        known = tuple(n for n, _ in out)
        if (made := stage.data) is not None:
            out.append((name, made))
            continue
        beside = file.parent / str(stage.recipe)
        recipe = beside if beside.is_file() else Path(str(stage.recipe))
        words = _words(_flat(stage.set))
        out.append((name, Spec(name, recipe, words, name, tuple(study.seed_keys), 0, Arm(), known, "before")))
    return out


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


def train_stage(spec: Spec, out: Path, seed: int) -> pipeline.Stage:
    """One run as a stage. The outputs of an arm are the files that measures read. The output of an earlier stage is its
    weights, which later ones read."""
    method, config = resolved(spec, out, seed)

    def announced(folder: Path) -> Mapping[str, Any] | None:
        print(f"study: {spec.name}, seed {seed}", file=sys.stderr, flush=True)
        return made.make(folder)

    outputs = None if spec.home == "before" else ("recipe.yaml", "metrics.jsonl", "evaluation", "results.json")
    name = f"{spec.home}/{spec.runs}/seed-{seed}"
    made = training_stage(name, config, out, outputs=outputs, grows=("steps",), method=method)
    return replace(made, make=announced)


def bring(stage: pipeline.Stage, out: Path, seed: int, title: str) -> bool:
    """Finish one stage. False if another process is working on it."""
    try:
        pipeline.run_stages(out, [stage])
    except RunBusy:
        return False
    except TrailmarkError as e:
        kind = Unfinished if e.code == 1 else RunError
        raise kind(f"{title}, seed {seed}: {e}") from e
    gc.collect()  # free the memory of this arm's models before the next arm
    return True


def train_one(spec: Spec, out: Path, seed: int) -> bool:
    title = f"stage '{spec.name}'" if spec.home == "before" else f"arm '{spec.name}'"
    return bring(train_stage(spec, out, seed), out, seed, title)


def prepare(shared: Sequence[tuple[str, StudyData | Spec]], out: Path, seed: int, poll: float) -> None:
    """Make what the arms of a seed share, or wait for the process that makes it."""
    for name, stage in shared:
        if isinstance(stage, Spec):
            work = partial(train_one, stage, out, seed)
        else:
            work = partial(bring, stage.stage(f"before/{name}/seed-{seed}", seed), out, seed, f"stage '{name}'")
        while not work():
            time.sleep(poll)


def run_study(
    path: Path, overrides: Sequence[str] = (), out: Path | None = None, resume: bool = True, poll: float = 1.0
) -> tuple[dict[str, Any], Path]:
    """Run what is not finished, measure it, decide the claims, and write the results. Returns the result and its
    folder."""
    from trailmark.evaluate.pages import draw
    from trailmark.evaluate.tables import study_markdown

    study, specs, claims = load_study(path, overrides)
    out = out or Path("runs/studies") / study.name
    if not resume and out.is_dir() and any(out.iterdir()):
        raise RunError(f"{out} is not empty: go on with --resume, or choose another directory with --out DIR.")
    shared = stages(study, path)
    jobs = [(s, seed) for seed in study.seeds for s in specs if s.reads.of is None]
    for spec, seed in [*((s, seed) for _, s in shared if isinstance(s, Spec) for seed in study.seeds), *jobs]:
        resolved(spec, out, seed)  # find a mistake in the last arm before the first one runs
    gc.freeze()  # what is loaded by now stays, so looking for garbage between two arms is fast
    try:
        _train_all(jobs, shared, out, poll)
    finally:
        gc.unfreeze()
    result = {
        "name": study.name, "about": study.about, "file": path.name, "overrides": list(overrides),
        "trailmark": __version__, "seeds": study.seeds, "budget": study.budget.model_dump(exclude_none=True),
        **collect(study.measures, study.budget, specs, claims, study.seeds, out, study.correct),
    }  # fmt: skip
    atomic_write(out / "study.json", (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
    atomic_write(out / "table.md", study_markdown(result).encode())
    draw(result, out)
    return result, out


def _train_all(
    jobs: Sequence[tuple[Spec, int]], shared: Sequence[tuple[str, StudyData | Spec]], out: Path, poll: float
) -> None:
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
