from .._statics import Static as Static
from .base import (
    Indices as Indices,
    Kind as Kind,
    Program as Program,
    Spec as Spec,
    Tensors as Tensors,
    TOKEN as TOKEN,
)
from .batch import Vmap as Vmap
from .calculus import (
    adjoint as adjoint,
    batched_with_graph as batched_with_graph,
    differential as differential,
    recording as recording,
    untaped as untaped,
)
from .derivative import Jvp as Jvp, Record as Record, Vjp as Vjp
from .exclusive import EXCLUSIVE as EXCLUSIVE, local_gpus as local_gpus, settle as settle
from .function import (
    Code as Code,
    Compiled as Compiled,
    Findings as Findings,
    Learnt as Learnt,
    Lock as Lock,
    Outputs as Outputs,
    Plain as Plain,
    PROCESS_LOCK as PROCESS_LOCK,
    Residuals as Residuals,
    Run as Run,
    TorchFunction as TorchFunction,
    VmapMethod as VmapMethod,
)
from .generators import (
    draw_from as draw_from,
    drawing_from as drawing_from,
    own_generator as own_generator,
)
from .hints import hint_for as hint_for
from .interposed import interposing as interposing, with_interposed as with_interposed
from .leaf import Leaf as Leaf, same_bits as same_bits, write_error as write_error
from .results import opened as opened
from .site import argument_name as argument_name, Own as Own, Site as Site
from .tape import Guard as Guard, Kept as Kept, TAPES as TAPES, TapeSite as TapeSite
