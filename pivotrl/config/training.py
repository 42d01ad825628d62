"""Recipe sections of the two training stages: `sft` (Eq. 1) and `train` (Eq. 7)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pivotrl.config.correction import CorrectionConfig
from pivotrl.config.episodes import EpisodesConfig
from pivotrl.config.parity import ParityConfig
from pivotrl.config.reprofile import ReprofileConfig
from pivotrl.config.section import Fraction01, PositiveInt, Section

Batching = Literal["padded", "packed", "shared_prefix"]
"""How the sequences of a micro-batch go through the model (docs/batching.md)."""


class OptimizerConfig(Section):
    """Adam on megatron-core's optimizer."""

    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up from lr / warmup_steps."""
    decay: Literal["constant", "cosine"] = "constant"
    """After warm-up: constant, or cosine to lr / 10 at the last step."""
    beta1: Fraction01 = 0.9
    """Adam's first decay."""
    beta2: Fraction01 = 0.999
    """Adam's second decay."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradient clipping by global norm."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Format in which gradients are added up over micro-batches and processes. bfloat16 halves their memory, rounds every sum, and needs bfloat16
    weights: a GPU."""


class TraceConfig(Section):
    """A torch profiler trace of some steps, for finding out where time goes."""

    first_step: Annotated[int, Field(ge=0)]
    """First optimizer step traced; not 0, whose first forward also allocates and compiles."""
    num_steps: PositiveInt = 1
    """Steps traced; each adds tens of megabytes."""


class SftConfig(Section):
    """Eq. 1 on expert turns: makes the reference policy pi_0, or the SFT baseline."""

    paths: tuple[str, ...] = ()
    """Chat files to learn from beside or instead of the ingested trajectories; `{run}` and `{recipe}` are replaced."""
    use_ingested: bool
    """Whether the ingested training-split trajectories are demonstrations."""
    num_steps: PositiveInt
    """Optimizer steps."""
    batch_sequences: PositiveInt
    """Sequences per step."""
    max_sequence_tokens: PositiveInt
    """Longer conversations are cut into windows that end at an assistant turn, or dropped where one turn is longer; counted."""
    optimizer: OptimizerConfig
    """Optimizer settings."""
    batching: Literal["padded", "packed"] = "padded"
    """packed: rows without their padding, one after the other. Memory and speed, never the gradient."""
    micro_batch_tokens: PositiveInt
    """Tokens of one forward pass, padding included; changes memory, never the gradient."""
    checkpoint_every: PositiveInt
    """Steps between checkpoints."""
    trace: TraceConfig | None = None
    """Write a profiler trace of some steps, or None."""


class ClipConfig(Section):
    """Clip range of the ratio, Eq. 7."""

    low: Annotated[float, Field(gt=0, lt=1)]
    """eps_low: ratios below 1 - low are clipped where the advantage is negative."""
    high: Annotated[float, Field(gt=0)]
    """eps_high: ratios above 1 + high are clipped where the advantage is positive."""


class KlConfig(Section):
    """KL to the reference policy pi_0, Eq. 7."""

    beta: Annotated[float, Field(ge=0)]
    """beta; 0 switches the term and the reference forward off (the public NVIDIA recipes)."""
    estimator: Literal["k1", "k3"] = "k3"
    """k1 = log p - log q; k3 = exp(log q - log p) - (log q - log p) - 1, never negative."""


class ValidationConfig(Section):
    """Held-out pivots, single-step reward."""

    every_steps: PositiveInt
    """Steps between validations; step 0 and the last step always."""
    num_pivots: PositiveInt
    """Held-out candidates sampled each time (the same ones)."""
    num_samples: PositiveInt
    """Samples per held-out candidate."""
    patience: PositiveInt | None = None
    """Validations without a new best before the run stops early (None: never)."""


class CurveConfig(Section):
    """Success of whole episodes on the test tasks of the recipe's world, for figures of accuracy over cost. It chooses no checkpoint."""

    every_steps: PositiveInt
    """Steps between measurements; step 0 and the last step always."""
    num_samples: PositiveInt
    """Episodes per test task."""


class TrainConfig(Section):
    """GRPO on pivots, Algorithm 1 and Eq. 7."""

    num_steps: PositiveInt
    """Optimizer steps."""
    pivots_per_step: PositiveInt
    """B: pivots of one step; not read where `episodes` is set."""
    group_size: Annotated[int, Field(ge=2)]
    """G: actions sampled per pivot; episodes per task where `episodes` is set."""
    advantage: Literal["mean_std", "leave_one_out", "no_std", "leave_one_out_std"]
    """mean_std is the paper's; leave_one_out_std is the incumbent's, for compatibility."""
    aggregation: Literal["action", "token"]
    """action: mean over actions of the mean over tokens (Eq. 7); token: mean over all action tokens."""
    clip: ClipConfig
    """Clip range."""
    kl: KlConfig
    """KL to pi_0."""
    optimizer: OptimizerConfig
    """Optimizer settings."""
    updates_per_rollout: PositiveInt = 1
    """Optimizer steps per batch of rollouts; 1 is exactly on-policy."""
    correction: CorrectionConfig | None = None
    """Importance weights from the engine that samples to the trainer that learns, or None: every token weighs 1."""
    max_policy_age: Literal[0, 1] = 0
    """Published policies between the one that samples and the one that learns. 1 samples the next round while this one is learnt; needs
    `correction`, which then weighs that step of training too."""
    batching: Batching = "padded"
    """packed: rows without their padding; shared_prefix: a group's prompt once for all its actions. Memory and speed, never the gradient."""
    micro_batch_tokens: PositiveInt
    """Tokens of one forward pass as `batching` lays them out; changes memory, never the gradient."""
    checkpoint_every: PositiveInt
    """Steps between checkpoints."""
    trace: TraceConfig | None = None
    """Write a profiler trace of some steps, or None."""
    max_infra_frac: Fraction01 = 0.05
    """The run stops where a step has more than this share of infra verdicts."""
    validation: ValidationConfig | None = None
    """Held-out validation, or None."""
    curve: CurveConfig | None = None
    """Success on the world's test tasks over the steps, or None; not counted as cost."""
    reprofile: ReprofileConfig | None = None
    """Profile and select again with the current policy when the pivots have no more to teach, or None: one pivot set for the whole run."""
    parity: ParityConfig | None = None
    """Compare the engine's log-probs with the trainer's and refuse to train where they differ, or None."""
    episodes: EpisodesConfig | None = None
    """End-to-end RL on whole episodes of the recipe's world, or None: pivots."""

    @model_validator(mode="after")
    def _older_rollouts_are_corrected(self) -> TrainConfig:
        if self.max_policy_age and self.correction is None:
            raise ValueError(
                "max_policy_age is 1 but there is no correction; rollouts of an older policy need importance weights; "
                "add train.correction, for example {type: truncated, cap: 2.0}, or set max_policy_age to 0"
            )
        return self

    @model_validator(mode="after")
    def _episodes_have_no_pivots(self) -> TrainConfig:
        if self.episodes is None:
            return self
        for found, is_set, why, fix in (
            ("reprofile", self.reprofile is not None, "there is no profile to make again", "leave it out"),
            ("validation", self.validation is not None, "held-out pivots come from a profile, which end-to-end RL does not have", "leave it out"),
            ("parity", self.parity is not None, "the gate samples pivots", "leave it out"),
            ("max_policy_age 1", self.max_policy_age > 0, "only pivots are sampled ahead", "set it to 0"),
            ("batching shared_prefix", self.batching == "shared_prefix", "the turns of a task have different prompts", "set padded or packed"),
        ):
            if is_set:
                raise ValueError(f"episodes is set with {found}, but {why}; {fix}")
        return self
