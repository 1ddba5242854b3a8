"""Every command that stands on a line of its own in the README, the pages, the recipes and the studies parses: the
command and its options exist, and the recipe that it names is found."""

import re
import shlex

import click
import pytest
import typer
from from_pages import ROOT

from trailmark.commands.app import app
from trailmark.recipe import find_recipe

COMMANDS = typer.main.get_command(app)
FOLDERS = (ROOT / "recipes", ROOT / "studies")
PLACES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(p for f in FOLDERS for p in f.glob("*.yaml"))]
PAGES = sorted(p for p in PLACES if "trailmark " in p.read_text())
LINE = re.compile(r"^(?:#\s+)?(?:\$ )?(?:[A-Z_]+=\S+ )*(trailmark [a-z].*)$", re.M)


def parse(words):
    """As the command line does, up to the call of the command."""
    command, name = COMMANDS, "trailmark"
    context = command.make_context(name, list(words))
    while hasattr(command, "commands"):
        rest = [*getattr(context, "_protected_args", []), *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, list(rest), parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_commands_of_a_page_parse(page):
    wrong = []
    for line in LINE.findall(page.read_text().replace("\\\n", " ")):
        line = re.split(r" +# | {2,}|[|>&]", line)[0]  # what follows two blanks is a remark
        words = [w for w in shlex.split(line)[1:] if w != "…"]
        if not words or set(words) & {"WORLD"}:
            continue
        try:
            parse(words)
        except click.exceptions.MissingParameter:
            wrong += [] if "…" in line or (page.suffix == ".md" and len(words) < 3) else [f"{line}: lacks an argument"]
        except click.ClickException as e:
            wrong.append(f"{line}: {e.format_message()}")
        for word in words:
            if word.startswith("recipes/") and not find_recipe(ROOT / word).is_file():
                wrong.append(f"{line}: there is no {word}")
    assert wrong == []
