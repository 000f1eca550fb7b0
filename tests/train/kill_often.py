"""A program for the kill test: starts a run again and again and kills it at random moments.

Prints, as JSON, the step of the newest intact checkpoint after each kill. A program of its own, because
it forks: everything is imported once, and each start takes no time.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from gradsync.train.checkpoint import list_checkpoints, newest_intact
from training_jobs import options_for, train

OPTIONS = {"steps": 4000, "checkpoint_every": 1, "eval_every": 0, "keep_checkpoints": 2, "dropout": 0.1}


def newest_step(checkpoints: Path) -> int:
    found = newest_intact(checkpoints, sys.exit)
    return 0 if found is None else found.step


def kill_once(folder: Path, is_resumed: bool, delay_s: float) -> int:
    config = options_for(folder, resume=is_resumed, **OPTIONS)
    checkpoints = Path(str(config.run)) / "checkpoints"
    before = newest_step(checkpoints)
    child = os.fork()
    if child == 0:
        train(config)
        os._exit(3)  # it was to be killed
    while max((c.step for c in list_checkpoints(checkpoints)), default=0) <= before:
        time.sleep(0.001)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    return newest_step(checkpoints)


def main() -> None:
    folder, num_kills = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    moments = random.Random(7)
    print(json.dumps([kill_once(folder, number > 0, moments.uniform(0.0, 0.05)) for number in range(num_kills)]))


if __name__ == "__main__":
    main()
