"""Find the tensors in whatever a module's forward returns."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

_MAX_OBJECTS = 100_000
_LONG = 10_000
_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None), type, nn.Module)


def find_tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor inside ``output`` once.

    Looks into containers, mappings, dataclasses and plain objects (their ``__dict__`` and ``__slots__``),
    not into modules. Something that refers to itself is no problem; a structure of more than 100,000
    objects is searched no further.
    """
    seen: set[int] = set()
    stack = [output]
    for _ in range(_MAX_OBJECTS):
        if not stack:
            return
        value = stack.pop()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        else:
            stack.extend(_parts(value))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.values(), *_attributes(value)]
    if isinstance(value, list | tuple):
        return [] if _holds_numbers(value) else list(value)
    if isinstance(value, set | frozenset):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, f.name, None) for f in dataclasses.fields(value)] + _attributes(value)
    if _is_remote_reference(value):
        return [value.local_value()] if value.is_owner() else []
    if callable(value) and not hasattr(value, "__dict__"):
        return []
    return _attributes(value)


def _holds_numbers(value: Sequence[Any]) -> bool:
    """Whether a long sequence begins and ends with plain values, as lists of token numbers do."""
    return len(value) > _LONG and all(
        isinstance(part, _ATOMS) for part in (value[0], value[-1], value[len(value) // 2])
    )


def _attributes(value: Any) -> list[Any]:
    found = list(getattr(value, "__dict__", {}).values())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                found.append(getattr(value, name, None))
    return found


def _is_remote_reference(value: Any) -> bool:
    return type(value).__name__ in ("RRef", "PyRRef") and hasattr(value, "local_value")
