"""The one line that makes a program written for torch's wrapper use gradsync's.

Frameworks (Accelerate, Lightning Fabric, the transformers Trainer) construct torch's class themselves, under
names that they have imported long before. So the name stays, and constructing it makes another object.
"""

import inspect
from types import TracebackType
from typing import Any

from torch import nn

from gradsync.ddp.module import DistributedDataParallel

_TorchDDP = nn.parallel.distributed.DistributedDataParallel


class Replacement:
    """What ``replace_torch_ddp`` returns: ends with ``restore``, or with the ``with`` block that it heads."""

    def __enter__(self) -> "Replacement":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Let torch's class make its own objects again."""
        _TorchDDP.__new__ = _plain  # type: ignore[assignment, method-assign]


def replace_torch_ddp() -> Replacement:
    """From here on ``torch.nn.parallel.DistributedDataParallel(...)`` makes a ``gradsync.DistributedDataParallel``.

    Call it once, anywhere before the model is wrapped; every module that has imported torch's class, under whatever
    name, gets gradsync's. What is made is an instance of both classes. Subclasses of torch's class stay torch's.
    """
    _TorchDDP.__new__ = _ours  # type: ignore[assignment, method-assign]
    return Replacement()


def _ours(cls: type, *args: Any, **kwargs: Any) -> Any:
    # copying and unpickling ask for an empty object of exactly this class
    is_constructed = bool(args or kwargs)
    return object.__new__(DistributedDataParallel if cls is _TorchDDP and is_constructed else cls)


def _plain(cls: type, *_args: Any, **_kwargs: Any) -> Any:
    return object.__new__(cls)


for _new in (_ours, _plain):  # what the class shows to those who look at its arguments
    _new.__signature__ = inspect.signature(_TorchDDP.__init__)  # type: ignore[attr-defined]
