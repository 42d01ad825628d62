"""Plans against independent figures: transformers' own models on the meta device, published sizes, hand-computed bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pivotrl.config.load import load_section
from pivotrl.config.parallel import ParallelConfig
from pivotrl.config.planning import ClusterConfig, EfficiencyConfig, PlanConfig, WorkloadConfig
from pivotrl.errors import UserError
from pivotrl.megatron.architecture import Split
from pivotrl.planning.activations import activation_bytes
from pivotrl.planning.cost import step_work, touched_weight_bytes
from pivotrl.planning.host import host_memories
from pivotrl.planning.inputs import load_model
from pivotrl.planning.memory import GIB, engine_memory, key_value_bytes, optimizer_bytes, receiver_staging, ssm_bytes, trainer_memory
from pivotrl.planning.proposals import assess, propose
from pivotrl.planning.remedies import remedies
from pivotrl.planning.weights import Buffer, buffers, count_parameters, count_tensors, local_part, stage_buffers, stage_tensors
from pivotrl.verbs.plan import run_plan

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MODELS = sorted((CONFIGS / "models").glob("*.yaml"))
CLUSTERS = sorted((CONFIGS / "clusters").glob("*.yaml"))
SUPER = CONFIGS / "models" / "nemotron3_super_120b.yaml"
# Public pivot stage on Super: 64 nodes of 8, 32 of them generating, 131,072 tokens.
SUPER_LAYOUT = ParallelConfig(
    tensor_model_parallel_size=8,
    sequence_parallel=True,
    context_parallel_size=16,
    expert_model_parallel_size=8,
    expert_tensor_parallel_size=1,
    recompute="full",
)
SUPER_PLAN = PlanConfig(num_nodes=64, generation_nodes=32, workload=WorkloadConfig(max_sequence_tokens=131_072, micro_batch_tokens=131_072))


def cluster(name: str) -> ClusterConfig:
    return load_section(ClusterConfig, file=CONFIGS / "clusters" / f"{name}.yaml")


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_parameters_are_those_of_the_model_transformers_builds(path: Path) -> None:
    config = load_model(path)[1]
    values = {key: value for key, value in vars(config).items() if key != "num_hidden_layers" or config.model_type != "nemotron_h"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config.model_type].from_dict(values))
    assert count_parameters(config).total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "total", "active"), [("nemotron3_super_120b", 120.6e9, 12.7e9), ("qwen3_30b_a3b", 30.5e9, 3.3e9), ("qwen3_8b", 8.2e9, 8.2e9)]
)
def test_published_sizes(name: str, total: float, active: float) -> None:
    """Nemotron's published counts agree to 0.1 % where routers are left out; with them the active ones to 0.6 %; Qwen's are given to two digits."""
    counts = count_parameters(load_model(CONFIGS / "models" / f"{name}.yaml")[1])
    tolerance = 0.005 if name.startswith("nemotron") else 0.02
    assert counts.total == pytest.approx(total, rel=tolerance)
    assert counts.total - counts.router == pytest.approx(total, rel=tolerance)
    assert counts.active == pytest.approx(active, rel=max(tolerance, 0.006))
    assert counts.active - counts.router == pytest.approx(active, rel=tolerance)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 4), (4, 2, 8), (8, 4, 64)])
def test_parts_of_all_processes_make_the_model(sizes: tuple[int, int, int]) -> None:
    """Every split tensor is held once over its processes; stages hold disjoint layers."""
    config = load_model(SUPER)[1]
    tensor, pipeline, expert = sizes
    parallel = ParallelConfig(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert, expert_tensor_parallel_size=1
    )
    held = 0
    for stage in range(pipeline):
        for one, times in stage_tensors(config, parallel, stage).items():
            copies = {Split.REPLICATED: 1, Split.TENSOR: tensor, Split.EXPERT: expert}[one.split]
            held += times * copies * math.prod(local_part(one, parallel))
    assert held == count_parameters(config).total


def test_virtual_stages_deal_layers_out_in_turn() -> None:
    config = load_model(CONFIGS / "models" / "qwen3_8b.yaml")[1]
    config.num_hidden_layers = 8
    plain = ParallelConfig(pipeline_model_parallel_size=2)
    virtual = ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    for stage in (0, 1):
        assert stage_tensors(config, plain, stage) == stage_tensors(config, virtual, stage)


def test_buffers_are_aligned_and_divisible() -> None:
    config = load_model(SUPER)[1]
    for part in buffers(stage_tensors(config, SUPER_LAYOUT, 0), SUPER_LAYOUT, world_size=256, is_bf16=True):
        assert part.num_padded >= part.num_elements
        assert part.num_padded % math.lcm(part.num_sharers, 128) == 0
        assert part.num_padded - part.num_elements < 0.01 * part.num_elements + 64 * 10_000


def test_optimizer_bytes_by_hand() -> None:
    """A bfloat16 model keeps 4 bytes of main weight and 8 of moments per element of its share; float32 tensors need no main copy."""
    parts = [Buffer(1_000, 1_024, 10, is_fp32=False), Buffer(64, 128, 2, is_fp32=True)]
    assert optimizer_bytes(parts, PlanConfig(num_nodes=1)) == 100 * 12 + 32 * 8
    assert optimizer_bytes(parts, PlanConfig(num_nodes=1, moment_dtype="bfloat16")) == 100 * 8 + 32 * 4


def test_caches_by_hand() -> None:
    """Super: 8 attention layers of 2 heads of 128 channels; 40 Mamba layers of 128 heads of 64 channels with a state of 128 in float32."""
    config = load_model(SUPER)[1]
    assert key_value_bytes(config, 1) == 8 * 2 * 2 * 128 * 2
    # Fewer key/value heads than processes: each keeps one.
    assert key_value_bytes(config, 8) == 8 * 2 * 1 * 128 * 2
    assert ssm_bytes(config, 1) == 40 * (128 * 64 * 128 * 4 + 3 * (128 * 64 + 2 * 8 * 128) * 2)


def test_decoding_reads_only_the_experts_that_are_chosen() -> None:
    config = load_model(SUPER)[1]
    counts = count_parameters(config)
    assert touched_weight_bytes(config, 1) == pytest.approx(2 * (counts.active - counts.embedding), rel=1e-9)
    assert touched_weight_bytes(config, 10_000) == pytest.approx(2 * (counts.total - counts.embedding), rel=1e-6)


def test_a_shared_prefix_is_forwarded_once() -> None:
    shared = step_work(WorkloadConfig(pivots_per_step=2, group_size=3, prompt_tokens=10, action_tokens=4))
    copied = step_work(WorkloadConfig(pivots_per_step=2, group_size=3, prompt_tokens=10, action_tokens=4, is_prefix_shared=False))
    assert (shared.num_tokens, copied.num_tokens) == (2 * 10 + 24, 6 * 14)
    assert copied.num_pairs == 6 * sum(range(1, 15))
    assert shared.num_pairs == 2 * sum(range(1, 11)) + 6 * sum(range(11, 15))
    assert shared.num_scored == copied.num_scored == 24


def test_published_layout_of_super_names_the_knob_it_needs() -> None:
    """Experts at EP8 with float32 gradients take 57 GiB of gradients alone: an 80 GB GPU needs bfloat16 ones, larger GPUs nothing."""
    config = load_model(SUPER)[1]
    assert not assess(config, SUPER_LAYOUT, SUPER_PLAN, cluster("h100_80gb")).fits
    found = [str(remedy) for remedy in remedies(config, SUPER_LAYOUT, SUPER_PLAN, cluster("h100_80gb"))]
    assert found[:2] == ["parallel.expert_model_parallel_size=32", "parallel.overlap_grad_reduce=True gradient_dtype=bfloat16"]
    other = SUPER_PLAN.model_copy(update={"checkpoint_gathers": False})
    found = [str(remedy) for remedy in remedies(config, SUPER_LAYOUT, other, cluster("h100_80gb"))]
    assert found == ["parallel.expert_model_parallel_size=16", "gradient_dtype=bfloat16"]
    assert assess(config, SUPER_LAYOUT, other, cluster("h200")).fits
    eight = SUPER_LAYOUT.model_copy(update={"context_parallel_size": 8})
    assert assess(config, eight, other, cluster("b200")).fits


def test_trainer_and_engine_on_one_gpu_must_fit_together() -> None:
    """20 nodes that train and generate, TP8 EP16 CP4, on 80 GB: each fits a GPU of its own, their sum does not."""
    layout = SUPER_LAYOUT.model_copy(update={"context_parallel_size": 4, "expert_model_parallel_size": 16})
    plan = PlanConfig(num_nodes=20, checkpoint_gathers=False, workload=WorkloadConfig(pivots_per_step=32))
    config, machine = load_model(SUPER)[1], cluster("h100_80gb")
    needs = assess(config, layout, plan, machine).needs
    assert needs.shared is not None
    assert (needs.trainer.fits, needs.engine.fits, needs.shared.fits, needs.fits) == (True, True, False, False)
    assert needs.shared.total == needs.trainer.total + needs.engine.total
    assert [memory for _, memory in needs.judged if not memory.fits] == [needs.shared]
    found = remedies(config, layout, plan, machine)
    assert str(found[0]) == "generation_nodes=4"
    assert "engine_sleeps=True (not in this trainer)" in map(str, found)
    assert assess(config, layout, plan.model_copy(update={"engine_sleeps": True}), machine).fits
    assert assess(config, layout, plan.model_copy(update={"generation_nodes": 4}), machine).needs.shared is None


def test_an_engine_beside_a_trainer_takes_the_share_it_was_told_to() -> None:
    config, machine = load_model(CONFIGS / "models" / "qwen3_8b.yaml")[1], cluster("h100_80gb")
    layout, plan = ParallelConfig(tensor_model_parallel_size=8, sequence_parallel=True, recompute="full"), PlanConfig(num_nodes=1)
    needed, told = (assess(config, layout, plan.model_copy(update={"engine_memory_frac": share}), machine).needs for share in (None, 0.85))
    assert needed.shared is not None
    assert told.shared is not None
    assert needed.fits
    assert not told.fits
    assert told.shared.total - told.trainer.total == round(0.85 * told.engine.capacity)


def test_remedies_that_this_trainer_has_come_first_and_each_makes_it_fit() -> None:
    """The public Super layout on 80 GB: one single setting that is here helps, so pairs are named too; every one is put to the test."""
    layout, plan, config = SUPER_LAYOUT, SUPER_PLAN, load_model(SUPER)[1]
    found = remedies(config, layout, plan, cluster("h100_80gb"))
    assert len(found) > 2
    assert [bool(remedy.caveat) for remedy in found] == sorted(bool(remedy.caveat) for remedy in found)
    for remedy in found:
        words = dict(word.split("=") for word in remedy.words.split())
        length = ["workload.max_sequence_tokens=131072", "workload.micro_batch_tokens=131072"]
        sizes = [f"parallel.{key}={value}" for key, value in layout.model_dump(exclude_none=True).items() if f"parallel.{key}" not in words]
        given = ["num_nodes=64", "generation_nodes=32", *length, *sizes, *remedy.words.split()]
        changed = load_section(PlanConfig, file=None, overrides=given)
        assert changed.parallel is not None
        assert assess(config, changed.parallel, changed, cluster("h100_80gb")).fits, remedy


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_are_split_by_kind_of_block(recompute: str) -> None:
    """The terms add up to the whole; an MoE layer is the largest that is computed again, so then no Mamba block is."""
    config = load_model(SUPER)[1]
    layout = SUPER_LAYOUT.model_copy(update={"recompute": recompute})
    terms = {term.name: term.num_bytes for term in trainer_memory(config, layout, SUPER_PLAN, cluster("h200"), world_size=256).terms}
    whole = activation_bytes(config, layout, expert_imbalance=1.5).of(num_tokens=131_072 // 16, num_in_flight=1)
    assert terms["activations"] + terms["MoE buffers"] + terms["Mamba states"] == pytest.approx(whole, abs=3)
    assert terms["MoE buffers"] > 0
    assert (terms["Mamba states"] > 0) == (recompute == "none")
    dense = load_model(CONFIGS / "models" / "qwen3_8b.yaml")[1]
    plain = trainer_memory(dense, ParallelConfig(), SUPER_PLAN, cluster("h200"), world_size=256)
    assert not {"MoE buffers", "Mamba states"} & {term.name for term in plain.terms}


def test_weight_sync_by_hand() -> None:
    """Through an adapter in 20 s each way; a GPU digests in 5 s, a host in 100, copies in 50; 10 s for all tensors per end, both at once."""
    config = load_model(SUPER)[1]
    machine = cluster("h100_80gb").model_copy(update={"network_gb_per_s": count_parameters(config).total * 2 / 20e9, "link_gb_per_s": 1e9})
    size = count_parameters(config).total * 2 / 1e9
    rates = {
        "device_digest_gb_per_s": size / 5,
        "digest_gb_per_s": size / 100,
        "host_copy_gb_per_s": size / 50,
        "tensor_s": 10 / count_tensors(config),
    }
    plan = SUPER_PLAN.model_copy(update={"efficiency": EfficiencyConfig(network=1.0, **rates)})

    def sync_s(**changes: Any) -> float:
        return assess(config, SUPER_LAYOUT, plan.model_copy(update=changes), machine).cost.sync_s

    # Gathered and sent at once; the other end receives, digests and loads meanwhile.
    assert sync_s() == pytest.approx(20 + 5 + 10)
    assert sync_s(generation_tensor_parallel_size=1) == pytest.approx(20 + 5 + 10)
    # Through /dev/shm: written by the sender, read and digested, written again for the workers and read by them.
    assert sync_s(generation_nodes=0) == pytest.approx(50 + (100 + 50 + 10) + 50)
    assert sync_s(generation_nodes=0, generation_tensor_parallel_size=1) == pytest.approx(50 + (100 + 10))


def test_a_hand_over_sends_every_expert_of_super_on_its_own() -> None:
    """40 layers of 512 experts with two matrices, and 10 to 17 other tensors a block."""
    config = load_model(SUPER)[1]
    experts = 40 * 512 * 2
    assert experts < count_tensors(config) < experts + 88 * 17


def test_memory_of_a_hand_over_by_hand() -> None:
    """A layer of experts of Super is 512 x 2 x 1,024 x 2,688 bfloat16 values; 8 GPUs share what is made of it."""
    config, machine = load_model(SUPER)[1], cluster("h100_80gb")
    experts = 512 * 2 * 1_024 * 2_688 * 2
    assert receiver_staging(config, SUPER_PLAN) == pytest.approx(experts * 9 / 8 + 2 * 256 * 2**20, rel=0.02)
    tight = SUPER_PLAN.model_copy(update={"engine_memory_frac": 0.95})
    assert engine_memory(config, tight, machine).margin == receiver_staging(config, SUPER_PLAN)
    assert engine_memory(config, tight.model_copy(update={"generation_nodes": 0}), machine).margin == pytest.approx(0.05 * 80 * GIB, rel=0.02)
    terms = {term.name: term.num_bytes for term in trainer_memory(config, SUPER_LAYOUT, SUPER_PLAN, machine, world_size=256).terms}
    assert terms["weight sync"] == 2 * 131_072 * 4_096 * 2 + 256 * 2**20


def test_host_memory_by_hand() -> None:
    """Per process 12 bytes of every parameter it holds, twice 4 of its largest buffer, 2 for weights copied; a node has eight."""
    config, machine = load_model(SUPER)[1], cluster("h200")
    layout = SUPER_LAYOUT.model_copy(update={"async_save": True})
    hosts = host_memories(config, layout, SUPER_PLAN, machine, world_size=256)
    parts = stage_buffers(config, layout, 0, world_size=256, is_bf16=True)
    elements, largest = sum(part.num_elements for part in parts), max(part.num_padded for part in parts)
    trainer, engine = hosts["the host of a trainer node"], hosts["the host of an engine node"]
    assert trainer.total == 8 * (8 * GIB + 12 * elements + 2 * 4 * largest + 2 * elements)
    assert engine.total == 8 * 8 * GIB
    offloaded = SUPER_PLAN.model_copy(update={"optimizer_offload_frac": 0.5})
    assert host_memories(config, layout, offloaded, machine, world_size=256)["the host of a trainer node"].total > trainer.total
    together = host_memories(config, layout, SUPER_PLAN.model_copy(update={"generation_nodes": 0}), machine, world_size=512)
    assert list(together) == ["the host of a node"]
    # Only there an engine of several GPUs has its weights in /dev/shm.
    terms = {term.name: term.num_bytes for term in together["the host of a node"].terms}
    assert terms["new weights in /dev/shm"] == 2 * count_parameters(config).total


def test_a_host_that_is_too_small_is_refused_by_name() -> None:
    config = load_model(SUPER)[1]
    layout = SUPER_LAYOUT.model_copy(update={"expert_model_parallel_size": 64})
    assert assess(config, layout, SUPER_PLAN, cluster("h200")).fits
    small = assess(config, layout, SUPER_PLAN, cluster("h200").model_copy(update={"host_memory_gib": 300.0})).needs
    assert [name for name, memory in small.judged if not memory.fits] == ["the host of a trainer node"]
    found = [str(remedy) for remedy in remedies(config, SUPER_LAYOUT, SUPER_PLAN, cluster("b200"))]
    settings = ["parallel.overlap_grad_reduce=True", "parallel.expert_model_parallel_size=16"]
    assert found == [*settings, "checkpoint_gathers=False (not in this trainer)"]


def test_saving_in_pieces_takes_less_of_the_gpu() -> None:
    """Where activations are few, what a checkpoint gathers is the peak; buckets of overlapped reduction are gathered one by one."""
    config, machine = load_model(SUPER)[1], cluster("h200")
    layout = SUPER_LAYOUT.model_copy(update={"overlap_grad_reduce": True})
    whole, pieces = (trainer_memory(config, one, SUPER_PLAN, machine, world_size=256) for one in (SUPER_LAYOUT, layout))
    without = trainer_memory(config, SUPER_LAYOUT, SUPER_PLAN.model_copy(update={"checkpoint_gathers": False}), machine, world_size=256)
    largest = max(part.num_padded for part in stage_buffers(config, SUPER_LAYOUT, 0, world_size=256, is_bf16=True))
    gone = sum(term.num_bytes for term in without.terms if term.name in ("activations", "MoE buffers", "Mamba states", "logits"))
    assert whole.total == without.total - gone + 4 * largest
    assert pieces.total == without.total


def test_what_obviously_cannot_fit_does_not() -> None:
    config = load_model(SUPER)[1]
    plan = PlanConfig(num_nodes=1)
    assert not any(proposal.fits for proposal in propose(config, plan, cluster("h100_80gb"), num_shown=50))
    tiny = cluster("h100_80gb").model_copy(update={"gpu_memory_gib": 16.0})
    assert not any(proposal.fits for proposal in propose(load_model(CONFIGS / "models" / "qwen3_8b.yaml")[1], plan, tiny, num_shown=50))


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_proposals_fit_and_the_first_is_among_the_fastest(path: Path) -> None:
    config = load_model(path)[1]
    plan = PlanConfig(num_nodes=32, generation_nodes=16)
    found = propose(config, plan, cluster("h200"), num_shown=10)
    assert found
    assert all(proposal.needs.trainer.total + proposal.needs.trainer.margin <= 139.8 * GIB for proposal in found)
    assert found[0].cost.step_s <= 1.05 * min(proposal.cost.step_s for proposal in found)


def test_more_of_anything_takes_more_memory() -> None:
    """Monotone in what must be held; a reference policy adds exactly the weights."""
    config, machine = load_model(SUPER)[1], cluster("h200")

    def total(plan: PlanConfig, layout: ParallelConfig = SUPER_LAYOUT) -> int:
        return trainer_memory(config, layout, plan, machine, world_size=256).total

    base = total(SUPER_PLAN)
    trained = SUPER_PLAN.model_copy(update={"checkpoint_gathers": False})
    weights = trainer_memory(config, SUPER_LAYOUT, SUPER_PLAN, machine, world_size=256).terms[0].num_bytes
    assert total(SUPER_PLAN.model_copy(update={"has_reference": True})) == base + weights
    assert total(SUPER_PLAN.model_copy(update={"gradient_dtype": "bfloat16"})) < base
    assert total(SUPER_PLAN.model_copy(update={"optimizer_offload_frac": 1.0})) < base
    assert total(trained) < base
    assert total(trained, SUPER_LAYOUT.model_copy(update={"recompute": "none"})) > total(trained)
    few = engine_memory(config, SUPER_PLAN.model_copy(update={"max_num_seqs": 1}), machine).total
    assert few < engine_memory(config, SUPER_PLAN, machine).total


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_model_parallel_size": 3}, "3"),
        ({"tensor_model_parallel_size": 16, "context_parallel_size": 16}, "n_groups"),
        ({"expert_model_parallel_size": 48}, "expert_model_parallel_size"),
        ({"sequence_parallel": False}, "sequence_parallel"),
    ],
)
def test_impossible_layouts_name_the_term(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        assess(load_model(SUPER)[1], SUPER_LAYOUT.model_copy(update=changes), SUPER_PLAN, cluster("h200"))


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_cluster_files_are_complete(path: Path) -> None:
    assert load_section(ClusterConfig, file=path).source


def test_the_page_lists_every_option() -> None:
    page = (CONFIGS.parent / "docs" / "planning.md").read_text()

    def rows(section: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            if isinstance(field.default, BaseModel):
                yield from rows(type(field.default), f"{prefix}{name}.")
            else:
                default = "required" if field.is_required() else field.default
                yield f"| `{prefix}{name}` | {default} | {field.description} |"

    missing = [row for row in rows(PlanConfig, "") if row not in page]
    assert not missing


def test_without_a_cluster_terms_are_shown_and_nothing_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallel.tensor_model_parallel_size=8", "parallel.sequence_parallel=true", "parallel.expert_model_parallel_size=8"]
    assert run_plan(SUPER, None, None, [*words, "parallel.expert_tensor_parallel_size=1"], num_shown=1)
    shown = capsys.readouterr().out
    assert "120.67 billion parameters, 12.77 active" in shown
    assert "PFLOP" in shown
    assert "one of 8" in shown
    assert all(term in shown for term in ("gradients", "optimizer", "activations", "key/value cache", "SSM cache"))
    assert "fits" not in shown.lower()
    with pytest.raises(UserError, match="sequence_parallel"):
        run_plan(SUPER, None, None, [*words, "parallel.sequence_parallel=false"], num_shown=1)


def test_a_recipe_states_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes, layout and engine of recipes/nemotron3_super_120b/swe; words of the recipe change the recipe, words of the plan the plan."""
    recipe, machine = CONFIGS.parent / "recipes" / "nemotron3_super_120b" / "swe", CONFIGS / "clusters" / "h100_80gb.yaml"
    given = ["model.path=/checkpoint", "ingest.paths=[/trajectories]"]
    assert run_plan(SUPER, machine, None, given, num_shown=1, recipe=recipe)
    shown = capsys.readouterr().out
    assert "64 nodes of 8 x H100 80GB SXM, 32 of them generating" in shown
    assert "TP8 CP16 EP64 ETP1 SP recompute" in shown
    assert "32 sequences at full length" in shown
    changed = [*given, "parallel.expert_model_parallel_size=8", "efficiency.network=0.35"]
    assert not run_plan(SUPER, machine, None, changed, num_shown=1, recipe=recipe)
    shown = capsys.readouterr().out
    assert "EP8 ETP1" in shown
    assert "network 0.35" in shown
    with pytest.raises(UserError, match="--plan and --recipe"):
        run_plan(SUPER, machine, machine, given, num_shown=1, recipe=recipe)


def test_the_command_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    machine, model = CONFIGS / "clusters" / "h100_80gb.yaml", CONFIGS / "models" / "qwen3_8b.yaml"
    words = ["num_nodes=1", "parallel.tensor_model_parallel_size=8", "parallel.sequence_parallel=true", "max_num_seqs=16"]
    assert run_plan(model, machine, None, words, num_shown=1)
    assert "8.19 billion parameters" in capsys.readouterr().out
    assert not run_plan(model, machine, None, ["num_nodes=1", "parallel.pipeline_model_parallel_size=1"], num_shown=1)
    assert "; it would with more nodes or a finer split" in capsys.readouterr().out
    with pytest.raises(UserError, match="generation_nodes is 2"):
        run_plan(model, machine, None, ["num_nodes=2", "generation_nodes=2"], num_shown=1)
