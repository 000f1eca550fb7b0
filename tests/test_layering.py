"""The layers of the package, read from its import statements: imports go down only.

The table here is the rule; docs and reviews point to it. Imports inside functions and under
``TYPE_CHECKING`` count as well: what a module must not know, it must not name.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).parent.parent / "src" / "gradsync"

_MAY_IMPORT: dict[str, set[str]] = {
    "cli": {"bench", "doctor", "train", "parallel", "ddp", "model", "data", "observe", "comm"},
    "doctor": {"comm"},
    "bench": {"ddp", "model", "comm"},
    "train": {"parallel", "ddp", "model", "data", "observe", "comm"},
    "parallel": {"ddp", "model", "comm"},
    "ddp": {"comm"},
    "comm": set(),
    "model": set(),
    "data": set(),
    "observe": set(),
    "errors": set(),
    "__main__": {"cli"},
}
_EVERY_LAYER_MAY_IMPORT = {"errors"}
# Ranks come to these as plain numbers.
_WITHOUT_DISTRIBUTED = {"model", "data", "observe"}


def _module_name(path: Path) -> str:
    parts = path.relative_to(_PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_names(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that is imported, relative imports resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called_name(node) in {"import_module", "__import__"}:
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def _called_name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _uses_distributed(tree: ast.AST, imported: list[tuple[int, str]]) -> Iterator[int]:
    for line, name in imported:
        if name == "torch.distributed" or name.startswith("torch.distributed."):
            yield line
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno


def _violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """What a module of gradsync imports against the rules, as "module:line: text"."""
    layer = module.split(".")[1]
    tree = ast.parse(source)
    imported = list(_imported_names(tree, module if is_package else module.rpartition(".")[0]))
    found = []
    for line, name in imported:
        if name.split(".")[0] != "gradsync" or name == "gradsync.__version__":
            continue
        target = name.split(".")[1] if "." in name else "the package itself"
        if target not in _MAY_IMPORT[layer] | _EVERY_LAYER_MAY_IMPORT | {layer}:
            found.append(f"{module}:{line}: {layer} must not import {target} ({name})")
    if layer in _WITHOUT_DISTRIBUTED:
        lines = sorted(_uses_distributed(tree, imported))
        found += [f"{module}:{line}: {layer} must not use torch.distributed" for line in lines]
    return found


def _modules() -> list[Path]:
    return sorted(path for path in _PACKAGE.rglob("*.py") if path != _PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", _modules(), ids=_module_name)
def test_imports_go_down_only(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert _violations(_module_name(path), source, is_package=path.name == "__init__.py") == []


def test_every_layer_has_a_rule() -> None:
    layers = {_module_name(path).split(".")[1] for path in _modules()}
    assert layers <= set(_MAY_IMPORT)


def test_the_rules_have_no_cycle() -> None:
    left = dict(_MAY_IMPORT)
    while left:
        bottom = {layer for layer, below in left.items() if not below & set(left)}
        assert bottom, f"cycle among {sorted(left)}"
        left = {layer: below for layer, below in left.items() if layer not in bottom}


def test_the_package_root_imports_nothing_eagerly() -> None:
    tree = ast.parse((_PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    eager = {
        name.split(".")[0]
        for statement in tree.body
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for _, name in _imported_names(statement, "gradsync")
    }
    assert eager <= {"importlib", "typing"}


@pytest.mark.parametrize(
    ("module", "source", "is_fine"),
    [
        ("gradsync.ddp.reducer", "from gradsync.comm.process import RankInfo", True),
        ("gradsync.ddp.reducer", "from gradsync.errors import ContractError", True),
        ("gradsync.ddp.reducer", "from gradsync.ddp import plan", True),
        ("gradsync.ddp.reducer", "from . import plan", True),
        ("gradsync.cli.main", "from gradsync import __version__", True),
        ("gradsync.cli.main", "from gradsync import DistributedDataParallel", False),
        ("gradsync.cli.main", "import gradsync", False),
        ("gradsync.ddp.reducer", "from gradsync.observe import recorder", False),
        ("gradsync.ddp.reducer", "from gradsync import observe", False),
        ("gradsync.ddp.reducer", "from ..observe import recorder", False),
        ("gradsync.ddp.reducer", "def f():\n    import gradsync.train.trainer", False),
        ("gradsync.ddp.reducer", "importlib.import_module('gradsync.train.trainer')", False),
        ("gradsync.comm.shm", "from gradsync.ddp import plan", False),
        ("gradsync.errors", "from gradsync.comm import process", False),
        ("gradsync.model.gpt2", "import torch\nfrom torch import nn", True),
        ("gradsync.model.gpt2", "from torch import distributed as dist", False),
        ("gradsync.data.loader", "import torch.distributed as dist", False),
        ("gradsync.observe.page", "from torch.distributed import get_rank", False),
        ("gradsync.observe.page", "import torch\nrank = torch.distributed.get_rank()", False),
        ("gradsync.comm.process", "import torch.distributed as dist", True),
    ],
)
def test_the_checker_sees(module: str, source: str, is_fine: bool) -> None:
    assert (_violations(module, source) == []) is is_fine
