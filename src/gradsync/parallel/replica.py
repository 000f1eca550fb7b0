"""The model as one rank trains it, whatever the parallelism: what the training loop sees.

``Whole`` runs all blocks on this rank, whole or cut (one process, DDP, ZeRO, FSDP, tensor parallel); a pipeline is in
``pipeline``. What is common: losses are sums over tokens, divided once by one number, and gradients are added over the
ranks without dividing. So a gradient does not depend on how the batch was laid out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.ddp.module import DistributedDataParallel
from gradsync.model.gpt2 import GPT2, GPT2Config
from gradsync.parallel.division import Flow
from gradsync.parallel.held import Held, clip_global_norm, held_whole
from gradsync.parallel.mesh import Mesh
from gradsync.parallel.sequence import slices_of
from gradsync.parallel.stage import Stage
from gradsync.parallel.vocabulary import Vocabulary

MicroBatches = Sequence[tuple[Tensor, Tensor]]
Context = Callable[[], AbstractContextManager[Any]]


class Replica(ABC):
    """What one rank has of the model, and where it stands among the ranks.

    ``data_rank`` of ``data_world`` says which sequences it sees; ranks that share a replica see the same ones, and
    one of them ``speaks`` for all: has the loss and counts it.
    """

    config: GPT2Config
    held: dict[str, Held]
    ddp: DistributedDataParallel | None = None
    """The wrapper, where there is one and its module is the whole model."""
    engines: Sequence[DistributedDataParallel] = ()
    """All wrappers of this rank, whatever part of the model their modules are."""
    data_rank = 0
    data_world = 1
    stage = 0
    sequence_slice = 0
    """Which part of the sequences it has between matrices; 0 where it has all of them there."""
    speaks = True
    is_collective = False
    """Whether running the model takes other ranks, which must then run it as well, on inputs of the same shape."""

    @abstractmethod
    def forward_backward(self, micro_batches: MicroBatches, divisor: int, on_loss: Callable[[Tensor], None]) -> None:
        """Add up the gradients of the summed losses, divided by ``divisor``, over micro-batches and ranks.

        ``on_loss`` gets the summed loss of this rank's sequences (0 where another rank has it) as soon as it is known.
        """

    @abstractmethod
    def summed_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over the targets, to evaluate; 0 where another rank has it."""

    @abstractmethod
    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits (B, T, V) of token ids (B, T), whole on every rank of the replica."""

    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """Return the modules that are run here, unwrapped."""

    @property
    def computed(self) -> Sequence[tuple[str, int, int]]:
        """What of the last steps' computing was seen in pieces: name, begin and end (``time.perf_counter_ns``)."""
        return ()

    def next_token_logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, V) of the token after ``tokens``; all ranks get the very same numbers."""
        return self.logits(tokens)[:, -1].contiguous()

    def clip_gradients(self, limit: float) -> float:
        """Scale all gradients so that their norm is at most ``limit``; return the norm before."""
        parameters = [held.tensor for held in self.held.values()]
        return float(nn.utils.clip_grad_norm_(parameters, limit))

    # What samplers and evaluations use of a module:

    @property
    def training(self) -> bool:
        """Whether the modules are in training mode."""
        return self.modules()[0].training

    def train(self, mode: bool = True) -> "Replica":
        """Put the modules into training mode, or out of it."""
        for module in self.modules():
            module.train(mode)
        return self

    def eval(self) -> "Replica":
        """Put the modules into evaluation mode."""
        return self.train(False)

    def __call__(self, tokens: Tensor) -> tuple[Tensor, None]:
        """Return logits as the bare model does."""
        return self.logits(tokens), None


class Whole(Replica):
    """A whole GPT-2 on this rank."""

    def __init__(self, model: GPT2 | Stage, held: dict[str, Held], training: Context) -> None:
        self.config = model.config
        self.held = held
        self._bare: Any = model
        self._wrapped: nn.Module = model
        self._training = training
        self._without_reduction: Context = nullcontext

    def wrapped_in(self, wrapped: nn.Module, without_reduction: Context) -> "Whole":
        """Train through a wrapper."""
        self._wrapped, self._without_reduction = wrapped, without_reduction
        return self

    def forward_backward(self, micro_batches: MicroBatches, divisor: int, on_loss: Callable[[Tensor], None]) -> None:
        """Accumulate micro-batch by micro-batch; the backward of the last one reduces the gradients."""
        total = torch.zeros((), dtype=torch.float64, device=micro_batches[0][0].device)
        for inputs, targets in micro_batches[:-1]:
            with self._without_reduction(), self._losses():
                loss = self._training_loss(inputs, targets)
                total += loss.detach()
                _backward(loss, divisor)
        with self._losses():
            loss = self._training_loss(*micro_batches[-1])
            total += loss.detach()
            on_loss(total)
            _backward(loss, divisor)

    def summed_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the bare model."""
        return self._bare(inputs, targets, reduction="sum")[1]  # type: ignore[no-any-return]

    def logits(self, tokens: Tensor) -> Tensor:
        """Run the bare model."""
        return self._bare(tokens)[0]  # type: ignore[no-any-return]

    def next_token_logits(self, tokens: Tensor) -> Tensor:
        """Run the bare model's head on the last position alone."""
        return self._bare.next_token_logits(tokens)  # type: ignore[no-any-return]

    def modules(self) -> list[nn.Module]:
        """Return the bare model."""
        return [self._bare]

    def _training_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._training():
            return self._wrapped(inputs, targets, reduction="sum")[1]  # type: ignore[no-any-return]

    def _losses(self) -> AbstractContextManager[None]:
        return nullcontext()


class Shared(Whole):
    """All blocks, of which this rank holds a part: FSDP's shards, its share of cut matrices, or both.

    ``stage`` is the model without its loss, ``vocabulary`` what its logits are of.
    """

    is_collective = True

    def __init__(self, stage: Stage, held: dict[str, Held], mesh: Mesh, vocabulary: Vocabulary, flow: Flow) -> None:
        super().__init__(stage, held, nullcontext)  # a stage opens its context itself
        self._mesh = mesh
        self._slices = slices_of(flow, mesh)
        self.sequence_slice = self._slices.own
        self._vocabulary = vocabulary
        self.data_rank, self.data_world = mesh.data_rank, mesh.degrees.data
        self.speaks = mesh.tensor_rank == 0

    def forward_backward(self, micro_batches: MicroBatches, divisor: int, on_loss: Callable[[Tensor], None]) -> None:
        """As one rank does it; of the ranks that share a replica, one tells the loss."""
        super().forward_backward(micro_batches, divisor, lambda loss: on_loss(self._spoken(loss)))

    def summed_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the shared model."""
        logits = self._run(inputs)
        with self._losses():
            return self._spoken(self._vocabulary.summed_loss(logits, targets))

    def logits(self, tokens: Tensor) -> Tensor:
        """Run the shared model."""
        return self._vocabulary.gathered(self._run(tokens))

    def next_token_logits(self, tokens: Tensor) -> Tensor:
        """All ranks take the first one's numbers, so that none draws another token."""
        last = self._run(tokens)[:, -1].contiguous()
        return same_everywhere(self._vocabulary.gathered(last), self._mesh)

    def clip_gradients(self, limit: float) -> float:
        """See ``held.clip_global_norm``."""
        return clip_global_norm(self.held.values(), limit, self._mesh.device)

    def _training_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._vocabulary.summed_loss(self._wrapped(inputs), targets)

    def _run(self, tokens: Tensor) -> Tensor:
        """Return this rank's logits of sequences of any length."""
        return self._bare(self._slices.padded(tokens))[:, : tokens.shape[1]]  # type: ignore[no-any-return]

    def _losses(self) -> AbstractContextManager[None]:
        return self._vocabulary.losses()

    def _spoken(self, loss: Tensor) -> Tensor:
        return loss if self.speaks else torch.zeros_like(loss)


def replica_of(model: GPT2, data_rank: int = 0, data_world: int = 1) -> Whole:
    """Return a bare model as one of several replicas that need no words with each other, to evaluate."""
    replica = Whole(model, held_whole(model), nullcontext)
    replica.data_rank, replica.data_world = data_rank, data_world
    return replica


def same_everywhere(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Return the first replica's numbers on all ranks."""
    tensor = tensor.contiguous()
    dist.broadcast(tensor, src=mesh.speaker)
    return tensor


def _backward(loss: Tensor, divisor: int) -> None:
    mean: Any = loss / divisor
    mean.backward()
