"""The base of all recipe sections and the number ranges they share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# What manifests can hold.
MAX_INT = 2**63 - 1

type Fraction01 = Annotated[float, Field(ge=0, le=1)]
type PositiveInt = Annotated[int, Field(ge=1, le=MAX_INT)]


class Section(BaseModel):
    """Base of all sections: unknown keys fail, numbers are finite (a manifest's JSON holds no others), values cannot change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=())
