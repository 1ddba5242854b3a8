"""Weights that are used are the checkpoint's own: complete, of the right shapes, and finite.

transformers fills a missing weight with random numbers and goes on. Here a weight that is missing, left over, of
another shape or not finite is refused by its name. What is meant to be new (heads, adapters) is added after loading.
transformers itself knows which weights are tied, and which buffers are computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.errors import ModelError, first_line
from trailmark.memory import need
from trailmark.plain_files import open_plain

if TYPE_CHECKING:
    from torch import Tensor

MOST_LAYERS, MOST_EXPERTS = 2_000, 10_000  # a config with more is damaged, and building it would take for ever
READ = (".json", ".jinja", ".model", ".txt", ".safetensors", ".bin", ".pt")
SIZES = {
    "num_hidden_layers": MOST_LAYERS, "num_experts": MOST_EXPERTS, "num_local_experts": MOST_EXPERTS,
    "n_routed_experts": MOST_EXPERTS,
}  # fmt: skip


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own tables and warnings: what matters of them becomes an error here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def must_hold_files(folder: Path) -> None:
    """Refuse a folder in which a file of a model is a pipe, a device or a folder: a reader may wait for ever."""
    if folder.is_dir():
        for path in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")]):
            if path.suffix in READ and not path.is_file():
                raise ModelError(f"{path} is not a file of its own (but a folder, a pipe, a device or a lost link).")
            if path.suffix == ".json":
                need(8 * path.stat().st_size, f"{path}: the whole file", "look at what it holds")


def check_sizes(config: Any, where: str) -> None:
    """Refuse a config that no model has, before anything of that size is built."""
    for key, most in SIZES.items():
        value = getattr(config.get_text_config(), key, None)
        if isinstance(value, int) and value > most:
            raise ModelError(f"{where}: its config.json says {key} {value:,}; at most {most:,} can be built here.")


def _empty(config: Any) -> Any:
    """The model of a config. Nothing is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    with quiet(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def described(config: Any) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the weights that a config asks for."""
    return {name: tuple(t.shape) for name, t in _empty(config).state_dict().items()}


def weights_of(config: Any) -> int:
    """The number of weights that a config asks for, tied ones once."""
    model = _empty(config)
    model.tie_weights()
    return sum(p.numel() for p in model.parameters())


def load_whole(path: str | Path, called: str | Path = "", **options: Any) -> Any:
    """A causal language model with exactly the weights that its config asks for. `called` is its name in errors."""
    from transformers import AutoModelForCausalLM

    with quiet():
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are listed, and refused below
            **options,
        )
    _must_fit(found, called or path)
    must_be_finite({**dict(model.named_parameters()), **dict(model.named_buffers())}, called or path)
    return model


def _must_fit(found: Mapping[str, Any], what: str | Path) -> None:
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f"{what} has no weight '{missing[0]}', which its config.json asks for ({len(missing)} are missing). It is "
            "not filled at random: copy the whole checkpoint."
        )
    _must_have_shapes(found["mismatched_keys"], what)
    if extra := sorted(found["unexpected_keys"]):
        raise ModelError(
            f"{what} has a weight '{extra[0]}' that its config.json does not ask for ({len(extra)} are too many): it "
            "is the checkpoint of another model."
        )


def same_shapes(held: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], what: str | Path) -> None:
    """Refuse weights of other shapes than wanted, before a model of these shapes is built."""
    both = ((name, tuple(t.shape), wanted[name]) for name, t in held.items() if name in wanted)
    _must_have_shapes([found for found in both if found[1] != found[2]], what)


def _must_have_shapes(other: Iterable[tuple[str, Iterable[int], Iterable[int]]], what: str | Path) -> None:
    """`other` are the weights that have another shape: name, shape and what it must be."""
    if listed := sorted(other):
        name, held, wanted = listed[0]
        raise ModelError(
            f"{what}: its weights do not fit its config.json: '{name}' is {list(held)} and must be {list(wanted)} "
            f"({len(listed)} have another shape)."
        )


def must_be_finite(tensors: Mapping[str, Tensor], what: str | Path) -> None:
    """Refuse weights that are not numbers, or infinite. (Buffers of masks may be infinite.)"""
    import torch

    for name, t in tensors.items():
        if t.is_floating_point() and t.numel() and not t.is_meta and "mask" not in name:
            low, high = torch.aminmax(t.detach() if t.itemsize > 1 else t.detach().float())
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise ModelError(f"{what}: its weight '{name}' is not finite (NaN or infinite).")


def same_names(held: Iterable[str], wanted: Iterable[str], what: str) -> None:
    """Refuse weights that are missing or too many, by name."""
    held, wanted = set(held), set(wanted)
    if missing := sorted(wanted - held):
        raise ModelError(f"{what} has no weight '{missing[0]}' ({len(missing)} of {len(wanted)} are missing).")
    if extra := sorted(held - wanted):
        raise ModelError(f"{what} has a weight '{extra[0]}' that nothing here reads ({len(extra)} are too many).")


def load_plain(file: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of a safetensors file. Its reader would wait for ever for a pipe, and hear no signal."""
    from safetensors.torch import load_file

    open_plain(file).close()
    return load_file(file, device)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The finite tensors of a safetensors file."""
    try:
        tensors = load_plain(file)
    except Exception as problem:  # a damaged file may raise anything
        raise ModelError(f"{file} cannot be read: {first_line(problem)}.") from None
    must_be_finite(tensors, file)
    return tensors


def must_be_plain(tensors: Mapping[Any, Any], what: Path) -> None:
    """Refuse what is no plain, finite tensor with its numbers stored, and what does not fit into memory."""
    import torch

    if not tensors:
        raise ModelError(f"{what} holds no weights.")
    for name, t in tensors.items():
        if not isinstance(name, str) or not torch.is_tensor(t):
            raise ModelError(f"{what}: {str(name)[:80]!r} is no weight with a name.")
        odd = t.layout != torch.strided or t.is_quantized or t.is_meta or t.is_nested or t.is_complex()
        if odd or (name.endswith(".weight") and not t.is_floating_point()):
            raise ModelError(f"{what}: its weight '{name}' is no plain tensor ({t.layout}, {t.dtype}, {t.device}).")
        if t.numel() * t.element_size() > t.untyped_storage().nbytes():
            raise ModelError(f"{what}: its weight '{name}' of {t.numel():,} numbers repeats the few that are stored.")
    whole = sum(t.numel() * t.element_size() for t in tensors.values())
    need(whole, f"{what}: weights", "convert it on a machine with more memory")
    must_be_finite(tensors, what)
