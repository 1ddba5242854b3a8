"""Imitation of each of Reflect-RL's five files on a quantised base: int8 weights, LoRA trained, on a GPU.

    trailmark data taxi mode=full history=none menu=false walls=false --starts 60 --perturb 0.3 --out FOLDER
    python bench/gpu_int8.py FOLDER/oracle [--out FILE]

The base is random (4 layers, width 512), so the numbers show that training works, not that a model is good. Prints one
JSON object last: the loss per token at the first and at the last step, and whether the adapter loads back over the int8
base.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
import transformers
from common import commit

from trailmark.config import ModelConfig, ModelShape, load_recipe, resolve
from trailmark.methods import get_config, get_method
from trailmark.models.load import load_model
from trailmark.runs.checkpoints import listed
from trailmark.runs.launch import launch
from trailmark.runs.store import read_metrics

RECIPE = Path(__file__).parent.parent / "recipes" / "reflect-sft.yaml"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="with the five files")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp())
    shape = ModelShape(layers=4, width=512, heads=8, context=2048)
    made = load_model(ModelConfig(shape=shape))
    made.model.save_pretrained(scratch / "base")
    made.tokenizer.save_pretrained(scratch / "base")
    model = f"{{name: {scratch}/base, quant: {args.quant}, dtype: bfloat16, lora: {{rank: 8}}}}"
    found = {}
    for file in sorted(args.folder.glob("*.jsonl")):
        out = scratch / file.stem
        words = [f"data={file}", f"out={out}", f"name={file.stem}", "steps=60", "batch=16", f"model={model}"]
        loaded = load_recipe(RECIPE, [*words, "learner.optim.lr=1e-3"])
        launch(get_method("sft"), resolve(loaded, get_config("sft")))
        rows = read_metrics(out)
        folder = listed(out / "checkpoints")[-1] / "policy"
        back = load_model(ModelConfig(name=str(folder), quant=args.quant, dtype="bfloat16"))
        found[file.stem] = {"first_nll": rows[0]["nll"], "last_nll": rows[-1]["nll"], "loads_back": back.adapted}
    about = {
        "bench": "gpu_int8", "commit": args.commit or commit(), "quant": args.quant, "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }  # fmt: skip
    line = json.dumps({**about, "files": found})
    if args.out:
        args.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
