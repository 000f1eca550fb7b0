"""A Lightning Fabric loop as a user writes it: no synchronisation while accumulating, clipping, averaged losses."""

import json
import sys

import torch
from lightning_fabric import Fabric, seed_everything
from torch import nn

if "--gradsync" in sys.argv:
    import gradsync

    gradsync.replace_torch_ddp()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self(x) - y).square().mean()


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    model.mark_forward_method("loss")  # runs through the wrapper too
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))

    losses = []
    for epoch in range(3):
        for number, (x, y) in enumerate(loader):
            accumulates = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = model.loss(x, y) if epoch == 2 else (model(x) - y).square().mean()
                fabric.backward(loss)
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach()).item())
    state = model.state_dict()
    if fabric.global_rank == 0:
        result = {
            "wrapper": type(model._forward_module).__module__,
            "bare": type(model.module).__name__,
            "losses": losses,
            "names": list(state),
            "weights": state["head.weight"].flatten().tolist(),
        }
        print("RESULT", json.dumps(result))


main()
