"""Ctrl-C while torch runs in the main thread.

XLA may run a torch call in the thread that asked for it. In the main thread Python then raises
`KeyboardInterrupt` inside of torch, and XLA makes of it an error like any other, which
`except Exception` catches. So it is delivered again as soon as the main thread has left the call.
"""

import _thread
import sys
import threading
import time

from .._deadlocks import inside_callback


_PATIENCE = 0.1
_STEP = 0.001


def deliver_again() -> None:
    """Interrupts the main thread after the torch call that it is in. Elsewhere, does nothing."""
    if threading.current_thread() is threading.main_thread():
        threading.Thread(target=_interrupt_outside, daemon=True).start()


def _interrupt_outside() -> None:
    main = threading.main_thread().ident or 0
    deadline = time.monotonic() + _PATIENCE
    # A program that goes from one torch call to the next may never be seen outside of one. If it is
    # interrupted inside, this begins anew.
    while inside_callback(sys._current_frames().get(main)) and time.monotonic() < deadline:
        time.sleep(_STEP)
    _thread.interrupt_main()
