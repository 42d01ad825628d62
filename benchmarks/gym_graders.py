"""What NeMo-Gym's rules accept on the labelled pairs, beside PivotRL's own verifiers, and how fast each judges.

    PYTHONPATH=. .venv/bin/python benchmarks/gym_graders.py

Per domain and verifier, on tests/labelled (held and fresh, pairs that only a judge can decide left out): precision, recall, and verdicts per
second over the same pairs, one core. Speeds are for comparing the lines of one run.
"""

from __future__ import annotations

import time
from pathlib import Path

from pivotrl.build_verifiers import build_verifier
from pivotrl.config.load import load_verifier
from pivotrl.verifiers.labelled import LabelledPair, read_pairs
from pivotrl.verifiers.protocol import Verifier

# Not dev.jsonl, by which our own verifiers were made.
_FILES = ("held.jsonl", "fresh.jsonl")
_PAIRS = Path(__file__).resolve().parents[1] / "tests" / "labelled"
_WANTED_S = 0.5

LINES: dict[str, list[tuple[str, list[str]]]] = {
    "conversational": [("gym_single_step", ["word_count_similarity_threshold=0.1"]), ("tool_call", ["message=similarity"])],
    "message": [("gym_single_step", ["word_count_similarity_threshold=0.1"]), ("tool_call", ["message=similarity"])],
    "search": [("gym_single_step", ["word_count_similarity_threshold=0.3"]), ("search", [])],
    "swe": [
        ("gym_single_step", ["word_count_similarity_threshold=0.0"]),
        ("gym_swe_pivot", ["enable_target_match=false", "enable_argument_similarity=false"]),
        ("gym_swe_pivot", []),
        ("swe", ["granularity=arguments"]),
    ],
    "terminal": [("gym_terminus", ["enable_llm_judge=false"]), ("terminal", [])],
}


def _verdicts(verifier: Verifier, pairs: list[LabelledPair]) -> list[bool]:
    return [verifier.verify(pair.state, pair.expert, pair.action).reward == 1 for pair in pairs]


def _per_second(verifier: Verifier, pairs: list[LabelledPair]) -> float:
    rounds, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < _WANTED_S:
        _verdicts(verifier, pairs)
        rounds += 1
    return rounds * len(pairs) / spent


def main() -> None:
    pairs = [pair for name in _FILES for pair in read_pairs(_PAIRS / name) if not pair.needs_judge]
    print("| domain | verifier | pairs | precision | recall | accepted wrongly | verdicts/s |\n|---|---|---|---|---|---|---|")
    for domain, lines in LINES.items():
        of_domain = [pair for pair in pairs if pair.domain == domain]
        for name, settings in lines:
            verifier = build_verifier(load_verifier(name, settings), expand=Path)
            accepted = _verdicts(verifier, of_domain)
            right = sum(took and pair.is_equivalent for took, pair in zip(accepted, of_domain, strict=True))
            wrong, positives = sum(accepted) - right, sum(pair.is_equivalent for pair in of_domain)
            precision = f"{right / (right + wrong):.2f}" if right + wrong else "-"
            numbers = f"{len(of_domain)} | {precision} | {right / positives:.2f} | {wrong} of {len(of_domain) - positives}"
            print(f"| {domain} | `{' '.join([name, *settings])}` | {numbers} | {_per_second(verifier, of_domain):,.0f} |")


if __name__ == "__main__":
    main()
