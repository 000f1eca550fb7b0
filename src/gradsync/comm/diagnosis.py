"""What the places of all ranks say about why nobody gets on: words only, no store and no torch.

The odd one out is whoever does not wait like the others: who does not answer, has left, or is elsewhere. If all wait,
it is whoever waits in a collective of his own, in another step or pass, or for another bucket.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from gradsync.comm.ledger import BEFORE_FIRST_PASS, FAILED_START, STARTING, Place

_COLLECTIVE = re.compile(r"distributed_c10d\.py:\d+ in (\w+)|functional_collectives")
_INNER_FUNCTIONS = {"wrapper", "wait", "_object_to_tensor"}
_DATA = re.compile(
    r"dataloader|data_loader|dataset|loader\.py| in \w*(load|fetch|collate|next_batch)\w*", re.IGNORECASE
)
_EVALUATION = re.compile(r" in \w*(eval|valid|test_step|sample|generate)\w*", re.IGNORECASE)
HAS_ENDED = (
    "it has left its loop and ended, so it had fewer batches than the others; give all ranks the same number of "
    "batches, or train inside ddp.join()"
)
_SAVING = re.compile(r" in \w*(save|checkpoint)\w*|serialization\.py", re.IGNORECASE)


def diagnose(
    members: Sequence[int],
    places: Mapping[int, Place],
    gone: Mapping[int, str],
    limit_s: float,
    asker: int,
    is_of_several_groups: bool = False,
) -> str:
    """Return what to tell all ranks: who waits, where every rank is, who is the odd one, and what is likely.

    ``gone``: ranks that take part no more, and why. ``is_of_several_groups``: the ranks wait in different groups, so in
    which collective and pass they do says nothing.
    """
    mine = places.get(asker)
    waited_s = limit_s if mine is None or mine.waited_s is None else mine.waited_s
    lines = [f"rank {asker} has waited {waited_s:.1f} s for other ranks, and the soft limit is {limit_s:g} s"]
    lines += [f"  rank {rank}: {_describe(places.get(rank), rank in gone)}" for rank in members]
    odd, cause = odd_ones(members, places, gone, is_of_several_groups)
    if odd:
        lines.append(f"the odd one out is {name_of(odd)}: {cause}")
    else:
        lines.append(cause)
    lines.append("if this is meant to take so long, raise soft_limit_s (gradsync train: --soft-limit)")
    return "\n".join(lines)


def odd_ones(
    members: Sequence[int], places: Mapping[int, Place], gone: Mapping[int, str], is_of_several_groups: bool = False
) -> tuple[list[int], str]:
    """Return the ranks that are not where the others are, and the likely cause with its cure."""
    missing = [rank for rank in members if rank in gone]
    if missing:
        return missing, gone[missing[0]]
    silent = [rank for rank in members if rank not in places]
    if silent:
        return silent, (
            "it does not answer: it was killed, is stopped, cannot be reached, or does not use gradsync; look at "
            "its output and its machine"
        )
    elsewhere = [rank for rank in members if places[rank].waited_s is None]
    if elsewhere and len(elsewhere) < len(members):
        return elsewhere, _cause_of(places[elsewhere[0]])
    alone = [rank for rank in members if places[rank].collective]
    if alone and len(alone) < len(members) and not is_of_several_groups:
        return alone, _cause_of(places[alone[0]])
    odd, cause = _unlike_the_others(members, places, is_of_several_groups)
    return (sorted(gone), gone[min(gone)]) if gone and not odd else (odd, cause)


def has_destroyed(error: str) -> str:
    """Return what to say of a rank that has destroyed its group; ``error`` was on its way then, if any."""
    if error:
        return f"it has destroyed its process group after {error}"
    return (
        "it has destroyed its process group: if it has failed, its output says of what; else give all ranks the same "
        "number of batches, or train inside ddp.join()"
    )


def name_of(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 3, 5``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _unlike_the_others(
    members: Sequence[int], places: Mapping[int, Place], is_of_several_groups: bool
) -> tuple[list[int], str]:
    of_engine = (
        ("pass", {rank: places[rank].step for rank in members}),
        ("phase", {rank: places[rank].phase for rank in members}),
        ("bucket", {rank: places[rank].bucket for rank in members}),
    )
    for what, of in (
        ("", {rank: places[rank].loop for rank in members}),
        *(() if is_of_several_groups else of_engine),
    ):
        counts = Counter(of.values())
        if len(counts) > 1:
            usual = max(counts, key=lambda value: (counts[value], of[members[0]] == value))
            odd = [rank for rank in members if of[rank] != usual]
            here, there = (f"{what} {name}".strip() or "no loop" for name in (of[odd[0]], usual))
            return odd, (
                f"it waits in {here} and the others in {there}: it skipped a backward, ran one more, or branched "
                f"before a collective; every rank must run the same number of synchronised backwards (uneven inputs: "
                f"ddp.join())"
            )
    if is_of_several_groups or all(places[rank].collective for rank in members):
        return [], (
            "all ranks wait in collectives, so none of them is late: they have not issued the same ones (compare the "
            "stacks), or the network between them or the process group's backend has failed"
        )
    return [], (
        "all ranks wait in the same place, so none of them is late: look at the network between them and at the "
        "process group's backend"
    )


def _cause_of(place: Place) -> str:
    where = "; ".join(place.stack)
    innermost = place.stack[-1] if place.stack else "an unknown place"
    collective = [name for name in _COLLECTIVE.findall(where) if name not in _INNER_FUNCTIONS]
    if collective or _COLLECTIVE.search(where) or place.collective:
        name = next((name for name in reversed(collective) if name), place.collective or "another one")
        return (
            f"it is in a collective that the others did not issue ({name}); every rank must issue the same "
            "collectives in the same order (if its loop is over, it had fewer batches: train inside ddp.join())"
        )
    if place.mishap:
        return f"a thread of it has ended with {place.mishap}, and it may be waiting for that thread ({innermost})"
    if _DATA.search(where):
        return f"its data loader has no batch ready ({innermost}); look at its storage and its loader's workers"
    if _EVALUATION.search(where):
        return (
            f"it evaluates while the others train ({innermost}); evaluate on all ranks, or let the others wait "
            "in a barrier of your own"
        )
    if _SAVING.search(where):
        return f"it is saving ({innermost}); save on all ranks together, or in the background"
    return (
        f"it is busy elsewhere ({innermost}); it may be slow, stuck, or past the end of its loop (uneven inputs: join)"
    )


def _describe(place: Place | None, is_gone: bool) -> str:
    if is_gone:
        return "takes part no more"
    if place is None:
        return "no answer"
    doing = [place.loop] if place.loop else []
    if not place.loop or place.phase != BEFORE_FIRST_PASS:
        bucket = "" if place.bucket is None else f", bucket {place.bucket}"
        is_starting = place.phase in (STARTING, FAILED_START)
        doing.append(place.phase if is_starting else f"pass {place.step}, {place.phase}{bucket}")
    where = f" in {place.collective}" if place.collective else ""
    waited = "" if place.waited_s is None else f" (waiting{where} for {place.waited_s:.1f} s)"
    mishap = f"; a thread has ended with {place.mishap}" if place.mishap else ""
    stack = "".join(f"\n      {line}" for line in place.stack)
    return f"{'; '.join(doing)}{waited}{mishap}{stack}"
