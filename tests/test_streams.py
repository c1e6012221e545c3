"""The order between streams, with a stand-in for `torch.cuda`."""

import contextlib
import types

import pytest

from eqx_torch._call.streams import on_stream


class Stream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def record_event(self):
        self.log.append(f"{self.name} records")
        return f"event of {self.name}"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


class Cuda:
    """Records what is asked of it; has nothing that synchronises a device."""

    def __init__(self):
        self.log = []

    def current_stream(self):
        return Stream(self.log, "current")

    def ExternalStream(self, address):  # noqa: N802
        return Stream(self.log, f"external {address}")

    @contextlib.contextmanager
    def stream(self, stream):
        self.log.append(f"enter {stream.name}")
        yield
        self.log.append(f"leave {stream.name}")


ORDER = [
    "current records",
    "external 7 waits for event of current",
    "enter external 7",
    "torch",
    "leave external 7",
    "external 7 records",
    "current waits for event of external 7",
]


def test_order():
    cuda = Cuda()
    with on_stream(types.SimpleNamespace(stream=7), cuda):
        cuda.log.append("torch")
    assert cuda.log == ORDER


def test_streams_are_joined_after_an_error_too():
    cuda = Cuda()
    with pytest.raises(KeyError), on_stream(types.SimpleNamespace(stream=7), cuda):
        raise KeyError
    assert cuda.log == [entry for entry in ORDER if entry not in ("torch", "leave external 7")]
