"""What a rank does in the tests over several hosts: trains a small model, and says how it went."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.comm.process import destroy_process_group

STEP_LIMIT = 100_000  # more than any test waits for


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank))


def train(num_steps: int) -> None:
    rank = dist.get_rank()
    model = gradsync.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        if step == 3:
            print("training", flush=True)
    print("finished", sum(float(parameter.detach().double().sum()) for parameter in model.parameters()), flush=True)


def main(num_steps: int, timeout_s: float) -> None:
    torch.set_num_threads(1)
    gradsync.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    train(num_steps)
    destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
