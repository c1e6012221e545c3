from .convert import from_torch as from_torch
from .models import (
    load_state_dict as load_state_dict,
    stack_modules as stack_modules,
    state_dict as state_dict,
    to_torch as to_torch,
    trainable as trainable,
)
from .module import TorchModule as TorchModule
