from ._versions import warn_of_unsupported as _warn_of_unsupported


_warn_of_unsupported()  # before anything is imported that another version may not have

from torch import Size as Size

from ._arrays import j2t as j2t, t2j as t2j, tree_j2t as tree_j2t, tree_t2j as tree_t2j
from ._call import check_errors as check_errors
from ._dtypes import dtype_j2t as dtype_j2t, dtype_t2j as dtype_t2j
from ._errors import (
    AnnotationError as AnnotationError,
    ConversionError as ConversionError,
    DepthError as DepthError,
    DtypeError as DtypeError,
    EqxTorchError as EqxTorchError,
    InputError as InputError,
    ModuleError as ModuleError,
    OutputError as OutputError,
    ShapeError as ShapeError,
    ShardingError as ShardingError,
)
from ._filter_shard_map import filter_shard_map as filter_shard_map
from ._function import __getattr__ as __getattr__, torch2jax as torch2jax
from ._module import (
    capture as capture,
    from_torch as from_torch,
    fsdp as fsdp,
    load_state_dict as load_state_dict,
    patch as patch,
    reparametrise as reparametrise,
    replace_module as replace_module,
    select as select,
    stack_modules as stack_modules,
    state_dict as state_dict,
    to_torch as to_torch,
    TorchModule as TorchModule,
    trainable as trainable,
    unstack_modules as unstack_modules,
)
from ._timeline import Timeline as Timeline, timeline as timeline


__version__ = "0.1.0"
