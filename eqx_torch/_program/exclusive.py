"""The one lock around torch state of which a process has one.

- The forward-mode level: a thread that leaves it erases the tangents of the others, which then
  are zero.
- The CPU's default random generator.

One lock serves both, so that no two threads can wait for each other.
"""

import threading


EXCLUSIVE = threading.RLock()
