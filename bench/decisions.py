"""One decision by label scores from one forward pass, against one forward pass for every action.

    python bench/decisions.py [--repeats 7] [--quick]

Ours: state and menu in one prompt, one token out of the listed labels; the scores of all labels come from that pass.
The other way (action-prompt scoring): a row for each action, state and action, and the log-prob of the action's words
summed. Its rows go through the model together, as one batch without padding, which is as kind to it as can be without
sharing the state between rows. Both run on the same weights, in turns, in one process. Costs should be those of the
prompt tokens, |s| + sum |a_i| against |A| |s| + sum |a_i|, so `ratio` (decisions a second, ours to the other) grows
with the number of actions.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from common import compare, one_thread

from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.models.attention import Layout
from trailmark.models.lm import LM
from trailmark.models.tiny import build, tiny_config, tiny_tokenizer
from trailmark.types import SamplingLaw

STATE, WORDS = 160, 5  # tokens of a state, and of one listed action
PEER = "a row for each action"


def engine() -> LocalEngine:
    tokenizer = tiny_tokenizer()
    config = tiny_config("llama", vocab=len(tokenizer), context=1024, layers=2, width=64, heads=4)
    return LocalEngine(LM(build(config, 0), tokenizer, "0.2M"), slots=16, max_len=1024, fixed=False)


def situations(n: int, actions: int) -> list[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
    draw = np.random.default_rng([n, actions])
    words = lambda size: tuple(int(t) for t in draw.integers(0, 200, size))
    return [(words(STATE), [words(WORDS) for _ in range(actions)]) for _ in range(n)]


@torch.inference_mode()
def best_action(lm: LM, state: tuple[int, ...], listed: list[tuple[int, ...]]) -> int:
    """The action whose words are the most likely after the state."""
    ids = torch.tensor([state + a for a in listed])
    pos = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = lm.hidden(ids, Layout(torch.full_like(ids, ids.shape[1]), pos), pos)[:, STATE - 1 : -1]
    logp = lm.logits(hidden).log_softmax(-1).gather(2, ids[:, STATE:, None])[..., 0]
    return int(logp.sum(1).argmax())


def measure(held: LocalEngine, actions: int, repeats: int, n: int) -> None:
    rows = situations(n, actions)
    law = SamplingLaw(allowed=tuple(range(actions)))
    prompts = [state + sum(listed, ()) for state, listed in rows]

    def ours() -> float:
        run(held, [Request(p, law, 1, 1, key=str(i)) for i, p in enumerate(prompts)])
        return float(n)

    def peer() -> float:
        for state, listed in rows:
            best_action(held.lm, state, listed)
        return float(n)

    tokens = (STATE + WORDS * actions, actions * (STATE + WORDS))
    compare(
        f"decisions/{actions} actions", ours, peer, PEER, "decisions/s", repeats,
        f"state of {STATE} tokens, {WORDS} tokens an action: {tokens[0]} prompt tokens against {tokens[1]}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="few actions, to see that it runs")
    args = parser.parse_args()
    one_thread()
    held = engine()
    for actions in (2, 6) if args.quick else (2, 6, 20, 60, 120):
        measure(held, actions, args.repeats, 4)


if __name__ == "__main__":
    main()
