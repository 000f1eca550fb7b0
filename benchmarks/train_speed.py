"""How fast ``gradsync train`` is beside a bare hand-written loop in one process.

    python benchmarks/train_speed.py

The model of nanoGPT's example for CPUs (4 layers, 4 heads, 128 wide, context 64, 12 sequences a step, float32), on text
as bytes. In alternating rounds: the bare loop on as many threads as the machine has cores, the bare loop on one thread,
one bare loop a core at the same time, each with its share of the sequences and no word between them (what ``gradsync
train`` could reach if synchronisation and loop took nothing), and ``gradsync train`` with one process a core. Tokens a
second are medians over the steps of a round, without its first ones.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_LAYERS, _HEADS, _WIDTH, _CONTEXT, _SEQUENCES = 4, 4, 128, 64, 12
_TOKENS = _CONTEXT * _SEQUENCES
_WARMUP = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sequences", type=int, default=_SEQUENCES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare is not None:
        print(bare_loop(given.bare, given.steps, given.sequences))
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    speeds: dict[str, list[float]] = {}
    for _ in range(given.rounds):
        for threads in (cores, 1):
            speeds.setdefault(f"bare loop, {threads} thread(s)", []).append(_in_processes(1, threads, given.steps))
        speeds.setdefault(f"{cores} bare loops, no words", []).append(_in_processes(cores, 1, given.steps))
        speeds.setdefault(f"gradsync train, {cores} process(es)", []).append(_train(cores, given.steps))
    reference, *_ = (statistics.median(samples) for samples in speeds.values())
    for name, samples in speeds.items():
        median = statistics.median(samples)
        print(
            f"{name:<34} {median:>9,.0f} tokens/s {_TOKENS / median * 1e3:>7.1f} ms a step {median / reference:>6.2f}x"
        )


def bare_loop(threads: int, steps: int, sequences: int) -> float:
    """Return the tokens a second of a loop with nothing in it but the model."""
    import torch

    from gradsync.model.gpt2 import GPT2, GPT2Config

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = GPT2Config(num_layers=_LAYERS, num_heads=_HEADS, width=_WIDTH, context=_CONTEXT, vocab_size=257)
    model = GPT2(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = torch.randint(257, (100_000,))
    seconds = []
    for _ in range(steps):
        start_s = time.perf_counter()
        starts = torch.randint(len(data) - _CONTEXT - 1, (sequences,)).tolist()
        inputs = torch.stack([data[start : start + _CONTEXT] for start in starts])
        targets = torch.stack([data[start + 1 : start + 1 + _CONTEXT] for start in starts])
        optimizer.zero_grad(set_to_none=True)
        model(inputs, targets)[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - start_s)
    return sequences * _CONTEXT / statistics.median(seconds[_WARMUP:])


def _in_processes(count: int, threads: int, steps: int) -> float:
    """Return the tokens a second of bare loops that run at the same time and share a step's sequences."""
    command = [sys.executable, __file__, "--bare", str(threads), "--steps", str(steps)]
    command += ["--sequences", str(_SEQUENCES // count)]
    environment = {**_environment(), "OMP_NUM_THREADS": str(threads)}
    loops = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    outputs = [loop.communicate()[0] for loop in loops]
    return sum(map(float, outputs))


def _train(cores: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        options = {
            "run": run,
            "nproc": cores,
            "steps": steps,
            "layers": _LAYERS,
            "heads": _HEADS,
            "width": _WIDTH,
            "context": _CONTEXT,
            "batch-tokens": _TOKENS,
            "dtype": "float32",
            "eval-every": steps,
            "eval-tokens": 4096,
            "sample-tokens": 1,
            "checkpoint-every": steps,
            "progress": "none",
        }
        command = [sys.executable, "-m", "gradsync", "train"]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        subprocess.run(command, env={**_environment(), "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = [record["tokens_per_s"] for record in records if "tokens_per_s" in record]
    return statistics.median(speeds[_WARMUP:])


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(_ROOT / "src")}


if __name__ == "__main__":
    main()
