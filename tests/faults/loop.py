"""A plain training script, as a user writes it: torch's launcher, data loader workers, gradsync's class."""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gradsync


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index % 7))


def main(mode: str) -> None:
    torch.set_num_threads(1)
    gradsync.init_process_group("gloo", soft_limit_s=6)
    rank = int(os.environ["RANK"])
    model = gradsync.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    print("started", flush=True)
    for step, batch in enumerate(DataLoader(Numbers(), batch_size=4, num_workers=1)):
        if rank == 1 and step == 5:
            if mode == "raise":
                raise ValueError("no such batch")
            if mode == "hang":
                time.sleep(600)
            print("on the way", flush=True)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
