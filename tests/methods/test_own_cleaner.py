"""A cleaner of one's own that fails is named, with the solution that it got."""

import pytest

from trailmark.errors import DataError
from trailmark.methods.lpr.config import LprClean
from trailmark.methods.lpr.states import clean_all
from trailmark.models.tiny import tiny_tokenizer
from trailmark.types import Episode, Scored, Task, Turn


@pytest.mark.parametrize(
    ("cleaner", "why"),
    [
        (lambda text: text[10_000], "clean.clean raised IndexError: string index out of range. .* solution 'e'"),
        (lambda text: 3, "clean.clean returned 3 for solution 'e': it must return a text or None"),
    ],
)
def test_a_cleaner_that_raises_is_named(cleaner, why):
    e = Episode("e", Task("t"), "g", (Turn("policy", (1,), (2,), text="a\nb"),), {"self": Scored(1.0, True)})
    with pytest.raises(DataError, match=why):
        clean_all([e], LprClean(), tiny_tokenizer(), "policy", lambda e: "", cleaner)
