from torch import Size as Size

from ._arrays import j2t as j2t, t2j as t2j, tree_j2t as tree_j2t, tree_t2j as tree_t2j
from ._dtypes import dtype_j2t as dtype_j2t, dtype_t2j as dtype_t2j
from ._errors import (
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
from ._function import torch2jax as torch2jax


__version__ = "0.1.0"
