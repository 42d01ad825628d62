"""Which sequences begin others, against a comparison of every pair."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pivotrl.objective.nesting import hosts


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12))
def test_a_host_begins_with_its_guest_and_begins_nothing_longer(sequences: list[list[int]]) -> None:
    found = hosts(sequences)
    begins = lambda one, other: sequences[other][: len(sequences[one])] == sequences[one]  # noqa: E731
    for index, host in enumerate(found):
        assert begins(index, host)
        assert found[host] == host
        assert not any(begins(host, other) and len(sequences[other]) > len(sequences[host]) for other in range(len(sequences)))
    # One place for everything that is the same: as many hosts as there are sequences that begin nothing longer, each once.
    ends = {tuple(one) for i, one in enumerate(sequences) if not any(begins(i, j) and len(sequences[j]) > len(one) for j in range(len(sequences)))}
    assert len(set(found)) == len(ends)
