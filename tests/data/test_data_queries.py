"""Sentences that authors wrote: which are used, and in what form."""

import pytest

from trailmark.methods.reflect.queries import Excerpt, plain_text, queries

DOC = '''
class Cart:
    """Carries things from one end of the yard to the other. More is said here."""

    def push(self):
        """Push the thing with both hands until it has come to rest again."""

    async def load(self, a):
        """Fill it up to the brim, but not
        above :attr:`Cart.limit`, with ``stones``.

        :param a: nothing
        """

    def tip(self):
        """:param a: a list of fields is not a sentence that describes anything."""

    def turn(self):
        """Too short."""

    def stop(self):
        """Waits, e.g. at a gate, i.e. where someone has to open it! Then on."""
'''
PAGE = """\
Heading
=======

The first paragraph spans two lines
and mentions `a name`_, **twice** even, with [a link](x.html).

* a point that is long enough to be mistaken for a paragraph.

    Indented text is an example and not prose, however long it is.

.. note:: a directive that is long enough to be a paragraph of its own.

lower case does not begin a paragraph that anyone would ask about here.

1. A numbered point that is long enough to be mistaken for one.

This one leads to a list of things that are to come below:

See https://example.org for more than can be said in this place.
"""


def found(path, text):
    return queries(Excerpt("r", path, "code", text, text))


def test_docstrings():
    assert found("a/b.py", DOC) == [
        ("Carries things from one end of the yard to the other.", "It is Cart in a/b.py."),
        ("Fill it up to the brim, but not above Cart.limit, with stones.", "It is load in a/b.py."),
        ("Waits, e.g. at a gate, i.e. where someone has to open it!", "It is stop in a/b.py."),
    ]  # push holds its own name


def test_paragraphs():
    assert [q for q, _ in found("a.rst", PAGE)] == [
        "The first paragraph spans two lines and mentions a name, twice even, with a link."
    ]


@pytest.mark.parametrize(
    "path, text", [("a.py", "def f(:\n  '''"), ("a.py", "\0"), ("a.c", DOC), ("a.csv", PAGE), ("a.md", "")]
)
def test_files_without_prose(path, text):
    assert found(path, text) == []


def test_plain_text():
    assert plain_text(":func:`~a.b` is `x <y>`_,\n  ``z`` and **w**, :ref:`words <w>`") == "a.b is x, z and w, words"
