"""A critic: a value head on the policy's body, whose gradient stops at the head, or on a model of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trailmark.models.attention import Decoding, Layout
from trailmark.models.lm import LM


class MlpHead(nn.Sequential):
    """Linear, LayerNorm, ReLU, Linear. The last layer starts at 0, so V does too."""

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype, seed: int):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = [nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1)]
        super().__init__(*layers)
        nn.init.zeros_(layers[-1].weight)  # type: ignore[arg-type]
        nn.init.zeros_(layers[-1].bias)  # type: ignore[arg-type]
        self.to(device=device, dtype=dtype)

    @property
    def weight(self) -> Tensor:
        """Gives the dtype that hidden states are converted to."""
        return self[0].weight  # type: ignore[return-value]


class _SharedBody(nn.Module):
    """The policy's body as the critic sees it. It is neither trained nor saved here."""

    def __init__(self, policy: LM):
        super().__init__()
        self.policy = policy

    @property
    def config(self) -> Any:
        return self.policy.base.config

    def get_input_embeddings(self) -> Any:
        return self.policy.base.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.policy.base.get_output_embeddings()

    def save_pretrained(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)

    def tie_weights(self) -> None:
        return None


class SharedCritic(LM):
    """A head on the policy's last hidden state. No gradient reaches the body, and its dropout is off."""

    def __init__(self, policy: LM):
        super().__init__(_SharedBody(policy), policy.tokenizer, f"{policy.name} (critic)", sharing=policy.sharing)
        self.policy = policy

    def hidden(self, ids: Tensor, layout: Layout | Decoding, pos: Tensor) -> Tensor:
        training = self.policy.model.training
        self.policy.train(False)
        try:
            with torch.no_grad():
                return self.policy.hidden(ids, layout, pos)
        finally:
            self.policy.train(training)


def make_critic(policy: LM, own: LM | None, head: str, seed: int) -> LM:
    """A model with a head "value". `own` is a model for the critic alone; None: the critic reads the policy's body.
    `head` is linear or mlp."""
    lm = SharedCritic(policy) if own is None else own
    lm.add_head("value")
    if head == "mlp":
        real = torch.float64 if lm.dtype == torch.float64 else torch.float32
        lm.heads["value"] = MlpHead(lm.width, lm.device, real, seed)
    return lm
