r"""The worker process of `pool.py`: a script that compares formulas with math-verify, one JSON line in, one out.

It runs as a file and imports nothing of ours. Only the LaTeX parser reads formulas. The parser for plain text would
pass them to Python's own parser, and an answer cannot be trusted with that.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from typing import Any

IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])|\\sqrt\{\s*-")  # 2i, \sqrt{-4}
PROOF = ((r"\frac{1}{2}", "0.5"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), ("(x+1)^2", "x^2+2x+1"))


def main() -> None:
    seconds, memory = float(sys.argv[1]), int(sys.argv[2]) << 20
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not become an answer
    sys.setrecursionlimit(3000)
    try:
        import logging

        logging.disable(logging.CRITICAL)
        wrong = next((p for p in PROOF if not equal(*p)), None)
        hello: dict[str, Any] = {"ready": wrong is None}
        if wrong:
            hello["problem"] = f"it does not know that {wrong[0]} is {wrong[1]}"
    except Exception as problem:
        hello = {"problem": f"{type(problem).__name__}: {problem}"}
    out.write(json.dumps(hello).encode() + b"\n")
    limit_memory(memory)
    for line in sys.stdin.buffer:
        alarm(seconds)
        answer = reply(json.loads(line))
        alarm(0)
        out.write(json.dumps(answer).encode() + b"\n")


def reply(question: dict[str, Any]) -> dict[str, Any]:
    compare = close if question.get("how") == "close" else equal
    try:
        return {"equal": bool(compare(question["gold"], question["answer"]))}
    except (MemoryError, RecursionError) as problem:
        return {"equal": False, "problem": type(problem).__name__}
    except Exception as problem:
        return {"equal": False, "problem": f"{type(problem).__name__}: {problem}"[:200]}


def read(*texts: str) -> list[Any]:
    """Formulas as sympy expressions. Their symbols are real unless one formula is complex. A differs from a, and no
    letter is a unit."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify.grader import should_treat_as_complex

    spelling = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
    real = not any(should_treat_as_complex(t) or IMAGINARY.search(t) for t in texts)
    names = ConversionConfig(lowercase_symbols=False)
    found = [
        latex2sympy(t, is_real=real, convert_degrees=False, normalization_config=spelling, conversion_config=names)
        for t in texts
    ]
    return found if real else [imaginary(x) for x in found]


def imaginary(x: Any) -> Any:
    """Replace the letter i by the imaginary unit."""
    from sympy import I

    return x.subs({s: I for s in getattr(x, "free_symbols", ()) if s.name == "i"})


def equal(gold: str, answer: str) -> bool:
    """Whether both are the same number, expression, equation or inequality."""
    from math_verify import verify

    a, b = read(gold, answer)
    return verify(a, b, strict=True, timeout_seconds=0) or same_solutions(a, b) or same_name(a, b)


def same_name(a: Any, b: Any) -> bool:
    """A name and an expression that simplifies to it, x and 2x/2. math-verify compares names only by their spelling."""
    from sympy import Expr, simplify

    named = [x.is_Symbol for x in (a, b) if isinstance(x, Expr)]
    return len(named) == 2 and any(named) and simplify((a - b).doit()) == 0


def same_solutions(a: Any, b: Any) -> bool:
    """Whether two inequalities in the same variable hold for the same numbers."""
    from sympy import Eq
    from sympy.core.relational import Relational

    if not all(isinstance(x, Relational) and not isinstance(x, Eq) for x in (a, b)):
        return False
    if a.free_symbols != b.free_symbols or len(a.free_symbols) != 1:
        return False
    return a.doit().as_set() == b.doit().as_set()


def close(gold: str, answer: str) -> bool:
    """The reference's last check: the difference simplifies to 0, or both are numbers within 0.001."""
    from sympy import simplify

    a, b = read(gold, answer)
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        if abs(float(a.doit().evalf()) - float(b.doit().evalf())) < 1e-3:
            return True
    return simplify(a - b) == 0


def alarm(seconds: float) -> None:
    """End the process after so much computing time, wherever it is; 0 cancels that."""
    with contextlib.suppress(ImportError, AttributeError):
        import signal

        signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_memory(size: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
