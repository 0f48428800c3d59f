"""Version counters: what autograd knows of changes in place.

Relies on: the dispatch key that lets `detach` keep the counter, the function that sets one, and the copy of many
tensors at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def detach_with_version(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph but with its version counter, which `detach` replaces inside a dispatch mode."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def version_witness(tensor: torch.Tensor, nothing: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor that shares its version counter and no memory, also when made inside a dispatch mode.

    `nothing`: an empty tensor of this type and device, for somebody who needs many witnesses.
    """
    witness = detach_with_version(tensor)
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device) if nothing is None else nothing
    return witness


def share_version_counter(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether a change in place of one shows at the other. Views and detached tensors do; chunks made by
    `unsafe_chunk` and `.data` do not, though they share memory."""
    version = second._version
    if first._version != version:
        return False
    torch._C._autograd._unsafe_set_version_counter((second,), (version + 1,))
    try:
        return first._version != version
    finally:
        torch._C._autograd._unsafe_set_version_counter((second,), (version,))


def show_version(stand_in: torch.Tensor, tensor: torch.Tensor) -> None:
    """Let what stands in for a tensor have its version. What shares the counter of the former has it, too."""
    if not stand_in.is_inference() and not tensor.is_inference():
        set_version(stand_in, tensor._version)


def set_version(tensor: torch.Tensor, version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def write_silently(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target; autograd is not told. On a device a few kernels do it."""
    with torch.no_grad():
        torch._foreach_copy_([target.data for target in targets], list(sources))
