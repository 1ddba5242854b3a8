"""`docs/benchmarks.md` from the results of the benchmarks: the newest measurement of every name.

python bench/table.py > docs/benchmarks.md

It also draws `docs/plots/gpu_growth.png`, how cost grows on a GPU.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ALONE = {"name", "ours", "unit", "device", "versions", "commit"}
FIELDS = {"name", "ours", "peer", "peer_name", "ratio", "unit", "device", "versions", "commit", "repeats", "spread"}
TITLES = {
    "answers": "Answer checking",
    "data": "Files of many rows",
    "decisions": "Label decisions",
    "explore": "AutoExplore",
    "gpu_engine": "The engine on a GPU",
    "gpu_growth": "How cost grows on a GPU",
    "gpu_sampling": "Sampling on a GPU",
    "gpu_sft": "Fine-tuning on a GPU",
    "gpu_step": "A whole online step on a GPU",
    "gpu_waits": "Where the host waits for a GPU",
    "gpu_training": "GRPO's gradient on a GPU",
    "gpu_unsloth": "GRPO's gradient on a GPU, against Unsloth",
    "gpu_vrcli": "A GRPO update of VR-CLI on a GPU",
    "plan": "What a plan foretells",
    "montecarlo": "Completions from shared states",
    "sampling": "Sampling",
    "training": "Training",
    "vllm_cpu": "Sampling on a CPU, against vLLM",
    "worlds": "ALFWorld and WebShop",
}
PICTURE = Path("docs/plots/gpu_growth.png")
GROWS = {
    "group size": "gradient: answers of one prompt of 2,048",
    "prompt length": "gradient: prompt tokens of 16 answers",
    "turns": "gradient: turns of 16 conversations that part ways",
    "model size": "gradient: size of the model, 16 answers",
    "likelihoods": "likelihoods: texts after one context of 2,048",
    "completions": "sampling: completions of each of 16 states",
    "labels": "decisions: labels to choose from",
}
HEAD = """# Benchmarks

`python bench/table.py > docs/benchmarks.md` makes this page from `bench/results/*.jsonl`. The scripts named below wrote
these files, and running a script again adds to its file. Ours and the peer run in turns in one process. `ratio` says
how many times better we are (the median over the repeats), with the smallest and the largest value; below 1 the peer is
better. Where there is no peer, they are those of our own number. On a CPU everything runs in one thread, and seconds
are computing time of the process, which on a quiet machine equals wall-clock time. Only `bench/vllm_cpu.py`, which has
two processes and up to two threads, takes wall-clock time, on a quiet machine.
"""


def rows(path: Path) -> list[dict[str, Any]]:
    """The newest row of every name, in the order in which names first appear. Lines that are not measurements are left
    out."""
    newest: dict[str, dict[str, Any]] = {}
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        if row.keys() >= ALONE:
            newest[row["name"]] = row
    return list(newest.values())


def page(folder: Path = RESULTS) -> str:
    parts = [HEAD]
    for path in sorted(folder.glob("*.jsonl")):
        if found := rows(path):
            parts.append(section(path.stem, found))
    return "\n".join(parts)


def section(name: str, found: list[dict[str, Any]]) -> str:
    peers = {r["peer_name"] for r in found if "peer_name" in r}
    lines = [
        f"## {TITLES.get(name, name)}",
        "",
        f"`python bench/{name}.py`{', against ' if peers else ''}{', '.join(sorted(peers))}.",
        "",
    ]
    if name == "gpu_growth":
        lines += [f"![Seconds of a pass over what grows, with and without sharing]({PICTURE.relative_to('docs')})", ""]
    lines += ["| what | ours | peer | unit | ratio | from – to | of |", "|---|---:|---:|---|---:|---|---|"]
    for r in found:
        if "ratio" not in r:
            spread = " – ".join(number(x) for x in r["spread"]) if "spread" in r else "–"
            lines.append(
                f"| {r['name'].partition('/')[2]} | {number(r['ours'])} | – | {r['unit']} | – | {spread} | "
                f"{r.get('what', '')} |"
            )
            continue
        low, high = r["spread"]
        lines.append(
            f"| {r['name'].partition('/')[2]} | {number(r['ours'])} | {number(r['peer'])} | {r['unit']} | "
            f"**{r['ratio']:.2f}** | {low:.2f} – {high:.2f} | {r.get('what', '')} |"
        )
    if name == "gpu_training":
        lines += ["", *left(found)]
    told: dict[str, list[str]] = {}
    for r in found:
        used = ", ".join(f"{k} {v}" for k, v in r["versions"].items())
        repeats = f"; {r['repeats']} repeats" if "repeats" in r else ""
        told.setdefault(f"{r['device']}; {used}; commit {r['commit']}{repeats}", []).append(r["name"])
    lines.append("")
    for about, names in told.items():
        which = "" if len(told) == 1 else f" ({', '.join(n.partition('/')[2] for n in names)})"
        lines.append(f"Measured on {about}{which}.\n")
    return "\n".join(lines)


def work(prompt: int, written: int, rows: int, shared: bool) -> float:
    """FLOPs of GRPO's gradient at Qwen2-0.5B's shape: the weights of the layers at every place (6 for each weight), the
    vocabulary at every written token (6; 8 if it is computed again in the backward pass, as ours is), and attention
    over every pair of places that see each other (14 for each number of a query: two products, and five in the backward
    pass)."""
    layers, width, middle, narrow, vocabulary = 24, 896, 4864, 128, 151_936
    weights = layers * (2 * width * width + 2 * width * narrow + 3 * width * middle)
    places = prompt + rows * written if shared else rows * (prompt + written)
    own = written * prompt + written**2 / 2
    pairs = prompt**2 / 2 + rows * own if shared else rows * (prompt**2 / 2 + own)
    readout = (8 if shared else 6) * vocabulary * width * rows * written
    return 6.0 * weights * places + readout + 14.0 * layers * width * pairs


def left(found: list[dict[str, Any]]) -> list[str]:
    """What is left of the time of GRPO's gradient: the work that ours and TRL's do, by counting, and the profile."""
    lines = [
        "What is left: sharing saves places, but every written token still attends to the whole prompt, and our",
        "readout computes the vocabulary twice, to save memory. At equal FLOP/s the ratio would be that of the work,",
        "which `work` in `bench/table.py` counts:",
        "",
        "| what | TFLOP, ours | TFLOP, TRL | ratio of the work | ratio of places | ours, of 989 TFLOP/s | TRL |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in found:
        lengths = re.match(r"(\d+) samples of (\d+) after (\d+)", r.get("what", ""))
        if "ratio" not in r or lengths is None:
            continue
        rows, written, prompt = map(int, lengths.groups())
        mine, theirs = (work(prompt, written, rows, shared) / 1e12 for shared in (True, False))
        places = rows * (prompt + written) / (prompt + rows * written)
        lines.append(
            f"| {r['name'].partition('/')[2]} | {mine:.1f} | {theirs:.1f} | {theirs / mine:.2f} | {places:.2f} | "
            f"{mine * r['ours'] / 989:.0%} | {theirs * r['peer'] / 989:.0%} |"
        )
    missing = [c for c in ("512", "4096", "12000") if not any(r["name"].endswith(f"/profile {c}") for r in found)]
    if missing:
        lines += [
            "",
            "Which kernels take that time is not yet measured:",
            f"`python bench/gpu_training.py --profile --cases {','.join(missing)}` on a GPU adds it here.",
        ]
    return lines


def draw(found: list[dict[str, Any]]) -> None:
    """A panel for each curve: seconds with sharing and without, over what grows; for labels, decisions a second."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(15, 6.5), layout="constrained")
    for axis, row in zip(axes.flat, found):
        name, points = row["name"].partition("/")[2], row["points"]
        places, ticks = range(len(points)), [str(p["x"]) for p in points]
        if "tree" in points[0]:
            axis.plot(places, [p["flat"] for p in points], "s--", color="#b0553a", label="without sharing")
            axis.plot(places, [p["tree"] for p in points], "o-", color="#2b6a99", label="with sharing")
            axis.set_ylabel("seconds")
            axis.legend(frameon=False)
        else:
            axis.plot(places, [p["decisions_per_second"] for p in points], "o-", color="#2b6a99")
            axis.set_ylabel("decisions a second")
        axis.set_ylim(bottom=0)
        axis.set_xticks(places, ticks)
        axis.set_title(GROWS.get(name, name), fontsize=10)
    for axis in list(axes.flat)[len(found) :]:
        axis.set_visible(False)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


def number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


if __name__ == "__main__":
    if growth := rows(RESULTS / "gpu_growth.jsonl"):
        draw(growth)
    print(page(), end="")
