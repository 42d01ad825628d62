"""What the profile stage costs beside generation: rendering, parsing, verdicts, files. One run of a recipe, measured from inside.

    python benchmarks/profile_overhead.py RECIPE --run RUN [key=value ...]

Runs the recipe's stages up to `profile` in the run directory, with a clock around the engine's `generate`. Prints seconds inside and outside,
and the ratio; starting the engine is left out of both. The bar is 10 %.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pivotrl import build, pipeline
from pivotrl.profiling.measure import Measured, Measurer
from pivotrl.rollouts.engine import Engine, GenerationRequest
from pivotrl.types import Candidate, Completion

_BAR = 0.10


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    seconds = {"generate": 0.0, "close": 0.0}
    first_s = num_tokens = 0.0

    def clocked(engine: Engine) -> Engine:
        generate, close = engine.generate, engine.close

        def timed(requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
            nonlocal num_tokens
            started_s = time.perf_counter()
            results = generate(requests)
            seconds["generate"] += time.perf_counter() - started_s
            num_tokens += sum(len(sample.token_ids) for samples in results for sample in samples)
            return results

        def timed_close() -> None:
            started_s = time.perf_counter()
            close()
            seconds["close"] += time.perf_counter() - started_s

        engine.generate, engine.close = timed, timed_close  # type: ignore[method-assign]
        return engine

    start_engine, measure = build.engine, Measurer.measure
    build.engine = lambda *words, **settings: clocked(start_engine(*words, **settings))

    def timed_measure(self: Measurer, candidates: Sequence[Candidate], *settings: Any) -> list[Measured]:
        nonlocal first_s
        first_s = first_s or time.perf_counter()
        return measure(self, candidates, *settings)

    Measurer.measure = timed_measure  # pyright: ignore[reportAttributeAccessIssue]
    loaded = pipeline.load(arguments.recipe, arguments.overrides)
    for stage in ("ingest", *(["sft"] if loaded.recipe.sft is not None else []), "profile"):
        pipeline.run_stage(stage, loaded, arguments.run)
    outside_s = time.perf_counter() - first_s - seconds["generate"] - seconds["close"]
    print(f"generate {seconds['generate']:8.2f} s  {num_tokens:.0f} tokens, {num_tokens / seconds['generate']:.0f} tok/s")
    print(f"outside  {outside_s:8.2f} s  {outside_s / seconds['generate']:.1%} of it (bar {_BAR:.0%})")


if __name__ == "__main__":
    main()
