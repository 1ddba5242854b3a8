"""OREO: a policy and a value that satisfy the soft Bellman equation on logged trajectories.

V(s_t) = R - beta sum_{i>=t} l_i,  l_i = log pi(a_i|s_i) - log ref(a_i|s_i), for every decision state. This is the
telescoped form of V(s) - V(s') = r - beta l. Observation tokens are not actions and add nothing to the sum.

A *state* is a token with weight: the moment before it was chosen. A *step* goes from one state to the next. If every
action is a state (token level), a step is one token, so the token loss and the step loss are one formula. Let e_k be
the residual of state k with V held fixed, sg the stop-gradient, and L_k the sum of l over step k:

level         e_k, squared                                     what carries the gradient
token, step   V(s_k) - R + beta L_k + sg[beta sum later]       the step's own actions
undetached    V(s_k) - R + beta sum_{i>=k} l_i                 all actions from here on
one_step      V(s_k) - r_k - V(s_{k+1}) + beta L_k             the step's own actions (r = R at the end, V after it 0)
response      V(s_0) - R + beta sum_i l_i, of the first state  all actions

At token level the loss is the mean over states, as in the paper. Like the paper's code, it has no factor 1/2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from trailmark.models.readout import Readout, View
from trailmark.objectives.base import Note, Objective, Term
from trailmark.objectives.kl import kl

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "step", "response", "one_step", "undetached"]


def tail_sums(x: Tensor, row: Tensor) -> Tensor:
    """sum over tokens >= t of the same row, for every t: [M] -> [M]."""
    import torch

    after = x.double().flip(0).cumsum(0).flip(0)  # the sum over all later tokens of all rows
    last = torch.cat([row[1:] != row[:-1], torch.ones(1, dtype=torch.bool, device=row.device)])
    beyond = torch.cat([after[1:], after.new_zeros(1)])[last]  # the part that belongs to later rows
    return (after - beyond[row]).to(x.dtype)


class SoftBellman(Objective):
    """`part` "value": V carries the gradient, towards R - beta A_t. A_t is the sum of l from t on, from the stream
    `policy_logp`. "policy": the policy carries the gradient, and V is the stream `value`. "both": two losses in one
    pass of each model, both at the current weights. That is OREO's order (the value learns from the policy before its
    step, the policy from the value before its step), with every forward pass done once. With `lagged` the value's
    target comes from the stream `policy_logp` (for example of a moving average) there too.

    Streams: weight (states), reward (R on every action), `actions` (weights of the actions, for the mean of the KL),
    ref. If `ref` is set, that model is read instead of the stream. Level "response" also needs `first` (its mean: 1 on
    the first state), and the hinge needs `won` (1 on the first state of a success).

    alpha * KL is added to the policy loss. The KL is exact over the vocabulary (`reverse`: KL(pi || ref), `forward`:
    KL(ref || pi)), or k3 of the logged token, which is biased because the policy did not draw it. With `kl_target`
    alpha is exp(c), and Adam learns c on -c (KL - target). `importance` multiplies the value loss and the token or step
    loss of a row by exp(min(sum l, 1)).
    """

    kind: Literal["soft_bellman"] = "soft_bellman"
    part: Literal["value", "policy", "both"] = "policy"
    level: Level = "token"
    beta: float = Field(0.03, gt=0)
    critic: str = "critic"
    ref: str = ""
    actions: str = "weight"
    lagged: bool = False
    alpha: float = Field(0.0, ge=0)
    kl: Literal["reverse", "forward", "k3"] = "reverse"
    kl_target: float | None = Field(None, ge=0)
    kl_lr: float = Field(1e-3, gt=0)
    kl_start: float = 0.0
    clip_log: float | None = Field(None, gt=0)
    importance: bool = False
    hinge: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> SoftBellman:
        if self.hinge and self.level != "response":
            raise ValueError("hinge belongs to level 'response': it uses the whole response")
        return self

    @property
    def regularised(self) -> bool:
        return self.part != "value" and (self.alpha > 0 or self.kl_target is not None)

    def readouts(self) -> list[Readout]:
        out = []
        if self.part != "policy":
            out.append(Readout("value", "head", model=self.critic))
        if self.part != "value":
            out.append(Readout("logp", model=self.model, law=False, where=self.actions))
        if self.regularised and self.kl != "k3":
            reverse = self.kl == "reverse"
            to = self.ref or "ref"
            out.append(Readout("exact_kl", "kl", self.model, False, to=to, reverse=reverse, where=self.actions))
        if self.ref:
            out.append(Readout("ref", model=self.ref, law=False, where=self.actions, detach=True))
        return out

    def terms(self, view: View) -> list[Term | Note]:
        steps = _Steps(view, self.actions)
        out: list[Term | Note] = []
        own = None if self.part == "value" else (view["logp"] - view["ref"]) * steps.on
        past = (view["policy_logp"] - view["ref"]) * steps.on if own is None or self.lagged else own.detach()
        again = steps.per_row(past).clamp(max=1.0).exp()[steps.row] if self.importance else None
        if self.part != "policy":
            out += self._value(view, steps, past, again)
        if own is not None:
            out += self._policy(view, steps, own, again)
            out += self._regulariser(view, steps, own)
        return out

    def _value(self, view: View, steps: _Steps, past: Tensor, again: Tensor | None) -> list[Term | Note]:
        tail, v = steps.at(tail_sums(past, view.row)), steps.at(view["value"])
        clipped = tail if self.clip_log is None else tail.clamp(-self.clip_log, self.clip_log)
        error = (v - steps.at(view["reward"]) + self.beta * clipped).square()  # (V - R + beta sum_{i>=t} l_i)^2
        out: list[Term | Note] = [
            Term("value", (steps.w * (error if again is None else again * error)).sum()),
            Note("v", v.detach()),
            Note("v_first", v[steps.first].detach()),
        ]
        if self.clip_log is not None:
            cut = (tail != clipped).to(v.dtype)
            out.append(Term("clip_ratio", (steps.w * cut).sum().detach(), coef=0.0, mean=True))
        return out

    def _policy(self, view: View, steps: _Steps, own: Tensor, again: Tensor | None) -> list[Term | Note]:
        import torch

        v, reward = steps.at(view["value"].detach()), steps.at(view["reward"])
        if self.level == "one_step":
            ends = steps.last.to(v.dtype)
            after = torch.cat([v[1:], v.new_zeros(1)]) * (1 - ends)
            error = v - reward * ends - after + self.beta * steps.own(own)
        elif self.level in ("token", "step"):  # V - R + beta l_t + sg[beta sum_{i>t} l_i]
            mine = steps.own(own)
            tail = steps.at(tail_sums(own.detach(), view.row)) + (mine - mine.detach())
            error = v - reward + self.beta * tail
        else:  # V - R + beta sum_{i>=t} l_i
            error = v - reward + self.beta * steps.at(tail_sums(own, view.row))
        square = error.square()
        if self.level == "response":
            out: list[Term | Note] = [Term("policy", (steps.at(view["first"]) * square).sum(), weight="first")]
        else:
            weighed = square if again is None or self.level not in ("token", "step") else again * square
            out = [Term("policy", (steps.w * weighed).sum())]
        whole = steps.per_row(own)[steps.row]  # sum of l of the row, at each of its states
        if self.hinge:
            short = steps.at(view["won"]) * (-whole).relu()
            out.append(Term("hinge", short.sum(), weight="won", coef=self.hinge, optional=True))
        if view.has("won"):
            won = steps.at(view["won"]) != 0
            out.append(Note("log_weight_won", whole[steps.first & won].detach()))
            out.append(Note("log_weight_lost", whole[steps.first & ~won].detach()))
        return out

    def _regulariser(self, view: View, steps: _Steps, own: Tensor) -> list[Term | Note]:
        w = view[self.actions]
        k3 = kl("k3", own, own.new_zeros(own.shape))
        out: list[Term | Note] = [Term("kl_estimate", (w * k3).sum().detach(), self.actions, 0.0)]
        if self.regularised:
            coef = self.alpha if self.kl_target is None else math.exp(view.learned["log_kl"])
            each = k3 if self.kl == "k3" else view["exact_kl"]
            out.append(Term("kl", (w * each).sum(), self.actions, coef))
        return out

    def begin(self) -> dict[str, float]:
        means = {f"{name}_mean": 0.0 for name in ("value", "policy") if self.part in (name, "both")}
        if self.kl_target is None or self.part == "value":
            return means
        return {**means, "log_kl": self.kl_start, "_m": 0.0, "_v": 0.0, "_steps": 0.0}

    def learn(self, learned: Mapping[str, float], report: Mapping[str, float]) -> dict[str, float]:
        """Moving averages of the losses (0.9 old + 0.1 new), and one Adam step on the log of alpha."""
        out = dict(learned)
        for name in ("value", "policy"):
            if name in report and f"{name}_mean" in out:
                out[f"{name}_mean"] = 0.9 * out[f"{name}_mean"] + 0.1 * report[name]
        if "log_kl" in out and "kl" in report:
            assert self.kl_target is not None
            gradient, t = -(report["kl"] - self.kl_target), out["_steps"] + 1
            m, v = 0.9 * out["_m"] + 0.1 * gradient, 0.999 * out["_v"] + 0.001 * gradient**2
            move = (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
            out |= {"log_kl": out["log_kl"] - self.kl_lr * move, "_m": m, "_v": v, "_steps": t}
        return out


class _Steps:
    """The states of a view as an axis of their own, [K], in the order of the tokens."""

    def __init__(self, view: View, actions: str):
        import torch

        weight = view["weight"]
        self.view, self.on = view, (view[actions] != 0).to(weight.dtype)
        self.index = weight.nonzero()[:, 0]
        self.w, self.row = weight[self.index], view.row[self.index]
        changes = self.row[1:] != self.row[:-1]
        edge = torch.ones(min(1, len(self.row)), dtype=torch.bool, device=changes.device)
        self.first, self.last = torch.cat([edge, changes]), torch.cat([changes, edge])
        step = (weight != 0).long().cumsum(0) - 1  # the last state at or before each token
        mine = (step >= 0) & (self.row[step.clamp(min=0)] == view.row) if len(self.row) else step >= 0
        self.mine, self.step = mine.nonzero()[:, 0], step[mine]

    def at(self, x: Tensor) -> Tensor:
        """[M] -> [K]."""
        return x[self.index]

    def own(self, x: Tensor) -> Tensor:
        """[M] -> [K]: the sum over the tokens of each step."""
        return self.w.new_zeros(self.w.shape).index_add(0, self.step, x[self.mine])

    def per_row(self, x: Tensor) -> Tensor:
        return self.view.row_sum(x)
