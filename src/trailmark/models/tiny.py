"""Small new models with their own tokenizer, built in a moment: for tests, laptops and learning the library."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_tokenizer(words: Sequence[str] = (), pad_is_eos: bool = False) -> Any:
    """A byte tokenizer with `words` as whole tokens (labels such as "17", a world's vocabulary). Any text
    round-trips."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in ("<|pad|>", *SPECIALS)])
    core.add_tokens([AddedToken(w, normalized=False) for w in words])
    return _wrapped(core, pad_is_eos)


def learnt_tokenizer(texts: Iterable[str], size: int) -> Any:
    """A tokenizer of bytes and of the commonest pieces of some texts, at most `size` tokens. Any text round-trips."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = [AddedToken(s, special=True, normalized=False) for s in ("<|pad|>", *SPECIALS)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    return _wrapped(core)


def _wrapped(core: Any, pad_is_eos: bool = False) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>" if pad_is_eos else "<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def tiny_config(
    family: str = "llama",
    vocab: int = 320,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    kv_heads: int | None = None,
    ffn: int | None = None,
    context: int = 512,
    window: int | None = None,
    tied: bool | None = None,
) -> Any:
    """A transformers config of a model family, at any size."""
    import transformers as hf

    ffn, kv_heads = ffn or 4 * width, kv_heads or heads
    common: dict[str, Any] = dict(
        vocab_size=vocab, max_position_embeddings=context, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    if tied is not None:
        common["tie_word_embeddings"] = tied
    if family == "gpt2":
        return hf.GPT2Config(
            **common,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            n_inner=ffn,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    common.update(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
    )
    if family == "mistral":
        return hf.MistralConfig(**common, sliding_window=window)
    if family in ("gemma", "gemma2"):
        more: dict[str, Any] = {"sliding_window": window or 4096} if family == "gemma2" else {}
        kind = hf.GemmaConfig if family == "gemma" else hf.Gemma2Config
        return kind(**common, head_dim=width // heads, **more)
    kinds = {"llama": hf.LlamaConfig, "qwen2": hf.Qwen2Config, "qwen3": hf.Qwen3Config}
    if family not in kinds:
        from trailmark.errors import ModelError, nearest

        raise ModelError(
            f"unknown model family '{family}'.{nearest(family, [*kinds, 'gpt2', 'mistral', 'gemma', 'gemma2'])}"
        )
    extra: dict[str, Any] = {"head_dim": width // heads} if family == "qwen3" else {}
    return kinds[family](**common, **extra)


def build(config: Any, seed: int = 0, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Any:
    """Random weights that depend only on the seed. The global random state is left unchanged."""
    from transformers import AutoModelForCausalLM

    from trailmark.models.attention import NAME

    devices = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=NAME, trust_remote_code=False
        )
    return model.to(dtype=dtype).eval()
