from .failures import check_errors as check_errors, FAILURES as FAILURES
from .primitive import align as align, call as call, torch_call_p as torch_call_p
