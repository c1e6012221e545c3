from .base import (
    Indices as Indices,
    Kind as Kind,
    Program as Program,
    Spec as Spec,
    Tensors as Tensors,
    TOKEN as TOKEN,
)
from .batch import Vmap as Vmap
from .bits import same_bits as same_bits
from .calculus import adjoint as adjoint, differential as differential, untaped as untaped
from .derivative import Jvp as Jvp, Vjp as Vjp
from .dtype_hints import dtype_hint as dtype_hint
from .exclusive import EXCLUSIVE as EXCLUSIVE
from .function import (
    Compiled as Compiled,
    Findings as Findings,
    Lock as Lock,
    Outputs as Outputs,
    PROCESS_LOCK as PROCESS_LOCK,
    Residuals as Residuals,
    TorchFunction as TorchFunction,
    VmapMethod as VmapMethod,
)
from .leaf import (
    input_label as input_label,
    Leaf as Leaf,
    not_a_tensor as not_a_tensor,
    write_error as write_error,
)
from .record import Record as Record
from .site import argument_name as argument_name, Site as Site, Static as Static
from .tape import Kept as Kept, TAPES as TAPES
