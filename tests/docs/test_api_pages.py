"""Every public name is documented: on a page of the API, with arguments, errors and an example."""

import doctest
import inspect
import re
import types
from pathlib import Path

import pytest

import eqx_torch
from docs.doctest_blocks import fenced

from ..helpers.run_blocks import blocks


ROOT = Path(__file__).parents[2]
API = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md")))
NAMES = sorted(
    name
    for name, value in vars(eqx_torch).items()
    if not name.startswith("_") and not isinstance(value, types.ModuleType)
)
OWN = [n for n in NAMES if getattr(eqx_torch, n).__module__.startswith("eqx_torch.")]
FUNCTIONS = [n for n in OWN if inspect.isfunction(getattr(eqx_torch, n))]
METHODS = [
    f"{name}.{method}"
    for name in OWN
    for method, value in vars(getattr(eqx_torch, name)).items()
    if inspect.isroutine(value) and (not method.startswith("_") or method == "__call__")
]


def _lookup(name: str):
    value = eqx_torch
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _section(docstring: str, title: str) -> str:
    """The text of a section of a docstring, up to the next one."""
    parts = re.split(r"^(?:\*\*(\w+):\*\*|!!! (\w+))$", docstring, flags=re.MULTILINE)
    titles = [a or b for a, b in zip(parts[1::3], parts[2::3], strict=True)]
    return dict(zip(titles, parts[3::3], strict=True)).get(title, "")


def test_the_public_names_are_known():
    assert {"TorchModule.__call__", "TorchModule.is_stateful", "Timeline.plot"} <= set(METHODS)
    assert {"torch2jax", "from_torch", "TorchModule", "Size", "ShapeError"} <= set(NAMES)
    assert set(NAMES) - set(OWN) == {"Size"}  # torch's own; its page has a block that is run


@pytest.mark.parametrize("name", NAMES)
def test_has_an_entry_in_the_reference(name):
    by_docstring = re.search(rf"^::: eqx_torch\.{name}$", API, re.MULTILINE)
    by_hand = f"#eqx_torch.{name} " in API and any(name in block for _, block in blocks(API))
    assert by_docstring or by_hand


def test_the_reference_has_no_other_entries():
    assert set(re.findall(r"^::: eqx_torch\.(\w+)$", API, re.MULTILINE)) == set(OWN)


@pytest.mark.parametrize("name", OWN + METHODS)
def test_has_an_example_that_is_run_as_a_doctest(name):
    value = _lookup(name)
    module = inspect.getmodule(value)
    found = doctest.DocTestFinder().find(module, module.__name__)
    examples = {test.name: test.examples for test in found}
    assert examples[f"{module.__name__}.{name}"]
    assert _section(inspect.getdoc(value), "example")


@pytest.mark.parametrize("name", FUNCTIONS + METHODS)
def test_says_its_arguments_result_and_errors(name):
    value = _lookup(name)
    docstring = inspect.getdoc(value)
    arguments = _section(docstring, "Arguments")
    parameters = [p for p in inspect.signature(value).parameters.values() if p.name != "self"]
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for parameter in parameters:
        assert f"`{stars.get(parameter.kind, '')}{parameter.name}`" in arguments
    assert _section(docstring, "Returns")
    assert _section(docstring, "Raises") or not parameters


def test_doctests_become_blocks():
    text = "Text.\n\n!!! example\n\n    >>> x = (\n    ...     1,\n    ... )\n    >>> x\n    (1,)\n"
    block = "    >>> x = (\n    ...     1,\n    ... )\n    >>> x\n    (1,)\n"
    expected = f"Text.\n\n!!! example\n\n    ```pycon\n{block}    ```\n"
    assert fenced(text) == expected


GUIDES = re.findall(r"^ +- .*: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
OF_NO_NAME = {  # guides about more than single functions
    "index.md",
    "installation.md",
    "moving.md",
    "benchmarks.md",
    "guarantees.md",
    "limitations.md",
    "torch_map.md",
    "equinox_map.md",
    "changelog.md",
    "architecture.md",
}


@pytest.mark.parametrize("guide", sorted(set(GUIDES) - OF_NO_NAME))
def test_guides_link_to_the_reference(guide):
    assert re.search(r"\]\(api/\w+\.md", (ROOT / "docs" / guide).read_text())


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "api").glob("*.md")), ids=lambda p: p.stem)
def test_the_reference_links_to_guides(page):
    assert re.search(r"\]\(\.\./\w+\.md", page.read_text())
