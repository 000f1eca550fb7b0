"""The user's own function: what goes wrong in it is told as theirs, with their line."""

import pytest

from gradsync.errors import ConfigError, UserCodeError
from gradsync.model.factory import load_factory

_OWN = """
import torch
from torch import nn

LIMIT = 3


def fails():
    return 1 / (LIMIT - 3)


def leaves():
    raise SystemExit("no data here")


def wrong_loss():
    def loss(module, batch):
        return module(batch[:, :2]).sum()

    return nn.Linear(4, 2), torch.ones(2, 4), loss


def fine():
    return nn.Linear(4, 2), torch.ones(2, 4)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    (tmp_path / "users_own.py").write_text(_OWN)
    (tmp_path / "users_broken.py").write_text("import os\n\nos.no_such_thing()\n")
    (tmp_path / "users_typo.py").write_text("def make(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("users_nowhere:make", "No module named 'users_nowhere'; give MODULE:FUNCTION"),
        ("users_own:make", "users_own has no function 'make'; give MODULE:FUNCTION"),
        ("users_own:LIMIT", "users_own has no function 'LIMIT'"),
        ("users_own", "has no function ''"),
        (
            "users_broken:make",
            r"users_broken cannot be imported: AttributeError: .* \(users_broken.py:3 in <module>: os.no_such",
        ),
        ("users_typo:make", r"users_typo cannot be imported: SyntaxError: .*users_typo.py, line 1"),
    ],
)
def test_a_function_that_cannot_be_had_is_wrong_usage(path, message):
    with pytest.raises(ConfigError, match=f"^--model {path}: .*{message}"):
        load_factory(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "users_own:fails",
            r"ZeroDivisionError: division by zero \(users_own.py:9 in fails: return 1 / \(LIMIT - 3\)\)$",
        ),
        ("users_own:leaves", "SystemExit: no data here"),
    ],
)
def test_an_exception_of_the_function_is_told_with_its_line(path, message):
    with pytest.raises(UserCodeError, match=f"^--model {path}: {message}"):
        load_factory(path)


def test_an_exception_of_the_loss_or_the_model_too():
    factory = load_factory("users_own:wrong_loss")
    with pytest.raises(UserCodeError, match=r"RuntimeError: .* \(users_own.py:18 in loss: return module"):
        factory.loss(factory.build(), factory.batch)
    factory = load_factory("users_own:fine")
    with pytest.raises(UserCodeError, match=r"^--model users_own:fine: RuntimeError: .*shapes"):
        factory.loss(factory.build(), factory.batch[:, :3])
