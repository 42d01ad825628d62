"""The one reader of YAML that somebody else wrote: recipes, sections, model files, words of a command line, result files of harnesses.

It reads what OmegaConf reads (safe types, no duplicate keys), within limits: aliases are counted as what they stand for, so that a few lines
that stand for a billion values are refused before anything is built of them. Called by config/load.py, planning/inputs.py and
evaluation/tables/harness.py, which name the file in their own words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from pivotrl.errors import UserError

# Far above any recipe or result file, and read in seconds.
MAX_BYTES = 4 * 2**20
MAX_VALUES = 100_000
MAX_DEPTH = 32
_RULE = f"it is YAML of at most {MAX_VALUES:,} values and {MAX_DEPTH} levels, aliases counted as what they stand for"


def read_yaml_file(path: Path) -> Any:
    """The value of a YAML file; None for an empty one.

    Raises:
        UserError: naming the file, where it is not UTF-8, not YAML, or beyond the limits.
        OSError: where the file cannot be read.
    """
    with path.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UserError(
            f"{path} has more than {MAX_BYTES:,} bytes", rule="a YAML file of a recipe or of results is far smaller", fix="correct the path"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not readable YAML: {error}", rule="it must be UTF-8", fix="correct the file") from error
    return read_yaml(text, source=str(path))


def read_yaml(text: str, *, source: str) -> Any:
    """The value of a YAML text; None for an empty one.

    Args:
        source: what the text is, for messages.

    Raises:
        UserError: where it is not YAML, or has more than 100,000 values or 32 levels, aliases counted as what they stand for.
    """
    import yaml
    from omegaconf._utils import get_yaml_loader

    try:
        _refuse_too_much(text, source)
        # The loader is OmegaConf's own, and a safe one.
        return yaml.load(text, Loader=get_yaml_loader())
    except UserError:
        raise
    # A tag such as !!int before a value that is none fails in Python's own conversions.
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{source} is not readable YAML: {' '.join(str(error).split())}", rule=_RULE, fix="correct it") from error


def _refuse_too_much(text: str, source: str) -> None:
    """By the parser's events, of which nothing is built yet."""
    import yaml

    num_values = 0
    values_by_anchor: dict[str, int] = {}
    # Anchor of every list and mapping that is open, and the values before it.
    is_open: list[tuple[str | None, int]] = []
    parse = cast("Callable[..., Iterator[Any]]", yaml.parse)  # pyright: ignore[reportUnknownMemberType] (PyYAML has no types)
    for event in parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _ in is_open):
                raise UserError(f"{source}: alias {event.anchor!r} stands for something that holds it", rule=_RULE, fix="take out the alias")
            num_values += values_by_anchor.get(event.anchor, 0)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = is_open.pop()
            values_by_anchor |= {anchor: num_values - before} if anchor else {}
        elif isinstance(event, yaml.CollectionStartEvent):
            is_open.append((event.anchor, num_values))
            num_values += 1
        elif isinstance(event, yaml.ScalarEvent):
            num_values += 1
            values_by_anchor |= {event.anchor: 1} if event.anchor else {}
        if num_values > MAX_VALUES or len(is_open) > MAX_DEPTH:
            found = f"more than {MAX_VALUES:,} values" if num_values > MAX_VALUES else f"more than {MAX_DEPTH} levels"
            raise UserError(f"{source} has {found}", rule=_RULE, fix="write out what is meant, without aliases of aliases")
