"""Estimators of KL(p || q) from tokens drawn from p, by name. An unbiased value may have a biased gradient.

With d = log q - log p at a drawn token (p is the policy, q the reference), and expectations over tokens drawn from p:

name          value                 E[value]       E[gradient] when used as a loss
k1            -d                    KL(p || q)     0: as a loss it does nothing on average
k2            d^2 / 2               biased         the gradient of KL(p || q)
k3            e^d - 1 - d           KL(p || q)     the gradient of KL(q || p), the other direction
k3_weighted   r (e^d - 1 - d)       KL(p || q)     the gradient of KL(p || q)

r = p / stop(p_old) equals 1 on policy. It carries the gradient of the sampling itself. If p_old is the policy that drew
the tokens, r also corrects for drift. The exact KL over the vocabulary is a readout (`kind="kl"`), not an estimator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from trailmark.errors import RecipeError, nearest

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "k3_weighted"]


def kl(name: Estimator, logp: Tensor, ref: Tensor, old: Tensor | None = None) -> Tensor:
    """The estimate per token. `old` is the log-prob that the token was drawn with (default: the policy now)."""
    d = ref - logp
    if name == "k1":
        return -d
    if name == "k2":
        return d.square() / 2
    if name == "k3":
        return d.expm1() - d
    if name == "k3_weighted":
        ratio = (logp - (logp.detach() if old is None else old)).exp()
        return ratio * (d.expm1() - d)
    raise RecipeError(f"unknown KL estimator '{name}'.{nearest(name, get_args(Estimator))}")
