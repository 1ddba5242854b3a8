import pytest

from trailmark.tasks.alfworld.dialect import command_in, observation_in, of_grammar

COMMANDS = [
    ("move apple 1 to fridge 1", "put apple 1 in/on fridge 1"),
    ("go to desk 2", "go to desk 2"),
    ("take mug 1 from shelf 3", "take mug 1 from shelf 3"),
    ("move", "move"),
    ("move apple to fridge", "move apple to fridge"),
]
SEEN = [  # command, move, put
    ("go to desk 2", "You arrive at desk 2. On the desk 2, you see nothing.", "On the desk 2, you see nothing."),
    ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed.", "The fridge 1 is closed."),
    ("examine desk 2", "On the desk 2, you see nothing.", "On the desk 2, you see nothing."),
    ("move mug 1 to desk 2", "You move the mug 1 to the desk 2.", "You put the mug 1 in/on the desk 2."),
    ("open safe 1", "You open the safe 1. The safe 1 is open. In it, you see a cd 1.",
     "You open the safe 1. The safe 1 is open. In it, you see a cd 1."),
    ("go to moon 1", "Nothing happens.", "Nothing happens."),
    ("help", "Available commands:\n  move (object) to (receptacle):  place an object in or on a receptacle",
     "Available commands:\n  put (object) in/on (receptacle):  place an object in or on a receptacle"),
]  # fmt: skip


@pytest.mark.parametrize("move, put", COMMANDS)
def test_commands_go_both_ways(move, put):
    assert command_in("put", move) == command_in("put", put) == put
    assert command_in("move", put) == command_in("move", move) == move


@pytest.mark.parametrize("command, move, put", SEEN)
def test_observations_go_both_ways(command, move, put):
    assert observation_in("put", move, command) == observation_in("put", put, command) == put
    assert observation_in("move", put, command) == observation_in("move", move, command) == move


def test_the_arrival_of_older_games_is_no_sentence_of_either_dialect():
    older = "You arrive at loc 12. On the desk 2, you see a cd 1."
    assert observation_in("put", older, "go to desk 2") == "On the desk 2, you see a cd 1."
    assert observation_in("move", older, "go to desk 2") == "You arrive at desk 2. On the desk 2, you see a cd 1."


def test_without_the_command_an_arrival_that_was_said_stays():
    assert observation_in("move", "You arrive at desk 2. The desk 2 is closed.").startswith("You arrive at desk 2.")
    assert observation_in("move", "On the desk 2, you see nothing.") == "On the desk 2, you see nothing."


def test_a_grammar_says_which_dialect_it_speaks():
    assert of_grammar('template :: "put {o} in/on {r}";') == "put"
    assert of_grammar('template :: "move {o} to {r}";') == "move"
