from .failures import check_errors as check_errors, PENDING as PENDING
from .primitive import align as align, call as call, torch_call_p as torch_call_p
