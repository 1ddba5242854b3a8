"""What a small training run imports. Each of these takes a tenth of a second or more, and none of them is needed to
train a tiny model on a CPU."""

import json
import os
import subprocess
import sys

UNNEEDED = (
    "peft", "datasets", "trl", "pandas", "sklearn", "matplotlib", "IPython", "torchvision", "torchaudio", "tensorboard",
    "wandb", "bitsandbytes", "torch._inductor.runtime.triton_heuristics", "torch._inductor.compile_fx",
    "transformers.models.auto.image_processing_auto", "transformers.models.auto.feature_extraction_auto",
    "transformers.pipelines", "transformers.trainer",
    "trailmark.report", "trailmark.serve.app", "trailmark.serve.service", "trailmark.evaluate.run", "trailmark.verify",
    "trailmark.models.shards", "trailmark.models.deepspeed", "trailmark.tasks.alfworld.engine",
    "trailmark.tasks.alfworld.source", "trailmark.methods.lpr.method", "trailmark.methods.reflect.method",
)  # fmt: skip

TRAIN = """
import json, sys
from trailmark.commands.app import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
import gc
print(json.dumps({"modules": sorted(sys.modules), "collects": gc.isenabled()}))
"""


def test_a_tiny_train_imports_no_more_than_it_needs(tmp_path):
    words = ["train", "recipes/bandit-policy-gradient.yaml", "steps=1", f"out={tmp_path}/run"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, *words], capture_output=True, text=True, env=env, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "torch" in found["modules"] and "trailmark.learn.learner" in found["modules"]
    assert [name for name in UNNEEDED if name in found["modules"]] == []
    assert found["collects"], "the collector is off only while transformers is imported"
