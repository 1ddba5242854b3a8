"""The process that renders chat templates of which no bound is known: `python -m trailmark.template_worker SECONDS`.

It reads one JSON object a line and writes one. The system ends it when a template computes for more than `SECONDS`, and
lets it take no more than `MEMORY`. `templates.py` starts it and talks to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

SECONDS = 2.0  # of computing for one rendering
MEMORY = 512 << 20  # bytes beside what the process has when it starts


def main() -> None:
    import resource

    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the process that asks hears it, and then ends this
        signal.signal(sent, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write there
    from transformers.utils.chat_template_utils import render_jinja_template

    with contextlib.suppress(OSError):  # where the system does not say, only the time is limited
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
        answer = json.dumps(_answer(render_jinja_template, line)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(answer + b"\n")
        answers.flush()


def _answer(render: Any, line: bytes) -> dict[str, str]:
    try:
        asked = json.loads(line)
        text = render(
            [asked["messages"]], chat_template=asked["template"], add_generation_prompt=asked["prompt"], **asked["more"]
        )[0][0]
        return {"text": text} if len(text) <= asked["longest"] else {"large": "text"}
    except MemoryError:
        return {"large": "memory"}
    except Exception as problem:
        said = {"problem": f"{problem}"[:1000] or type(problem).__name__}
        return said if _by_template(problem) else {**said, "unfit": type(problem).__name__}


def _by_template(problem: BaseException) -> bool:
    """Whether the template is at fault: Jinja refuses it, or it ran. What fails before is the state of this process."""
    from jinja2 import TemplateError

    frames = traceback.walk_tb(problem.__traceback__)
    return isinstance(problem, (TemplateError, RecursionError)) or any(
        frame.f_code.co_filename == "<template>" for frame, _ in frames
    )


if __name__ == "__main__":
    main()
