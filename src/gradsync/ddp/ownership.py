"""Which reducer synchronises a parameter that several wrapped modules share.

A wrapper inside a wrapper, a layer in two wrapped models, a module wrapped a second time: the gradient must be
reduced once. The latest wrapper takes the parameter; when it is gone, the one before gets it back.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary


class Owner(Protocol):
    """What synchronises parameters."""

    @property
    def keeper(self) -> object | None:
        """What the user holds; None once that is gone, though a graph may keep the owner."""

    def review_ownership(self) -> None:
        """Take note that parameters were taken away or given back."""

    def unsynchronized_ids(self) -> set[int]:
        """Return the ids of the parameters with gradients that have not been reduced yet."""

    def reached_ids(self) -> set[int]:
        """Return the ids of the parameters that could have such gradients; the same on all ranks."""


@dataclass(frozen=True)
class Known:
    """Ids of parameters: those with gradients that have not been reduced yet, and those that could have some."""

    unsynchronized: frozenset[int]
    reached: frozenset[int]


_claims: "WeakIdKeyDictionary" = WeakIdKeyDictionary()
"""By parameter: everyone who synchronises it (weak references), the latest last."""


def claim(owner: Owner, parameters: Iterable[torch.Tensor]) -> Known:
    """Make ``owner`` the one who synchronises these parameters; those who did so until now are told.

    Returns what the others know of them.
    """
    parameters = list(parameters)
    rivals = [other for other in _claimants(parameters) if other is not owner]
    known = Known(
        frozenset().union(*(rival.unsynchronized_ids() for rival in rivals)),
        frozenset().union(*(rival.reached_ids() for rival in rivals)),
    )
    for parameter in parameters:
        others = [r for r in _claims.get(parameter, []) if r() is not None and r() is not owner]  # type: ignore[no-untyped-call]
        _claims[parameter] = [*others, weakref.ref(owner)]
    if rivals and owner.keeper is not None:
        told = [weakref.ref(each) for each in (owner, *rivals)]
        weakref.finalize(owner.keeper, _review, told).atexit = False
        _review([weakref.ref(rival) for rival in rivals])
    return known


def owns(owner: Owner, parameter: torch.Tensor) -> bool:
    """Whether ``owner`` is the one who synchronises the parameter; true where nobody has claimed it."""
    living = _living(parameter)
    return not living or living[-1]() is owner


def _living(parameter: torch.Tensor) -> list["weakref.ref[Owner]"]:
    claims: list[weakref.ref[Owner]] = _claims.get(parameter, [])  # type: ignore[no-untyped-call]
    return [reference for reference in claims if (o := reference()) is not None and o.keeper is not None]


def _claimants(parameters: Iterable[torch.Tensor]) -> list[Owner]:
    """Return all that have claimed one of these parameters and exist, even if only a graph keeps them."""
    claims = [reference for p in parameters for reference in _claims.get(p, [])]  # type: ignore[no-untyped-call]
    return list({id(o): o for reference in claims if (o := reference()) is not None}.values())


def _review(rivals: list["weakref.ref[Owner]"]) -> None:
    for reference in rivals:
        rival = reference()
        if rival is not None:
            rival.review_ownership()
