"""Who plays a run is asked of its method: a method of one's own is evaluated by default, wherever its task lies now."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.evaluate.players import plays_alone

WORLD = '''
from pathlib import Path
from trailmark.errors import TaskError
from trailmark.tasks.solved import Solved

class Placed(Solved):
    """A bandit that lies in a folder."""
    def __init__(self, folder):
        if not Path(folder).is_dir():
            raise TaskError(f"there is no folder {folder}")
        super().__init__(kind="bandit", rewards=[0, 1])
'''
METHOD = '''
from trailmark.methods.policy_gradient import PolicyGradientMethod

class Mine(PolicyGradientMethod):
    """A method that no list of the library knows. It evaluates on two starts, whatever it is asked for."""

    @classmethod
    def starts(cls, config, source, split, n, seed):
        return list(source.tasks(split, n, seed))[:2]

class Talking(Mine):
    @classmethod
    def protocol(cls, config, source):
        async def speak(desk):
            while not desk.over:
                seen = desk.observation
                await desk.act((await desk.ask("policy", text=seen.text, allowed=seen.labels)).text)
        return speak
'''
RECIPE = """
method: own_method:{method}
out: {method}
steps: 1
prompts_per_step: 2
n: 2
task: {{name: "placed:Placed", options: {{folder: here}}}}
model: {{name: tiny, shape: {{layers: 1, width: 16, heads: 2, context: 64}}}}
engine: {{max_num_seqs: 4, max_len: 64}}
"""


@pytest.mark.parametrize("method", ["Mine", "Talking"])
def test_a_method_of_ones_own_is_evaluated(tmp_path, monkeypatch, method):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("placed.py").write_text(WORLD)
    Path("own_method.py").write_text(METHOD)
    Path("r.yaml").write_text(RECIPE.format(method=method))
    Path("here").mkdir()
    call = lambda *words: CliRunner().invoke(app, list(words))
    done = call("train", "r.yaml")
    assert done.exit_code == 0, done.output
    Path("here").rename("there")
    recipe = {"method": f"own_method:{method}", "task": {"name": "placed:Placed", "options": {"folder": "here"}}}
    assert plays_alone(recipe, {"folder": "there"}) == (method == "Mine")
    lost = call("eval", method)
    assert lost.exit_code == 2 and "there is no folder here" in lost.stderr
    found = call("eval", method, "folder=there", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["rows"][0]["scored"] == 2  # the starts are the method's
