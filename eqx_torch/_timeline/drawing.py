"""The picture of a timeline: a lane for each device, a bar for each call.

A lane is as high as the number of its calls that overlap. A bar has its function's name where the
name fits. Matplotlib is imported when something is drawn; the package does not depend on it.
"""

import importlib
from collections.abc import Sequence
from typing import Any, get_args

from .._errors import EqxTorchError
from .._program import Kind
from .calls import by_lane, overlap, TorchCall


_COLOURS: dict[Kind, str] = {"forward": "#4c72b0", "backward": "#dd8452", "tangent": "#55a868"}
_WIDTH = 10.0  # inches
_ROW = 0.42
_BAR = 0.84  # of a row
_LETTER = 0.0078 * 8  # inches that a letter of 8 points takes, on average


def draw(calls: Sequence[TorchCall], origin: float, span: float) -> Any:
    """A matplotlib figure.

    Args:
        calls: what to draw, at least one call.
        origin: the time that the axis counts from.
        span: how long it is.
    """
    lanes = by_lane(calls)
    rows = sum(map(len, lanes.values()))
    figure = _matplotlib("figure").Figure(
        figsize=(_WIDTH, 1.5 + _ROW * rows), dpi=150, layout="constrained"
    )
    axes = figure.subplots()
    top, ticks = 0.0, []
    for lane in lanes.values():
        ticks.append(top + len(lane) / 2)
        for row in lane:
            _draw_row(axes, row, top, origin, span)
            top += 1
        axes.axhline(top, color="0.85", linewidth=0.8, zorder=0)
    axes.set_yticks(ticks, list(lanes))
    axes.set_ylim(top, 0)
    axes.set_xlim(0, span * 1e3)
    axes.set_xlabel("milliseconds")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _describe(axes, calls, len(lanes))
    return figure


def _draw_row(axes: Any, row: list[TorchCall], top: float, origin: float, span: float) -> None:
    for kind, colour in _COLOURS.items():
        bars = [(1e3 * (c.start - origin), 1e3 * c.duration) for c in row if c.kind == kind]
        place = (top + (1 - _BAR) / 2, _BAR)
        axes.broken_barh(bars, place, facecolors=colour, edgecolors="white", linewidth=0.4)
    for call in row:
        if len(call.function) * _LETTER < 0.9 * _WIDTH * call.duration / span:
            middle = 1e3 * (call.start + call.end - 2 * origin) / 2
            axes.text(
                middle, top + 0.5, call.function, size=8, color="white", ha="center", va="center"
            )


def _describe(axes: Any, calls: Sequence[TorchCall], devices: int) -> None:
    """The title, which states the measured overlap, and the legend."""
    title = f"{len(calls)} torch calls on {devices} device{'s' if devices > 1 else ''}"
    if any(not call.device.startswith("cpu:") for call in calls):
        title += " (on GPUs the time until the work was enqueued)"
    axes.set_title(title, loc="left", size=11, pad=22)
    subtitle = f"{overlap(calls)}"
    axes.annotate(subtitle, (0, 1), (0, 6), "axes fraction", "offset points", size=9, color="0.3")
    patch = _matplotlib("patches").Patch
    counts = {kind: sum(call.kind == kind for call in calls) for kind in get_args(Kind)}
    handles = [
        patch(color=_COLOURS[kind], label=f"{count} {kind}")
        for kind, count in counts.items()
        if count
    ]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
    )


def _matplotlib(part: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{part}")
    except ImportError as error:
        raise EqxTorchError(
            "a timeline is drawn by matplotlib, which cannot be imported here. Install it "
            "(`pip install matplotlib`), or write the timeline to a file by `.save(path)`, which "
            "https://ui.perfetto.dev opens."
        ) from error
