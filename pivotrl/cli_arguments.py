"""Words that several verbs of the command line take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="Folder with recipe.yaml.", show_default=False)]
OverridesArgument = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Overrides of recipe keys, values in YAML.")]
RunOption = Annotated[Path | None, typer.Option("--run", metavar="RUN", help="Run directory; runs/<recipe name> where not given.")]
