"""ALFWorld in our engine against the original (textworld's PDDL environment), on the same games and commands.

    python bench/worlds.py --games DATA [--n 6] [--repeats 3] [--quick]
    python bench/worlds.py --shop DATA [--repeats 3]      WebShop alone, in one process and in two at once
    python bench/worlds.py --shop DATA --copies 30        a catalogue of 30 copies of each product: loading, searches

It needs `pip install 'trailmark[alfworld]'`.

    first reset   from a game's texts, read but not parsed, to the first observation and its admissible commands. Our
                  engine has parsed the domain and the grammar before, because all games of a collection share them;
                  parsing and grounding the problem counts. The original loads and resets
    reset         the same for a loaded game: ours copies the start, the original translates the problem again
    new step      a command and the admissible commands after it, along a random walk in a game just parsed, so that
                  computing the actions of new places counts; `step` goes through places seen before
    memory        MB a play. Ours: 1,000 plays at different moments of the same games. The original: the growth of the
                  process per game

Ours alone (printed, and kept without a peer): copies, copies with a step, replayed commands without a menu,
environments in lockstep.

The shop: visits of its oracle with a look at every sub-page. Searches are measured apart, over the titles of the goals:
in the visits their results come from a table. Seconds are those that a process was computing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import common
from common import compare, one_thread, record

from trailmark.tasks import get_task
from trailmark.tasks.alfworld.compare_original import choose, pick
from trailmark.tasks.alfworld.engine import Game, Play, parse_game
from trailmark.tasks.alfworld.games import Games, Texts
from trailmark.tasks.alfworld.original import OriginalGame
from trailmark.tasks.row_files import file_rows
from trailmark.tasks.webshop.products import Catalogue


def parsed(texts: Texts, id: str) -> Game:
    return parse_game(texts.domain, texts.problem, texts.grammar, id=id)


def walk(game: Game, length: int, seed: int = 0) -> list[str]:
    """A random walk's commands, found beforehand: choosing them is not measured."""
    play, draw, out = game.start(), random.Random(seed), []
    for _ in range(length):
        out.append(pick(play.commands(), draw))
        play.step(out[-1])
    return out


class Bench:
    def __init__(self, games: Games, n: int, length: int):
        ids = choose(games, n, 0)
        self.texts = [(id, games.card(id).read()) for id in ids]
        self.ours = [parsed(t, id) for id, t in self.texts]
        self.walks = [walk(g, length) for g in self.ours]
        self.theirs = [OriginalGame(t.domain, t.problem, t.grammar, id=id) for id, t in self.texts]

    def close(self) -> None:
        for game in self.theirs:
            game.close()

    def our_first(self) -> float:
        for id, texts in self.texts:
            parsed(texts, id).start().commands()
        return len(self.texts)

    def their_first(self) -> float:
        for id, t in self.texts:
            with OriginalGame(t.domain, t.problem, t.grammar, id=id) as game:
                game.start().commands()
        return len(self.texts)

    def our_reset(self, times: int = 1000) -> float:
        for game in self.ours * times:
            game.start().commands()
        return len(self.ours) * times

    def their_reset(self) -> float:
        for game in self.theirs:
            game.start().commands()
        return len(self.theirs)


def follow(play: object, commands: list[str]) -> int:
    for command in commands:
        play.step(command)  # type: ignore[attr-defined]
        play.commands()  # type: ignore[attr-defined]
    return len(commands)


def timed(work: Callable[[], float]) -> float:
    began = time.process_time()
    done = work()
    return done / (time.process_time() - began)


def steps(bench: Bench, repeats: int, peer: str, new: bool) -> None:
    """Starts are not counted, so both sides are timed from after them."""
    mine, theirs = [], []
    for _ in range(repeats + 1):
        games = [parsed(t, id) for id, t in bench.texts] if new else bench.ours
        for game in games:
            game.start().commands()
        rounds = 1 if new else 20
        plays = [[(g.start(), w) for g, w in zip(games, bench.walks)] for _ in range(rounds)]
        mine.append(timed(lambda p=plays: sum(follow(play, w) for row in p for play, w in row)))
        spent, done = 0.0, 0
        for game, commands in zip(bench.theirs, bench.walks):
            play = game.start()
            began = time.process_time()
            done += follow(play, commands)
            spent += time.process_time() - began
        theirs.append(done / spent)
    mine, theirs = mine[1:], theirs[1:]  # the first of anything warms up
    ratios = [a / b for a, b in zip(mine, theirs)]
    what = "in places never seen before" if new else "in places seen before"
    record(f"worlds/alfworld {'new step' if new else 'step'}", statistics.median(mine), statistics.median(theirs), peer,
           statistics.median(ratios), "steps/s", repeats, [min(ratios), max(ratios)],
           f"a command and the commands after it, {what}")  # fmt: skip


def memory(bench: Bench, peer: str) -> None:
    ours = our_memory(bench)
    theirs = their_memory(bench)
    record("worlds/alfworld memory", ours, theirs, peer, theirs / ours, "MB a play", 1, [theirs / ours] * 2,
           "less is better; 1,000 plays of the same games, 5 to 10 commands in; the original: one loaded "
           "game")  # fmt: skip


def our_memory(bench: Bench, plays: int = 1000) -> float:
    def some() -> list[Play]:
        out = []
        for k in range(plays):
            at = k % len(bench.ours)
            play = bench.ours[at].start()
            for command in bench.walks[at][: 5 + k % 6]:
                play.step(command)
            play.commands()
            out.append(play)
        return out

    some()  # what the games remember is not a play's
    gc.collect()
    tracemalloc.start()
    kept = some()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return grown / len(kept) / 1e6


def resident() -> float:
    """MB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def their_memory(bench: Bench) -> float:
    gc.collect()
    before = resident()
    more = []
    for id, t in bench.texts:
        more.append(OriginalGame(t.domain, t.problem, t.grammar, id=id))
        more[-1].start()
    grown = (resident() - before) / len(more)
    for game in more:
        game.close()
    return grown


def alone(bench: Bench) -> None:
    """What the original cannot do, or not in one process."""
    play = bench.ours[0].start()
    play.step(bench.walks[0][0])
    commands = play.commands()
    table = bench.ours * (4096 // len(bench.ours))
    numbers = {
        "copies": timed(lambda: sum(play.copy() is not play for _ in range(100_000))),
        "copies, each with a step": timed(lambda: sum(bool(play.copy().step(c)) for c in commands * 100)),
        "replayed commands": timed(
            lambda: sum(_replay(g, w) for _ in range(20) for g, w in zip(bench.ours, bench.walks))
        ),
        f"steps of {len(table)} environments in turn": timed(lambda: _lockstep(bench, table)),
    }
    for name, rate in numbers.items():
        common.alone(f"worlds/alfworld {name}", rate, "1/s")


def _replay(game: Game, commands: list[str]) -> int:
    play = game.start()
    for command in commands:
        play.step(command)
    return len(commands)


def _lockstep(bench: Bench, table: list[Game]) -> float:
    plays = [(game.start(), bench.walks[k % len(bench.ours)]) for k, game in enumerate(table)]
    for step in range(10):
        for play, commands in plays:
            play.step(commands[step])
            play.commands()
    return 10 * len(plays)


def shop_steps(folder: str, steps: int) -> float:
    """Steps a second of visits, searches answered from a table."""
    source = get_task("webshop", catalogue=folder, actions="bare", horizon=20)
    world, visits = source.make(), []
    for task in source.tasks("train", 300, 0):
        world.reset(task)
        moves = []
        while not world.over:
            move = world.oracle()
            looks = ["description", "< prev", "features", "< prev", "reviews", "< prev"] if "Buy Now" in move else []
            moves += [*(f"click[{look}]" for look in looks), move]
            world.step(move)
        visits.append((task, moves))
    catalogue = source.catalogue
    search = catalogue.search
    found: dict[str, list[int]] = {}

    def remembered(words: str, n: int) -> list[int]:
        if words not in found:
            found[words] = search(words, n)
        return found[words]

    catalogue.search = remembered
    for warm in (True, False):
        began, done = time.process_time(), 0
        while done < (1 if warm else steps):
            for task, moves in visits:
                world.reset(task)
                for move in moves:
                    world.step(move)
                done += len(moves)
        spent = time.process_time() - began
    return done / spent


def shop_searches(folder: str, searches: int) -> float:
    source = get_task("webshop", catalogue=folder)
    titles = list(dict.fromkeys(w.goal.title for w in source.written))
    began = time.process_time()
    for k in range(searches):
        source.catalogue.search(titles[k % len(titles)], 50)
    return searches / (time.process_time() - began)


def large_shop(folder: Path, copies: int) -> None:
    """A catalogue as large as this: what it takes to load and to search. Goals are not loaded."""
    rows = list(file_rows(next(folder.glob("products*.jsonl*"))))
    titles = [row.value["Title"] for row in rows[:300]]
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "products.jsonl"
        with path.open("w") as file:
            for k in range(copies):
                for row in rows:
                    file.write(json.dumps({**row.value, "asin": f"{row.value['asin']}{k}"}) + "\n")
        del rows
        before, began = resident(), time.process_time()
        catalogue = Catalogue(path)
        spent = time.process_time() - began
        n = f"{len(catalogue):,} products"
        common.alone(f"worlds/webshop products loaded of {n}", len(catalogue) / spent, "products/s")
        common.alone(f"worlds/webshop memory of {n}", resident() - before, "MB")
        began = time.process_time()
        for title in titles:
            catalogue.search(title, 50)
        common.alone(f"worlds/webshop search of {n}", len(titles) / (time.process_time() - began), "searches/s")


def shop(folder: Path, repeats: int) -> None:
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        works = (("step", "steps/s", shop_steps, 50_000), ("search", "searches/s", shop_searches, 3_000))
        for name, unit, work, times in works:
            for cores in (1, 2):
                rates = []
                for _ in range(repeats):
                    began = [pool.submit(work, str(folder), times) for _ in range(cores)]
                    rates.append(sum(b.result() for b in began))
                what = f"{'one process' if cores == 1 else 'two processes at once'}, {folder.name}"
                common.alone(f"worlds/webshop {name}{' on two cores' * (cores == 2)}", rates, unit, what)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--games", type=Path, help="a folder of games")
    ask.add_argument("--shop", type=Path, help="a folder of products and goals")
    ask.add_argument("--copies", type=int, default=0, help="with --shop: copies of each product")
    ask.add_argument("--n", type=int, default=6, help="how many games, over all task types")
    ask.add_argument("--length", type=int, default=30, help="commands in a walk")
    ask.add_argument("--repeats", type=int, default=3)
    ask.add_argument("--quick", action="store_true", help="two games, one repeat")
    said = ask.parse_args()
    n, repeats = (2, 1) if said.quick else (said.n, said.repeats)
    one_thread()
    if said.shop is not None:
        return large_shop(said.shop, said.copies) if said.copies else shop(said.shop, repeats)
    if said.games is None:
        ask.error("--games or --shop is needed")
    peer = f"textworld {version('textworld')}"
    bench = Bench(Games(said.games), n, max(10, said.length))
    try:
        compare("worlds/alfworld first reset", bench.our_first, bench.their_first, peer, "resets/s", repeats,
                "from texts not yet parsed to the first observation and commands; the original: load and "
                "reset")  # fmt: skip
        compare("worlds/alfworld reset", bench.our_reset, bench.their_reset, peer, "resets/s", repeats,
                "again from a parsed game; the original: reset of a loaded one")  # fmt: skip
        steps(bench, repeats, peer, new=True)
        steps(bench, repeats, peer, new=False)
        memory(bench, peer)
        alone(bench)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
