"""The table of published layouts in docs/planning.md: each fits every GPU listed, or the settings that make it fit are named, this trainer's first.

Layouts and sizes are public ones; what they leave open (recomputation, experts, a split of the nodes) is said in the table's note.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pivotrl.config.load import load_section
from pivotrl.config.parallel import ParallelConfig
from pivotrl.config.planning import ClusterConfig, PlanConfig, WorkloadConfig
from pivotrl.planning.inputs import load_model
from pivotrl.planning.page import layout_name
from pivotrl.planning.proposals import assess
from pivotrl.planning.remedies import remedies

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ("h100_80gb", "h200", "b200")
# Alternatives that a cell names.
_SHOWN = 2


@dataclass(frozen=True, slots=True)
class Published:
    """One public run."""

    model: str
    nodes: tuple[int, int]
    """Training and generating; (n, 0): not split."""
    tokens: int
    batch: tuple[int, int]
    sizes: dict[str, int]
    """Tensor, pipeline, context and expert parallel size."""

    @property
    def layout(self) -> ParallelConfig:
        tensor = self.sizes.get("TP", 1)
        return ParallelConfig(
            tensor_model_parallel_size=tensor,
            sequence_parallel=tensor > 1,
            pipeline_model_parallel_size=self.sizes.get("PP", 1),
            context_parallel_size=self.sizes["CP"],
            expert_model_parallel_size=self.sizes["EP"],
            expert_tensor_parallel_size=1,
            recompute="full",
        )

    @property
    def plan(self) -> PlanConfig:
        workload = WorkloadConfig(
            pivots_per_step=self.batch[0], group_size=self.batch[1], max_sequence_tokens=self.tokens, micro_batch_tokens=self.tokens
        )
        return PlanConfig(num_nodes=sum(self.nodes), generation_nodes=self.nodes[1], workload=workload)

    def row(self) -> str:
        """The table's line."""
        nodes = f"{self.nodes[0]} + {self.nodes[1]}" if self.nodes[1] else str(self.nodes[0])
        cells = [self.model, nodes, f"{self.batch[0]} x {self.batch[1]}", f"{self.tokens:,}", layout_name(self.layout)]
        return "| " + " | ".join([*cells, *(self.verdict(name) for name in CLUSTERS)]) + " |"

    def verdict(self, cluster: str) -> str:
        """That it fits, or with which settings it does."""
        config, machine = load_model(ROOT / "configs" / "models" / f"{self.model}.yaml")[1], _cluster(cluster)
        if assess(config, self.layout, self.plan, machine).fits:
            return "fits"
        return " or ".join(_marked(remedy.words, remedy.caveat) for remedy in remedies(config, self.layout, self.plan, machine)[:_SHOWN])


def _cluster(name: str) -> ClusterConfig:
    return load_section(ClusterConfig, file=ROOT / "configs" / "clusters" / f"{name}.yaml")


def _marked(words: str, caveat: str) -> str:
    return " ".join(f"`{word.removeprefix('parallel.')}`" for word in words.split()) + (f" ({caveat})" if caveat else "")


_SUPER, _QWEN = "nemotron3_super_120b", "qwen3_30b_a3b"
PUBLISHED = [
    Published(_SUPER, (32, 32), 131_072, (64, 16), {"TP": 8, "CP": 16, "EP": 8}),
    Published(_SUPER, (32, 32), 131_072, (64, 16), {"TP": 8, "CP": 8, "EP": 8}),
    Published(_SUPER, (20, 0), 32_768, (32, 16), {"TP": 8, "CP": 4, "EP": 16}),
    Published(_SUPER, (4, 4), 32_768, (32, 16), {"TP": 8, "CP": 4, "EP": 16}),
    Published(_QWEN, (4, 0), 32_768, (64, 16), {"PP": 4, "CP": 4, "EP": 8}),
    Published(_QWEN, (16, 0), 32_768, (64, 16), {"PP": 4, "CP": 4, "EP": 8}),
    Published(_QWEN, (8, 8), 131_072, (64, 8), {"TP": 2, "PP": 2, "CP": 4, "EP": 8}),
    Published(_QWEN, (24, 0), 131_072, (64, 8), {"TP": 2, "PP": 2, "CP": 4, "EP": 8}),
]


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: f"{one.model}-{one.nodes[0]}-{one.nodes[1]}-cp{one.sizes['CP']}")
def test_a_published_layout_is_accepted_with_its_knobs_named(published: Published) -> None:
    assert all(published.verdict(name) for name in CLUSTERS), published
    row = published.row()
    assert row in (ROOT / "docs" / "planning.md").read_text().splitlines(), row


def test_the_knobs_are_the_ones_expected() -> None:
    """By hand: at EP8 float32 gradients, and saving, are too much for 80 GB; trainer and engine that share such GPUs need nodes apart."""
    by_key = {(one.nodes, one.sizes["CP"]): one for one in PUBLISHED if one.model == _SUPER}
    assert "`overlap_grad_reduce=True` `gradient_dtype=bfloat16`" in by_key[(32, 32), 16].verdict("h100_80gb")
    assert "`generation_nodes=4`" in by_key[(20, 0), 4].verdict("h100_80gb")
    assert by_key[(4, 4), 4].verdict("h200") == "fits"
