"""Prints precision and recall of the functional verifiers and of the compatibility modes on the labelled pairs, per domain.

Run: ``python benchmarks/labelled_pairs.py``. A dash is a domain that a verifier is not made for. The compatibility modes are at the thresholds
of the published data sets; their rewards count as accepted where they reach 1.
"""

from __future__ import annotations

from pathlib import Path

from pivotrl.build_verifiers import build_verifier
from pivotrl.config.load import load_verifier
from pivotrl.types import VerdictKind
from pivotrl.verifiers.labelled import LabelledPair, read_pairs

_LABELLED = Path(__file__).resolve().parents[1] / "tests" / "labelled"
_DOMAINS = ("conversational", "swe", "terminal", "search", "message")
# (what is printed, verifier and settings, the domains it is made for)
_VERIFIERS = (
    ("functional: tool_call", "tool_call message=similarity", ("conversational", "message")),
    ("functional: swe", "swe granularity=arguments", ("swe",)),
    ("functional: terminal", "terminal", ("terminal",)),
    ("functional: search", "search", ("search",)),
    ("functional: message", "message content=similarity", ("message",)),
    ("swe, target", "swe granularity=target", ("swe",)),
    ("swe, name (the paper)", "swe granularity=name", ("swe",)),
    ("gym_single_step, threshold 0.1", "gym_single_step word_count_similarity_threshold=0.1", ("conversational", "message")),
    ("gym_single_step, threshold 0.3", "gym_single_step word_count_similarity_threshold=0.3", ("search",)),
    ("gym_single_step, threshold 0.0", "gym_single_step word_count_similarity_threshold=0.0", ("swe",)),
    ("gym_swe_pivot", "gym_swe_pivot", ("swe",)),
    ("gym_terminus without judge", "gym_terminus enable_llm_judge=false", ("terminal",)),
    ("exact", "exact", _DOMAINS),
)


def _score(words: str, pairs: list[LabelledPair]) -> str:
    name, *settings = words.split()
    verifier = build_verifier(load_verifier(name, settings), expand=Path)
    counts = {True: [0, 0], False: [0, 0]}
    for pair in pairs:
        verdict = verifier.verify(pair.state, pair.expert, pair.action)
        counts[pair.is_equivalent][verdict.kind is VerdictKind.OK and verdict.reward >= 1] += 1
    (missed, found), (_, false) = counts[True], counts[False]
    precision = found / (found + false) if found + false else float("nan")
    return f"{precision:.3f} / {found / (found + missed):.3f}"


def main() -> None:
    pairs = [pair for path in sorted(_LABELLED.glob("*.jsonl")) for pair in read_pairs(path) if not pair.needs_judge]
    print(f"{len(pairs)} pairs; precision / recall")
    print(f"{'':<34}" + "".join(f"{domain:>18}" for domain in _DOMAINS))
    for label, words, domains in _VERIFIERS:
        cells = [_score(words, [pair for pair in pairs if pair.domain == domain]) if domain in domains else "-" for domain in _DOMAINS]
        print(f"{label:<34}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
