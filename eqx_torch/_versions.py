"""Which versions of its dependencies the package supports: those that its own metadata asks for.

pip keeps to them. Environments come about in other ways too (`--no-deps`, a later downgrade), and
then the first thing to fail would be the import of some name. So the package warns before it
imports anything else.
"""

import importlib.metadata
import warnings
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.version import Version


DISTRIBUTION = "eqx-torch"


def unsupported(distribution: str = DISTRIBUTION) -> list[str]:
    """A sentence for each dependency of which an unsupported version is installed.

    A package without metadata, as in a source tree that is only put on the path, asks for nothing.
    """
    return [
        f"{required.name} {installed} is installed, {required.name}{required.specifier} is needed"
        for required, installed in _installed(distribution)
        # Nightly builds (`0.11.0.dev3`) and those of vendors (`2.12.0a0+git1`) are taken for the
        # release that they lead to.
        if not required.specifier.contains(Version(installed).base_version)
    ]


def warn_of_unsupported(distribution: str = DISTRIBUTION) -> None:
    """One warning for all that `unsupported` finds."""
    found = unsupported(distribution)
    if found:
        wanted = " ".join(f"'{required}'" for required, _ in _installed(distribution))
        warnings.warn(
            f"{distribution} does not support what it runs with: {'; '.join(found)}. It may fail "
            f"or give wrong results. Run `pip install {wanted}`.",
            stacklevel=2,
        )


def _installed(distribution: str) -> Iterator[tuple[Requirement, str]]:
    """What a distribution requires, and its version, of what is installed."""
    try:
        parsed = map(Requirement, importlib.metadata.requires(distribution) or [])
    except importlib.metadata.PackageNotFoundError:
        return
    for required in parsed:
        if required.marker is None or required.marker.evaluate({"extra": ""}):
            try:
                yield required, importlib.metadata.version(required.name)
            except importlib.metadata.PackageNotFoundError:
                continue
