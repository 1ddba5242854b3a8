r"""How a problem is shown to a model. The words must be the same in training, sampling and evaluation.

    qwen-math      ChatML: a system message that asks for steps and for the marker of the answer, then the bare problem
    deepseek-math  "User: problem, instruction" and "Assistant:"; the answer always goes into a box
    plain          the problem and a newline

A prompt is encoded without further special tokens. Its control tokens are those of the style; in the problem itself
they are plain characters. So the only BOS is the one written here. Qwen has none, DeepSeek's stands in front of its
prompt, and for other models the option `bos` gives it.
"""

from __future__ import annotations

from typing import Literal, get_args

from trailmark.errors import TaskError, nearest
from trailmark.tasks.math.extract import Marker
from trailmark.texts import Marked, mark

Style = Literal["qwen-math", "deepseek-math", "plain"]
IN_BOX = "Please reason step by step, and put your final answer within \\boxed{}."  # these models were trained with it
BEHIND_HASHES = (
    "Please reason step by step, and end with a line that has your final answer behind four hash signs, as in #### 0."
)
DEEPSEEK_BOS = "<｜begin▁of▁sentence｜>"


def marker_of(style: Style, asks: Marker) -> Marker:
    """Where the model must write the answer. DeepSeekMath knows only boxes."""
    return "boxed" if style == "deepseek-math" else asks


def bos_of(style: Style) -> str:
    return DEEPSEEK_BOS if style == "deepseek-math" else ""


def messages(question: str, style: Style, asks: Marker) -> list[dict[str, str]]:
    """The problem as messages, for servers and chat templates. They write their own BOS."""
    _known(style)
    instruction = IN_BOX if marker_of(style, asks) == "boxed" else BEHIND_HASHES
    if style == "qwen-math":
        return [{"role": "system", "content": instruction}, {"role": "user", "content": question}]
    said = f"{question}\n{instruction}" if style == "deepseek-math" else question
    return [{"role": "user", "content": said}]


def prompt(question: str, style: Style, asks: Marker, bos: str | None = None) -> Marked:
    """The problem as the text before the answer. `bos` replaces the style's own BOS."""
    told = messages(question, style, asks)
    out = mark(bos_of(style) if bos is None else bos)
    if style == "qwen-math":
        for m in told:
            out = out + mark(f"<|im_start|>{m['role']}\n") + m["content"] + mark("<|im_end|>\n")
        return out + mark("<|im_start|>assistant\n")
    if style == "deepseek-math":
        return out + f"User: {told[0]['content']}\n\nAssistant:"
    return out + f"{question}\n"


def _known(style: str) -> None:
    if style not in get_args(Style):
        raise TaskError(f"math has no prompt style '{style}'.{nearest(str(style), get_args(Style))}")
