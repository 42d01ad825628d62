"""Trains the world's byte-level BPE on the world's own text and saves it as Hugging Face tokenizer files.

Deterministic: the same texts in the same order give the same bytes. Digits are tokens of their own, so that numbers can be copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from pivotrl.rundir import atomic_write, write_json

IM_START, IM_END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
# The call tags are ordinary tokens, not special ones: decoding for the parser skips special tokens and must keep these.
CALL_TAGS = ("<tool_call>", "</tool_call>")

# Pieces that never merge with each other. The fixed parts of a conversation are one piece each, so that a whole episode costs about a
# hundred tokens: the frame of a Hermes call, a tool's argument list, a role. Then words and single digits, each with the space before it,
# and runs of anything else.
_PIECES = "|".join(
    (
        r'\n?\{"name": "',
        r'", "arguments": \{"?',
        r"\([a-z,?]*\)",
        r"(?:system|user|assistant|tool)\n",
        r" ?\p{L}+",
        r" ?\p{N}",
        r"[^\p{L}\p{N}]+?(?= ?[\p{L}\p{N}]|\z)",
    )
)


def train_tokenizer(texts: Sequence[str], *, vocab_size: int, frames: Sequence[str] = ()) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` tokens, or fewer where the texts give no more merges.

    Args:
        frames: fixed pieces of actions that are one token each, beside the call tags.
    """
    fixed = (*CALL_TAGS, *frames)
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(fixed),
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in fixed])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, chat_template: str, max_tokens: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json (chat template inside), loadable by transformers' AutoTokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    atomic_write(directory / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": PAD,
        "additional_special_tokens": [IM_START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
        "chat_template": chat_template,
    }
    write_json(directory / "tokenizer_config.json", config)
