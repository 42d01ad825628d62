"""The recipe's `judge` verifier: a language model behind an OpenAI-compatible endpoint. Part of the schema; imports pydantic only."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from pivotrl.config.section import PositiveInt, Section

FROM_ENVIRONMENT = "env:"
"""Prefix of an endpoint whose address is in an environment variable."""


class JudgeVerifierConfig(Section):
    """A language model's opinion, asked twice with the roles swapped. An unreachable or unreadable judge is an infra verdict, never reward 0."""

    type: Literal["judge"]
    endpoint: str
    """Base URL of an OpenAI-compatible server up to `/v1`, or `env:NAME` to read it from that environment variable, so that a judge
    can move between jobs of one run."""
    model: str
    """Name of the model as the endpoint serves it. Verdicts are cached under this name: pin the revision where it is served."""
    api_key_env: str | None = None
    """Environment variable that holds the API key (None: no key is sent). The key itself is never stored or logged."""
    prompt: Literal["equivalence.v1", "rubric.v1"]
    """Versioned prompt: are two actions interchangeable in this state, or does a message meet the criteria that the expert's meets."""
    criteria: tuple[str, ...] = ()
    """What a message must do, one sentence each; for `rubric.v1` alone."""
    on_disagreement: Literal["abstain", "zero"]
    """The two opinions differ: the cascade goes on (reward 0 where the judge is its last stage), or reward 0 with no second opinion after a no."""
    cache: str = "{run}/judge_cache"
    """Directory of answers by content hash; runs and processes may share one. `{recipe}` and `{run}` are replaced."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature of the judge."""
    seed: int = 0
    """Sampling seed sent to the judge."""
    max_answer_tokens: PositiveInt = 1024
    """Generation cap of one opinion, tokens; a cut answer is unreadable."""
    max_action_chars: PositiveInt = 20_000
    """Longer actions (as one line of JSON) are invalid, unread: a judge can be flooded."""
    max_context_chars: PositiveInt = 12_000
    """Characters of conversation shown: the start of the first message and as many last messages as fit."""
    max_concurrency: PositiveInt = 16
    """Verdicts in flight."""
    deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """Time bound of one verdict, both opinions, retries and waiting for a rate limit included, seconds."""
    max_attempts: PositiveInt = 5
    """Requests for one opinion before the judge counts as unreachable. Waits between them double from half a second, or are what
    `Retry-After` says."""
    give_up_after: PositiveInt = 20
    """Verdicts that fail one after the other before the rest of the batch is not asked for: a dead judge must not cost a deadline per rollout."""

    @field_validator("endpoint")
    @classmethod
    def _endpoint_is_an_address(cls, endpoint: str) -> str:
        if not endpoint.startswith(("http://", "https://", FROM_ENVIRONMENT)) or "@" in endpoint:
            raise ValueError("it must be http://..., https://... or env:NAME, without a user or password: manifests show it; use api_key_env")
        return endpoint

    @model_validator(mode="after")
    def _criteria_belong_to_the_rubric(self) -> JudgeVerifierConfig:
        if (self.prompt == "rubric.v1") != bool(self.criteria):
            raise ValueError(f"prompt is {self.prompt} with {len(self.criteria)} criteria; rubric.v1 needs at least one, equivalence.v1 takes none")
        return self
