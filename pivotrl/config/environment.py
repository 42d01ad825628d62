"""Recipe section `environment`: servers of NeMo-Gym that play whole episodes with agents of their own. Imports pydantic only."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pivotrl.config.section import PositiveInt, Section


class EnvironmentConfig(Section):
    """Environments that are played by their own agents, as servers of NeMo-Gym: end-to-end RL and multi-turn evaluation. docs/environments.md"""

    type: Literal["nemo_gym"]
    head: str = "http://127.0.0.1:11000"
    """Address of NeMo-Gym's head server, which knows where the agents are. With `command`, the one that its servers are told to take."""
    listen: Annotated[str, Field(pattern=r"^[^\s:]+:\d{1,5}$")] = "127.0.0.1:8500"
    """HOST:PORT where the policy answers the agents, `policy_base_url: http://HOST:PORT/v1` of NeMo-Gym's configuration. Whoever reaches it can
    ask for completions."""
    command: tuple[str, ...] | None = None
    """Program that starts the servers, once per stage, ended with it (None: they run already). `{recipe}`, `{run}` and `{policy_base_url}` are
    replaced. Its output is in RUN/environment."""
    start_deadline_s: PositiveInt = 1800
    """The stage stops where the head server or an agent that a row names does not answer by then."""
    agent: str | None = None
    """The agent of rows that name none; without it such a row is refused."""
    train_rows: tuple[str, ...] = ()
    """JSONL files of NeMo-Gym rows that `train.episodes` plays. A row names its agent (`agent_ref`), or `agent` does. `{recipe}` and `{run}` are
    replaced."""
    test_rows: tuple[str, ...] = ()
    """Rows that the `environment` suite plays."""
    max_concurrent_episodes: PositiveInt = 256
    """Episodes that are played at the same time."""
    batch_wait_s: Annotated[float, Field(ge=0)] = 0.5
    """A batch of turns goes to the engine once every open episode has asked for one, or nothing more has arrived for so long."""
    episode_deadline_s: PositiveInt = 3600
    """An episode that takes longer is the infrastructure's failure."""
    max_retries: Annotated[int, Field(ge=0)] = 1
    """Times that an episode is played again after its server failed."""
    reasoning: Literal["apart", "in_content"] = "apart"
    """Where a reply has its thinking: in `reasoning_content`, for `uses_reasoning_parser: true` of NeMo-Gym's model server, or in the text, for
    false."""


WHERE_PLAYED = tuple(
    ("environment", key)
    for key in (
        *("head", "listen", "command", "start_deadline_s", "train_rows", "test_rows", "max_concurrent_episodes", "batch_wait_s"),
        *("episode_deadline_s", "max_retries"),
    )
)
"""Keys that say where and how patiently episodes are played. Which ones, a stage knows by the content of its rows."""
