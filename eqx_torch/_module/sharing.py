"""Tensors of a module that share memory.

In torch a view of a parameter follows it: its values, and gradients through it. In JAX parameters
are values, so a view is made anew from each parameter that a call is given. Where two registered
tensors overlap there is no such order between them, and the module is refused.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Mapping

import torch

from .._compat import is_functorch_wrapped_tensor
from .._errors import ModuleError


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor that is a view of a parameter or of a changing buffer.

    Attributes:
        owner: the position of that one, parameters first.
        size, stride, offset: where in its memory the view's elements are.
        attached: whether derivatives pass through it.
        placeholder: stands for it in a blueprint.
    """

    owner: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    attached: bool
    placeholder: torch.Tensor

    @property
    def key(self) -> Hashable:
        """Equal for equal views."""
        return self.owner, self.size, self.stride, self.offset, self.attached

    def of(self, owner: torch.Tensor) -> torch.Tensor:
        """The view of another tensor."""
        if not self.attached:
            owner = owner.detach()
        if owner.is_contiguous() and not is_functorch_wrapped_tensor(owner):
            return owner.as_strided(self.size, self.stride, self.offset)
        index = torch.full(self.size, self.offset, device=owner.device)
        for axis, (size, stride) in enumerate(zip(self.size, self.stride, strict=True)):
            steps = torch.arange(size, device=owner.device) * stride
            index += steps.reshape(-1, *(1,) * (len(self.size) - axis - 1))
        return owner.reshape(-1)[index]


def views(
    name: str,
    owners: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    others: Mapping[str, torch.Tensor],
) -> dict[int, View]:
    """The views of parameters and changing buffers among other tensors, by their identities.

    Args:
        name: of the module, for messages.
        owners: the parameters and the buffers that change.
        constants: the other buffers.
        others: what else the module holds.

    Raises:
        ModuleError: tensors overlap that are not views of one another.
    """
    positions = {id(tensor): i for i, tensor in enumerate(owners.values())}
    registered = {id(tensor) for tensor in (*owners.values(), *constants.values())}
    found: dict[int, View] = {}
    for (a, first), (b, second) in _overlapping({**others, **constants, **owners}):
        pair = sorted([(a, first), (b, second)], key=lambda x: positions.get(id(x[1]), len(owners)))
        (owner_name, owner), (view_name, view) = pair
        if id(owner) not in positions:
            continue
        known = found.get(id(view))
        if id(view) in registered or known is not None or not _is_view(view, owner):
            raise ModuleError(
                _refusal(name, owner_name, owner, view_name, view, id(view) in registered)
            )
        found[id(view)] = _view(view, owner, positions[id(owner)])
    return found


def _view(view: torch.Tensor, owner: torch.Tensor, position: int) -> View:
    offset = (view.data_ptr() - owner.data_ptr()) // owner.element_size()
    placeholder = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device="meta")
    attached = view.requires_grad
    return View(position, tuple(view.shape), view.stride(), offset, attached, placeholder)


def _is_view(view: torch.Tensor, owner: torch.Tensor) -> bool:
    """Whether a tensor can be made from another's elements in the order in which JAX has them."""
    low, high = _extent(owner)
    first, last = _extent(view)
    return (
        owner.is_contiguous()
        and low <= first
        and last <= high
        and (first - low) % owner.element_size() == 0
        and view.dtype == owner.dtype
        and not (view.is_conj() or view.is_neg())
    )


def _overlapping(
    tensors: Mapping[str, torch.Tensor],
) -> Iterator[tuple[tuple[str, torch.Tensor], tuple[str, torch.Tensor]]]:
    """The pairs that have memory in common."""
    unique = {id(t): (name, t) for name, t in tensors.items() if _has_memory(t)}
    ordered = sorted((str(t.device), *_extent(t), id(t)) for _, t in unique.values())
    open_: list[tuple[str, int, int, int]] = []
    for item in ordered:
        device, low, _, key = item
        open_ = [o for o in open_ if o[0] == device and o[2] > low]
        for *_, other in open_:
            if _intersect(unique[other][1], unique[key][1]):
                yield unique[other], unique[key]
        open_.append(item)


def _has_memory(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized)
        and tensor.numel() > 0
    )


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor's memory, and the one after its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _intersect(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors whose extents intersect have elements in common."""
    if (_is_dense(a) and _is_dense(b)) or a.element_size() != b.element_size():
        return True
    return bool(torch.isin(_elements(a), _elements(b)).any())


def _is_dense(tensor: torch.Tensor) -> bool:
    low, high = _extent(tensor)
    return high - low == tensor.numel() * tensor.element_size()


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The address of each element."""
    address = torch.tensor(tensor.data_ptr())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps = torch.arange(size) * (stride * tensor.element_size())
        address = address[..., None] + steps
    return address


def _refusal(
    module: str,
    owner_name: str,
    owner: torch.Tensor,
    view_name: str,
    view: torch.Tensor,
    registered: bool,
) -> str:
    text = (
        f"`{module}` cannot be converted: `{view_name}` shares memory with `{owner_name}`, so that "
        "in torch a change of one is a change of the other, but in JAX they would be two arrays. "
    )
    same = (view.shape, view.stride(), view.data_ptr()) == (
        *(owner.shape, owner.stride(), owner.data_ptr()),
    )
    if registered and same:
        return text + f"Make them one: `module.{view_name} = module.{owner_name}`."
    return text + (
        f"Do not keep `{view_name}`, but compute it in `forward` from `self.{owner_name}` (its "
        "`.t()`, a slice of it), or keep a copy: `.clone()`."
    )
