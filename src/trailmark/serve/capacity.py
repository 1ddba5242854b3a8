"""What the requests in work may take together: sequences, bytes, alternatives; and how large an answer can become."""

from __future__ import annotations

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterator, Sequence

from starlette.requests import Request

from trailmark.rollout.search import Plan
from trailmark.serve.answers import Reply
from trailmark.serve.errors import ApiError
from trailmark.types import Tokens

ANSWER = 64 << 20  # most bytes of one answer's log-probs and ids; four times that for all that are not yet read
SMALL = 1 << 16  # bytes of a body or an answer that are not counted: the number of connections limits these
QUICK, QUICK_ONES = 16, 64  # most sequences of a request that needs no slot; most of all these beside the queue
# Bytes in JSON, at most: a token with its log-prob (of a completion, of a chat), an alternative to it (the same), an
# entry of prompt_logprobs, a token id, a node of a search tree, the text of a token.
TOKEN, TOP, ENTRY, ID, NODE, TEXT = (64, 100), (45, 90), 70, 35, 200, 12


class Capacity:
    """A limit on the sequences in work (those beyond the engine's slots wait), or on something else that takes
    memory. A client holds no more than what is left free of twice the limit: alone, the limit; beside one that holds
    the limit, half of it; and so on, so that no number of requests of one client shuts out another."""

    def __init__(self, limit: int, what: str = "sequences"):
        self.limit, self.taken, self.what = limit, 0, what
        self.held: Counter[str] = Counter()  # by each client

    def check_possible(self, k: int) -> None:
        if k > self.limit:
            raise ApiError(400, f"this asks for {k} {self.what} at once; the limit is {self.limit}.", "n")

    def fits(self, k: int, client: str) -> bool:
        return self.held[client] + k <= 2 * self.limit - (self.taken + k)

    @contextlib.contextmanager
    def holding(self, k: int, client: str) -> Iterator[None]:
        self.check_possible(k)
        if not self.fits(k, client):
            raise full()
        self.taken += k
        self.held[client] += k
        try:
            yield
        finally:
            self.taken -= k
            self.held[client] -= k
            self.held += Counter()  # forget clients that hold nothing


class Queue(Capacity):
    """A limit on sequences. Few that need no slots have a place of their own, which is soon free again, so they find
    room even where the queue is full and its client has the same address: on one machine, all have."""

    def __init__(self, limit: int):
        super().__init__(limit)
        self.quick = Capacity(QUICK_ONES)

    @property
    def in_work(self) -> int:
        return self.taken + self.quick.taken

    def check_room(self, k: int, client: str) -> None:
        """Refuse what has no room now before its texts are read. (Few may yet turn out to need no slots.)"""
        self.check_possible(k)
        if k > QUICK and not self.fits(k, client):
            raise full()

    def place(self, k: int, client: str, slots: bool = False) -> contextlib.AbstractContextManager[None]:
        quick = not slots and k <= QUICK and self.quick.fits(k, client)
        return (self.quick if quick else self).holding(k, client)


def full() -> ApiError:
    return ApiError(429, "the queue is full: try again later.", code="queue_full", headers={"Retry-After": "1"})


def client_of(request: Request) -> str:
    """The address that a request comes from. An owner of one address of IPv6 has 2**64 of them."""
    host = request.client.host if request.client else ""
    with contextlib.suppress(ValueError):
        if (address := ipaddress.ip_address(host.partition("%")[0])).version == 6:
            return str(ipaddress.ip_network((address, 64), strict=False))
    return host


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
def holding_answer(answers: Capacity, size: int, client: str) -> Iterator[None]:
    """Hold the bytes of an answer until it is sent; an answer beyond all bounds is refused."""
    if size > ANSWER:
        raise ApiError(
            400,
            f"the answer would have up to {size >> 20} MB; the limit is {ANSWER >> 20}: ask for fewer samples, tokens "
            "(max_tokens), log-probs or rounds.",
            code="answer_too_large",
        )
    with answers.holding(size if size > SMALL else 0, client):
        yield
