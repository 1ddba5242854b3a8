"""The reward of each turn. The reward of an action belongs to every turn of its side since the action before.

An adviser speaks, an actor acts, the world pays. Both turns led to the action, so both get its reward and its return:

    turn      0 adviser   1 actor     2 adviser   3 actor
    acts                  r = 1                   r = 2
    reward    1           1           2           2
    return    1 + 2g      1 + 2g      2           2            (g: the discount, once for each action of the side)

A side may also be paid for an action of another side. Then the reward belongs to the side's own last action. A reward
before the side's first action, and turns after its last action, belong to no action and do not count. If an episode
marks no actions at all, as in some files, every turn is an action.
"""

from __future__ import annotations

import numpy as np

from trailmark.credit.returns import discounted
from trailmark.types import Episode, Outcome


def side_of(episode: Episode, seat: str) -> str:
    """The side of a seat; empty for the only side."""
    player = episode.players.get(seat)
    return player.side if player else ""


def outcome_of(episode: Episode, seat: str) -> Outcome:
    """The outcome of the side of a seat."""
    return episode.outcomes.get(side_of(episode, seat), episode.outcome)


def turn_rewards(episode: Episode, seat: str) -> np.ndarray:
    """The reward of each turn of a seat: the reward of the action that the turn led to. One number per turn that wrote
    something."""
    rewards, led_to = _actions(episode, seat)
    return np.array([0.0 if k is None else rewards[k] for k in led_to])


def turn_returns(episode: Episode, seat: str, gamma: float = 1.0) -> np.ndarray:
    """The return at each turn of a seat: G_k = sum_{j>=k} gamma^(j-k) r_j over the actions of its side, if the turn led
    to action k. One number per turn that wrote something."""
    rewards, led_to = _actions(episode, seat)
    ahead = discounted(rewards, gamma)
    return np.array([0.0 if k is None else ahead[k] for k in led_to])


def _actions(episode: Episode, seat: str) -> tuple[list[float], list[int | None]]:
    """The rewards of the actions of a seat's side, and for each turn of the seat the number of the action it led to."""
    side = side_of(episode, seat)
    rewards: list[float] = []
    led_to: list[int | None] = []
    waiting: list[int] = []  # turns of the seat that have not led to an action yet
    named = any(turn.action is not None for turn in episode.turns)
    for turn in episode.turns:
        mine = side_of(episode, turn.seat) == side
        if turn.seat == seat and turn.tokens:
            waiting.append(len(led_to))
            led_to.append(None)
        if named and turn.action is None:
            continue
        if mine:
            for i in waiting:
                led_to[i] = len(rewards)
            waiting = []
            rewards.append(turn.reward)
        elif rewards and side in turn.rewards:
            rewards[-1] += turn.rewards[side]
    return rewards, led_to
