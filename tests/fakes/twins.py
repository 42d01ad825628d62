"""Twins of the production recipes for a CPU: the recipe itself, a layer of sizes, data and hardware, and a tiny checkpoint of the family's shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from fakes.trainer_batches import hf_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pivotrl.config.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES, TWINS = ROOT / "recipes", ROOT / "tests" / "recipes" / "twins"
DATA = {"tau2": "tau2.json", "swe": "swe.jsonl", "terminal": "terminal.jsonl", "browsecomp": "browsecomp.jsonl"}
"""Made-up episodes of each domain, in the format of a public source of such."""
_AXES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
# The production recipes are written for nodes of this size.
_GPUS_PER_NODE = 8
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
    layers = [production / "recipe.yaml", TWINS / "cpu.yaml", TWINS / "one_process.yaml", *([TWINS / "sft.yaml"] if is_sft else [])]
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(json.dumps({"extends": [str(layer) for layer in layers]}))
    return folder


@dataclass(frozen=True, slots=True)
class ParallelTwin:
    """A twin that keeps the parallel axes of a file of configs/parallelism, and the engines on nodes of their own."""

    folder: Path
    layout: Mapping[str, int | bool | str]
    """What a checkpoint must say of its trainer, all of it reckoned from the production recipe."""


def write_parallel_twin(folder: Path, family: str, domain: str, parallelism: str) -> ParallelTwin:
    """The production recipe with a file of configs/parallelism in place of its own, scaled to the smallest world that shows all axes together.

    Every size above 1 becomes 2: tensor, pipeline, context, data parallel, the copies of an expert, nodes that train, nodes that generate. The
    experts are then laid out over what their copies leave of a pipeline stage's processes, all of them where there is one copy, as in production.
    """
    production_file = RECIPES / family / domain / "recipe.yaml"
    content = yaml.safe_load(production_file.read_text())
    bases = [(production_file.parent / base).resolve() for base in content["extends"]]
    content["extends"] = [str(base.with_stem(parallelism) if base.parent.name == "parallelism" else base) for base in bases]
    folder.mkdir(parents=True)
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps(content))
    production = load_recipe(folder, ("model.path=/checkpoint", "ingest.paths=[/trajectories]")).recipe
    tp, pp, cp, ep, etp = (getattr(production.parallel, f"{name}_parallel_size") for name in _AXES)
    world = production.launch.train_nodes * _GPUS_PER_NODE
    data, copies = world // (tp * pp * cp), world // (pp * ep * etp)
    tp, pp, cp, etp, data, copies = (min(size, 2) for size in (tp, pp, cp, etp, data, copies))
    processes = tp * pp * cp * data
    ep = processes // (pp * etp * copies)
    sizes = {f"{name}_parallel_size": size for name, size in zip(_AXES, (tp, pp, cp, ep, etp), strict=True)}
    launch = {"train_nodes": 2, "generation_nodes": 2, "processes_per_node": processes // 2}
    (folder / "production.yaml").write_text(json.dumps(content))
    recipe.write_text(json.dumps({"extends": ["production.yaml", str(TWINS / "cpu.yaml")], "parallel": sizes, "launch": launch}))
    layout = {"processes": processes, "tensor": tp, "pipeline": pp, "virtual_pipeline": 1, "context": cp, "data": data}
    experts = {"expert": ep, "expert_tensor": etp, "expert_data": copies}
    kept = {"sequence_parallel": production.parallel.sequence_parallel, "recompute": production.parallel.recompute}
    return ParallelTwin(folder, {**layout, **experts, **kept})


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
