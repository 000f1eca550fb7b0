"""A small network on random data, one process a device: the smallest whole DDP program.

    python examples/toy_ddp.py

Takes every GPU there is, else two CPU processes.
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import gradsync
from gradsync import DistributedDataParallel as DDP

EPOCHS = 5
BATCH_SIZE = 32
REPORT_EVERY = 10


class SimpleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class RandomDataset(Dataset):
    def __init__(self, size: int = 1000, features: int = 10) -> None:
        generator = torch.Generator().manual_seed(0)  # the same data in every process
        self.inputs = torch.randn(size, features, generator=generator)
        self.targets = torch.randn(size, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def train(rank: int, world_size: int) -> None:
    gradsync.init_process_group(rank=rank, world_size=world_size)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")

    model = DDP(SimpleModel().to(device), device_ids=[rank] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_function = nn.MSELoss()
    dataset = RandomDataset()
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # another order in every epoch
        for number, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_function(model(inputs.to(device)), targets.to(device))
            loss.backward()  # averages the gradients over all processes on the way
            optimizer.step()
            if rank == 0 and number % REPORT_EVERY == 0:
                print(f"epoch {epoch} batch {number:2d} loss {loss.item():.4f}", flush=True)

    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def main() -> None:
    world_size = torch.cuda.device_count() or 2
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    mp.spawn(train, args=(world_size,), nprocs=world_size)


if __name__ == "__main__":
    main()
