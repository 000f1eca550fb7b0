"""Print the largest difference between the losses of two runs: ``python compare_losses.py RUN RUN``."""

import json
import sys
from pathlib import Path


def losses(run: str) -> dict[int, float]:
    lines = Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {entry["step"]: entry["loss"] for entry in map(json.loads, lines) if "loss" in entry}


def main() -> None:
    first, second = losses(sys.argv[1]), losses(sys.argv[2])
    common = sorted(first.keys() & second.keys())
    difference, step = max((abs(first[s] - second[s]), s) for s in common)
    print(f"{len(common)} steps; largest difference of the loss {difference:.2e}, at step {step}")


if __name__ == "__main__":
    main()
