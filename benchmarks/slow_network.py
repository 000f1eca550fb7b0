"""How much of the all-reduce hides behind backward on a slow network, and what bucket size suits it.

    python benchmarks/slow_network.py --rate 1gbit --workload mlp     (as root, on Linux with iproute2)

Two hosts are made of network namespaces, and what leaves each is limited with tc. One rank on each times, in
alternating rounds: the model alone; the all-reduce of its gradients alone, in the buckets' sizes; torch's class; and
gradsync's with each bucket size. Serial is model plus all-reduce. What can be hidden is the shorter of the all-reduce
and of backward after the first layer's gradients (nothing can be sent before there is any); what is hidden is what a
step is shorter than serial.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(_ROOT / "src"), str(_ROOT / "tests" / "cluster")]

Step = Callable[[], dict[str, float]]

_WARMUP = 12  # sizes that are fitted to what was measured are chosen by then
_MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of each host's cable, as tc writes it; 'none' for no limit")
    parser.add_argument("--workload", default="mlp", choices=("mlp", "gpt-small"))
    parser.add_argument(
        "--caps", default="default,auto", help="bucket sizes of gradsync, by commas: MiB, default, auto"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", help="file for the raw samples")
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given)
    else:
        start(given)


def start(given: argparse.Namespace) -> None:
    from hosts import hosts, outputs

    with hosts(2) as made:
        for host in made if given.rate != "none" else ():
            host.slow_down(given.rate)
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": made[0].name, "MASTER_PORT": "29514", "LOCAL_RANK": "0"}
        common["LOCAL_WORLD_SIZE"] = "1"
        ranks = [
            host.start(__file__, *sys.argv[1:], **common, RANK=str(rank), GLOO_SOCKET_IFNAME="net0")
            for rank, host in enumerate(made)
        ]
        stories = outputs(ranks, 300.0)
    print(stories[0] if not any(rank.returncode for rank in ranks) else "\n".join(stories), end="")
    sys.exit(max(rank.returncode for rank in ranks))


def measure(given: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import gradsync

    torch.set_num_threads(1)
    gradsync.init_process_group("gloo", timeout=timedelta(seconds=120))
    contestants = make_contestants(given.workload, given.caps.split(","))
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for number in range(_WARMUP + given.rounds):
        for name, step in contestants.items():
            dist.barrier()
            taken = step()
            if number >= _WARMUP:
                samples[name].append(taken)
    if dist.get_rank() == 0:
        report(given, samples)
    dist.barrier()
    dist.destroy_process_group()


def make_contestants(workload_name: str, caps: list[str]) -> dict[str, Step]:
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    import gradsync
    from gradsync.bench.workloads import WORKLOADS

    workload = WORKLOADS[workload_name]()

    def with_cap(cap: str) -> Callable[[Any], Any]:
        if cap == "default":
            return gradsync.DistributedDataParallel
        value = float(cap) if cap.isdigit() else cap
        return lambda module: gradsync.DistributedDataParallel(module, bucket_cap_mb=value)

    return {
        "bare": training_step(workload, lambda module: module),
        "all-reduce alone": all_reduce_alone(workload),
        "torch": training_step(workload, TorchDDP),
        **{f"gradsync, {cap}{' MiB' * cap.isdigit()}": training_step(workload, with_cap(cap)) for cap in caps},
    }


def training_step(workload: Any, wrap: Callable[[Any], Any]) -> Step:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    module = workload.build()
    model, optimizer, batch = wrap(module), workload.optimizer(module), workload.batch(dist.get_rank())
    arrivals: list[float] = []
    for parameter in list(module.parameters())[-2:] if model is module else ():  # of the layer that comes first
        parameter.register_post_accumulate_grad_hook(lambda _: arrivals.append(time.perf_counter()))

    def step() -> dict[str, float]:
        arrivals.clear()
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = workload.loss(model, batch)
        middle = time.perf_counter()
        loss.backward()
        backward_s = time.perf_counter() - middle
        optimizer.step()
        first_s = max(arrivals, default=middle) - middle
        return {"step": time.perf_counter() - started, "backward": backward_s, "first": first_s}

    return step


def all_reduce_alone(workload: Any) -> Step:
    """The gradients' bytes in buckets of the default sizes, all started at once."""
    import torch
    import torch.distributed as dist

    num_bytes = sum(p.numel() * p.element_size() for p in workload.build().parameters())
    sizes = [_MIB] + [25 * _MIB] * ((num_bytes - _MIB) // (25 * _MIB)) + [(num_bytes - _MIB) % (25 * _MIB)]
    buckets = [torch.ones(size // 4) for size in sizes]

    def step() -> dict[str, float]:
        started = time.perf_counter()
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        return {"step": time.perf_counter() - started}

    return step


def report(given: argparse.Namespace, samples: dict[str, list[dict[str, float]]]) -> None:
    median = {name: 1e3 * statistics.median(each["step"] for each in rows) for name, rows in samples.items()}
    backward = 1e3 * statistics.median(each["backward"] for each in samples["bare"])
    first = 1e3 * statistics.median(each["first"] for each in samples["bare"])
    bare, alone = median["bare"], median["all-reduce alone"]
    print(f"{given.workload} on 2 hosts at {given.rate}, gloo, medians of {given.rounds} rounds")
    print(
        f"  model alone {bare:.1f} ms (backward {backward:.1f}, {first:.1f} of it before the first gradients are there)"
    )
    print(f"  all-reduce alone {alone:.1f} ms, all at once in buckets of torch's sizes")
    for name in list(samples)[2:]:
        hidden = bare + alone - median[name]
        share = hidden / min(backward - first, alone)
        print(f"  {name:<20} step {median[name]:6.1f} ms, hidden {hidden:5.1f} ms: {share:4.0%} of what can be")
    if given.json:
        content = {"rate": given.rate, "workload": given.workload, "samples": samples}
        Path(given.json).write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
