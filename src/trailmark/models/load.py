"""From a `model:` section to a model: tiny, SmolLM2 from its PyPI package, a local folder, or a name on the hub."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.config import ModelConfig, ModelShape
from trailmark.errors import ModelError, TrailmarkError, first_line
from trailmark.fetching import allowed
from trailmark.memory import LAYER, need, parameters
from trailmark.models.adapters import add_lora, attach, find_base, is_adapter
from trailmark.models.checked import check_sizes, load_whole, must_hold_files, read_tensors, weights_of
from trailmark.models.hardware import check_bf16

if TYPE_CHECKING:
    import torch

    from trailmark.models.lm import LM

HEAD = re.compile(r"[a-z]\w*\.(\d+\.)?(weight|bias)")
BEGINNINGS = 1 << 28  # letters of all beginnings of added tokens, which are kept (`texts.py`), or twice as many
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def pick_device(wish: str = "auto") -> str:
    """cuda, mps, npu or cpu. The backends themselves read CUDA_VISIBLE_DEVICES and ASCEND_RT_VISIBLE_DEVICES."""
    import torch

    def there(kind: str) -> bool:
        if kind == "mps":
            return torch.backends.mps.is_available()
        if kind == "npu":
            try:
                import torch_npu  # noqa: F401  # type: ignore[import-not-found]
            except ImportError:
                return False
        module = getattr(torch, kind, None)
        return kind == "cpu" or bool(module and module.is_available())

    if wish == "auto":
        return next(k for k in ("cuda", "npu", "mps", "cpu") if there(k))
    if not there(wish.split(":")[0]):
        raise ModelError(f"device '{wish}' is not available on this machine: set model.device to auto or cpu")
    return wish


def load_model(config: ModelConfig, words: Sequence[str] = ()) -> LM:
    """Load a model, add adapters, move it to its device, and test which layouts are exact for it. `words` become single
    tokens of a tiny tokenizer."""
    import torch
    from transformers.utils import logging

    from trailmark.models.lm import LM

    logging.disable_progress_bar()  # Trailmark shows its own progress
    device, dtype = pick_device(config.device), getattr(torch, config.dtype)
    if dtype == torch.bfloat16:
        check_bf16(device, "model.dtype", "float32 or float16")
    model, tokenizer = _weights(config, device, dtype, words)
    adapted = hasattr(model, "peft_config")
    _no_dropout(model)
    if config.lora and not adapted:
        model = add_lora(model, config)
    elif config.quant != "none" and not adapted:
        model.requires_grad_(False)  # a quantised base is frozen
    lm = LM(model, tokenizer, config.name, config.revision or "")
    _mark_ends(lm)
    _load_heads(lm, Path(config.name))
    _check(lm)
    if config.lora and adapted:
        lm.notes = (
            *lm.notes,
            f"model.lora is not used: {config.name} is an adapter already, and training goes on with it",
        )
    elif config.lora and config.lora.dropout > 0:
        lm.sharing, lm.notes = (
            "rows",
            (*lm.notes, "model.lora.dropout > 0: prefixes are not shared, dropout has no meaning on a tree"),
        )
    _tell(lm.notes)
    if config.gradient_checkpointing:
        lm.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lm.base.enable_input_require_grads()
    return lm


def _check(lm: LM) -> None:
    """Find out what is exact for a model: its output layer, its windows, and the layouts of a batch. A family whose
    code cannot run with our layout is refused."""
    import torch

    from trailmark.models.context_limit import find_limit, rope_note
    from trailmark.models.layout_check import richest_layout

    try:
        lm.check_output_layer()
        lm.limit, notes = find_limit(lm)
        lm.sharing, more = richest_layout(lm)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError, AttributeError, LookupError) as problem:
        raise ModelError(
            f"model '{lm.name}' ({type(lm.base).__name__}) cannot be computed with Trailmark's attention "
            f"({type(problem).__name__}: {first_line(problem)}). Use another family."
        ) from problem
    lm.notes = (*rope_note(lm), *notes, *more)


def _tell(notes: Sequence[str]) -> None:
    """Print what a user should know about a model, once in a process: a run may load it several times."""
    for note in notes:
        if note not in _told:
            _told.add(note)
            print(note, file=sys.stderr)


_told: set[str] = set()


def load_untrained(config: ModelConfig, key: str) -> LM:
    """A model that is not trained. Errors begin with `key`."""
    try:
        return load_model(config).freeze()
    except ModelError as problem:
        raise ModelError(f"{key}: {problem}") from problem


def load_reference(config: ModelConfig, name: str | None = None) -> LM | None:
    """The policy of `config` before training (or the model `name`), frozen. None if the policy is a new adapter: then
    the policy without its adapter is the reference, and needs no second copy."""
    if name is None and config.lora and not is_adapter(config.name):
        return None
    return load_model(config.model_copy(update={"lora": None, "name": name or config.name})).freeze()


def _no_dropout(model: Any) -> None:
    """Turn dropout off: rollouts and updates must use the same policy, and on a tree dropout has no meaning. Some
    families store their rates as numbers and call the function."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _mark_ends(lm: LM) -> None:
    """Write into the model's configs which tokens end a turn: the tokenizer's end of sequence and the template's end of
    turn. So a saved model stops in transformers, TRL and vLLM where it stops here. An end token that the model already
    names stays, if it is a special token of this tokenizer. No pad token is written to config.json: a model would
    freeze that row of its embedding."""
    from trailmark.chat import end_of_turn

    tokenizer, base = lm.tokenizer, lm.base
    own = "own" if getattr(tokenizer, "chat_template", None) else None
    try:
        ends = [tokenizer.eos_token_id, end_of_turn(tokenizer, template=own)]
    except TrailmarkError:  # neither template nor tokenizer has an end token: only the length ends a turn
        ends = []
    generation, config = base.generation_config, base.config
    known = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ends += [t for t in _listed(generation.eos_token_id) + _listed(getattr(config, "eos_token_id", None)) if t in known]
    ends = list(dict.fromkeys(int(t) for t in ends if t is not None))
    if not ends:
        return
    generation.eos_token_id = config.eos_token_id = ends[0] if len(ends) == 1 else ends
    if generation.pad_token_id is None:
        generation.pad_token_id = ends[0] if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    try:
        generation.validate(strict=True)
    # some published models set a temperature without sampling, which transformers would not save
    except ValueError:
        generation.do_sample = True


def _listed(ids: Any) -> list[int]:
    return [] if ids is None else list(ids) if isinstance(ids, list | tuple) else [ids]


def _load_heads(lm: LM, folder: Path) -> None:
    """Load the heads of a checkpoint, which are stored next to its weights."""
    if (folder / "heads.safetensors").is_file():
        file = folder / "heads.safetensors"
        tensors = read_tensors(file)
        taken = set(dir(lm.heads))
        if other := next((n for n in tensors if not HEAD.fullmatch(n) or n.partition(".")[0] in taken), None):
            raise ModelError(f"{file}: '{other}' is no weight of a head.")
        tensors = {n: t for n, t in tensors.items() if n.count(".") == 1 and n.endswith(".weight")}  # linear heads
        for name, weight in tensors.items():
            if not weight.is_floating_point() or weight.ndim != 2 or not len(weight) or weight.shape[1] != lm.width:
                kind = f"{list(weight.shape)} of {weight.dtype}"
                raise ModelError(f"{file}: head '{name}' is {kind}, and the model's width is {lm.width}.")
            lm.add_head(name.removesuffix(".weight"), weight.shape[0])
        lm.heads.load_state_dict(tensors)


def _weights(config: ModelConfig, device: str, dtype: torch.dtype, words: Sequence[str]) -> tuple[Any, Any]:
    from trailmark.models.tiny import build, tiny_tokenizer

    if config.name == "tiny" and config.quant != "none":
        raise ModelError("model.quant has no meaning for a tiny model: set it to none")
    if config.name == "tiny":
        tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else tiny_tokenizer(words)
        shape = config.shape or ModelShape()
        vocab = shape.vocab or len(tokenizer)
        if vocab < len(tokenizer):
            raise ModelError(
                f"model.shape.vocab is {vocab}, but the tokenizer has {len(tokenizer)} tokens: raise it or leave it out"
            )
        need_weights(parameters(shape, vocab), "model.shape", max(dtype.itemsize, 4), device, shape.layers)
        return build(_shaped(shape, vocab), config.seed, dtype, device), tokenizer
    if config.quant != "none":
        _check_quant(config, device)
    path = _fetched(config.name)
    folder = Path(path)
    must_hold_files(folder)
    if is_adapter(folder):
        return _load_adapter(folder, config, device, dtype)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json: this folder is not a model that transformers can load")
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        pickled = next((f.name for f in sorted(folder.glob("*.bin")) if f.name.startswith("pytorch_model")), None)
        raise ModelError(
            f"{folder}: its weights are only in {pickled}, a pickle, which may run any code when it is read: "
            f"`trailmark convert {folder} NEW --to transformers` reads the weights alone and writes model.safetensors"
            if pickled
            else f"{folder}: no weights there (model.safetensors is missing)"
        )
    tokenizer = load_tokenizer(config.tokenizer or path, config.revision)
    return pretrained(path, config, device, dtype), tokenizer


def pretrained(path: str, config: ModelConfig, device: str, dtype: torch.dtype) -> Any:
    import torch

    from trailmark.models.attention import NAME

    here = not _hub_answers(path)
    shaped = _config(path, here, config.revision)
    more: dict[str, Any] = {}
    if config.quant != "none":
        import logging

        from transformers import BitsAndBytesConfig

        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it would warn about a cast at every product
        eight = config.quant == "int8"
        more = {
            "quantization_config": BitsAndBytesConfig(
                load_in_8bit=eight, load_in_4bit=not eight, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
            ),
            "device_map": device,
        }
    try:
        if config.quant == "none":
            plain = getattr(shaped, "quantization_config", None) is None
            count = stored_parameters(path, floats=plain)
            if count and plain:
                count = max(count, weights_of(shaped))
            need_weights(count, path, dtype.itemsize, device)
        model = load_whole(
            path,
            revision=config.revision or "main",
            local_files_only=here,
            dtype=dtype,
            attn_implementation=NAME,
            **more,
        )
    except (TrailmarkError, torch.OutOfMemoryError):
        raise
    except Exception as problem:  # a damaged checkpoint may raise anything
        raise ModelError(_why(path, problem)) from problem
    return (model if more else model.to(device)).eval()


def need_weights(count: int, what: str, bytes_each: int, device: str, layers: int = 0) -> None:
    size = count * bytes_each + layers * LAYER
    need(size, f"{what}: a model of {count:,} weights", "choose a smaller model or another device", device)


def stored_parameters(path: str, floats: bool = True) -> int:
    """The number of weights in a local folder; 0 if the model is not there. `floats`: other kinds are refused."""
    from safetensors import SafetensorError, safe_open

    count = 0
    for file in Path(path).glob("model*.safetensors") if Path(path).is_dir() else ():
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118
                    held = stored.get_slice(name)
                    count += math.prod(held.get_shape())
                    if floats and name.endswith(".weight") and held.get_dtype() not in FLOATS:
                        raise ModelError(f"{file}: its weight '{name}' holds {held.get_dtype()}, which are no weights.")
        except (SafetensorError, OSError) as problem:
            raise ModelError(_why(path, problem)) from problem
    return count


def load_tokenizer(path: str, revision: str | None = None) -> Any:
    from transformers import AutoTokenizer

    folder = Path(path)
    must_hold_files(folder)
    if folder.is_dir() and not any(
        (folder / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    ):
        raise ModelError(
            f"{folder}: the model folder has no tokenizer: copy the tokenizer files there or set model.tokenizer"
        )
    try:
        made = AutoTokenizer.from_pretrained(
            path, revision=revision or "main", local_files_only=not _hub_answers(path), trust_remote_code=False
        )
    except Exception as problem:  # damaged files may raise anything
        raise ModelError(_why(path, problem)) from problem
    added = [t.content for t in getattr(made, "added_tokens_decoder", {}).values()]
    if sum(len(word) ** 2 for word in added) > BEGINNINGS:
        long: str = max(added, key=len)
        raise ModelError(
            f"{path}: its tokenizer has an added token of {len(long):,} letters, '{long[:40]}…': shorten it."
        )
    return made


def load_config(path: str) -> Any:
    """The transformers config of a folder or of a name on the hub, without its weights."""
    return _config(path, not _hub_answers(path))


def _config(path: str, here: bool, revision: str | None = None) -> Any:
    from transformers import AutoConfig

    must_hold_files(Path(path))
    try:
        found = AutoConfig.from_pretrained(
            path, revision=revision or "main", local_files_only=here, trust_remote_code=False
        )
        found._attn_implementation = None  # it may name code of the hub
        check_sizes(found, path)
    except TrailmarkError:
        raise
    except Exception as problem:  # a damaged config may raise anything
        raise ModelError(_why(path, problem)) from problem
    return found


def tokenizer_by_name(name: str) -> Any:
    """The tokenizer that `--tokenizer` names: tiny, smollm2, a folder, or a name on the hub."""
    if name == "tiny":
        from trailmark.models.tiny import tiny_tokenizer

        return tiny_tokenizer()
    return load_tokenizer(_fetched(name))


def _fetched(name: str) -> str:
    if name != "smollm2":
        return name
    from trailmark.models.smollm import smollm2_folder

    return str(smollm2_folder())


def _load_adapter(folder: Path, config: ModelConfig, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A LoRA checkpoint with its base, and the tokenizer of the one that has a tokenizer."""
    base = find_base(folder)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(config.tokenizer or (str(folder) if has_tokenizer else base.path))
    model = pretrained(base.path, config.model_copy(update={"revision": base.revision}), device, dtype)
    return attach(model, folder, base), tokenizer


def _hub_answers(path: str) -> bool:
    """Ask the hub once before its own calls, which retry six times each if the hub cannot be reached. Any answer is
    fine: the next call reports what the hub says about this model. A local folder needs no hub."""
    from huggingface_hub import constants, get_session

    if Path(path).exists() or not allowed():
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT, follow_redirects=False)
    except Exception:  # the HTTP library, and so its errors, depend on the version of huggingface_hub
        return False
    return True


def _why(path: str, problem: Exception) -> str:
    from huggingface_hub.errors import LocalEntryNotFoundError

    from trailmark.models.attention import NAME

    lines = (str(problem).strip() or type(problem).__name__).split("\n")
    if "remote code" in str(problem) or "trust_remote_code" in str(problem):
        return (
            f"model '{path}' brings code of its own (trust_remote_code), which Trailmark does not run: use a model of "
            "a family that transformers knows"
        )
    if isinstance(problem, KeyError) and problem.args == (NAME,):
        return (
            f"model '{path}': transformers has no way to replace the attention of this family, and Trailmark must: use "
            "another family"
        )
    if Path(path).exists():
        return f"{path}: the model cannot be loaded: {lines[0][:200]}"
    if path.count("/") > 1 or path.startswith((".", "/", "~")):  # a name on the hub has at most one slash
        return f"model '{path}': there is no such folder. For a dry run without it, describe it in model.shape"
    answered = not isinstance(problem.__cause__, LocalEntryNotFoundError)
    said = " ".join(lines[: 1 + answered])[:400]  # its second line says what to do: ask for access, log in
    return (
        f"model '{path}' is neither a local folder nor reachable on the hub ({said}). For a dry run without it, "
        "describe it in model.shape"
    )


def _check_quant(config: ModelConfig, device: str) -> None:
    import importlib.util

    if not device.startswith("cuda"):
        raise ModelError(
            f"model.quant={config.quant} needs a CUDA device and this is '{device}': set model.quant to none"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(f"model.quant={config.quant} needs bitsandbytes: pip install 'trailmark[quant]'")


def describe(config: ModelConfig) -> dict[str, Any]:
    """What `--dry-run` says about a model, without network and weights: its family and number of parameters."""
    from trailmark.models.context_limit import context_of
    from trailmark.models.tiny import tiny_tokenizer

    if config.shape or config.name == "tiny":
        shape = config.shape or ModelShape()
        count = parameters(shape, shape.vocab or len(tiny_tokenizer()))
        return {"family": shape.family, "parameters": count, "context": shape.context}
    shaped = shape_of(config)
    try:
        count = weights_of(shaped)
    except Exception as problem:  # a damaged config may raise anything
        raise ModelError(_why(config.name, problem)) from problem
    return {"family": shaped.model_type, "parameters": count, "context": context_of(shaped)}


def _shaped(shape: ModelShape, vocab: int) -> Any:
    from trailmark.models.tiny import tiny_config

    return tiny_config(**{name: getattr(shape, name) for name in type(shape).model_fields} | {"vocab": vocab})


def shape_of(config: ModelConfig) -> Any:
    """The transformers config of a model, without network and without weights."""
    from trailmark.models.tiny import tiny_config, tiny_tokenizer

    if config.shape or config.name == "tiny":
        shape = config.shape or ModelShape()
        return _shaped(shape, shape.vocab or len(tiny_tokenizer()))
    if Path(config.name).is_dir():
        return _config(find_base(Path(config.name)).path if is_adapter(config.name) else config.name, here=True)
    if config.name == "smollm2":
        shaped = tiny_config("llama", vocab=49152, layers=30, width=576, heads=9, kv_heads=3, ffn=1536, context=8192)
        shaped.tie_word_embeddings = True
        return shaped
    raise ModelError(
        f"model '{config.name}' is not here: add a model.shape block (family, layers, width, heads, vocab) to check "
        f"this recipe without it"
    )
