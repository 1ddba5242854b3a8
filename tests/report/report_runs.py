"""Runs made by hand: two seats, steps, forced tokens, annotations, evaluations, as on disk."""

from __future__ import annotations

from pathlib import Path

from trailmark.models.tiny import tiny_tokenizer
from trailmark.runs.episode_json import to_json
from trailmark.runs.store import Run, write_segment
from trailmark.types import Annotation, Episode, Failed, Player, SamplingLaw, Scored, Task, Turn

WORDS = tiny_tokenizer()
EVIL = "</script><img src=x onerror=\"document.body.dataset.owned='yes'\"><b>bold</b> <!-- é中🙂"
RECIPE = "method: policy_gradient\nname: made\nout: runs/made\nsteps: {steps}\ncredit: returns\ngamma: 0.5\n"


def ids(text: str) -> tuple[int, ...]:
    return tuple(WORDS.encode(text, add_special_tokens=False))


def turn(seat: str, prompt: str, text: str, forced: str = "", **more) -> Turn:
    tokens = ids(text)
    logp = tuple(-(0.1 + 0.7 * (k % 9)) for k in range(len(tokens)))
    return Turn(
        seat, ids(prompt), tokens, logp, tuple(x / 2 for x in logp), forced=ids(forced), text=forced + text, **more
    )


def episode(name: str, start: int = 0, win: bool = True, say: str = "Go north, then east.", group: str = "") -> Episode:
    """The reflector advises, the policy acts with one label; two such rounds. Rewards of the policy: -1, then 4 or
    -2."""
    law = SamplingLaw(allowed=ids("0123"))
    last = 4.0 if win else -2.0
    turns = (
        turn("reflector", f"Map {start}: T..P\nThought:", say, forced=" Well.", stop="stopped"),
        turn(
            "policy",
            f"Map {start}: T..P\n{say}\nAction:",
            "2",
            law=law,
            stop="length",
            action="2",
            reward=-1.0,
            version=3,
        ),
        turn(
            "reflector", "\nMap: .T.P\nThought:", " Nearly there.", continues=0, steps=((0, 7), (7, 14)), stop="length"
        ),
        turn(
            "policy",
            "\nMap: .T.P\nAction:",
            "1",
            law=law,
            continues=1,
            stop="length",
            action="1",
            reward=last,
            version=3,
        ),
    )
    return Episode(
        name, Task(f"start-{start}", data={"state": start}), group or f"g-{start}", turns,
        {"self": Scored(last - 1.0, win)}, terminated=True,
        players={"reflector": Player("frozen", "tiny"), "policy": Player("trained", "tiny", version=3)},
    )  # fmt: skip


def make_run(
    path: Path, steps: int = 40, done: int = 40, checkpoint: bool = True, say: str = "Go north, then east."
) -> Run:
    """A run with `done` of `steps` steps; its logged values follow a fixed wave."""
    with Run.create(path, RECIPE.format(steps=steps)) as run:
        for step in range(1, done + 1):
            metrics = {"reward": step / 20 - 1 + 0.2 * (step % 3), "success": min(1.0, step / 50), "lr": 0.001,
                       "entropy": 1.5 - step / 40, "kl_old": 0.001 * (step % 4), "failed": int(step == 7)}  # fmt: skip
            if step % 10 == 0:
                metrics |= {"eval/success": step / 45, "eval/reward": step / 30}
            run.log(step, metrics, {"seconds": 0.5, "collect_seconds": 0.25, "collect_tokens": 100})
        for step in (1, done // 2, done):
            rows = [episode(f"{step}:{k}", k % 2, (k + step) % 2 == 0, say) for k in range(4)]
            if step == 1:
                broken = episode("1:broken", 5)
                rows.append(Episode(broken.id, broken.task, "g", broken.turns[:1], {"self": Failed("engine: gone")}))
            write_segment(run.episodes_dir, step, rows)
            notes = [
                Annotation(e.id, "value", "token", (0.5,), turn=3, source="critic") for e in rows if len(e.turns) > 3
            ]
            whole = [e for e in rows if len(e.turns) > 3]
            for e in whole:  # what the method would have stored: returns to go of the policy, discounted by a half
                last = e.turns[3].reward
                for turn, value in ((1, e.turns[1].reward + last / 2), (3, last)):
                    notes.append(Annotation(e.id, "advantage", "turn", (value,), turn, "return to go"))
            run.annotate(step, notes)
    if checkpoint:
        WORDS.save_pretrained(path / f"checkpoints/{done:06d}/policy")
    return run


def add_evaluation(run: Run, name: str, wins: int, n: int = 10) -> None:
    folder = run.path / "evaluation"
    folder.mkdir(exist_ok=True)
    rows = [episode(f"{name}:{k}", k, k < wins) for k in range(n)]
    (folder / f"{name}.jsonl").write_text("".join(to_json(e) + "\n" for e in rows))
