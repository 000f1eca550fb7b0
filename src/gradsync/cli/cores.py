"""How many CPU cores this process may use."""

import os


def num_cores() -> int:
    """Return the cores that the scheduler gives this process, where the system tells, else those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
