"""Pages of docs/ from the schema and the registry, so that they cannot drift: `make docs`, checked by a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAliasType, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pivotrl.config.launch import ClusterFile
from pivotrl.config.load import section_models
from pivotrl.config.schema import Recipe
from pivotrl.metrics import registered

DOCS = Path(__file__).resolve().parents[2] / "docs"


def config_page() -> str:
    """Markdown of every key: section by section, its type, default and meaning."""
    lines = [
        "# Recipe keys",
        "",
        "Generated from `pivotrl/config/` by `make docs`. A key without a default must be in the recipe; unknown keys fail.",
        "`pivotrl config RECIPE` prints every value of a recipe and where it came from.",
    ]
    return "\n".join(lines + _tables("recipe.yaml", Recipe)) + "\n"


def cluster_page() -> str:
    """Markdown of every key of a cluster file."""
    lines = ["# Cluster files", "", "Generated from `pivotrl/config/launch.py` by `make docs`; what they are for is in [launch.md](launch.md)."]
    return "\n".join(lines + _tables("launch/clusters/NAME.yaml", ClusterFile)) + "\n"


def _tables(file: str, root: type[BaseModel]) -> list[str]:
    lines: list[str] = []
    for title, model in _sections("", root):
        lines += [
            "",
            f"## {title or file}",
            "",
            " ".join((model.__doc__ or "").split()),
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| `{name}` | {_type_name(info)} | {_default(info)} | {' '.join((info.description or 'Chooses this form of the section.').split())} |"
            for name, info in model.model_fields.items()
        ]
    return lines


def metrics_page() -> str:
    """Markdown of every registered metric."""
    lines = [
        "# Metrics",
        "",
        "Generated from `pivotrl/metrics.py` by `make docs`. `<stage>/<noun>[/<facet>]/<reduction>`; a name that is not here is an error.",
        "",
        "| name | meaning |",
        "|---|---|",
    ]
    return "\n".join(lines + [f"| `{spec.name}` | {spec.meaning} |" for spec in registered()]) + "\n"


def _sections(prefix: str, model: type[BaseModel], above: frozenset[type[BaseModel]] = frozenset()) -> Iterator[tuple[str, type[BaseModel]]]:
    """Sections in reading order. A form that holds other forms of its own section (a cascade of verifiers) does not list them again."""
    yield prefix, model
    for name, info in model.model_fields.items():
        forms = list(section_models(info.annotation))
        for below in forms:
            if below in above:
                continue
            # Only a key with one value tells forms apart; a section of several types has one form.
            values = [get_args(below.model_fields[key].annotation) for key in ("type", "rule") if key in below.model_fields]
            tag = next((str(tags[0]) for tags in values if len(tags) == 1), "")
            yield from _sections(f"{prefix}.{name}".lstrip(".") + (f" ({tag})" if tag else ""), below, above | set(forms))


def _default(info: FieldInfo) -> str:
    if isinstance(info.default, BaseModel):
        return "its defaults"
    return "**required**" if info.is_required() else f"`{info.get_default(call_default_factory=True)}`"


def _type_name(info: FieldInfo) -> str:
    return f"`{_annotation_name(info.annotation)}`".replace("|", "\\|")


def _annotation_name(annotation: Any) -> str:
    if next(section_models(annotation), None) is not None:
        return "list of sections" if str(annotation).startswith("tuple") else "section"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, TypeAliasType):
        return _annotation_name(annotation.__value__)
    if get_origin(annotation) is Annotated:
        return _annotation_name(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return " | ".join(str(value) for value in get_args(annotation))
    parts = [part for part in get_args(annotation) if part is not Ellipsis]
    if not parts:
        return str(getattr(annotation, "__name__", annotation)).lower()
    if get_origin(annotation) is dict:
        return f"mapping to {_annotation_name(parts[1])}"
    if get_origin(annotation) is tuple:
        return f"list of {_annotation_name(parts[0])}"
    return " | ".join(_annotation_name(part) for part in parts)


def main() -> None:
    """Writes the pages."""
    DOCS.mkdir(exist_ok=True)
    (DOCS / "config.md").write_text(config_page())
    (DOCS / "cluster_files.md").write_text(cluster_page())
    (DOCS / "metrics.md").write_text(metrics_page())


if __name__ == "__main__":
    main()
