"""From the recipe's `verifier` section to an object: the only place that maps a verifier's `type:` to a class, with imports inside the cases.

Called by build.py and by the verbs that take a verifier without a recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pivotrl.config.gym_verifiers import GymSingleStepVerifierConfig, GymSwePivotVerifierConfig, GymTerminusVerifierConfig
from pivotrl.config.judge import JudgeVerifierConfig
from pivotrl.config.shell_effect import ShellEffectVerifierConfig
from pivotrl.config.verifiers import (
    ComposeVerifierConfig,
    ExactVerifierConfig,
    FlippedVerifierConfig,
    MemberVerifierConfig,
    MessageVerifierConfig,
    SearchVerifierConfig,
    SweVerifierConfig,
    TerminalVerifierConfig,
    ToolCallVerifierConfig,
    VerifierConfig,
)

if TYPE_CHECKING:
    from pivotrl.verifiers.protocol import Verifier


def build_verifier(config: VerifierConfig, *, expand: Callable[[str], Path]) -> Verifier:
    """The verifier that a section describes, as a cascade: it never abstains.

    Args:
        expand: replaces the placeholders in a path of the section.
    """
    from pivotrl.verifiers.compose import ComposeVerifier, Stage

    if isinstance(config, FlippedVerifierConfig):
        from pivotrl.verifiers.flipped import FlippedVerifier

        return FlippedVerifier(config, build_verifier(config.verifier, expand=expand))
    if isinstance(config, ComposeVerifierConfig):
        stages = [Stage(_member(stage.verifier, expand), stage.decides, frozenset(stage.undecided_reasons)) for stage in config.stages]
        return ComposeVerifier(stages, config.undecided)
    return ComposeVerifier([Stage(_member(config, expand), "both")], "zero")


def _member(config: MemberVerifierConfig, expand: Callable[[str], Path]) -> Verifier:
    match config:
        case ExactVerifierConfig():
            from pivotrl.verifiers.exact import ExactVerifier

            return ExactVerifier()
        case ToolCallVerifierConfig():
            from pivotrl.verifiers.tool_call import ToolCallVerifier

            return ToolCallVerifier(config)
        case SweVerifierConfig():
            from pivotrl.verifiers.swe import SweVerifier

            return SweVerifier(config)
        case TerminalVerifierConfig():
            from pivotrl.verifiers.terminal import TerminalVerifier

            return TerminalVerifier(config)
        case JudgeVerifierConfig():
            from pivotrl.verifiers.judge.verifier import JudgeVerifier

            return JudgeVerifier.from_config(config, expand(config.cache))
        case ShellEffectVerifierConfig():
            from pivotrl.verifiers.sandbox.shell_effect import ShellEffectVerifier

            return ShellEffectVerifier(config, expand(config.fixture))
        case MessageVerifierConfig():
            from pivotrl.verifiers.message import MessageVerifier

            return MessageVerifier(config)
        case SearchVerifierConfig():
            from pivotrl.verifiers.search import SearchVerifier

            return SearchVerifier(config)
        case GymSingleStepVerifierConfig():
            from pivotrl.verifiers.gym_single_step import GymSingleStepVerifier

            return GymSingleStepVerifier(config)
        case GymSwePivotVerifierConfig():
            from pivotrl.verifiers.gym_swe_pivot import GymSwePivotVerifier

            return GymSwePivotVerifier(config)
        case GymTerminusVerifierConfig():
            from pivotrl.verifiers.gym_terminus import GymTerminusVerifier

            return GymTerminusVerifier(config)
