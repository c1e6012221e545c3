"""Checking one value against a spec, binding the names in it.

The walk raises a `MismatchError` at the first value that does not match. What is not an array, a
container of arrays or a named structure is not looked at.
"""

from collections.abc import Mapping
from typing import Any

import jax

from .._compat_jaxtyping import leaf_position
from . import structures
from .bindings import add_array, Bindings, Origin
from .dtypes import dtype_name, Seen
from .mismatch import array_mismatch, kind_mismatch, MismatchError
from .specs import (
    accepts,
    Array,
    Choice,
    Elements,
    is_array,
    Items,
    Nothing,
    Other,
    Record,
    Spec,
    Tree,
    Values,
)


def check(spec: Spec, value: Any, path: str, bindings: Bindings) -> None:
    """Checks `value`, called `path` in messages, and extends `bindings`.

    Raises `MismatchError`.
    """
    match spec:
        case Array():
            _array(spec, value, path, bindings)
        case Items(text=text, items=items):
            if not (isinstance(value, tuple) and len(value) == len(items)):
                raise kind_mismatch(path, text, value, bindings, f"a tuple of {len(items)}")
            for index, item in enumerate(items):
                check(item, value[index], f"{path}[{index}]", bindings)
        case Elements(text=text, kind=kind, item=item):
            if not isinstance(value, kind):
                raise kind_mismatch(path, text, value, bindings, f"a {kind.__name__.lower()}")
            for index, one in enumerate(value):
                check(item, one, f"{path}[{index}]", bindings)
        case Values(text=text, value=item):
            if not isinstance(value, Mapping):
                raise kind_mismatch(path, text, value, bindings, "a dict")
            for name, one in value.items():
                check(item, one, f"{path}[{name!r}]", bindings)
        case Record():
            _record(spec, value, path, bindings)
        case Tree():
            _tree(spec, value, path, bindings)
        case Choice():
            _choice(spec, value, path, bindings)
        case Nothing():
            if value is not None:
                raise kind_mismatch(path, "None", value, bindings, "None")
        case Other():
            pass


def _array(spec: Array, value: Any, path: str, bindings: Bindings) -> None:
    if not is_array(value):
        raise kind_mismatch(path, spec.text, value, bindings, "an array")
    name = dtype_name(value.dtype)
    try:
        matched = spec.family.admits(name) and add_array(spec, value, path, bindings)
    except Exception:
        matched = False  # an expression that cannot be evaluated; the message names it
    if not matched:
        raise array_mismatch(spec, value, path, bindings)
    bindings.seen.append(Seen(spec.family, name, len(value.shape), value))


def _record(spec: Record, value: Any, path: str, bindings: Bindings) -> None:
    if not isinstance(value, Mapping if spec.keyed else spec.cls):
        raise kind_mismatch(path, spec.text, value, bindings, f"a {spec.text}")
    for name, field in spec.fields:
        if not spec.keyed:
            check(field, getattr(value, name), f"{path}.{name}", bindings)
        elif name in value:
            check(field, value[name], f"{path}[{name!r}]", bindings)
        elif name not in spec.optional:
            raise MismatchError(path, spec.text, [f"the key {name!r} is missing"], bindings)


def _tree(spec: Tree, value: Any, path: str, bindings: Bindings) -> None:
    # Below what is annotated as a leaf a tree is not flattened; arrays and unchecked things are
    # leaves by themselves.
    is_leaf = None if isinstance(spec.leaf, Other) else lambda one: accepts(spec.leaf, one)
    leaves, found = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_leaf)
    if spec.structure is not None:
        _structure(spec, spec.structure, found, path, bindings)
    for index, (keys, leaf) in enumerate(leaves):
        with leaf_position(index, spec.structure):
            check(spec.leaf, leaf, path + jax.tree_util.keystr(keys), bindings)


def _structure(spec: Tree, structure: str, found: Any, path: str, bindings: Bindings) -> None:
    if structures.is_binding(structure) and structure not in bindings.structures:
        bindings.structures[structure] = found
        bindings.origins[structure] = Origin(path)
        return
    try:
        matched = structures.matches(structure, found, bindings.structures)
    except KeyError as error:
        problem = f"the structure `{error.args[0]}` is not bound by any argument of this call"
        raise MismatchError(path, spec.text, [problem], bindings) from None
    if not matched:
        problem = f"its structure is {found}, which is not `{structure}`"
        raise MismatchError(path, spec.text, [problem], bindings)


def _choice(spec: Choice, value: Any, path: str, bindings: Bindings) -> None:
    members = [member for member in spec.members if accepts(member, value)]
    if not members:
        raise kind_mismatch(path, spec.text, value, bindings, "one of these")
    problems = []
    for member in members:
        tried = bindings.copy()
        try:
            check(member, value, path, tried)
        except MismatchError as mismatch:
            if len(members) == 1:
                raise
            where = "" if mismatch.path == path else f"`{mismatch.path}`, "
            problems += [f"not {member.text}: {where}{one}" for one in mismatch.problems]
        else:
            bindings.become(tried)
            return
    actual = f"{dtype_name(value.dtype)} {tuple(value.shape)}" if is_array(value) else None
    raise MismatchError(path, spec.text, problems, bindings, actual=actual)
