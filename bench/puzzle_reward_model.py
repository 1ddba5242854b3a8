"""How far reward models of order puzzles can choose. The start of a road answers 200 questions of the split `val`
eight times, and each model scores every step. For each way to make one number of them: the correlation with being right
within a question, the correlation with the number of steps, and the share of right answers among the best of eight. `z`
is what GRPO pays: the sum of the normalised scores. `short` takes the shortest answer and needs no model.

    python bench/puzzle_reward_model.py ROAD PRM PRM …
"""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np

from trailmark.config import EngineConfig, ModelConfig
from trailmark.credit.steps import group_steps
from trailmark.episodes import won
from trailmark.evaluate.run import read_answer
from trailmark.models.load import load_model
from trailmark.rollout.play import Seat, play
from trailmark.score.classes import class_numbers, over_steps, step_outputs
from trailmark.score.value_models import locate_value
from trailmark.seats.open import open_engine
from trailmark.seats.pinned_models import pin_models
from trailmark.steps import mark_steps, without_end
from trailmark.tasks import get_task
from trailmark.tasks.base import draw_tasks


def main(road: str, models: list[str]) -> None:
    source = get_task("puzzle", level=1)
    policy = load_model(pin_models(ModelConfig.model_validate({"name": f"{road}/sft"})))
    engine = open_engine(policy, EngineConfig(max_num_seqs=128, max_len=64))
    seat = Seat("policy", engine, max_tokens=40)
    played = play(source, draw_tasks(source, "val", 200, 100), [seat], n=8, seed=101, prefix="bench:")
    words = policy.tokenizer
    played = [without_end(mark_steps(e, "policy", words, "newline"), "policy", words) for e in played]
    right = np.array([float(won(e)) for e in played])
    length = np.array([float(len(e.turns[0].steps)) for e in played])
    groups = [e.group for e in played]
    rows = [[i for i, g in enumerate(groups) if g == name] for name in dict.fromkeys(groups)]
    votes = []
    for mine in rows:
        said = Counter(a for i in mine if (a := read_answer(played[i])))
        top = said.most_common(1)[0][0] if said else None
        votes.append(max((right[i] for i in mine if read_answer(played[i]) == top), default=0.0) if top else 0.0)
    print(f"one answer {right.mean():.3f}, most votes {np.mean(votes):.3f}, any of eight right "
          f"{np.mean([right[mine].max() for mine in rows]):.3f}")  # fmt: skip

    def centred(x: np.ndarray) -> np.ndarray:
        out = x.copy()
        for mine in rows:
            out[mine] -= x[mine].mean()
        return out

    print(f"{'':<24}{'over':<10}{'with right':>12}{'with length':>13}{'best of 8':>11}")
    for model in models:
        lm = load_model(ModelConfig.model_validate({"name": str(locate_value(model))})).freeze()
        read = step_outputs(lm, played, "step")
        scores = [class_numbers(read[e.id, 0], [2, 3]).tolist() for e in played]
        numbers = {over: [over_steps(s, over) for s in scores] for over in ("product", "last", "mean")}
        numbers["z"] = [float(z.sum()) for z in group_steps(scores, groups)]
        for over, found in ({**numbers, "short": (-length).tolist()} if model == models[-1] else numbers).items():
            x = np.array(found)
            best = np.mean([right[max(mine, key=lambda i: x[i])] for mine in rows])
            along = np.corrcoef(centred(x), centred(right))[0, 1], np.corrcoef(x, length)[0, 1]
            name = model[-23:] if over != "short" else ""
            print(f"{name:<24}{over:<10}{along[0]:>12.2f}{along[1]:>13.2f}{best:>11.3f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
