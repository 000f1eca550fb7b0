"""What other programs call on ``ddp.reducer``: the methods of torch's own Reducer that mean something here.

torch's class is compiled and works otherwise, so most of these have little to do; what they promise holds
by itself. Pipelining, Accelerate and some communication hooks are their callers.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.futures import Future

if TYPE_CHECKING:
    from gradsync.ddp.reducer import Reducer


class ReducerSurface:
    """Mixed into the reducer; see the module's docstring."""

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """Watch these tensors, from which a backward may start that is to be synchronised."""
        reducer = cast("Reducer", self)
        if not reducer.synchronizes:
            reducer.watch_unplanned()
        for tensor in outputs:
            if tensor.requires_grad and not tensor.is_leaf:
                reducer.watch_output(tensor)

    def prepare_for_forward(self) -> None:
        """Do nothing: a forward needs no preparation."""

    def _rebuild_buckets(self) -> bool:
        """Return False: buckets are planned anew at the end of a pass, never in between."""
        return False

    def _run_allreduce_hook(self, bucket: Any) -> Future[torch.Tensor]:
        """Sum a bucket over the ranks; for communication hooks that leave the collective to the reducer."""
        work = cast("Reducer", self).group.allreduce([bucket.buffer()])
        return cast("Future[torch.Tensor]", work.get_future().then(lambda done: done.value()[0]))

    def _check_reducer_finalized(self) -> None:
        """Raise if the last pass failed or was left unfinished."""
        cast("Reducer", self).settle()

    def _remove_autograd_hooks(self) -> None:
        """Synchronise no gradient any more."""
        cast("Reducer", self).detach()

    def _set_optimizer_in_backward(self) -> None:
        """Do nothing: who steps in backward clears the gradients himself."""

    def _set_sparse_metadata(self, global_unique_ids: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: which rows the ranks have is learned from the gradients."""
