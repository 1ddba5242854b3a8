"""An errand with the commands that random walks seldom reach: slice, clean, heat, cool, and examine after each.

The errand fetches a knife, slices something and puts the knife back. Then the thing goes to the sink, the microwave and
the fridge. In rooms without a knife, the first thing that can be cleaned, heated or cooled is used. Other rooms leave
little to do.
"""

from __future__ import annotations

from trailmark.tasks.alfworld.engine import Game

KNIVES = ("butterknife", "knife")
TREATED = (("clean", "sinkbasin"), ("heat", "microwave"), ("cool", "fridge"))


def errand(game: Game) -> tuple[str, ...]:
    """The commands of an errand; all of them are admissible."""
    walk = _Walk(game)
    knives = [x for x in sorted(walk.kinds) if walk.kinds[x] in KNIVES and walk.places(x)]
    things = walk.known("sliceable") or walk.known("heatable") or walk.known("coolable") or walk.known("cleanable")
    if knives and things and things[0] in walk.known("sliceable"):
        walk.slice(things[0], knives[0])
    if things and walk.take(things[0]):
        walk.treat(game.names[things[0]])
    walk.do("inventory")
    walk.do("look")
    return tuple(walk.done)


class _Walk:
    def __init__(self, game: Game):
        self.game, self.play = game, game.start()
        self.done: list[str] = []
        self.kinds = {x: name.split()[0] for x, name in game.names.items()}

    def do(self, command: str) -> bool:
        """Do a command if it can be done."""
        if command not in self.play.commands():
            return False
        self.play.step(command)
        self.done.append(command)
        return True

    def known(self, predicate: str) -> list[str]:
        """The things with a property that lie in some receptacle."""
        return sorted(f[1] for f in self.game.still.get(predicate, ()) if self.places(f[1]))

    def places(self, x: str) -> list[str]:
        return sorted(self.game.names[f[2]] for f in self.play.facts if f[0] == "inreceptacle" and f[1] == x)

    def visit(self, place: str) -> None:
        self.do(f"go to {place}")
        self.do(f"open {place}")

    def take(self, x: str) -> bool:
        for place in self.places(x):
            self.visit(place)
            if self.do(f"take {self.game.names[x]} from {place}"):
                return True
        return False

    def slice(self, x: str, knife: str) -> None:
        home = self.places(knife)[0]
        if self.take(knife):
            self.visit(self.places(x)[0])
            self.do(f"slice {self.game.names[x]} with {self.game.names[knife]}")
            self.visit(home)
            self.do(f"move {self.game.names[knife]} to {home}")

    def treat(self, name: str) -> None:
        self.do(f"examine {name}")
        for verb, kind in TREATED:
            for place in sorted(self.game.names[r] for r in self.kinds if self.kinds[r] == kind):
                self.do(f"go to {place}")
                if self.do(f"{verb} {name} with {place}"):
                    self.do(f"examine {name}")
