"""How the model is run: in which precision, and compiled or not.

Compilation is per block, so that gradients become ready block by block and their reduction overlaps
with backward. It is for training steps only: whatever else runs the model (validation, samples) runs it
as written, so it neither recompiles the training's graphs nor waits for graphs of its own.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import nn

from gradsync.errors import ConfigError

DtypeName = Literal["auto", "float32", "bfloat16"]


class Modes:
    """The two ways in which a run uses its model."""

    def __init__(self, dtype: DtypeName, device: torch.device, is_compiled: bool) -> None:
        self._device_type = device.type
        self._is_compiled = is_compiled
        self._uses_bfloat16 = _uses_bfloat16(dtype, device)

    @property
    def dtype_name(self) -> str:
        """The dtype of matrix products."""
        return "bfloat16" if self._uses_bfloat16 else "float32"

    @contextmanager
    def training(self) -> Iterator[None]:
        """For the forward pass of a training step."""
        with torch.autocast(self._device_type, torch.bfloat16, enabled=self._uses_bfloat16):
            yield

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """For all other uses."""
        with ExitStack() as stack:
            if self._is_compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self.training())
            yield


def compile_block(block: nn.Module) -> None:
    """Compile a block, in place: names of parameters stay what they are."""
    block.compile(dynamic=False)


def _uses_bfloat16(dtype: DtypeName, device: torch.device) -> bool:
    if device.type == "cuda" and dtype != "float32":
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
        if dtype == "bfloat16" and not has_it:
            name = torch.cuda.get_device_name(device)
            raise ConfigError(f"--dtype bfloat16: {name} has no bfloat16; use --dtype float32")
        return bool(has_it)
    return dtype == "bfloat16"
