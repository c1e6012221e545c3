"""The diagnosis as text."""

import textwrap
from collections.abc import Iterable, Iterator

from .checks import Finding
from .facts import Facts


_WIDTH = 88


def report(facts: Facts, findings: Iterable[Finding]) -> str:
    """The facts, and then what is wrong with them."""
    findings = list(findings)
    notes = [finding for finding in findings if not finding.wrong]
    lines = [
        *_table("Versions", facts.versions.items()),
        *_table("Devices", _devices(facts)),
        *_table("Memory and threads", _resources(facts)),
        *_table("Environment", facts.environment.items() or [("none of its variables", "is set")]),
        *_section("What looks wrong", [finding for finding in findings if finding.wrong]),
        *(_section("Worth knowing", notes) if notes else ()),
    ]
    return "\n".join(lines).rstrip()


def _devices(facts: Facts) -> Iterator[tuple[str, str]]:
    count, kind = facts.jax_devices
    jax = f"{count} x {kind}" + (f" ({facts.jax_platform})" if kind != facts.jax_platform else "")
    yield "jax", "none" if facts.jax_error else jax
    gpus = "no GPU"
    if facts.torch_gpus:
        gpus = ", ".join(f"{name} ({_gibibytes(size)})" for name, size in facts.torch_gpus)
    yield "torch", f"built for {facts.torch_platform}, {gpus}"


def _resources(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "main memory", "unknown" if facts.memory is None else _gibibytes(facts.memory)
    yield "cores", f"{facts.cores}"
    yield "torch threads", f"{facts.torch_threads} for each device that calls torch"
    wide = "kept" if facts.x64 else "converted to 32 bits"
    yield "64-bit dtypes", f"{wide} (jax_enable_x64={facts.x64})"
    yield "multiprocessing", facts.start_method


def _gibibytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _table(title: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    rows = list(rows)
    width = max(len(name) for name, _ in rows) + 2
    yield title
    yield from (f"  {name:<{width}}{value}" for name, value in rows)
    yield ""


def _section(title: str, findings: list[Finding]) -> Iterator[str]:
    yield title
    for finding in findings:
        yield _wrapped(finding.what, "  - ")
        yield _wrapped(finding.why, "    ")
        yield _wrapped(finding.remedy, "    -> ")
    if not findings:
        yield "  nothing"
    yield ""


def _wrapped(text: str, start: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
