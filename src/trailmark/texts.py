"""Text to tokens, so that what a text says never becomes a control token.

A tokenizer reads `<|im_end|>` in a file, a question or a chat message as the end of the turn. Here a text is *content*: its
characters are encoded as characters. Only a template, or code of ours that adds an end or a BOS, writes control tokens.

Control tokens of a tokenizer are the added tokens that are flagged special, and those with which its chat template begins or
ends a turn, flagged or not. Other added tokens (labels, `<think>`, `<tool_call>`) are vocabulary that a text may use.

    encode(tokenizer, text)     the tokens of a text: content, but for the parts that a `Marked` text says are control
    Marked                      a text with a frame: `mark("<|im_start|>") + "user\n" + question`
    Controls                    the control tokens of one tokenizer; `guard` and `lay` take contents through a template

A template works on text, so contents go into it *guarded*: every control token they hold stands between two noncharacters, and
a piece of one at their edges has such a character beside it. What the template wrote itself has none. Texts that hold no control
token have the very tokens that the tokenizer gives; a text that holds one has those of `split_special_tokens=True`.
"""

from __future__ import annotations

import re
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trailmark.errors import DataError

OPEN, CLOSE, ESCAPE = "\ufdd0", "\ufdd1", "\ufdd2"  # noncharacters; where a text has one itself it is escaped
PROBE = "\ue000trailmark\ue001"  # private-use characters: no template writes or trims them
ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "function", "model", "ipython", "environment",
                   "observation", "context", "documents", "document", "critic"})  # fmt: skip
_escaped = {OPEN: ESCAPE + "o", CLOSE: ESCAPE + "c", ESCAPE: ESCAPE + "e"}
_plain = {v: k for k, v in _escaped.items()}
_signs = re.compile(f"{ESCAPE}[oce]|[{OPEN}{CLOSE}{ESCAPE}]")
_halves = re.compile("[\ud800-\udfff]")

Span = tuple[int, int]
Encoded = tuple[list[int], list[Span]]


class Marked(str):
    """A text of which the parts in `spans` may be control tokens. Adding keeps the spans; all else gives plain content."""

    spans: tuple[Span, ...]

    def __new__(cls, text: str, spans: Sequence[Span] = ()) -> Marked:
        made = super().__new__(cls, text)
        made.spans = tuple(spans)
        return made

    def __add__(self, other: str) -> Marked:
        more = tuple((a + len(self), b + len(self)) for a, b in getattr(other, "spans", ()))
        return Marked(str(self) + str(other), self.spans + more)

    def __radd__(self, other: str) -> Marked:
        return Marked(other) + self


def mark(token: str) -> Marked:
    """A text that is control as a whole, such as a header that a template writes."""
    return Marked(token, [(0, len(token))] if token else ())


def encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without those that a tokenizer puts around it (a BOS)."""
    controls = controls_of(tokenizer)
    return controls.encode(*controls.lay(controls.guard(text)))[0]


def encode_with_places(tokenizer: Any, text: str) -> Encoded:
    """The same, and where in the text each token stands. Only a fast tokenizer knows that."""
    controls = controls_of(tokenizer)
    return controls.encode(*controls.lay(controls.guard(text)), places=True)


def whole_letters(text: str) -> str:
    """The text with U+FFFD for halves of characters (lone surrogates), which no tokenizer takes."""
    return _halves.sub("\ufffd", text)


def controls_of(tokenizer: Any, template: str | None = "own") -> Controls:
    """The control tokens of a tokenizer under its own template or another, found once."""
    if template == "own":
        template = getattr(tokenizer, "chat_template", None)
    known = _known.setdefault(tokenizer, {})
    key = (len(tokenizer) if hasattr(tokenizer, "__len__") else 0, str(template))
    if key not in known:
        if any(size != key[0] for size, _ in known):  # tokens were added
            known.clear()
        known[key] = Controls(tokenizer, template)
    return known[key]


_known: weakref.WeakKeyDictionary[Any, dict[tuple[int, str], Controls]] = weakref.WeakKeyDictionary()


class Controls:
    def __init__(self, tokenizer: Any, template: str | None = None):
        self._tokenizer: weakref.ref[Any] = weakref.ref(tokenizer)  # it is the key under which this is kept
        added = {t.content: (i, t) for i, t in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        named = set(getattr(tokenizer, "all_special_tokens", ()))
        wanted = {w for w, (_, t) in added.items() if w.strip() and (t.special or w in named)}
        wanted |= _turn_markers(tokenizer, template, list(added))
        self.words = {w: int(added[w][0]) for w in wanted}
        # A letter that a tokenizer does not know becomes its unknown token. It controls nothing, unless (GPT-2) it is the end too.
        unknown, *acting = (getattr(tokenizer, f"{n}_token_id", None) for n in ("unk", "bos", "eos", "sep", "cls"))
        self.ids = frozenset(self.words.values()) - ({unknown} - {*acting})
        self._eats = {w: (added[w][1].lstrip, added[w][1].rstrip) for w in wanted}
        self._any = _one_of([w for w in added if w.strip()])
        self._unsafe = re.compile(f"{_one_of(self.words).pattern}|[{OPEN}-{ESCAPE}]|{_halves.pattern}")
        longest = max(map(len, self.words), default=0)
        self._begins = {w[:k] for w in self.words for k in range(1, len(w))}
        self._ends = {w[k:] for w in self.words for k in range(1, len(w))}
        self._reach = longest - 1
        self._core: Any = None
        self._alone: bool | None = None

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer()

    # --- through a template

    def guard(self, text: str) -> str:
        """Content that a template may show: its control tokens, and pieces of them at its edges, cannot act."""
        spans = getattr(text, "spans", ())
        starts = [a for a, _ in spans]

        def replace(m: re.Match[str]) -> str:
            word = m[0]
            if len(word) == 1 and word not in self.words:
                return _escaped.get(word, "\ufffd")
            k = bisect_right(starts, m.start())
            return word if k and m.end() <= spans[k - 1][1] else OPEN + word + CLOSE

        out = self._unsafe.sub(replace, str(text))
        if spans or not self.words:
            return out
        body = out.rstrip()
        if any(body[-k:] in self._begins for k in range(1, min(self._reach, len(body)) + 1)):
            out = body + CLOSE + out[len(body) :]
        body = out.lstrip()
        if any(body[:k] in self._ends for k in range(1, min(self._reach, len(body)) + 1)):
            out = out[: len(out) - len(body)] + OPEN + body
        return out

    def guard_all(self, value: Any) -> Any:
        """The same for every text inside lists and mappings, such as tools."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, Mapping):
            return {self.guard_all(k) if self._holds(k) else k: self.guard_all(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard_all(v) for v in value]
        return value

    def guard_message(self, message: Mapping[str, Any], number: int) -> dict[str, Any]:
        """A message for a template. Templates build headers from roles, so a role may be no part of a control token."""
        role = message.get("role")
        if isinstance(role, str) and role not in ROLES and (self._holds(role) or any(role in w for w in self.words)):
            raise DataError(f"message {number}: the role {role[:40]!r} is, or could become, a control token of this model.")
        rest = {k: v for k, v in message.items() if k != "role"}
        return {**({"role": role} if "role" in message else {}), **self.guard_all(rest)}

    def lay(self, guarded: str) -> tuple[str, list[Span]]:
        """What a guarded text says, and where control tokens stand in it that no content wrote."""
        text, opens, breaks = str(guarded), set[int](), [-1]
        if _signs.search(text):
            parts, at = [], 0
            for piece, sign in _pieces(text):
                if sign:
                    breaks.append(at)
                    if piece == OPEN:
                        opens.add(at)
                    continue
                parts.append(piece)
                at += len(piece)
            text = "".join(parts)
        broken = lambda a, b: breaks[bisect_left(breaks, b) - 1] > a  # the last break before b lies behind a
        return text, [(a, b) for a, b in self.found(text) if a not in opens and not broken(a, b)]

    def found(self, text: str) -> Iterator[Span]:
        """Where control tokens stand in a text, as a tokenizer looks for them among all that were added."""
        return ((m.start(), m.end()) for m in self._any.finditer(text) if m[0] in self.words)

    def shown(self, guarded: str) -> Marked:
        """A guarded text as people read it, with its control tokens marked."""
        return Marked(*self.lay(guarded))

    def _holds(self, text: Any) -> bool:
        return isinstance(text, str) and self._unsafe.search(text) is not None

    # --- to tokens

    def encode(self, text: str, own: Sequence[Span] = (), places: bool = False) -> Encoded:
        """The tokens of `text`, and if wanted their places, with control tokens at `own` and nowhere else."""
        meant = [self.words[text[a:b]] for a, b in own]
        if len(meant) == sum(1 for _ in self.found(text)):
            ids, where = self._whole(text, places)
            left = iter(meant)
            if all(i in left for i in ids if i in self.ids):
                return ids, where
        ids, where, at, before = [], [], 0, ""
        for a, b in [*own, (len(text), len(text))]:
            new, spans = self._piece(text[at:a], before, text[a:b], places)
            ids += new
            where += _moved(spans, at)
            if b > a:
                ids.append(self.words[text[a:b]])
                where += [(a, b)] if places else []
            at, before = b, text[a:b]
        return ids, where

    def _piece(self, text: str, before: str, after: str, places: bool) -> Encoded:
        """What stands between two control tokens."""
        if after and self._eats[after][0]:
            text = text.rstrip()
        if not text:
            return [], []
        if not any(self.found(text)):
            cut = len(self._whole(before)[0]) if before else 0
            ids, where = self._whole(before + text, places)
            if self.ids.isdisjoint(ids[cut:]):
                return ids[cut:], _moved(where[cut:], -len(before))
        eaten = len(text) - len(text.lstrip()) if before and self._eats[before][1] else 0
        ids, where = self._literal(text[eaten:], not before)
        return ids, _moved(where, eaten) if places else []

    def _literal(self, text: str, first: bool) -> Encoded:
        """A text that holds control tokens, as ordinary characters: in one piece, else cut inside each, else in letters."""
        inside = [a + 1 for a, _ in self.found(text)]
        for cuts in ([], inside, range(1, len(text))):
            ids, where = self._cut(text, cuts, first)
            if self.ids.isdisjoint(ids):
                return ids, where
        word = next((text[a:b] for a, b in self.found(text)), text[:40])
        raise DataError(f"this tokenizer cannot write {word!r} as plain text: take it out.")

    def _cut(self, text: str, cuts: Sequence[int], first: bool) -> Encoded:
        ids, where = [], []
        for a, b in zip([0, *cuts], [*cuts, len(text)]):
            lead = "" if (first and a == 0) or self._stands_alone() else self._lead(text[a:b])
            skip = len(self._split(lead)[0])
            new, spans = self._split(lead + text[a:b])
            ids += new[skip:]
            where += _moved(spans[skip:], a - len(lead))
        return ids, where

    def _lead(self, text: str) -> str:
        """A character to encode `text` behind, where a tokenizer puts a space before what stands first."""
        for lead in ("\n", ">", "a"):
            alone = self._split(lead)[0]
            if self._split(lead + text)[0][: len(alone)] == alone:
                return lead
        return ""

    def _stands_alone(self) -> bool:
        """Whether a word behind a control token has the tokens that it has alone."""
        if self._alone is None:
            word = next(iter(self.words), "")
            cut = len(self._whole(word)[0])
            self._alone = self._whole(word + "a")[0][cut:] == self._whole("a")[0]
        return self._alone

    def _whole(self, text: str, places: bool = False) -> Encoded:
        """As the tokenizer has it: control tokens are found."""
        if not callable(self.tokenizer):  # something that only encodes
            return list(self.tokenizer.encode(text, add_special_tokens=False)), []
        if not places:
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]), []
        made = self.tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        return list(made["input_ids"]), list(made["offset_mapping"])

    def _split(self, text: str) -> Encoded:
        """Without looking for control tokens. A fast tokenizer keeps that as a setting, so a copy of it is asked: another
        thread may be at work with the tokenizer itself."""
        if not text:
            return [], []
        if not getattr(self.tokenizer, "is_fast", False):
            return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)), []
        if self._core is None:
            from tokenizers import AddedToken, Tokenizer

            core = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
            core.no_truncation()
            core.no_padding()
            core.add_special_tokens([AddedToken(w, special=True) for w in self.words])
            core.encode_special_tokens = True
            self._core = core
        made = self._core.encode(text, add_special_tokens=False)
        return made.ids, made.offsets


def _moved(spans: Sequence[Span], by: int) -> list[Span]:
    return [(a + by, b + by) for a, b in spans] if by else list(spans)


def _one_of(words: Sequence[str] | Mapping[str, Any]) -> re.Pattern[str]:
    """Any of the words, the longest first. The first letters are looked for before the words are tried."""
    if not words:
        return re.compile("(?!)")
    first = "".join(sorted({re.escape(w[0]) for w in words}))
    return re.compile(f"(?=[{first}])(?:{'|'.join(map(re.escape, sorted(words, key=len, reverse=True)))})")


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """A guarded text in pieces; True marks a sign that `guard` put there."""
    at = 0
    for m in _signs.finditer(text):
        if m.start() > at:
            yield text[at : m.start()], False
        yield (_plain[m[0]], False) if m[0] in _plain else (m[0], True)
        at = m.end()
    if at < len(text):
        yield text[at:], False


def _turn_markers(tokenizer: Any, template: str | None, words: Sequence[str]) -> set[str]:
    """Those of `words` with which the template begins or ends a turn: around a user's message, first in a prompt, and first
    behind what the assistant says. A word such as "user" is none: a marker begins and ends with a sign."""
    signs = [w for w in words if len(w) > 2 and not (w[0].isalnum() or w[-1].isalnum() or w[0].isspace() or w[-1].isspace())]
    if template is None or not signs:
        return set()
    find, out = _one_of(signs), set[str]()
    asked_for = {"chat_template": template} if isinstance(template, str) else {}
    user = {"role": "user", "content": PROBE}
    for talk in ([user], [{"role": "system", "content": PROBE}, user], [user, {"role": "assistant", "content": PROBE}, user]):
        try:
            shown, asked = (
                tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=p, **asked_for)
                for p in (False, True)
            )
        except Exception:  # a template may refuse roles, in any way it likes
            continue
        if len(talk) < 3:
            out.update(find.findall(shown))
            out.update(find.findall(asked.removeprefix(shown))[:1])
        elif shown.count(PROBE) == 3:  # between what the assistant says and the next message
            out.update(find.findall(shown.split(PROBE)[2])[:1])
    return out
