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
from .bits import same_bits as same_bits
from .calculus import (
    adjoint as adjoint,
    batched_with_graph as batched_with_graph,
    differential as differential,
    recording as recording,
    untaped as untaped,
)
from .derivative import Jvp as Jvp, Record as Record, Vjp as Vjp
from .exclusive import EXCLUSIVE as EXCLUSIVE
from .function import (
    Compiled as Compiled,
    Findings as Findings,
    Learnt as Learnt,
    Lock as Lock,
    Outputs as Outputs,
    PROCESS_LOCK as PROCESS_LOCK,
    Residuals as Residuals,
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
from .leaf import (
    input_label as input_label,
    Leaf as Leaf,
    write_error as write_error,
)
from .leaves import ask_for_gradients as ask_for_gradients, on_leaves as on_leaves
from .results import opened as opened
from .site import argument_name as argument_name, Site as Site
from .tape import Kept as Kept, TAPES as TAPES
