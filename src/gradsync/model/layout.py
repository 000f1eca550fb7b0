"""How a GPT-2 may be cut among ranks, as plain data: names of modules, and along which side each is cut.

Says nothing of how many ranks there are or what carries their words; that is ``gradsync.parallel``.

A matrix product y = x W^T is cut by *columns* when every rank computes some of the outputs, and by *rows* when
every rank takes some of the inputs and the results are added up. A block cut by columns and then by rows needs one
sum over the ranks for its attention and one for its MLP.

What lies between the projections (norms, dropout, the residual stream) treats each token by itself, so the ranks may
divide it by the tokens of a sequence; a projection cut by columns then takes whole sequences again.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layout:
    """Where a model may be cut; module names are relative to a block, or to the model where the field says so."""

    blocks: str
    """The list of blocks, in the model: what a pipeline divides, and what FSDP gathers at a time."""
    first: tuple[str, ...]
    """Modules of the model that stand before the blocks."""
    last: tuple[str, ...]
    """Modules of the model that stand after the blocks."""
    tied: tuple[str, str]
    """The head's weight, and the embedding's that it is the same parameter as; known by the second name."""
    columns: dict[str, int] = field(default_factory=dict)
    """Projections cut by columns, and how many of them lie one under the other in one matrix."""
    rows: tuple[str, ...] = ()
    """Projections cut by rows."""
    branches: tuple[str, ...] = ()
    """What of a block takes normalised activations and adds to the residual stream, projections included."""
    norms: tuple[str, ...] = ()
    """Norms of a block, of single tokens."""
    last_norm: str = ""
    """The norm before the head, in the model."""
    positions: str = ""
    """What gives one vector for each position (T, C), in the model."""


GPT2_LAYOUT = Layout(
    blocks="transformer.h",
    first=("transformer.wte", "transformer.wpe", "transformer.drop"),
    last=("transformer.ln_f", "lm_head"),
    tied=("lm_head.weight", "transformer.wte.weight"),
    # query, key and value are one matrix; each of them is cut by heads.
    columns={"attn.c_attn": 3, "mlp.c_fc": 1},
    rows=("attn.c_proj", "mlp.c_proj"),
    branches=("attn", "mlp"),
    norms=("ln_1", "ln_2"),
    last_norm="transformer.ln_f",
    positions="transformer.wpe",
)
"""The layout of ``GPT2``: heads are divided, and the rows of the vocabulary are for embedding and head alike."""
