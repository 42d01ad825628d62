"""The recipe's `shell_effect` verifier, the one that executes what a model wrote. Part of the schema; imports pydantic only."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pivotrl.config.section import PositiveInt, Section


class SandboxLimits(Section):
    """What one run of one command may use. Worst case of memory: processes x memory_mb + 2 x disk_mb per run, times max_concurrency."""

    deadline_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Wall time of the command, seconds; then everything it started is killed."""
    cpu_s: PositiveInt = 5
    """CPU seconds of each process."""
    memory_mb: PositiveInt = 256
    """Address space of each process, MB."""
    processes: PositiveInt = 16
    """Processes and threads at once."""
    file_mb: PositiveInt = 8
    """Largest file it may write, MB."""
    open_files: Annotated[int, Field(ge=16)] = 64
    """Open files of each process."""
    output_kb: PositiveInt = 256
    """Standard output and standard error, KB each; a command that writes more is stopped."""
    disk_mb: PositiveInt = 32
    """Size of its directory, and of its /tmp, MB; both are in memory."""
    max_files: PositiveInt = 2048
    """Files, directories and links in each of the two."""


class ShellEffectVerifierConfig(Section):
    """Runs the expert's and the model's commands in copies of one directory and compares what they did. It executes model output, in a
    sandbox without network, and refuses to start where the machine permits none. Effects outside the directory are not seen: put it into
    a cascade, with a directory that holds what the commands touch."""

    type: Literal["shell_effect"]
    executes_model_output: Literal[True]
    """Must be written out: a recipe that executes says so."""
    fixture: str
    """Small directory that every command starts in. `{recipe}` and `{run}` are replaced."""
    tools: Annotated[tuple[str, ...], Field(min_length=1)]
    """Tools whose calls are shell commands; an action with any other call is not judged (abstains)."""
    argument: str = "command"
    """The argument that holds the command; several calls run one after the other in one shell."""
    shell: str = "/bin/bash"
    """Shell that runs it with `-c`; an absolute path below /usr or /bin."""
    compare: Annotated[tuple[Literal["files", "stdout", "exit_status"], ...], Field(min_length=1)] = ("files", "stdout", "exit_status")
    """What must be equal. File times and owners never count, the executable bit does."""
    limits: SandboxLimits = SandboxLimits()
    """Bounds of one run."""
    max_concurrency: PositiveInt = 2
    """Commands that run at once."""
