"""Sections of the verifiers that reproduce NeMo-Gym's graders: the published knobs under their published names. Imports pydantic only.

A knob has the default of the grader's own class, except where every configuration that ships with the grader overrides it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pivotrl.config.section import Fraction01, Section

GymVersion = Literal["0.4.0", "0.7.0"]


class GymSingleStepVerifierConfig(Section):
    """NeMo-Gym's `single_step_tool_use_with_argument_comparison`: same verdicts, holes included (docs/gym.md names them)."""

    type: Literal["gym_single_step"]
    word_count_similarity_threshold: Fraction01
    """Least share of common words of two strings of two words or more (equal ones: 0.5). Published: 0.1 conversational, 0.3 search, 0.0 SWE."""
    floating_point_comparison_threshold: Annotated[float, Field(ge=0)] = 1e-6
    """Floats are equal where they differ by less than this."""
    version: GymVersion = "0.7.0"
    """Version of nemo-gym whose verdicts are given. 0.7.0 matches all calls, 0.4.0 looks at the first call of the response only."""
    parallel_tool_call_rewarding: bool = False
    """Whether the number of calls counts. Off: every expected call must be matched, and surplus calls are free."""
    allow_subset: bool = False
    """With `parallel_tool_call_rewarding`: fewer calls than expected are admissible, and only as many must match."""
    allow_superset: bool = False
    """With `parallel_tool_call_rewarding`: more calls than expected are admissible."""
    parallel_tool_call_reward_mode: Literal["binary_strict", "fractional", "f1"] = "binary_strict"
    """With `parallel_tool_call_rewarding`: all or nothing, the share of the calls that must match, or the F1 score of the two lists."""


class GymSwePivotVerifierConfig(Section):
    """NeMo-Gym's `swe_pivot`: tool category, then target, then similarity of what is written or run. Same verdicts, holes included."""

    type: Literal["gym_swe_pivot"]
    version: GymVersion = "0.7.0"
    """Version of nemo-gym whose verdicts are given. A command that only one side gives is another target in 0.7.0 and passes in 0.4.0."""
    reward_mode: Literal["binary", "continuous"] = "binary"
    """1 from `similarity_full_credit` on, or graded from 0.5 at `similarity_threshold` to 1 at `similarity_full_credit`."""
    enable_target_match: bool = True
    """Whether file, editor command, line range or shell verb and paths must agree. False (with no similarity) is the PivotRL paper's rule."""
    enable_argument_similarity: bool = True
    """Whether edits and shell commands must be similar (difflib's ratio of the first 2,000 characters)."""
    similarity_threshold: Fraction01 = 0.4
    """Least similarity for partial credit, `continuous` only."""
    similarity_full_credit: Fraction01 = 0.8
    """Least similarity for full credit."""
    enable_diff_size_shaping: bool = True
    """Whether long edits cost, `continuous` only."""
    diff_size_alpha: Fraction01 = 0.1
    """Share of the reward that an edit of 500 characters or more costs; shorter ones in proportion."""


class GymTerminusVerifierConfig(Section):
    """NeMo-Gym's `terminus_judge` without its judge: JSON, schema, completion flag, similarity of the keystrokes. Where the grader would ask its
    judge, this verifier abstains."""

    type: Literal["gym_terminus"]
    enable_string_similarity: bool = True
    """Whether keystrokes are compared as strings (difflib's ratio). Published: true in every shipped configuration."""
    string_similarity_threshold: Fraction01 = 0.9
    """Least similarity of all keystrokes, concatenated without a separator. Published: 0.9, and 0.95 with the rubric judge."""
    enable_llm_judge: bool = True
    """Whether a judge decides what similarity does not accept: this verifier then abstains, and must stand in a `compose` in front of a judge."""
    harness: Literal["auto", "terminus_1", "terminus_2"] = "auto"
    """Schema of the reply: what the row's `metadata.harness` says; `auto` reads it off the expert's own reply."""


GymVerifierConfig = GymSingleStepVerifierConfig | GymSwePivotVerifierConfig | GymTerminusVerifierConfig
