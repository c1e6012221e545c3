import jax.interpreters.ad as _ad
import jax.interpreters.batching as _batching
import jax.interpreters.mlir as _mlir

from .._compat import register_dce as _register_dce
from .autodiff import dce as _dce, jvp as _jvp, transpose as _transpose
from .batching import batch as _batch
from .failures import check_errors as check_errors, PENDING as PENDING
from .lowering import lower as _lower
from .primitive import (
    abstract_eval as _abstract_eval,
    align as align,
    call as call,
    impl as _impl,
    torch_call_p as torch_call_p,
)


torch_call_p.def_impl(_impl)
torch_call_p.def_abstract_eval(_abstract_eval)
_ad.primitive_jvps[torch_call_p] = _jvp
_ad.primitive_transposes[torch_call_p] = _transpose
_batching.primitive_batchers[torch_call_p] = _batch
_register_dce(torch_call_p, _dce)
_mlir.register_lowering(torch_call_p, _lower)
