"""Records that are made quickly are frozen records in every way: beside the same class made by `dataclass` alone."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest

from pivotrl.records import quickly_made
from pivotrl.types import Candidate, Message, Role, ToolCall


@dataclass(frozen=True, slots=True)
class Plain:
    """Every kind of field."""

    name: str
    count: int = 3
    seen: list[int] = field(default_factory=list[int])


@quickly_made
@dataclass(frozen=True, slots=True)
class Quick:
    """The same."""

    name: str
    count: int = 3
    seen: list[int] = field(default_factory=list[int])


@pytest.mark.parametrize(("values", "named"), [(("a",), {}), (("a", 4), {"seen": [1]}), ((), {"name": "a", "count": 5})])
def test_fields_are_those_of_the_plain_class(values: tuple, named: dict) -> None:
    quick, plain = Quick(*values, **named), Plain(*values, **named)
    assert type(quick) is Quick
    assert dataclasses.asdict(quick) == dataclasses.asdict(plain)
    assert repr(quick) == repr(plain).replace("Plain", "Quick")
    assert quick == Quick(*values, **named)
    assert quick.seen is not Quick(*values).seen if values else True


def test_it_is_frozen_and_has_no_other_attribute() -> None:
    quick = Quick("a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        quick.name = "b"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del quick.name  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(quick, "__dict__")


def test_copies_and_pickles() -> None:
    call = ToolCall("look", "{}", "c1")
    message = Message(Role.ASSISTANT, "x", (call,))
    for made in (copy.copy(message), copy.deepcopy(message), pickle.loads(pickle.dumps(message)), dataclasses.replace(message)):
        assert type(made) is Message
        assert (made, hash(made)) == (message, hash(message))
    assert dataclasses.replace(message, content="y") == Message(Role.ASSISTANT, "y", (call,))


def test_wrong_arguments_are_refused_and_the_signature_is_known() -> None:
    make: Any = Quick
    for values, named in (((), {}), (("a", 1, [], 2), {}), (("a",), {"other": 1}), (("a",), {"name": "b"})):
        with pytest.raises(TypeError):
            make(*values, **named)
    assert list(inspect.signature(Quick).parameters) == ["name", "count", "seen"]
    assert list(inspect.signature(Candidate).parameters) == [one.name for one in dataclasses.fields(Candidate)]


def test_other_layouts_are_refused() -> None:
    with pytest.raises(TypeError):
        quickly_made(dataclass(frozen=True)(type("Loose", (), {"__annotations__": {"name": str}})))
