"""The hand-written GPT-2 training loop, on one process or under torchrun.

    python examples/gpt2_loop.py
    torchrun --standalone --nproc-per-node 2 examples/gpt2_loop.py
    torchrun --standalone --nproc-per-node 8 examples/gpt2_loop.py --preset gpt2 --tokenizer gpt2 \\
        --data my.txt --micro-batch 16 --micro-batches-per-step 32 --steps 19073

A step is the same for any number of processes: they share its micro-batches. The text is the Python
standard library's source unless --data names another.
"""

import argparse
import os
import time
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

import gradsync
from gradsync import DistributedDataParallel as DDP
from gradsync.data.corpus import load_corpus
from gradsync.data.sequential import SequentialTokenLoader
from gradsync.model.gpt2 import GPT2, GPT2Config


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--context", type=int, default=None)
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences of one forward and backward")
    parser.add_argument("--micro-batches-per-step", type=int, default=4, help="over all processes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip-sync", choices=("context", "attribute"), default="context")
    return parser.parse_args()


def syncing(model: DDP, is_last: bool, spelling: str) -> AbstractContextManager[None]:
    """Let only the last backward of a step synchronise the gradients; there are two ways to say so."""
    if spelling == "attribute":
        model.require_backward_grad_sync = is_last
        return nullcontext()
    return nullcontext() if is_last else model.no_sync()


def main() -> None:
    options = parse_options()
    ddp = "RANK" in os.environ  # set by torchrun
    if ddp:
        gradsync.init_process_group()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if ddp else (0, 1)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_type, int(os.environ.get("LOCAL_RANK", 0)))
    num_accumulated, rest = divmod(options.micro_batches_per_step, world_size)
    if rest:
        raise SystemExit(f"--micro-batches-per-step must divide by the {world_size} processes")

    corpus = load_corpus(options.data, options.tokenizer)
    config = GPT2Config.preset(options.preset, corpus.tokenizer.vocab_size, options.context)
    tokens = torch.from_numpy(corpus.train.shards[0].astype("int64"))
    loader = SequentialTokenLoader(tokens, options.micro_batch, config.context, rank, world_size)

    torch.manual_seed(1337)
    model = GPT2(config).to(device)
    if ddp:
        model = DDP(model, device_ids=[device.index] if device_type == "cuda" else None)
    raw_model = model.module if ddp else model
    optimizer = raw_model.configure_optimizers(weight_decay=0.1, learning_rate=6e-4, device_type=device_type)

    for step in range(options.steps):
        started = time.perf_counter()
        step_loss = torch.zeros((), device=device)
        for micro_step in range(num_accumulated):
            is_last = micro_step == num_accumulated - 1
            inputs, targets = (part.to(device) for part in loader.next_batch())
            with syncing(model, is_last, options.skip_sync) if ddp else nullcontext():
                with torch.autocast(device_type, torch.bfloat16, enabled=device_type == "cuda"):
                    _, loss = model(inputs, targets)
                loss = loss / num_accumulated
                loss.backward()
            step_loss += loss.detach()
        if ddp:
            dist.all_reduce(step_loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            mean_loss = step_loss.item() / world_size
            num_tokens = options.micro_batches_per_step * options.micro_batch * config.context
            tokens_per_s = num_tokens / (time.perf_counter() - started)
            print(f"step {step} loss {mean_loss:.6f} {tokens_per_s:,.0f} tokens/s", flush=True)

    if ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
