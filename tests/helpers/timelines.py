"""A function to record, and calls that were never made."""

import numpy as np

from eqx_torch._timeline import TorchCall


def energy(x):
    return x.sin().sum()


X = np.full(3, 0.5, np.float32)


def made_up(device, start, end, function="f", kind="forward", core_time=0.0):
    return TorchCall(function, kind, function, device, 1, start, end, core_time)
