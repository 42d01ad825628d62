"""Tables to files: tables.md, tables.tex, index.html, figures/ and, last, tables.json with every cell's number and the files it came from.

The same results give the same bytes. Cells are text in all formats; each format escapes it here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pivotrl.evaluation.tables.cells import Table
from pivotrl.evaluation.tables.curves import Figure
from pivotrl.evaluation.tables.figures import write_figure
from pivotrl.rundir import atomic_write, write_json

CELLS, MARKDOWN, LATEX, PAGE, FIGURES = "tables.json", "tables.md", "tables.tex", "index.html", "figures"

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
}


def write_tables(
    out: Path, *, name: str, label: str, tables: Sequence[Table], figures: Sequence[Figure], record: Mapping[str, Any], advance: Callable[[int], None]
) -> None:
    """Writes all files into the directory, which is made.

    Args:
        label: what the paper's columns are.
        record: further keys of tables.json: the specification, hashes of the files read, commit.
        advance: told after each figure.
    """
    (out / FIGURES).mkdir(parents=True, exist_ok=True)
    for figure in figures:
        write_figure(figure, out / FIGURES)
        advance(1)
    atomic_write(out / MARKDOWN, markdown(name, label, tables, figures).encode())
    atomic_write(out / LATEX, latex(name, label, tables, figures).encode())
    templates = Path(__file__).parent / "templates"
    environment = Environment(loader=FileSystemLoader(templates), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = environment.get_template("tables.html.j2").render(name=name, label=label, tables=tables, figures=figures, directory=FIGURES)
    atomic_write(out / PAGE, page.encode())
    cells = {key: cell for table in tables for key, cell in table.as_dict().items()}
    drawn = {figure.key: _figure_dict(figure) for figure in figures}
    write_json(out / CELLS, {"name": name, "cells": cells, "figures": drawn, **record})


def markdown(name: str, label: str, tables: Sequence[Table], figures: Sequence[Figure]) -> str:
    """All tables as GitHub markdown."""
    lines = [f"# {_markdown(name)}", "", f"Columns headed `paper` are {_markdown(label)}.", ""]
    for table in tables:
        lines += [f"## {_markdown(table.title)}", "", *markdown_table(table)]
    for figure in figures:
        lines += [f"![{_markdown(figure.title)}]({FIGURES}/{figure.key}.svg)", "", _markdown(figure.caption), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def markdown_table(table: Table) -> list[str]:
    """Lines of one table without its title: caption, rows, notes, each followed by an empty line."""
    headings = [table.first_column, *(heading for _, heading in table.columns)]
    lines = [_markdown(table.caption), "", _markdown_row(headings)] if table.caption else [_markdown_row(headings)]
    is_words = [any(row.cells[index].kind == "text" for row in table.rows) for index in range(len(table.columns))]
    lines.append(f"|{'|'.join(['---'] + ['---' if words else '---:' for words in is_words])}|")
    for row in table.rows:
        cells = [row.label, *(cell.text for cell in row.cells)]
        lines.append(_markdown_row([f"**{cell}**" if row.is_total else cell for cell in cells]))
    return [*lines, "", *(line for note in table.notes if note for line in (_markdown(note), ""))]


def latex(name: str, label: str, tables: Sequence[Table], figures: Sequence[Figure]) -> str:
    """All tables as LaTeX environments for a document that loads booktabs and graphicx."""
    lines = [f"% {name}: needs \\usepackage{{booktabs}} and \\usepackage{{graphicx}}".replace("\n", " ")]
    for table in tables:
        columns = "l" + "r" * len(table.columns)
        notes = " ".join([table.caption, *table.notes, *([f"Columns headed paper are {label}."] if _has_paper(table) else [])])
        lines += ["", r"\begin{table}", r"\centering", rf"\caption{{{escape_latex(f'{table.title}. {notes}'.strip())}}}"]
        lines += [rf"\label{{tab:{table.key}}}", r"\resizebox{\textwidth}{!}{%", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
        lines += [_latex_row([table.first_column, *(heading for _, heading in table.columns)], is_bold=False), r"\midrule"]
        for index, row in enumerate(table.rows):
            if row.is_total and index:
                lines.append(r"\midrule")
            lines.append(_latex_row([row.label, *(cell.text for cell in row.cells)], is_bold=row.is_total))
        lines += [r"\bottomrule", r"\end{tabular}}", r"\end{table}"]
    for figure in figures:
        lines += ["", r"\begin{figure}", r"\centering", rf"\includegraphics[width=\textwidth]{{{FIGURES}/{figure.key}.png}}"]
        lines += [rf"\caption{{{escape_latex(figure.caption)}}}", rf"\label{{fig:{figure.key}}}", r"\end{figure}"]
    return "\n".join(lines) + "\n"


def escape_latex(text: str) -> str:
    """Text as LaTeX text: every special character escaped, line breaks to spaces.

    >>> escape_latex("lambda_diff <= 60%")
    'lambda\\\\_diff \\\\textless{}= 60\\\\%'
    """
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))


def _latex_row(cells: Sequence[str], *, is_bold: bool) -> str:
    shown = [escape_latex(cell) for cell in cells]
    # A bracket at the start of a line would be read as an option of the row before it.
    shown = [f"{{{cell}}}" if cell.startswith("[") else cell for cell in shown]
    return " & ".join(rf"\textbf{{{cell}}}" if is_bold and cell else cell for cell in shown) + r" \\"


def _markdown(text: str) -> str:
    """Text that cannot open markup or another cell."""
    for character in ("\\", "`", "*", "_", "<", "|"):
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


def _markdown_row(cells: Sequence[str]) -> str:
    bold = [cell.startswith("**") and cell.endswith("**") for cell in cells]
    shown = [f"**{_markdown(cell[2:-2])}**" if is_bold else _markdown(cell) for cell, is_bold in zip(cells, bold, strict=True)]
    return f"| {' | '.join(shown)} |"


def _has_paper(table: Table) -> bool:
    return any(cell.kind == "paper" for row in table.rows for cell in row.cells)


def _figure_dict(figure: Figure) -> dict[str, Any]:
    panels = [{"x": label, "lines": [asdict(line) for line in lines]} for label, lines in figure.panels]
    return {"title": figure.title, "y": figure.y_label, "panels": panels}
