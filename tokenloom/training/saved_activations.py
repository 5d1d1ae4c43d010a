"""List of the tensors that autograd keeps for backward, with their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch

from tokenloom.training.shards import local_part


@dataclass(frozen=True)
class SavedTensor:
    """Tensor that a graph keeps alive.

    Attributes:
        name: node that keeps the tensor, and in words what the tensor is there.
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        num_bytes: bytes of the whole storage, which stays even if the tensor is a part of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.name:40} {list(self.shape)!s:20} {str(self.dtype).removeprefix('torch.'):10} {self.num_bytes:>14,}"
        )


def saved_tensors(outputs: Iterable[torch.Tensor], left_out: Iterable[torch.Tensor]) -> list[SavedTensor]:
    """List every storage that the graph of ``outputs`` keeps, largest first.

    Custom nodes may name their saved tensors in ``saved_names``. Tensors in their other attributes count as well, and
    ``attribute_names`` may say in words what they are.

    Args:
        outputs: results of the graph.
        left_out: tensors whose storages are left out, such as parameters.
    """
    seen = {local_part(tensor.detach()).untyped_storage().data_ptr() for tensor in left_out}
    saved: list[SavedTensor] = []
    for node in _nodes(output.grad_fn for output in outputs):
        for name, tensor in _tensors_of(node):
            storage = local_part(tensor.detach()).untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                saved.append(SavedTensor(name, tuple(tensor.shape), tensor.dtype, storage.nbytes()))
    return sorted(saved, key=lambda each: -each.num_bytes)


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    waiting, visited = [node for node in roots if node is not None], set()
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        yield node
        waiting += [parent for parent, _ in node.next_functions if parent is not None]


def _tensors_of(node: Any) -> Iterator[tuple[str, torch.Tensor]]:
    label = node.name().removesuffix("Backward0").removesuffix("Backward").lstrip("_")
    if hasattr(node, "saved_tensors"):  # written in Python
        saved = node.saved_tensors
        named_here = getattr(node, "saved_names", None)  # set where the number of tensors depends on the input
        names = (
            named_here
            or getattr(getattr(node, "_forward_cls", None), "saved_names", None)
            or [f"saved {i}" for i in range(len(saved))]
        )
        for name, tensor in zip(names, saved, strict=True):
            yield from _inside(f"{label}: {name}", tensor)
        words = getattr(node, "attribute_names", {})
        for name, value in vars(node).items():
            yield from _inside(f"{label}: {words.get(name, name.replace('_', ' '))}", value)
        return
    for name in dir(node):
        if name.startswith("_saved_"):
            saved_name = name.removeprefix("_saved_")
            yield from _inside(f"{label}: {'input' if saved_name == 'self' else saved_name}", getattr(node, name))


def _inside(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif is_dataclass(value) and not isinstance(value, type):
        for each in vars(value).values():  # cached properties too, which are no fields
            yield from _inside(name, each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _inside(name, each)
