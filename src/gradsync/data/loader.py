"""The training loader: one global stream of token windows, dealt out to any number of ranks.

The stream is a function of data, context, seed and shuffle alone. Its *position* counts global
sequences; one optimizer step takes the next S of them, and rank r of N gets those at r, r + N, ...
of these S. So a run may go on with another number of ranks and no sequence is lost or repeated.
Rank and world size are plain ints here; nothing talks to a process group.

Shapes: B sequences of a micro-batch, T tokens of context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradsync.data.batch import MicroBatch, filler, inputs_and_targets
from gradsync.data.evaluation import evaluation_batches as evaluation_batches
from gradsync.data.source import TokenSource
from gradsync.errors import ConfigError, DataError

Shuffle = Literal["windows", "none"]


class GlobalBatchLoader:
    """Deals the windows of ``source`` to this rank, ``sequences_per_step`` over all ranks a step.

    ``shuffle="windows"`` visits the shards, and the windows of each shard, in an order drawn anew
    for every epoch from ``seed``; ``"none"`` takes them as they lie. A step that reaches the end of
    an epoch goes on in the next one.

    Every rank gets the same number of micro-batches in a step, of sizes as equal as possible and
    never above ``micro_batch``. Where a rank has too few sequences for that it gets a filler whose
    targets are all -1: divide the *summed* loss by the global token count
    (``tokens_per_step``) and any layout of the same step gives the same gradient.
    """

    def __init__(
        self,
        source: TokenSource,
        *,
        sequences_per_step: int,
        context: int,
        rank: int,
        world: int,
        micro_batch: int,
        shuffle: Shuffle = "windows",
        seed: int = 0,
        position: int = 0,
    ) -> None:
        _check_layout(sequences_per_step, context, rank, world, micro_batch)
        self.sequences_per_step = sequences_per_step
        self.context = context
        self.rank = rank
        self.world = world
        self.micro_batch = micro_batch
        self.position = position
        _check_shards(source, context)
        self._source = source
        self._order = EpochOrder(source, context, shuffle, seed)
        if self._order.num_windows < sequences_per_step:
            raise DataError(
                f"{source.name} is shorter than one step: {source.num_tokens:,} tokens make "
                f"{self._order.num_windows:,} windows of context {context}, one step takes "
                f"{sequences_per_step:,} ({sequences_per_step * context:,} tokens); give more text, or "
                f"make the step or the context smaller"
            )

    @property
    def tokens_per_step(self) -> int:
        """Targets that one step of all ranks holds."""
        return self.sequences_per_step * self.context

    @property
    def sequences_per_epoch(self) -> int:
        """Windows that the source holds."""
        return self._order.num_windows

    @property
    def epoch(self) -> int:
        """The epoch that the next sequence belongs to, counted from 0."""
        return self.position // self._order.num_windows

    @property
    def seed(self) -> int:
        """The seed of the order."""
        return self._order.seed

    def upcoming(self) -> range:
        """Global numbers of the sequences that this rank takes in the next step."""
        return range(self.position + self.rank, self.position + self.sequences_per_step, self.world)

    def next_step(self) -> list[MicroBatch]:
        """This rank's micro-batches for one optimizer step; moves all of the step's sequences on."""
        sequences = self.upcoming()
        most_of_a_rank = -(-self.sequences_per_step // self.world)
        num_micro_batches = -(-most_of_a_rank // self.micro_batch)
        parts = np.array_split(np.arange(len(sequences)), num_micro_batches)
        step = [self._read([sequences[i] for i in part]) for part in parts]
        self.position += self.sequences_per_step
        return step

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        """Steps without end."""
        while True:
            yield self.next_step()

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands and which stream it is; the same on every rank."""
        return {
            "position": self.position,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "context": self.context,
            "windows": self._order.num_windows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken, at any number of ranks; seed and order are the state's.

        Raises:
            DataError: it is damaged, or belongs to another stream.
        """
        numbers = [state.get(name) for name in ("context", "windows", "seed", "position")]
        if not all(type(number) is int and number >= 0 for number in numbers) or "shuffle" not in state:
            raise DataError(f"the saved position in the data is damaged: {state!r}")
        expected = {"context": self.context, "windows": self._order.num_windows}
        for name, here in expected.items():
            if state[name] != here:
                raise DataError(
                    f"the saved position belongs to another stream: {name} was {state[name]}, here it is "
                    f"{here}; resume with the same data and context, or start a new run"
                )
        self._order = EpochOrder(self._source, self.context, state["shuffle"], state["seed"])
        self.position = state["position"]

    def _read(self, sequences: list[int]) -> MicroBatch:
        if not sequences:
            return filler(self.context)
        windows = np.empty((len(sequences), self.context + 1), dtype=np.int64)
        for row, sequence in zip(windows, sequences, strict=True):
            window = self._order.window(sequence)
            self._source.read(window.shard, window.start, row)
        return inputs_and_targets(windows)


@dataclass(frozen=True)
class Window:
    """Where one training window lies."""

    shard: int
    start: int


class EpochOrder:
    """Which window is the n-th of the endless stream; a function of data, context, seed and shuffle.

    Holds the order of one shard at a time, so that its memory does not grow with the data.
    """

    def __init__(self, source: TokenSource, context: int, shuffle: Shuffle, seed: int) -> None:
        if shuffle not in ("windows", "none"):
            raise ConfigError(f"shuffle must be 'windows' or 'none', got {shuffle!r}")
        if seed < 0:
            raise ConfigError(f"the seed of the order cannot be negative, got {seed}")
        self.shuffle = shuffle
        self.seed = seed
        self._context = context
        self._windows = source.windows_per_shard(context)
        self._spare = [(len(shard) - 1) % context for shard in source.shards]
        self.num_windows = int(self._windows.sum())
        self._epoch = -1
        self._shards = np.arange(len(self._windows))
        self._ends = np.cumsum(self._windows)
        self._shard_key = (-1, -1)
        self._starts: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def window(self, sequence: int) -> Window:
        """The window that global sequence number ``sequence`` reads."""
        epoch, index = divmod(sequence, self.num_windows)
        self._enter_epoch(epoch)
        turn = int(np.searchsorted(self._ends, index, side="right"))
        shard = int(self._shards[turn])
        self._enter_shard(epoch, shard)
        first_of_shard = int(self._ends[turn] - self._windows[shard])
        return Window(shard, int(self._starts[index - first_of_shard]))

    def _enter_epoch(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self._epoch = epoch
        if self.shuffle == "windows":
            self._shards = _random_state(self.seed, epoch, 0).permutation(len(self._windows))
        self._ends = np.cumsum(self._windows[self._shards])

    def _enter_shard(self, epoch: int, shard: int) -> None:
        if self._shard_key == (epoch, shard):
            return
        self._shard_key = (epoch, shard)
        numbers = np.arange(self._windows[shard])
        first = 0
        if self.shuffle == "windows":
            random = _random_state(self.seed, epoch, 1 + shard)
            numbers = random.permutation(numbers)
            # Whole windows leave a few tokens over. A grid that begins elsewhere in every epoch
            # leaves out other tokens each time, and cuts the text at other places.
            first = random.randint(self._spare[shard] + 1)
        self._starts = first + numbers * self._context


def check_assignments(assignments: Sequence[Sequence[int]]) -> None:
    """Refuse ranks that would train on the same sequences; item r is rank r's ``upcoming()``."""
    owner: dict[int, int] = {}
    for rank, sequences in enumerate(assignments):
        for sequence in sequences:
            if sequence in owner:
                raise DataError(
                    f"ranks {owner[sequence]} and {rank} hold the same first batch (sequence {sequence}): "
                    f"every rank needs its own rank number, the same world size and the same position"
                )
            owner[sequence] = rank


def _check_layout(sequences_per_step: int, context: int, rank: int, world: int, micro_batch: int) -> None:
    for name, value in (("context", context), ("micro_batch", micro_batch), ("world", world)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} is not one of {world} ranks (0 to {world - 1})")
    if sequences_per_step < world:
        raise ConfigError(
            f"a step of {sequences_per_step} sequences leaves some of {world} ranks without work; "
            f"take at least {world} sequences a step, or fewer ranks"
        )


def _check_shards(source: TokenSource, context: int) -> None:
    """Refuse shards that no window fits into; the last one holds what was left over and may be short."""
    for number, shard in enumerate(source.shards[:-1]):
        if len(shard) <= context:
            raise DataError(
                f"shard {number} of {source.name} has {len(shard):,} tokens, too few for one window of context "
                f"{context} (which takes {context + 1:,}): they would never be trained on; prepare the data with "
                f"a larger --shard-tokens, or train with a shorter context"
            )


def _random_state(*key: int) -> np.random.RandomState:
    # The streams of MT19937 and RandomState are frozen for good, those of numpy's newer generators
    # are not: a run must resume in the same order under a later numpy.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(key)))
