"""Keep ``torch.compile`` out of the engine: its frames run as they are, whoever calls them.

A backward inside a compiled function calls the engine's hooks while Dynamo watches every frame; torch's own
wrapper is on Dynamo's list of files to skip, and so are these. Modules that the engine calls are compiled as
ever.
"""

import functools
import sys

from gradsync.errors import ConfigError

_ENGINE = ("gradsync.ddp", "gradsync.comm")


@functools.cache
def keep_compiler_out() -> None:
    """Tell Dynamo, once a process, to skip the engine's files."""
    from torch._dynamo import trace_rules

    for package in _ENGINE:
        trace_rules.add(package)


def refuse_compiled_autograd(rank: int) -> None:
    """Raise if this backward has been compiled as one graph: nothing would tell the engine when it is over.

    Raises:
        ConfigError: compiled autograd is on.
    """
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region:
        raise ConfigError(
            f"rank {rank}: compiled autograd is not compatible with DistributedDataParallel: it does not tell when "
            f"backward is over; leave torch._dynamo.config.compiled_autograd off (torch.compile itself is fine)"
        )
