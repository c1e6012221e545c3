from .convert import from_torch as from_torch
from .ensemble import stack_modules as stack_modules, trainable as trainable
from .module import TorchModule as TorchModule
from .round_trip import (
    load_state_dict as load_state_dict,
    state_dict as state_dict,
    to_torch as to_torch,
)
