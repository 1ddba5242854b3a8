"""VR-CLI with SmolLM2-135M on chapters of novels, on one GPU: what plans of the base model and of the trained policy,
and imitation, are worth on books that nobody trained on.

    PYTHONPATH=src python bench/gpu_vrcli_novels.py [--data carry-data] [--out carry-out] [--seconds 480] [--seed 0]

Each stage ends in one small file in `--out`. A stage whose file is there is done, so a call that was cut goes on where
it stopped, and a new machine needs only these files. A call begins no stage after `--seconds`, and stops one that is
longer; what it has trained is kept in runs/, and the next call resumes it.

    sft.json          imitation: SmolLM2 after recipes/vrcli-novels-sft-gpu.yaml reads the gold texts, without a plan
    reasoning.jsonl   plans of the untrained policy for all test rows
    rl.jsonl          plans of the policy after recipes/vrcli-novels-gpu.yaml
    table.json        improvements with bootstrap intervals, beside plans that need no model
    metrics.jsonl     the training's own

The rows come from the commands in recipes/vrcli-novels-gpu.yaml. `--small --model FOLDER` rehearses everything with a
tiny model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

RECIPES = Path(__file__).parent.parent / "recipes"
TINY = ["steps=2", "learner.amp=none", "model.gradient_checkpointing=false", "eval.every=1"]
SMALL = {
    "sft": [*TINY, "batch=2"],
    "rl": [*TINY, "prompts_per_step=2", "n=2", "sampling.max_tokens=8", "engine.dtype=null", "engine.max_len=2048"],
}


class Stages:
    def __init__(self, data: Path, out: Path, runs: Path, seconds: float, model: str, seed: int, small: bool):
        self.data, self.out, self.runs = data, out, runs
        self.until = time.monotonic() + seconds
        self.more = {k: [f"model.name={model}", f"seed={seed}", *(SMALL[k] if small else [])] for k in SMALL}
        self.reader = ["--model", model, "--tokens", "text", "--json"]

    def call(self, *words: str | Path) -> str:
        """The standard output of a command. One that takes too long is killed: it resumes at the next call."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        print("$ trailmark", *words, flush=True)
        line = [sys.executable, "-m", "trailmark", *map(str, words)]
        try:
            done = subprocess.run(line, stdout=subprocess.PIPE, text=True, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        if done.returncode:
            raise SystemExit(f"this command ended with exit code {done.returncode}")
        return done.stdout

    def train(self, recipe: str, name: str, *more: str) -> Path:
        run = self.runs / name
        resume = ["--resume"] if (run / "recipe.yaml").exists() else []
        self.call("train", RECIPES / f"{recipe}.yaml", f"out={run}", *more, *resume)
        return run

    def rl(self, name: str, *more: str) -> Path:
        files = [f"data={self.data / 'train.jsonl'}", f"task.options.val={self.data / 'val.jsonl'}"]
        return self.train("vrcli-novels-gpu", name, *files, *self.more["rl"], *more)

    def plans(self, run: Path, file: str) -> None:
        made = self.out / f"making-{file}"
        made.unlink(missing_ok=True)
        rows = [f"path={self.data / 'test.jsonl'}", "val="]
        law = ["--temperature", "0.7", "--top-p", "0.8"]
        self.call("eval", run, *rows, "--split", "test", "--n", "64", *law, "--out", made)
        made.rename(self.out / file)
        made.with_suffix(".annotations.jsonl").unlink(missing_ok=True)

    # -- the stages: each makes the file of its name ---------------------------------------------------------------

    def sft(self) -> None:
        files = [f"data={self.data / 'sft_train.jsonl'}", f"eval_data={self.data / 'sft_val.jsonl'}"]
        run = self.train("vrcli-novels-sft-gpu", "vrcli-novels-sft", *files, *self.more["sft"])
        reader = ["--reader", f"sft={run}/checkpoints/best", *self.reader]
        said = self.call("improvement", self.data / "test.jsonl", *reader)
        (self.out / "sft.json").write_text(said)

    def reasoning(self) -> None:
        """The untrained policy: a step with learning rate 0."""
        still = ["steps=1", "prompts_per_step=1", "n=2", "learner.optim.lr=0", "eval.every=0"]
        self.plans(self.rl("vrcli-novels-base", *still), "reasoning.jsonl")

    def trained(self) -> None:
        run = self.rl("vrcli-novels")
        shutil.copyfile(run / "metrics.jsonl", self.out / "metrics.jsonl")
        self.plans(run, "rl.jsonl")

    def table(self) -> None:
        arms = [f"{name}={self.out / name}.jsonl" for name in ("reasoning", "rl")]
        controls = [w for kind in ("empty", "gold", "synopsis", "other") for w in ("--control", kind)]
        made = self.out / "making-scores.jsonl"
        made.unlink(missing_ok=True)
        rows = self.data / "test.jsonl"
        said = self.call("improvement", rows, *arms, *controls, *self.reader, "--out", made)
        made.rename(self.out / "scores.jsonl")
        (self.out / "table.json").write_text(said)


def shown(out: Path) -> list[str]:
    """The rows of the table, in percent."""
    read = lambda name: json.loads((out / name).read_text())["arms"]
    lines = ["| arm | improvement, % [95 % interval] | trigrams copied, % |", "|---|---:|---:|"]
    lines.append("| base, no plan | 0 | – |")
    for name, a in {**read("sft.json"), **read("table.json")}.items():
        i, copied = a["improvement"], "–" if a["copied"] is None else f"{100 * a['copied']:.1f}"
        ends = "" if i["low"] is None else f" [{i['low'] + 0.0:.2f}, {i['high'] + 0.0:.2f}]"
        lines.append(f"| {name} | {i['value'] + 0.0:.2f}{ends} | {copied} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("carry-data"))
    parser.add_argument("--out", type=Path, default=Path("carry-out"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--model", default="smollm2", help="the start of all arms, and the reader")
    parser.add_argument("--seed", type=int, default=0, help="another one needs another --out and --runs")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    work = Stages(args.data, args.out, args.runs, args.seconds, args.model, args.seed, args.small)
    stages = [("sft.json", work.sft), ("reasoning.jsonl", work.reasoning), ("rl.jsonl", work.trained),
              ("table.json", work.table)]  # fmt: skip
    for file, make in stages:
        if (args.out / file).exists():
            print(f"{file}: done before", flush=True)
            continue
        began = time.monotonic()
        try:
            make()
        except TimeoutError:
            print(f"{file}: not finished within {args.seconds:g} s; the same command goes on", flush=True)
            raise SystemExit(3) from None
        print(f"{file}: {time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(shown(args.out)))


if __name__ == "__main__":
    main()
