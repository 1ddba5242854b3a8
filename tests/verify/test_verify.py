"""A sound run is verified; a run with a planted defect is not, and the report names the defect."""

import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr
from typer.testing import CliRunner

from trailmark import methods
from trailmark.config import dump, resolve
from trailmark.engines.local import LocalEngine
from trailmark.methods import sft
from trailmark.methods.policy_gradient import PolicyGradientMethod
from trailmark.models import forward
from trailmark.models import layout as pack
from trailmark.models.tiny import tiny_tokenizer
from trailmark.runs.store import Run, read_segment, segments, write_segment
from trailmark.samples import build_samples
from trailmark.types import Player, Sample, SamplingLaw, Scored, Turn
from trailmark.verify import verify
from trailmark.verify.data import rank_correlation
from trailmark.verify.masks import turn_defects

TINY = {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 256}}
KEPT = {"every": 1, "keep_last": 9}
TAXI = {"name": "taxi", "options": {"mode": "pickup", "history": "none", "menu": False, "horizon": 6}}
POLICY_GRADIENT = {
    "taxi": {"task": TAXI, "prompts_per_step": 4, "n": 4, "credit": "returns", "mean": "decision",
             "objective": {"kind": "weighted_logp"}},
    "talk": {"task": {"name": "talk_world:Talk"}, "prompts_per_step": 3, "n": 3, "mean": "sequence", "sampling":
             {"max_tokens": 5, "temperature": 0.9}, "model": {**TINY, "seed": 3}},
}  # fmt: skip


def train(out, **recipe):
    method = methods.get_method(recipe["method"])
    whole = {"out": str(out), "model": TINY, "learner": {"optim": {"lr": 3e-3}}, "checkpoint": KEPT, **recipe}
    config = resolve(whole, method.Config)
    with Run.create(out, dump(config)) as run:
        method.train(config, run)
    return out


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Three sound runs: one-token decisions, conversations of several turns, imitation."""
    root = tmp_path_factory.mktemp("sound")
    engine = {"max_num_seqs": 16, "max_len": 256}
    for name, recipe in POLICY_GRADIENT.items():
        train(root / name, method="policy_gradient", steps=4, engine=engine, **recipe)
    rows = [{"messages": [{"role": "user", "content": c}, {"role": "assistant", "content": c.upper() * 3},
                          {"role": "user", "content": "again"},
                          {"role": "assistant", "content": c}]} for c in "abcdef"]  # fmt: skip
    (root / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    train(root / "sft", method="sft", steps=3, batch=4, data=str(root / "data.jsonl"))
    return root


@pytest.fixture
def copy(sound, tmp_path):
    return lambda name: shutil.copytree(sound / name, tmp_path / name)


def edit(run, change, segment=None):
    """Rewrite stored episodes: `change` gets each episode, or all of a segment when it says so."""
    for path in segments(run / "episodes"):
        if segment in (None, int(path.stem)):
            write_segment(run / "episodes", int(path.stem), [change(e) for e in read_segment(path)])


def on_turns(change):
    return lambda e: dataclasses.replace(e, turns=tuple(change(t) for t in e.turns))


def failed(report):
    return {c.name for c in report.checks if c.status == "fail"}


# ---------------------------------------------------------------------------------------------------------- sound runs


@pytest.mark.parametrize("name", ["taxi", "talk"])
def test_a_sound_online_run_passes_every_check(sound, name):
    report = verify(sound / name)
    assert [(c.name, c.status, c.what) for c in report.checks if c.status != "pass"] == []
    assert list(report["sampler"].numbers["versions"]) == ["0", "1", "2", "3"]
    assert max(v["largest"] for v in report["sampler"].numbers["versions"].values()) < 1e-5
    assert report["step one"].numbers["largest"] == report["step one"].numbers["kl"] == 0.0
    assert max(report["one gradient"].numbers["relative"].values()) < 1e-5
    assert report["replay"].numbers["prompts_compared"] == report["replay"].numbers["episodes"] > 30
    assert report["rewards"].numbers["sum_of_turns"] == 1.0 and report["groups"].numbers["smallest"] in (3, 4)


def test_a_run_of_adapters_and_one_that_keeps_only_its_end(tmp_path):
    """With LoRA the first and the newest weights are available. With one checkpoint stale weights cannot be noticed,
    and the report says so."""
    more = {"engine": {"max_num_seqs": 16, "max_len": 256}, **POLICY_GRADIENT["taxi"]}
    model = {**TINY, "lora": {"rank": 2}}
    adapted = verify(train(tmp_path / "lora", method="policy_gradient", steps=2, model=model, **more))
    assert adapted.ok and list(adapted["sampler"].numbers["versions"]) == ["0", "1"]
    end = verify(train(tmp_path / "end", method="policy_gradient", steps=2, checkpoint={"every": 0}, **more))
    assert end.ok and list(end["sampler"].numbers["versions"]) == ["0"] and "stale weights" in end["sampler"].notes[0]


@pytest.mark.parametrize("opening", ["apart", "joined"])
def test_alfworld_with_its_instruction_apart_is_replayed_as_it_was_played(tmp_path, opening):
    sys.path.append(str(Path(__file__).parents[1] / "tasks" / "alfworld"))
    from small_home import write_download

    options = {"games": str(write_download(tmp_path / "games")), "mode": "text", "opening": opening, "horizon": 2}
    shape = {"layers": 1, "width": 16, "heads": 2, "context": 2048}
    run = train(
        tmp_path / "run", method="policy_gradient", steps=1, task={"name": "alfworld", "options": options},
        prompts_per_step=2,
        n=2,
        sampling={"max_tokens": 4}, engine={"max_num_seqs": 4, "max_len": 2048}, model={"name": "tiny", "shape": shape},
    )  # fmt: skip
    replay = next(c for c in verify(run).checks if c.name == "replay")
    assert replay.status == "pass" and replay.numbers["prompts_compared"] == 4, replay


def test_two_seats_with_the_methods_own_protocol(copy, monkeypatch):
    """If a method names its protocol, the prompts of every seat are compared. If it does not, the report says so."""

    def rename(e):
        turns = tuple(dataclasses.replace(t, seat="adviser") if i == 0 else t for i, t in enumerate(e.turns))
        return dataclasses.replace(e, turns=turns)

    async def by_turns(desk):
        while not desk.over:
            seen, seat = desk.observation, "policy" if desk.turns else "adviser"
            turn = await desk.ask(seat, text=seen.text, allowed=seen.labels)
            await desk.act(turn.text)

    run = copy("taxi")
    edit(run, rename)
    silent = verify(run)["replay"]
    assert silent.status == "pass" and "names no protocol" in silent.notes[0]
    monkeypatch.setattr(PolicyGradientMethod, "protocol", classmethod(lambda cls, config, source: by_turns))
    told = verify(run)["replay"]
    assert told.status == "pass" and told.numbers["prompts_compared"] == told.numbers["episodes"]
    edit(run, on_turns(lambda t: dataclasses.replace(t, prompt=(*t.prompt, 5)) if t.seat == "adviser" else t))
    assert "seat 'adviser' is now shown something else" in verify(run)["replay"].what


def test_a_sound_imitation_passes_what_applies(sound):
    report = verify(sound / "sft")
    status = {c.name: c.status for c in report.checks}
    assert {n for n, s in status.items() if s == "pass"} == {"recipe", "records", "checkpoint", "masks", "one gradient"}
    assert "fail" not in status.values() and all(c.what for c in report.checks)
    rows = report["masks"].numbers
    assert rows["rows"] == 6 and rows["trained"] == 6 * (4 + 2)  # three letters and an end, one letter and an end


def test_the_command(sound, copy, tmp_path):
    from trailmark.commands.app import app

    run = copy("taxi")
    done = CliRunner().invoke(app, ["verify", str(run), "--json", "--limit", "20"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said == json.loads((run / "verify.json").read_text())
    assert (
        said["ok"] and said["method"] == "policy_gradient" and said["fail"] == 0 and said["pass"] == len(said["checks"])
    )
    assert all(c.keys() == {"name", "status", "what", "numbers", "notes"} for c in said["checks"])
    first = read_segment(run / "episodes" / "000001.jsonl")
    write_segment(run / "episodes", 1, [dataclasses.replace(e, group="all one") for e in first])
    done = CliRunner().invoke(app, ["verify", str(run)])
    assert done.exit_code == 1 and "wrong group" in done.output and "failed: groups" in done.output
    for nothing in (tmp_path / "nowhere", tmp_path):
        done = CliRunner().invoke(app, ["verify", str(nothing)])
        assert done.exit_code == 2 and "is not a run" in done.output


# ------------------------------------------------------------------------------------------- defects of stored episodes


def late(t):
    """The border of prompt and turn one token late: the first written token is taken for a part of the prompt."""
    if len(t.tokens) < 2:
        return t
    return dataclasses.replace(
        t, prompt=t.prompt + t.tokens[:1], tokens=t.tokens[1:], logp=t.logp[1:], logq=t.logq[1:]
    )  # fmt: skip


def early(t):
    """One token early: the last token of the prompt is taken for written."""
    return dataclasses.replace(
        t, prompt=t.prompt[:-1], tokens=t.prompt[-1:] + t.tokens, logp=(-1.0, *t.logp), logq=(-1.0, *t.logq)
    )  # fmt: skip


@pytest.mark.parametrize(("name", "shift"), [("talk", late), ("talk", early), ("taxi", early)])
def test_borders_off_by_one(copy, name, shift):
    run = copy(name)
    edit(run, on_turns(shift))
    report = verify(run)
    assert {"turns", "replay"} <= failed(report)
    assert "the border of prompt and turn is off" in report["turns"].what
    assert "shown something else" in report["replay"].what


def test_ends_of_turns():
    """A turn that stopped holds what it stopped at: the end of turn, or the rest of a stop text; and no more than
    that."""
    tokenizer = tiny_tokenizer()
    ids, eos = tuple(tokenizer.encode("abc")), tokenizer.eos_token_id
    turn = Turn("policy", (1,), (*ids, eos), stop="stopped", text="abc")
    defects = lambda **changes: turn_defects(dataclasses.replace(turn, **changes), tokenizer, {eos})
    assert defects() == defects(text="ab", tokens=ids) == defects(stop="length", tokens=ids) == []
    assert "an end that is never trained" in defects(tokens=ids)[0]
    assert "the end of the turn is off" in defects(tokens=(*ids, *ids, eos))[0]
    assert "border" in defects(tokens=(*ids[1:], eos))[0] and "border" in defects(text="xabc")[0]
    assert "differ in number" in defects(logp=(-1.0,) * 3)[0]
    assert "not among those allowed" in defects(law=SamplingLaw(allowed=(eos, 7)))[0]


def test_turns_of_a_plain_chat_server_have_no_tokens(copy):
    """A server that gives text alone stores turns without tokens. Those of a model in this process must have them."""

    def by_server(e, kind):
        players = {**e.players, "helper": Player(kind, "served")}
        first = dataclasses.replace(e.turns[0], seat="helper", tokens=(), logp=(), logq=())
        return dataclasses.replace(e, players=players, turns=(first, *e.turns[1:]))

    run = copy("talk")
    turns = verify(run)["turns"].numbers["turns"]
    edit(run, lambda e: by_server(e, "remote"))
    report = verify(run)["turns"]
    assert report.status == "pass" and 0 < report.numbers["turns"] < turns
    edit(run, lambda e: by_server(e, "frozen"))
    assert "a turn without a written token" in verify(run)["turns"].what


def test_members_of_different_starts(copy):
    run = copy("taxi")
    path = segments(run / "episodes")[1]
    episodes = read_segment(path)
    a, b = episodes[0], next(e for e in episodes if e.task.data != episodes[0].task.data)
    groups = {a.id: b.group, b.id: a.group}
    edit(run, lambda e: dataclasses.replace(e, group=groups.get(e.id, e.group)), 2)
    report = verify(run)
    assert failed(report) == {"groups"} and "wrong group: members play different tasks" in report["groups"].what
    edit(run, lambda e: dataclasses.replace(e, group="g", task=a.task), 2)  # and a group id that all share
    report = verify(run)
    assert "different first prompts" in report["groups"].what and "replay" in failed(report)


def test_stale_weights_by_hand(copy):
    """Episodes of version 1 claim to be of version 3, whose weights are available."""
    run = copy("taxi")
    old = read_segment(segments(run / "episodes")[1])
    assert {t.version for e in old for t in e.turns} == {1}
    newer = on_turns(lambda t: dataclasses.replace(t, version=3))
    write_segment(run / "episodes", 4, [dataclasses.replace(newer(e), id="x" + e.id, group="x" + e.group) for e in old])
    (run / "annotations/advantage/000004.jsonl").unlink()  # of the episodes that were there
    report = verify(run)
    assert failed(report) == {"sampler"}
    assert "stale" in report["sampler"].what and "version 1, which is older, explains" in report["sampler"].what


def test_stale_weights_of_an_engine_that_is_never_told(tmp_path, monkeypatch):
    """A sampler with its own copy that counts versions but never takes new weights."""

    async def publish(self, version, weights=None):
        self.version = version

    monkeypatch.setattr(LocalEngine, "publish", publish)
    engine = {"max_num_seqs": 16, "max_len": 256, "dtype": "float64"}
    report = verify(
        train(tmp_path / "run", method="policy_gradient", steps=3, engine=engine, **POLICY_GRADIENT["taxi"])
    )
    assert failed(report) == {"sampler"}
    assert "version 0, which is older, explains the log-probs of version 2" in report["sampler"].what


def test_an_edited_reward(copy):
    run = copy("taxi")
    chosen = read_segment(segments(run / "episodes")[2])[5]
    better = {"self": Scored(0.95, True)}
    edit(run, lambda e: dataclasses.replace(e, outcomes=better) if e.id == chosen.id else e, 3)
    report = verify(run)
    assert failed(report) == {"rewards", "replay"}
    assert "not the sum of its turns' rewards" in report["rewards"].what and chosen.id in report["rewards"].what
    assert "outcome differs from the stored one" in report["replay"].what and chosen.id in report["replay"].what
    turns = (*chosen.turns[:-1], dataclasses.replace(chosen.turns[-1], reward=chosen.turns[-1].reward + 1))
    outcomes = {"self": Scored(chosen.outcome.reward + 1, True)}
    consistent = dataclasses.replace(chosen, turns=turns, outcomes=outcomes)  # only the world can notice
    edit(run, lambda e: consistent if e.id == chosen.id else e, 3)
    report = verify(run)
    assert failed(report) == {"replay"} and "replayed reward differs" in report["replay"].what


def test_rewards_that_teach_nothing(copy):
    run = copy("taxi")
    flat = lambda e: dataclasses.replace(
        on_turns(lambda t: dataclasses.replace(t, reward=0.0))(e), outcomes={"self": Scored(0.0)}
    )
    edit(run, flat)
    found = verify(run)["rewards"]
    assert found.status == "pass" and "the reward is constant: all 64 plays got 0" in " ".join(found.notes)


def test_rank_correlation_against_scipy():
    draw = np.random.default_rng(0)
    x = draw.integers(0, 9, 60).astype(float)
    y = x + draw.normal(size=60) * 4
    rho, low, high = rank_correlation(x, y)
    assert rho == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    half = 1.96 * math.sqrt((1 + rho**2 / 2) / 57)
    assert (math.atanh(low), math.atanh(high)) == pytest.approx((math.atanh(rho) - half, math.atanh(rho) + half))


# ----------------------------------------------------------------------------------- defects of the mask builder


def changed(change):
    """`build_samples` with a defect put into every sample."""

    def build(*args, **kwargs):
        return [change(s) for s in build_samples(*args, **kwargs)]

    return build


def rolled(by):
    masks = ("weight", "turn", "old", "law", "written", "step")
    return lambda s: dataclasses.replace(
        s, streams={n: np.roll(v, by) if n in masks else v for n, v in s.streams.items()}
    )


def prompt_too(s):
    weight = s.streams["weight"].copy()
    weight[1] = weight.max()
    return dataclasses.replace(s, streams={**s.streams, "weight": weight}, mass={"weight": float(weight.sum())})


def padded(s):
    """Two tokens of padding, which is the end of turn, with weight."""
    streams = {n: np.r_[v, [v[-1]] * 2] for n, v in s.streams.items()}
    streams["turn"][-2:] = -1
    mass = {"weight": float(streams["weight"].sum())}
    return Sample(np.r_[s.tokens, [258, 258]], streams, mass, s.laws, s.episode, s.group)


def endless(s):
    weight = s.streams["weight"].copy()
    weight[-1] = 0.0
    return dataclasses.replace(s, streams={**s.streams, "weight": weight})


@pytest.mark.parametrize(
    ("defect", "name"),
    [
        (rolled(-1), "it begins 1 token early"),
        (rolled(1), "the mask is not on the written tokens"),
        (prompt_too, "tokens that the seat did not write are in the loss"),
        (padded, "padding"),
        (endless, "written tokens are left out of the loss"),
        (lambda s: dataclasses.replace(s, mass={"weight": 2.0 * s.mass["weight"]}), "do not add up to its mass"),
    ],
    ids=["early", "late", "prompt", "pad", "end", "mass"],
)
def test_masks_that_are_wrong(sound, defect, name):
    report = verify(sound / "talk", build=changed(defect))
    assert "masks" in failed(report) and name in report["masks"].what


def test_a_mask_of_imitation_that_is_off(sound, monkeypatch):
    own = sft.conversation_samples

    def shifted(*args):
        return [[dataclasses.replace(s, streams={"weight": np.roll(s.streams["weight"], -1)}) for s in row]
                for row in own(*args)]  # fmt: skip

    monkeypatch.setattr(sft, "conversation_samples", shifted)
    report = verify(sound / "sft")
    assert failed(report) == {"masks"} and "does not end with the end of the turn" in report["masks"].what


# ---------------------------------------------------------------------------------------- defects of what is computed


def test_packing_that_leaks(sound, monkeypatch):
    own = pack.lay_out

    def leaky(samples, shape="tree", multiple=1, budget=None, near=None):
        made = own(samples, shape, multiple)
        return dataclasses.replace(made, end=np.full_like(made.end, made.end.max())) if shape == "flat" else made

    monkeypatch.setattr(pack, "lay_out", leaky)
    report = verify(sound / "talk")
    assert failed(report) == {"one gradient"} and "packing 'flat/" in report["one gradient"].what


def test_a_packing_that_changes_between_scoring_and_training(sound, monkeypatch):
    shapes = iter(["rows", "tree"] * 100)
    monkeypatch.setattr(forward, "choose_shape", lambda wish, lm: next(shapes) if wish == "auto" else wish)
    report = verify(sound / "talk")
    assert failed(report) == {"step one"} and "ratio at step one is not 1" in report["step one"].what


# ------------------------------------------------------------------------------------------------- defects of the files


def test_a_truncated_checkpoint(copy):
    run = copy("taxi")
    weights = run / "checkpoints" / "000004" / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    report = verify(run)
    assert failed(report) == {"checkpoint"}  # the other checks use older weights
    assert "damaged (truncated?) (000004/policy/model.safetensors" in report["checkpoint"].what


def test_a_checkpoint_of_other_weights(copy):
    """Tensors that fit but are not finite; half an optimiser file; a state of another step."""
    from safetensors.torch import load_file, save_file

    run = copy("taxi")
    root = run / "checkpoints" / "000004"
    tensors = load_file(root / "policy" / "model.safetensors")
    name = next(n for n in tensors if "mlp" in n)
    save_file({**tensors, name: tensors[name] * math.nan}, root / "policy" / "model.safetensors", {"format": "pt"})
    (root / "state.json").write_text((root / "state.json").read_text().replace('"step": 4', '"step": 3'))
    said = verify(run)["checkpoint"].what
    assert "a tensor is not finite" in said and name in said and "another step than its folder" in said


def test_records_with_gaps(copy):
    run = copy("taxi")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:1] + lines[2:]))
    segment = run / "episodes" / "000002.jsonl"
    segment.write_bytes(segment.read_bytes()[:-50])
    report = verify(run)
    assert failed(report) == {"records"}
    assert "line 2 is of step 3" in report["records"].what and "000002.jsonl" in report["records"].what


def test_annotations_that_are_damaged_or_of_something_else(copy):
    run = copy("taxi")
    file = run / "annotations/advantage/000002.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    first = json.loads(lines[0])
    turns = len(next(e for e in read_segment(run / "episodes/000002.jsonl") if e.id == first["episode"]).turns)

    def said(*new, tail=""):
        file.write_text("".join([*new, *lines[len(new) :]]) + tail)
        report = verify(run)
        assert failed(report) == {"records"}
        return report["records"].what

    wrong = lambda **more: json.dumps({**first, **more}) + "\n"
    many = said(wrong(values=[1.0, 2.0, 3.0]))
    assert f"{file}:1: has 3 numbers where turn {first['turn']} of episode '{first['episode']}' needs 1" in many
    assert f"{file}:1: is about episode 'other', which 000002.jsonl does not hold" in said(wrong(episode="other"))
    assert f"{file}:1: is about turn 99 of episode '{first['episode']}', which has {turns}" in said(wrong(turn=99))
    assert f"{file}:1: is called 'value' in a folder of 'advantage'" in said(wrong(name="value"))
    assert f"{file}:2: says again what line 1 says" in said(lines[0], lines[0])
    assert f"{file}:1: the line is not valid JSON" in said("{\n")
    assert f"{file}:{len(lines) + 1}: the line is cut off" in said(tail='{"episode"')
    file.write_text("".join(x for x in lines if json.loads(x)["episode"] != first["episode"]))
    report = verify(run)
    (note,) = report["records"].notes
    assert failed(report) == set() and note.startswith(f"{file}: 1 of ") and "have no advantage" in note
    file.write_text("".join(lines))
    assert verify(run).ok and not verify(run)["records"].notes


def test_a_recipe_that_no_longer_resolves(copy):
    run = copy("taxi")
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("prompts_per_step:", "prompts_per_stp:"))
    report = verify(run)
    assert failed(report) == {"recipe"} and "prompts_per_stp" in report["recipe"].what
    assert report["sampler"].status == "skip" and "does not resolve" in report["sampler"].what
