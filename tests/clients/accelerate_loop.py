"""A Hugging Face Accelerate loop as a user writes it: accumulation, clipping, a schedule, gathered losses."""

import json
import sys

import torch
from accelerate import Accelerator
from torch import nn

if "--gradsync" in sys.argv:
    import gradsync

    gradsync.replace_torch_ddp()


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    data = torch.utils.data.TensorDataset(torch.randn(36, 4), torch.randn(36, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    losses = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())

    # the first of two losses is accumulated, the second one synchronised after all
    first, second = model(data.tensors[0][:4]).sum(), model(data.tensors[0][4:8]).sum()
    with accelerator.no_sync(model):
        accelerator.backward(first)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    bare = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        result = {
            "wrapper": type(model).__module__,
            "bare": type(bare).__name__,
            "losses": losses,
            "last gradient": bare[0].weight.grad.flatten().tolist(),
            "weights": bare[0].weight.detach().flatten().tolist(),
        }
        print("RESULT", json.dumps(result))
    accelerator.end_training()


main()
