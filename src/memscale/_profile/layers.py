"""Layers are found by structure, not by class names.

A *block* is a non-leaf child of a `ModuleList` or `Sequential`: a transformer block, a stage of a CNN. Containers
inside containers are looked into until they hold blocks. The rest of the model (embeddings, stem, head) is listed
beside them, one entry a top-most module, so that every parameter is accounted for once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator

from torch import nn

from memscale._errors import MemScaleError
from memscale._profile import Layer
from memscale._torch import private

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Blocks by name, outermost first come; a module that is registered twice appears once."""
    blocks: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()
    for module_fqn, module in _walk_blocks("", model):
        if module not in seen:
            seen.add(module)
            blocks[module_fqn] = module
    return blocks


def _walk_blocks(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Blocks below `module`, never one inside another."""
    for name, child in module.named_children():
        module_fqn = f"{prefix}.{name}" if prefix else name
        if isinstance(module, _CONTAINERS) and _is_block(child):
            yield module_fqn, child
        else:
            yield from _walk_blocks(module_fqn, child)


def _is_block(module: nn.Module) -> bool:
    """Neither a leaf (nothing to recompute cheaply) nor a container that itself holds blocks."""
    children = list(module.children())
    holds_blocks = isinstance(module, _CONTAINERS) and any(any(True for _ in c.children()) for c in children)
    return bool(children) and not holds_blocks


def compiled_parts(model: nn.Module) -> frozenset[str]:
    """Names of the modules that `torch.compile` stands around; "" is the model itself."""
    return frozenset(module_fqn for module_fqn, module in model.named_modules() if private.is_compiled(module))


def refuse_compiled_around_blocks(model: nn.Module) -> None:
    """What is done to a block must not be inside compiled code. See NOTE [around compiled code] in overrides.py."""
    parts = compiled_parts(model)
    blocks = find_blocks(model) if parts else {}
    for part in sorted(parts):
        inside = [name for name in blocks if name != part and (not part or name.startswith(f"{part}."))]
        if inside:
            what = f"{type(model).__name__}.{part}" if part else f"this {type(model).__name__}"
            names = ["model", *inside[0].split(".")[:-1]]
            holder = ".".join(name for name in names if name != "_orig_mod")
            raise MemScaleError(
                f"{what} is compiled as a whole, so MemScale cannot recompute or move its {len(inside)} blocks one by "
                f"one. Compile the blocks of the plain model instead, and wrap it after that: "
                f"`for block in {holder}: block.compile()`, then `memscale.wrap(model)`."
            )


def describe_layers(model: nn.Module, blocks: Collection[str] | None = None) -> tuple[Layer, ...]:
    """Blocks and what is left, in the order of `named_modules`; shared parameters count for the first owner.

    `blocks` are the names of the model's blocks, where they are known already.
    """
    counted: set[int] = set()
    blocks = find_blocks(model) if blocks is None else blocks
    return tuple(
        _describe(module_fqn, module, counted, is_block=module_fqn in blocks)
        for module_fqn, module in find_pieces(model, blocks).items()
    )


def find_pieces(model: nn.Module, blocks: Collection[str]) -> dict[str, nn.Module]:
    """The whole model as its blocks and what is left; a module that is registered twice appears once."""
    pieces: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()
    for module_fqn, module in _pieces("", model, set(blocks)):
        if module not in seen:
            seen.add(module)
            pieces[module_fqn] = module
    return pieces


def _pieces(prefix: str, module: nn.Module, blocks: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """The model cut into blocks and the largest modules that hold none of them."""
    if prefix in blocks or not any(name == prefix or name.startswith(f"{prefix}.") or not prefix for name in blocks):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from _pieces(f"{prefix}.{name}" if prefix else name, child, blocks)


def _describe(module_fqn: str, module: nn.Module, counted: set[int], *, is_block: bool) -> Layer:
    param_bytes = trainable_bytes = 0
    for parameter in module.parameters():
        key = private.storage_key(parameter.untyped_storage())
        if key in counted:
            continue
        counted.add(key)
        param_bytes += parameter.nbytes
        trainable_bytes += parameter.nbytes * parameter.requires_grad
    return Layer(
        module_fqn=module_fqn,
        class_name=type(module).__name__,
        param_bytes=param_bytes,
        trainable_bytes=trainable_bytes,
        is_block=is_block,
        fingerprint=fingerprint(module),
    )


def fingerprint(module: nn.Module) -> str:
    """Equal for modules of the same classes, shapes, dtypes and trainable parts."""
    digest = hashlib.sha256()
    for name, child in module.named_modules():
        digest.update(f"{name}:{type(child).__name__}:{child.extra_repr()}\n".encode())
    for name, parameter in module.named_parameters():
        digest.update(f"{name}:{tuple(parameter.shape)}:{parameter.dtype}:{parameter.requires_grad}\n".encode())
    return digest.hexdigest()[:16]
