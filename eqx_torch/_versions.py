"""Which versions of its dependencies the package supports: those that its own metadata asks for.

pip keeps to them. Environments come about in other ways too (`--no-deps`, a later downgrade), and
then the first thing to fail would be the import of some name. So the package warns before it
imports anything else.
"""

import importlib.metadata
import warnings
from collections.abc import Callable, Iterable

from packaging.requirements import Requirement
from packaging.version import Version


DISTRIBUTION = "eqx-torch"


def unsupported(
    distribution: str = DISTRIBUTION,
    version_of: Callable[[str], str] = importlib.metadata.version,
) -> list[str]:
    """A sentence for each dependency of which an unsupported version is installed.

    Args:
        distribution: whose dependencies. One without metadata, as in a source tree that is only
            put on the path, asks for nothing.
        version_of: gives the installed version of a distribution, or raises
            `importlib.metadata.PackageNotFoundError`; what is not installed is not reported.
    """
    return [
        f"{required.name} {installed} is installed, {required.name}{required.specifier} is needed"
        for required in _requirements(distribution)
        for installed in _installed(required.name, version_of)
        # Nightly builds (`0.11.0.dev3`) and those of vendors (`2.12.0a0+git1`) are taken for the
        # release that they lead to.
        if not required.specifier.contains(Version(installed).base_version)
    ]


def warn_of_unsupported(
    distribution: str = DISTRIBUTION,
    version_of: Callable[[str], str] = importlib.metadata.version,
) -> None:
    """One warning for all that `unsupported` finds."""
    found = unsupported(distribution, version_of)
    if found:
        wanted = " ".join(f"'{required}'" for required in _requirements(distribution))
        warnings.warn(
            f"{distribution} does not support what it runs with: {'; '.join(found)}. It may fail "
            f"or give wrong results. Run `pip install {wanted}`.",
            stacklevel=2,
        )


def _requirements(distribution: str) -> list[Requirement]:
    try:
        texts = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    parsed = map(Requirement, texts)
    return [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]


def _installed(name: str, version_of: Callable[[str], str]) -> Iterable[str]:
    try:
        return [version_of(name)]
    except importlib.metadata.PackageNotFoundError:
        return []
