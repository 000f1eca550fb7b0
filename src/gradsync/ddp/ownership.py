"""Which reducer synchronises a parameter that several wrapped modules share.

A wrapper inside a wrapper, a layer in two wrapped models, a module wrapped a second time: the gradient must be
reduced once. The latest wrapper takes the parameter; when it is gone, the one before gets it back.
"""

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary


class Owner(Protocol):
    """What synchronises parameters."""

    def review_ownership(self) -> None:
        """Take note that parameters were taken away or given back."""

    def unsynchronized_ids(self) -> set[int]:
        """Return the ids of the parameters with gradients that have not been reduced yet."""


_claims: "WeakIdKeyDictionary" = WeakIdKeyDictionary()
"""By parameter: everyone who synchronises it (weak references), the latest last."""


def claim(owner: Owner, parameters: Iterable[torch.Tensor]) -> set[int]:
    """Make ``owner`` the one who synchronises these parameters; those who did so until now are told.

    Returns the ids of those with gradients that have not been reduced yet, as far as the others know.
    """
    parameters = list(parameters)
    rivals = [other for other in _owners(parameters) if other is not owner]
    unsynchronized: set[int] = set().union(*(rival.unsynchronized_ids() for rival in rivals))
    for parameter in parameters:
        _claims[parameter] = [*(r for r in _living(parameter) if r() is not owner), weakref.ref(owner)]
    if rivals:
        weakref.finalize(owner, _review, [weakref.ref(rival) for rival in rivals]).atexit = False
        _review([weakref.ref(rival) for rival in rivals])
    return unsynchronized.intersection(map(id, parameters))


def owns(owner: Owner, parameter: torch.Tensor) -> bool:
    """Whether ``owner`` is the one who synchronises the parameter; true where nobody has claimed it."""
    living = _living(parameter)
    return not living or living[-1]() is owner


def _living(parameter: torch.Tensor) -> list["weakref.ref[Owner]"]:
    claims: list[weakref.ref[Owner]] = _claims.get(parameter, [])  # type: ignore[no-untyped-call]
    return [reference for reference in claims if reference() is not None]


def _owners(parameters: Iterable[torch.Tensor]) -> list[Owner]:
    found = {id(o): o for p in parameters for reference in _living(p) if (o := reference()) is not None}
    return list(found.values())


def _review(rivals: list["weakref.ref[Owner]"]) -> None:
    for reference in rivals:
        rival = reference()
        if rival is not None:
            rival.review_ownership()
