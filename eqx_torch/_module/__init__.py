from .convert import from_torch as from_torch
from .inside import (
    capture as capture,
    fsdp as fsdp,
    patch as patch,
    reparametrise as reparametrise,
    replace_module as replace_module,
    select as select,
)
from .models import (
    load_state_dict as load_state_dict,
    stack_modules as stack_modules,
    state_dict as state_dict,
    to_torch as to_torch,
    trainable as trainable,
    unstack_modules as unstack_modules,
)
from .module import TorchModule as TorchModule
