"""Ten minutes of coverage-guided fuzzing (atheris, libFuzzer) of action parsers and verifiers: ``python -m fuzz.run --seconds 600 --out DIR``.

The parent starts one fuzzing process, restarts it where an input kills it (timeout, memory), and prints executions and findings; exit code 1
where there is one. A finding is kept as DIR/findings/<hash>.bin with its traceback beside it; `--replay FILE` runs one again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import time
import traceback
from pathlib import Path

# Inputs of any size below MAX_BYTES must fit; the interpreter with all parsers takes about 200 MB of it.
_MEMORY_MB = 2048
# libFuzzer's own limit, for what never returns; slow verdicts are found by targets.check.
_HANG_S = 30
_COUNT_EVERY = 200
_STRUCTURED_SHARE = 0.7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replay is not None:
        from fuzz.targets import check

        sys.stdout.write(f"{check(arguments.replay.read_bytes())}: nothing found\n")
        return 0
    if arguments.worker:
        _work(arguments.out, arguments.seconds)
        return 0
    return _supervise(arguments.out, arguments.seconds)


def _supervise(out: Path, seconds: int) -> int:
    for name in ("corpus", "findings", "killed", "counts"):
        (out / name).mkdir(parents=True, exist_ok=True)
    _write_seeds(out / "corpus")
    started_s = time.monotonic()
    num_starts = 0
    while (left_s := seconds - (time.monotonic() - started_s)) > 5:
        words = [sys.executable, "-m", "fuzz.run", "--worker", "--seconds", str(int(left_s)), "--out", str(out)]
        with (out / f"worker{num_starts}.log").open("wb") as log:
            subprocess.run(words, stdout=log, stderr=log, check=False)
        num_starts += 1
    counts: dict[str, int] = {}
    for path in (out / "counts").glob("*.json"):
        for name, count in json.loads(path.read_text()).items():
            counts[name] = counts.get(name, 0) + count
    killed = sorted(path.name for path in (out / "killed").iterdir())
    findings = sorted(path.stem for path in (out / "findings").glob("*.txt"))
    for name, count in sorted(counts.items()):
        sys.stdout.write(f"{name:<32} {count:>12,}\n")
    for name in findings:
        sys.stdout.write(f"finding {name}: {(out / 'findings' / f'{name}.txt').read_text().splitlines()[-1][:200]}\n")
    for name in killed:
        sys.stdout.write(f"killed the process: {name}\n")
    elapsed_s = time.monotonic() - started_s
    sys.stdout.write(f"{sum(counts.values()):,} executions in {elapsed_s:,.0f} s, {len(findings)} findings, {len(killed)} inputs that killed\n")
    return 1 if findings or killed else 0


def _write_seeds(corpus: Path) -> None:
    from fuzz.seeds import completion_seeds, pair_seeds

    for seed in (*completion_seeds(), *pair_seeds()):
        (corpus / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)


def _work(out: Path, seconds: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["pivotrl.actions", "pivotrl.verifiers"]):
        from fuzz import targets

        # Builds every parser and verifier, whose modules are imported here and nowhere earlier.
        targets.targets()
    from fuzz.mutator import mutate

    counts: dict[str, int] = {}
    counts_file = out / "counts" / f"{time.time_ns()}.json"
    seen: set[str] = set()

    def test_one_input(data: bytes) -> None:
        try:
            name = targets.check(data)
        except Exception as error:  # noqa: BLE001 - every exception is what is looked for
            name = "finding"
            _keep(out / "findings", data, error, seen)
        counts[name] = counts.get(name, 0) + 1
        if sum(counts.values()) % _COUNT_EVERY == 0:
            counts_file.write_text(json.dumps(counts))

    def custom_mutator(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        mutated = mutate(data, rng) if rng.random() < _STRUCTURED_SHARE else atheris.Mutate(data, max_size)
        return mutated[:max_size]

    options = [f"-max_total_time={seconds}", f"-max_len={targets.MAX_BYTES}", f"-rss_limit_mb={_MEMORY_MB}", f"-timeout={_HANG_S}"]
    words = [sys.argv[0], *options, "-verbosity=1", f"-artifact_prefix={out / 'killed'}/", str(out / "corpus")]
    atheris.Setup(words, test_one_input, custom_mutator=custom_mutator)
    atheris.Fuzz()


def _keep(directory: Path, data: bytes, error: Exception, seen: set[str]) -> None:
    """Keeps a finding once per place that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    kind = f"{type(error).__name__}-{Path(last.filename).stem}-{last.lineno}-{str(error)[:40] if type(error).__name__ == 'Finding' else ''}"
    digest = hashlib.sha1(kind.encode(errors="replace"), usedforsecurity=False).hexdigest()[:12]
    if digest in seen:
        return
    seen.add(digest)
    (directory / f"{digest}.bin").write_bytes(data)
    lines = "".join(traceback.format_exception(error)).encode(errors="backslashreplace")
    (directory / f"{digest}.txt").write_bytes(lines)


if __name__ == "__main__":
    sys.exit(main())
