"""`trailmark stages` for every staged method: it lists, makes and makes again."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trailmark.commands.app import app

MODEL = {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 96}}
ROUNDS = {
    "method": "oreo_rounds", "out": "run", "steps": 2, "training": 1, "batch": 2, "model": MODEL,
    "task": {"name": "arith", "options": {"level": 1}}, "collect": {"prompts": 2, "n": 2,
    "sampling": {"max_tokens": 4}},
    "engine": {"max_num_seqs": 4, "max_len": 96},
}  # fmt: skip
REFLECT = {"method": "reflect", "out": "run", "model": MODEL, "task": {"name": "taxi"}}


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(recipe, *words):
        Path("r.yaml").write_text(yaml.safe_dump(recipe))
        done = CliRunner().invoke(app, ["stages", "r.yaml", *words])
        assert "Traceback" not in done.output
        return done.exit_code, done.stdout.splitlines(), " ".join(done.stderr.split())

    return run


def test_rounds_of_oreo(shell):
    states = lambda *words: [line.split(maxsplit=1) for line in shell(ROUNDS, *words)[1]]
    names = ["collect-1", "round-1", "collect-2", "round-2"]
    assert states() == [[name, "to do"] for name in names]
    code, said, _ = shell(ROUNDS, "--only", "collect", "--only", "round")
    assert code == 0 and [line.split(":")[0] for line in said] == names[:2]
    assert not Path("run/metrics.jsonl").exists()  # the rounds are not logged before all of it is made
    assert [state for _, state in states()] == ["done", "done", "to do", "to do"]
    assert states("critic_from=fresh")[1] == ["round-1", "done"]
    assert states("collect.n=3")[0][1] == "to do again: key 'collect.n' was 2 and is 3"
    assert states("collect.n=3")[1][1] == "done, and looked at again after collect-1"
    code, _, why = shell(ROUNDS, "--only", "round-2")
    assert code == 2 and "stage 'round-2' needs 'collect-2', which is not done yet" in why
    episodes = Path("run/episodes/000001.jsonl").read_bytes()
    code, said, why = shell(ROUNDS, "--redo", "collect")
    assert code == 0 and "stage 'collect-1' is made again: you want it again" in why
    assert Path("run/episodes/000001.jsonl").read_bytes() == episodes  # so the round is still done
    assert [state for _, state in states()] == ["done", "done", "to do", "to do"]


def test_imitation_of_reflect(shell):
    assert shell(REFLECT)[1] == ["reflector       to do", "policy          to do"]
    assert shell({**REFLECT, "reflect": False})[1] == ["policy          to do"]
    code, _, why = shell({**REFLECT, "sft": {"reflector": 0, "policy": 0}})
    assert code == 2 and "its method 'reflect' has no stages" in why
    code, _, why = shell(REFLECT, "--only", "polcy")
    assert code == 2 and "there is no stage 'polcy' of round 1 in this recipe. Did you mean 'policy'?" in why
