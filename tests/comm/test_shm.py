"""What the shm backend tells about itself."""

import os
import sys

import pytest
import torch.distributed as dist

from gradsync.comm import shm


def test_registering_twice_is_the_same_as_once() -> None:
    shm.register()
    shm.register()
    assert dist.Backend.backend_list.count("shm") == 1
    assert dist.is_backend_available("shm")


def test_it_is_available_on_linux() -> None:
    assert shm.is_available() is None


def test_it_says_why_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux" in str(shm.is_available())
    monkeypatch.undo()
    monkeypatch.delattr(os, "memfd_create")
    assert "memfd_create" in str(shm.is_available())
    monkeypatch.undo()

    def refuse(name: str) -> int:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert "not here" in str(shm.is_available())
