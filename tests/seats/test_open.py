"""One module constructs engines: a tree of syntax for each file of the library."""

import ast
from pathlib import Path

import pytest

import trailmark
from trailmark.config import EngineConfig, ModelConfig, ModelShape
from trailmark.models.load import load_model
from trailmark.seats.open import open_engine, watching

ROOT = Path(trailmark.__file__).parent
ENGINES = {"LocalEngine", "HttpEngine", "ScriptedEngine", "PersonEngine"}


def constructed(text):
    """The constructors of engines that a module calls, under whatever name it imported them."""
    tree = ast.parse(text)
    named = {a.asname or a.name: a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    called = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    found = [f.attr if isinstance(f, ast.Attribute) else named.get(f.id, f.id) for f in called
             if isinstance(f, ast.Attribute | ast.Name)]  # fmt: skip
    return {name for name in found if name == "engine_copy" or (name.endswith("Engine") and name[0].isupper())}


def test_a_constructor_is_found_under_any_name():
    text = "from a import LocalEngine as L\nimport b\nL(1)\nb.HttpEngine(2)\nengine_copy(3)\nsearch_engine(4)\n"
    assert constructed(text) == {"LocalEngine", "HttpEngine", "engine_copy"}


def test_one_module_constructs_engines():
    found = {str(f.relative_to(ROOT)): constructed(f.read_text()) for f in ROOT.rglob("*.py")}
    assert {name: made for name, made in found.items() if made} == {"seats/open.py": ENGINES | {"engine_copy"}}
    defined = {n.name for f in (ROOT / "engines").glob("*.py") for n in ast.walk(ast.parse(f.read_text()))
               if isinstance(n, ast.ClassDef) and any(getattr(b, "id", "") == "Engine" for b in n.bases)}  # fmt: skip
    assert defined == ENGINES


def test_an_opened_engine_can_be_watched():
    lm, seen = load_model(ModelConfig(shape=ModelShape(layers=1, width=32, heads=2, context=64))), []
    with pytest.raises(ZeroDivisionError), watching(seen.append):
        engine = open_engine(lm, EngineConfig(max_num_seqs=2))
        open_engine(lm, EngineConfig(max_num_seqs=2), plays=False)
        raise ZeroDivisionError
    open_engine(lm, EngineConfig(max_num_seqs=2))
    assert seen == [engine]
