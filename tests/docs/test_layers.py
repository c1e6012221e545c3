"""Imports inside the package go down through the layers that `docs/architecture.md` draws."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "eqx_torch"
LIBRARIES = {"equinox", "jax", "jaxlib", "jaxtyping", "numpy", "torch"}


def _module_name(path: Path) -> str:
    """The dotted name inside the package: `_arrays`, `_call.tape`, `_call`, `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if len(parts) > 1 and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


MODULES = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
every_module = pytest.mark.parametrize("name", MODULES)


def _drawn_layers() -> dict[str, int]:
    """How high each module stands that the picture names; the others stand at zero."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    (picture,) = re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = picture.splitlines()[::-1]
    assert lines[0].split(maxsplit=1)[1] == "every other module"
    return {
        name: height
        for height, line in enumerate(lines[1:], 1)
        for name in line.split(maxsplit=1)[1].split(", ")
    }


LAYERS = _drawn_layers()


def _height(name: str) -> int:
    return LAYERS.get(name.partition(".")[0], 0)


def _imported_names(name: str) -> Iterator[str]:
    """Absolute dotted names of everything the module imports."""
    package = ["eqx_torch", *MODULES[name].relative_to(PACKAGE).parent.parts]
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)


def _imports_of(name: str) -> set[str]:
    """The modules of the package that a module imports, by name inside the package."""
    found = set()
    for imported in _imported_names(name):
        first, _, rest = imported.partition(".")
        if first == "eqx_torch":
            # The last part is a module or a name in one; the package itself is `__init__`.
            parent = rest.rpartition(".")[0]
            found.add(rest if rest in MODULES else parent or "__init__")
    return found


def _attribute_chain(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        chain = _attribute_chain(node.value)
        return [*chain, node.attr] if chain else []
    return [node.id] if isinstance(node, ast.Name) else []


def _private_uses(name: str) -> list[str]:
    uses = [imported.split(".") for imported in _imported_names(name)]
    uses += [
        _attribute_chain(node) for node in ast.walk(TREES[name]) if isinstance(node, ast.Attribute)
    ]
    return [
        ".".join(chain)
        for chain in uses
        if chain
        and chain[0] in LIBRARIES
        and any(part == "internal" or re.match("_[^_]", part) for part in chain)
    ]


def test_the_picture_names_what_exists():
    assert set(LAYERS) <= {name.partition(".")[0] for name in MODULES}


@every_module
def test_imports_go_down_through_the_layers(name):
    upward = [other for other in _imports_of(name) if _height(other) > _height(name)]
    assert upward == []


def test_imports_have_no_cycle():
    graph = {name: _imports_of(name) for name in MODULES}
    assert tuple(graphlib.TopologicalSorter(graph).static_order())


@every_module
def test_private_names_of_other_libraries_only_in_compat(name):
    if name not in ("_compat", "_compat_jaxtyping"):
        assert _private_uses(name) == []


@every_module
def test_module_opens_with_its_model(name):
    if MODULES[name].name != "__init__.py":
        assert ast.get_docstring(TREES[name]), f"{name} has no module docstring"
