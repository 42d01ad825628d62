"""Twins of the production recipes for a CPU: the recipe itself, a layer of sizes, data and hardware, and a tiny checkpoint of the family's shape."""

from __future__ import annotations

import json
from pathlib import Path

from fakes.trainer_batches import hf_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
RECIPES, TWINS = ROOT / "recipes", ROOT / "tests" / "recipes" / "twins"
DATA = {"tau2": "tau2.json", "swe": "swe.jsonl", "terminal": "terminal.jsonl", "browsecomp": "browsecomp.jsonl"}
"""Made-up episodes of each domain, in the format of a public source of such."""
_VOCAB = 512
_SIZES = {"vocab_size": _VOCAB, "max_position_embeddings": 2048, "hidden_size": 64}
# As in the models that the recipes are for: which layers there are, and experts that are chosen from.
_SHAPES = {
    "qwen3_30b_a3b": ("qwen3_moe", {"num_experts": 8}),
    "nemotron3_super_120b": ("nemotron_3", {"n_routed_experts": 8, "hybrid_override_pattern": "MEM*E"}),
}
_ACTIONS = (
    '<tool_call>\n{"name": "order", "arguments": {"number": 1}}\n</tool_call>',
    "<tool_call>\n<function=open>\n<parameter=path>\nred.py\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=find>\n<parameter=text>\nblue.py\n</parameter>\n</function>\n</tool_call>",
    "<think>\nNext.\n</think>\n\n<answer>A baker.</answer>",
)


def data_file(domain: str) -> Path:
    """The episodes of a domain."""
    return TWINS / DATA[domain]


def write_twin(folder: Path, family: str, domain: str, *, is_sft: bool) -> Path:
    """A recipe folder that extends the production recipe, or its SFT baseline, by the twin's layers and has no word of its own."""
    production = RECIPES / family / domain / "sft" if is_sft else RECIPES / family / domain
    layers = [production / "recipe.yaml", TWINS / "cpu.yaml", *([TWINS / "sft.yaml"] if is_sft else [])]
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(json.dumps({"extends": [str(layer) for layer in layers]}))
    return folder


def save_tiny_checkpoint(directory: Path, family: str) -> Path:
    """Random weights in the family's shape, a tokenizer of the episodes' words, and a chat template."""
    kind, settings = _SHAPES[family]
    hf_model(kind, **_SIZES, **settings).save_pretrained(directory)
    tokenizer = _tokenizer()
    tokenizer.chat_template = (RECIPES / "quickstart" / "chat_template.jinja").read_text()
    tokenizer.save_pretrained(directory)
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB - 2,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*(data_file(domain).read_text() for domain in DATA), *(_ACTIONS * 100)], trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", additional_special_tokens=["<|im_start|>"]
    )
