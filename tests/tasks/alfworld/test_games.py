import json
import os
from pathlib import Path

import pytest
from small_home import DOMAIN, ERRANDS, THINGS, game_file, grammar, names, packed_rows, write_download, write_packed

from trailmark.errors import DataError, TaskError
from trailmark.tasks.alfworld import games as module
from trailmark.tasks.alfworld.games import TYPES, Games


def write_one(folder: Path, **changes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "game.tw-pddl").write_text(game_file(**changes))
    return folder


def test_download_and_packed_files_hold_the_same_games(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    loose, packed = Games(write_download(tmp_path / "a")), Games(write_packed(tmp_path / "b"))
    assert loose.splits == packed.splits == ("train", "valid_seen")
    assert loose.ids("seen") == packed.ids("seen") == tuple(sorted(f"valid_seen/{n}" for n in names().values()))
    for id in loose.ids("train"):
        a, b = loose.game(id), packed.game(id)
        assert a.start().observation == b.start().observation
        assert (a.id, a.task_type, a.walkthrough, a.goal) == (b.id, b.task_type, b.walkthrough, b.goal)
        assert loose.dialect(id) == packed.dialect(id) == "move"


def test_the_split_folder_itself_and_the_download_root_are_both_understood(tmp_path):
    write_download(tmp_path)
    assert Games(tmp_path / "json_2.1.1").ids("train") == Games(tmp_path).ids("train")


def test_listing_parses_nothing_and_a_parsed_game_is_kept(tmp_path, monkeypatch):
    games, parsed = Games(write_packed(tmp_path)), []
    real = module.parse_game
    monkeypatch.setattr(module, "parse_game", lambda *a, **k: parsed.append(k["id"]) or real(*a, **k))
    first = games.ids("train")[0]
    assert parsed == []
    assert games.game(first) is games.game(first)
    assert parsed == [first]
    monkeypatch.setattr(module, "KEPT", 1)
    games.game(games.ids("train")[1])
    games.game(first)
    assert len(parsed) == 3, "only the last one parsed is kept"


def test_valid_is_every_split_that_begins_so(tmp_path):
    games = Games(write_packed(tmp_path, ("train", "valid_train", "valid_seen")))
    both = {*games.ids("valid_train"), *games.ids("seen")}
    assert set(games.ids("valid")) == both and len(games.ids("valid")) == len(both) == 2 * len(games.ids("train"))
    (tmp_path / "lone").mkdir()
    with pytest.raises(TaskError, match="there is no split 'valid'"):
        Games(write_packed(tmp_path / "lone", ("train",))).ids("valid")


@pytest.mark.parametrize("name", ["seen", "valid_seen", "dev", "eval_in_distribution"])
def test_splits_answer_to_both_kinds_of_names(tmp_path, name):
    assert len(Games(write_packed(tmp_path)).ids(name)) == 6


def test_a_missing_split_says_which_exist(tmp_path):
    games = Games(write_packed(tmp_path))
    with pytest.raises(TaskError, match="split 'unseen' is not in .* which has train, valid_seen"):
        games.ids("unseen")
    with pytest.raises(TaskError, match="there is no split 'sen'. Did you mean 'seen'"):
        games.ids("sen")


def test_games_come_from_the_environment_when_no_path_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(write_download(tmp_path)))
    assert Games().splits == ("train", "valid_seen")
    monkeypatch.delenv("ALFWORLD_DATA")
    with pytest.raises(TaskError, match="set the option 'games'"):
        Games()


def test_a_folder_without_splits_is_one_split_at_any_depth(tmp_path):
    write_one(tmp_path / "a" / "b" / "c")
    write_one(tmp_path / "d")
    (tmp_path / "e.tw-pddl").write_text(game_file("look_at_obj_in_light"))
    assert Games(tmp_path).ids("train") == ("train/a/b/c", "train/d", "train/e")
    assert (
        Games(tmp_path / "d" / "game.tw-pddl").game(Games(tmp_path / "d" / "game.tw-pddl").ids("train")[0]).walkthrough
    )


def test_a_path_with_no_games_is_said(tmp_path):
    with pytest.raises(TaskError, match="neither game.tw-pddl files nor"):
        Games(tmp_path)
    with pytest.raises(TaskError, match="does not exist"):
        Games(tmp_path / "nowhere")
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(TaskError, match="is neither a"):
        Games(tmp_path / "x.txt")


def test_filters_by_type_and_by_name(tmp_path):
    games = Games(write_packed(tmp_path))
    assert games.ids("train", task_types=["pick_two_obj_and_place"]) == (
        "train/pick_two_obj_and_place-Apple-None-Shelf-1/trial_T1",
    )
    assert games.ids("train", only=["-Mug-None-Countertop", "-Mug-None-Cabinet"]) == (
        "train/pick_and_place_simple-Mug-None-Cabinet-1/trial_T1",
        "train/pick_heat_then_place_in_recep-Mug-None-Countertop-1/trial_T1",
    )
    assert games.ids("train", only=["Tomato"]) == ()
    with pytest.raises(TaskError, match="no task type 'pick_two'. Did you mean 'pick_two_obj_and_place'"):
        games.ids("train", task_types=["pick_two"])


def test_the_type_comes_from_traj_data_where_the_folder_does_not_say_it(tmp_path):
    write_one(tmp_path / "a")
    (tmp_path / "a" / "traj_data.json").write_text('{"task_type": "look_at_obj_in_light"}')
    write_one(tmp_path / "b")
    (tmp_path / "b" / "traj_data.json").write_text("[]")
    assert [c.task_type for c in Games(tmp_path).cards("train").values()] == ["look_at_obj_in_light", ""]


def test_movable_and_sliced_are_no_text_games(tmp_path):
    write_one(tmp_path / "pick_and_place_with_movable_recep-Fork-Bowl-Shelf-1" / "trial_T1")
    write_one(tmp_path / "pick_clean_then_place_in_recep-AppleSliced-None-Shelf-1" / "trial_T1")
    write_one(tmp_path / "ok")
    assert Games(tmp_path).ids("train") == ("train/ok",)


def test_a_game_is_found_by_a_part_of_its_name(tmp_path):
    games = Games(write_packed(tmp_path, ["train"]))
    assert games.find("Book") == "train/look_at_obj_in_light-Book-None-Desklamp-1/trial_T1"
    with pytest.raises(TaskError, match="'Mug' is in 3 games' names"):
        games.find("Mug")
    with pytest.raises(TaskError, match="no game in .* has 'Tomato' in its name"):
        games.find("Tomato")
    with pytest.raises(TaskError, match="there is no game 'train/x'"):
        games.game("train/x")


# --- what is broken ----------------------------------------------------------------------------------------------


def test_broken_pddl_names_file_line_and_token(tmp_path):
    write_one(tmp_path / "a", pddl_problem="(define (problem x)\n(:domain home)\n(:objects\n(:goal (and))\n")
    domain = DOMAIN.replace("(isClean ?o)", "(isKlean ?o)")
    write_one(tmp_path / "b", pddl_domain=domain)
    games = Games(tmp_path)
    with pytest.raises(DataError, match=r"a/game\.tw-pddl.*:\d+: "):
        games.game("train/a")
    line = next(n for n, text in enumerate(domain.split("\n"), 1) if "(isKlean" in text)
    with pytest.raises(DataError, match=rf"(?is)b/game\.tw-pddl.*:{line}: .*isKlean"):
        games.game("train/b")


def test_an_unknown_grammar_symbol_is_named(tmp_path):
    write_one(tmp_path / "a", grammar=grammar().replace("#inside#", "#outside#"))
    with pytest.raises(DataError, match=r"a/game\.tw-pddl.*outside"):
        Games(tmp_path).game("train/a")


@pytest.mark.parametrize(
    "text, why",
    [
        ("{", "is not JSON"),
        ("[]", "must be an object"),
        (game_file(grammar=None), "key 'grammar': is missing"),
        (game_file(pddl_domain=3), "key 'pddl_domain': must be text, not 3"),
        (game_file(walkthrough="go"), "key 'walkthrough': must be a list of commands"),
        (game_file(solvable="yes"), "key 'solvable': must be true or false"),
    ],
)
def test_a_file_that_is_no_game_is_an_error_for_one_and_a_counted_skip_for_many(tmp_path, text, why):
    write_one(tmp_path / "good")
    write_one(tmp_path / "bad")
    (tmp_path / "bad" / "game.tw-pddl").write_text(text)
    games = Games(tmp_path)
    with pytest.raises(DataError, match=why):
        games.game("train/bad")
    assert list(games.usable(games.ids("train"))) == ["train/good"]
    assert list(games.skipped) == ["train/bad"] and why in games.skipped["train/bad"]


def test_what_cannot_be_won_is_left_out_and_counted(tmp_path):
    write_one(tmp_path / "marked", solvable=False)
    write_one(tmp_path / "planned", walkthrough=None, solvable=None)
    write_one(tmp_path / "hopeless", walkthrough=[], things={k: v for k, v in THINGS.items() if k != "mug 1"})
    games = Games(tmp_path)
    assert list(games.usable(games.ids("train"))) == ["train/planned"]
    assert games.skipped == {
        "train/marked": "marked as unsolvable",
        "train/hopeless": "no walkthrough, and no plan was found",
    }


def test_pddl_is_only_read_for_usable_games_when_asked(tmp_path):
    write_one(tmp_path / "a", pddl_problem="(define")
    write_one(tmp_path / "b")
    games = Games(tmp_path)
    assert list(games.usable(games.ids("train"))) == ["train/a", "train/b"]
    assert list(games.usable(games.ids("train"), parse=True)) == ["train/b"]
    assert list(games.skipped) == ["train/a"]


def test_a_broken_line_of_a_packed_file_is_a_counted_skip(tmp_path):
    write_packed(tmp_path, ["train"])
    rows = list(packed_rows("train"))
    del rows[1]["task_desc"]
    lines = [json.dumps(r) for r in rows]
    lines[0] = lines[0][:-3]
    (tmp_path / "games_train.jsonl.xz").unlink()
    (tmp_path / "games_train.jsonl").write_text("\n".join(lines))
    games = Games(tmp_path)
    assert len(games.ids("train")) == 4
    assert [k.rsplit("/")[-1] for k in games.skipped] == ["games_train.jsonl:1", "games_train.jsonl:2"]
    assert "key 'task_desc': is missing" in games.skipped[f"{tmp_path}/games_train.jsonl:2"]


def test_a_packed_file_that_is_cut_off_or_stands_alone_is_said(tmp_path):
    write_packed(tmp_path, ["train"])
    whole = (tmp_path / "games_train.jsonl.xz").read_bytes()
    (tmp_path / "games_train.jsonl.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="games_train.jsonl.xz: cannot be read"):
        Games(tmp_path).ids("train")
    (tmp_path / "words.twl2").unlink()
    with pytest.raises(DataError, match=r"needs one \*.twl2 file beside it, the grammar"):
        Games(tmp_path).ids("train")


@pytest.mark.data
def test_the_packed_games_are_all_there():
    games = Games(Path(os.environ["TRAILMARK_DATA"]) / "alfworld")
    assert len(games.ids("train")) == 3553 and len(games.ids("seen")) == 140 and len(games.ids("valid_train")) == 200
    assert len(games.ids("train", only=["pick_and_place_simple-Tomato-None-Microwave"])) > 0
    assert sum(len(games.ids("seen", task_types=[t])) for t in TYPES) == 140
    assert len(ERRANDS) == len(TYPES) and games.skipped == {}
