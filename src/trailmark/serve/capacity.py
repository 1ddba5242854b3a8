"""What the requests in work may take together: sequences, bytes, alternatives; and how large an answer can become."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from trailmark.rollout.search import Plan
from trailmark.serve.answers import Reply
from trailmark.serve.errors import ApiError
from trailmark.types import Tokens

ANSWER = 64 << 20  # most bytes of one answer's log-probs and ids; four times that for all that are not yet read
SMALL = 1 << 16  # bytes of an answer that are not counted: the number of connections limits these
# Bytes in JSON, at most: a token with its log-prob (of a completion, of a chat), an alternative to it (the same), an
# entry of prompt_logprobs, a token id, a node of a search tree, the text of a token.
TOKEN, TOP, ENTRY, ID, NODE, TEXT = (64, 100), (45, 90), 70, 35, 200, 12


class Capacity:
    """A limit on the sequences in work (those beyond the engine's slots wait), or on something else that takes
    memory."""

    def __init__(self, limit: int, what: str = "sequences"):
        self.limit, self.taken, self.what = limit, 0, what

    def check_possible(self, k: int) -> None:
        if k > self.limit:
            raise ApiError(400, f"this asks for {k} {self.what} at once; the limit is {self.limit}.", "n")

    def enter(self, k: int) -> None:
        self.check_possible(k)
        if self.taken + k > self.limit:
            raise ApiError(429, "the queue is full: try again later.", code="queue_full", headers={"Retry-After": "1"})
        self.taken += k

    @contextlib.contextmanager
    def holding(self, k: int) -> Iterator[None]:
        self.enter(k)
        try:
            yield
        finally:
            self.taken -= k


def answer_size(reply: Reply, prompts: Sequence[Tokens], rooms: Sequence[int], echo: bool, plan: Plan | None) -> int:
    """The most bytes of what an answer has beside its texts: everything that is repeated for each sample, each time."""
    body, n, chat = reply.body, reply.body.n, reply.chat
    drawn, given = n * sum(rooms), sum(map(len, prompts))
    size = ID * body.return_token_ids * (2 * drawn + given * (1 if chat else n))
    if reply.wants_logprobs:
        size += (TOKEN[chat] + TOP[chat] * reply.top) * (drawn + n * given * echo)
    if echo:
        size += TEXT * n * given
    if body.prompt_logprobs is not None:
        size += ENTRY * (1 + body.prompt_logprobs) * given * (1 if chat else n)
    if plan is not None and plan.tree:
        width = plan.width**2 if plan.kind == "beam" else plan.width
        size += sum((NODE + TEXT * room) * width * min(plan.rounds, room) for room in rooms)
    return size


@contextlib.contextmanager
def holding_answer(answers: Capacity, size: int, param: str | None = None) -> Iterator[None]:
    """Hold the bytes of an answer until it is sent; an answer beyond all bounds is refused."""
    if size > ANSWER:
        raise ApiError(
            400,
            f"the answer would have up to {size >> 20} MB; the limit is {ANSWER >> 20}: ask for fewer samples, tokens "
            "(max_tokens), log-probs or rounds.",
            param,
            "answer_too_large",
        )
    with answers.holding(size if size > SMALL else 0):
        yield
