"""The per-process token loader: which tokens each of N processes reads, and how they begin again together.

    python examples/token_loader.py

No processes are started: rank and world size are plain numbers for the loader.
"""

import argparse

import torch

from gradsync.data.sequential import SequentialTokenLoader


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=2, help="sequences of a batch (B)")
    parser.add_argument("--length", type=int, default=4, help="tokens of a sequence (T)")
    parser.add_argument("--processes", type=int, default=2, help="number of processes (N)")
    parser.add_argument("--tokens", type=int, default=60, help="tokens of the text")
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    # Tokens that are their own position show where a batch is from.
    tokens = torch.arange(options.tokens)
    loaders = [
        SequentialTokenLoader(tokens, options.batch, options.length, rank, options.processes)
        for rank in range(options.processes)
    ]
    for step in range(options.steps):
        for rank, loader in enumerate(loaders):
            inputs, targets = loader.next_batch()
            assert torch.equal(targets, inputs + 1)
            print(f"step {step} rank {rank}: inputs {inputs.tolist()}")


if __name__ == "__main__":
    main()
