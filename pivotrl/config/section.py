"""The base of all recipe sections and the number ranges they share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

type Fraction01 = Annotated[float, Field(ge=0, le=1)]
type PositiveInt = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys fail, values cannot change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())
