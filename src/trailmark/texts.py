"""Text to tokens, without letting a text write control tokens.

A plain tokenizer reads `<|im_end|>` in a file, a question or a chat message as the end of the turn. In this module a
text is *content*: its characters are encoded as characters. Control tokens come only from a template, or from our own
code that adds an end of turn or a BOS.

The control tokens of a tokenizer are its added tokens that are flagged special, and the tokens with which its chat
template begins or ends a turn. Other added tokens (labels, `<think>`, `<tool_call>`) are vocabulary that a text may
use.

    encode(tokenizer, text)     the tokens of a text; only the marked parts of a `Marked` text become control tokens
    Marked                      a text with marked parts: `mark("<|im_start|>") + "user\n" + question`
    Controls                    the control tokens of one tokenizer; `guard` and `unguard` protect texts in a template

A template works on text, so contents are *guarded* before they go into it. `guard` puts every control token of a
content between two noncharacters, and puts one beside a piece of a control token at the content's edge. What the
template writes itself has no such characters. A text without control tokens gets the tokens that the tokenizer gives. A
text with one gets those of `split_special_tokens=True`.
"""

from __future__ import annotations

import re
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trailmark.errors import DataError
from trailmark.templates import TemplateLimit, TemplateProblem, apply_template

OPEN, CLOSE, ESCAPE = "\ufdd0", "\ufdd1", "\ufdd2"  # noncharacters; if a text holds one itself, it is escaped
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
    """A text whose parts in `spans` may become control tokens. `+` keeps the spans; every other operation loses
    them."""

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
    """A text that is one control token, or one header that a template writes."""
    return Marked(token, [(0, len(token))] if token else ())


def encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without the BOS that a tokenizer may add."""
    controls = controls_of(tokenizer)
    return controls.encode(*controls.unguard(controls.guard(text)))[0]


def encode_with_places(tokenizer: Any, text: str) -> Encoded:
    """The tokens of a text, and the position of each in the text. This needs a fast tokenizer."""
    controls = controls_of(tokenizer)
    return controls.encode(*controls.unguard(controls.guard(text)), places=True)


def whole_letters(text: str) -> str:
    """The text with U+FFFD in place of lone surrogates, which no tokenizer accepts."""
    return _halves.sub("\ufffd", text)


def controls_of(tokenizer: Any, template: str | None = "own") -> Controls:
    """The control tokens of a tokenizer under its own template or another one. The result is cached."""
    if template == "own":
        template = getattr(tokenizer, "chat_template", None)
    known = _known.setdefault(tokenizer, {})
    key = (len(tokenizer) if hasattr(tokenizer, "__len__") else 0, str(template))
    if key not in known:
        if any(size != key[0] for size, _ in known):  # tokens were added since
            known.clear()
        known[key] = Controls(tokenizer, template)
    return known[key]


_known: weakref.WeakKeyDictionary[Any, dict[tuple[int, str], Controls]] = weakref.WeakKeyDictionary()


class Controls:
    def __init__(self, tokenizer: Any, template: str | None = None):
        self._tokenizer: weakref.ref[Any] = weakref.ref(tokenizer)  # weak: the tokenizer is the key of the cache
        added = {t.content: (i, t) for i, t in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        named = set(getattr(tokenizer, "all_special_tokens", ()))
        wanted = {w for w, (_, t) in added.items() if w.strip() and (t.special or w in named)}
        wanted |= _turn_markers(tokenizer, template, list(added))
        self.words = {w: int(added[w][0]) for w in wanted}
        # Letters that a tokenizer does not know become its unknown token. That token controls nothing, unless the
        # tokenizer (GPT-2) uses it as the end token too.
        unknown, *acting = (getattr(tokenizer, f"{n}_token_id", None) for n in ("unk", "bos", "eos", "sep", "cls"))
        self.ids = frozenset(self.words.values()) - ({unknown} - {*acting})
        self._eats = {w: (added[w][1].lstrip, added[w][1].rstrip) for w in wanted}
        self._any = _one_of([w for w in added if w.strip()])
        self._unsafe = re.compile(f"{_one_of(self.words).pattern}|[{OPEN}-{ESCAPE}]|{_halves.pattern}")
        self._firsts = sorted({w[0] for w in self.words})
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
        """Content that is safe in a template: its control tokens, and pieces of them at its edges, are escaped."""
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
        """`guard` for every text inside lists and mappings, such as tools."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, Mapping):
            return {self.guard_all(k) if self.holds(k) else k: self.guard_all(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard_all(v) for v in value]
        return value

    def guard_message(self, message: Mapping[str, Any], number: int) -> dict[str, Any]:
        """A message for a template. Templates build headers from roles, so a role must not hold part of a control
        token."""
        role = message.get("role")
        if isinstance(role, str) and role not in ROLES and (self.holds(role) or any(role in w for w in self.words)):
            raise DataError(
                f"message {number}: the role {role[:40]!r} is, or could become, a control token of this model."
            )
        rest = {k: v for k, v in message.items() if k != "role"}
        return {**({"role": role} if "role" in message else {}), **self.guard_all(rest)}

    def unguard(self, guarded: str) -> tuple[str, list[Span]]:
        """The plain text of a guarded text, and the spans of the control tokens that the template wrote."""
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
        broken = lambda a, b: breaks[bisect_left(breaks, b) - 1] > a  # the last break before b comes after a
        return text, [(a, b) for a, b in self.found(text) if a not in opens and not broken(a, b)]

    def found(self, text: str) -> Iterator[Span]:
        """The spans of control tokens in a text, found as a tokenizer finds them among all its added tokens."""
        return ((m.start(), m.end()) for m in self._any.finditer(text) if m[0] in self.words)

    def shown(self, guarded: str) -> Marked:
        """A guarded text without its escapes, with its control tokens marked."""
        return Marked(*self.unguard(guarded))

    def holds(self, text: Any) -> bool:
        """Whether a text holds a control token, or a character that `guard` escapes."""
        if not isinstance(text, str) or (text.isascii() and not any(c in text for c in self._firsts)):
            return False  # found without looking at every letter
        return self._unsafe.search(text) is not None

    # --- to tokens

    def encode(self, text: str, own: Sequence[Span] = (), places: bool = False) -> Encoded:
        """The tokens of `text`, and if asked their positions. Control tokens stand at `own` and nowhere else."""
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
        """The tokens between two control tokens."""
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
        """Encode control tokens as ordinary characters: in one piece, else cut inside each token, else letter by
        letter."""
        inside = [a + 1 for a, _ in self.found(text)]
        for cuts in ([], inside, range(1, len(text))):
            ids, where = self._cut(text, cuts, first)
            if self.ids.isdisjoint(ids):
                return ids, where
        word = next((text[a:b] for a, b in self.found(text)), text[:40])
        raise DataError(f"this tokenizer cannot write {word!r} as plain text: remove it from the text.")

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
        """A character to put before `text`, for tokenizers that add a space before the first word."""
        for lead in ("\n", ">", "a"):
            alone = self._split(lead)[0]
            if self._split(lead + text)[0][: len(alone)] == alone:
                return lead
        return ""

    def _stands_alone(self) -> bool:
        """Whether a word after a control token has the same tokens as the word alone."""
        if self._alone is None:
            word = next(iter(self.words), "")
            cut = len(self._whole(word)[0])
            self._alone = self._whole(word + "a")[0][cut:] == self._whole("a")[0]
        return self._alone

    def _whole(self, text: str, places: bool = False) -> Encoded:
        """The tokens as the tokenizer gives them, control tokens included."""
        if not callable(self.tokenizer):  # an object that has only `encode`
            return list(self.tokenizer.encode(text, add_special_tokens=False)), []
        if not places:
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]), []
        made = self.tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        return list(made["input_ids"]), list(made["offset_mapping"])

    def _split(self, text: str) -> Encoded:
        """The tokens without control tokens. A fast tokenizer keeps that as a setting, so this asks a copy: another
        thread may be using the tokenizer."""
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
    """A pattern for any of the words, the longest first. It checks the first letter before it tries the words."""
    if not words:
        return re.compile("(?!)")
    first = "".join(sorted({re.escape(w[0]) for w in words}))
    return re.compile(f"(?=[{first}])(?:{'|'.join(map(re.escape, sorted(words, key=len, reverse=True)))})")


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """A guarded text in pieces; True marks a character that `guard` added."""
    at = 0
    for m in _signs.finditer(text):
        if m.start() > at:
            yield text[at : m.start()], False
        yield (_plain[m[0]], False) if m[0] in _plain else (m[0], True)
        at = m.end()
    if at < len(text):
        yield text[at:], False


def _turn_markers(tokenizer: Any, template: str | None, words: Sequence[str]) -> set[str]:
    """Those of `words` with which the template begins or ends a turn. They stand around a user's message, first in a
    prompt, or first after the assistant's text. A marker begins and ends with a sign, so a word like "user" is none."""
    letter = lambda c: c.isalnum() or c.isspace()
    signs = [w for w in words if len(w) > 2 and not letter(w[0]) and not letter(w[-1])]
    if template is None or not signs:
        return set()
    find, out = _one_of(signs), set[str]()
    asked_for = template if isinstance(template, str) else None
    user = {"role": "user", "content": PROBE}
    system, assistant = {"role": "system", "content": PROBE}, {"role": "assistant", "content": PROBE}
    for talk in ([user], [system, user], [user, assistant, user]):
        try:
            shown, asked = (apply_template(tokenizer, talk, p, asked_for) for p in (False, True))
        except TemplateProblem:  # a template may refuse roles
            continue
        except TemplateLimit:
            break
        if len(talk) < 3:
            out.update(find.findall(shown))
            out.update(find.findall(asked.removeprefix(shown))[:1])
        elif shown.count(PROBE) == 3:  # between the assistant's text and the next message
            out.update(find.findall(shown.split(PROBE)[2])[:1])
    return out


def token_count(tokenizer: object = None) -> Callable[[str], int]:
    """A function that counts the tokens of a text; without a tokenizer, four bytes are one token."""
    if tokenizer is None:
        return lambda text: len(text.encode()) // 4
    return lambda text: len(encode(tokenizer, text))
