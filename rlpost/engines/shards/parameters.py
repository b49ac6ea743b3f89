"""The tensors of a model by their storage: parameters, buffers and plain attributes of modules."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator

import torch


class Parameters:
    """All tensors that a model's modules hold, by name and by storage.

    Tensors with a common storage (tied embeddings) have one name: the first.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        for name, tensor in _held(model):
            self.tensors[name] = tensor
            self._names.setdefault(_storage(tensor), name)
        self.device = next(iter(self.tensors.values())).device

    def name_of(self, view: torch.Tensor) -> str | None:
        """The name of the tensor in whose storage a view is; None for other memory."""
        return self._names.get(_storage(view))

    def layout(self, name: str) -> tuple[int, ...]:
        """The shape in which the storage of a tensor is contiguous.

        That is the tensor's own, sorted by strides, unless it is only a part of its storage.
        """
        tensor = self.tensors[name]
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        pairs = sorted(zip(tensor.stride(), tensor.size(), strict=True), reverse=True)
        expected = 1
        for stride, size in reversed(pairs):
            if size != 1 and stride != expected:
                return (elements,)
            expected *= size
        shape = tuple(size for _, size in pairs)
        return shape if expected == elements and tensor.storage_offset() == 0 else (elements,)

    def fingerprint(self) -> str:
        """Names, shapes, strides and dtypes as a digest; another means other regions."""
        facts = [
            [name, list(one.size()), list(one.stride()), one.storage_offset(), str(one.dtype)]
            for name, one in sorted(self.tensors.items())
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def checksums(self) -> dict[str, str]:
        """A digest of the elements of each tensor."""
        digests = {}
        for name, tensor in self.tensors.items():
            elements = tensor.detach().contiguous().flatten().view(torch.uint8).cpu()
            digests[name] = hashlib.sha256(elements.numpy()).hexdigest()
        return digests

    @contextlib.contextmanager
    def kept(self) -> Iterator[list[str]]:
        """Undo replacements of tensors at the end; the list then has their names."""
        before = {
            name: (one, one.data, _storage(one), one.size(), one.stride())
            for name, one in self.tensors.items()
        }
        replaced: list[str] = []
        try:
            yield replaced
        finally:
            now = dict(_held(self._model))
            for name, (tensor, data, *facts) in before.items():
                current = now.pop(name, None)
                if current is tensor and facts == [
                    _storage(tensor),
                    tensor.size(),
                    tensor.stride(),
                ]:
                    continue
                replaced.append(name)
                tensor.data = data
                _set(self._model, name, tensor)
            for name in now:  # new attributes
                replaced.append(name)
                _delete(self._model, name)


def _held(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    yield f"{prefix}.{name}" if prefix else name, value


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _set(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    prefix, _, last = name.rpartition(".")
    module = model.get_submodule(prefix)
    for held in (module._parameters, module._buffers):
        if last in held:
            held[last] = tensor  # type: ignore[assignment]
            return
    vars(module)[last] = tensor


def _delete(model: torch.nn.Module, name: str) -> None:
    prefix, _, last = name.rpartition(".")
    module = model.get_submodule(prefix)
    for held in (module._parameters, module._buffers, vars(module)):
        held.pop(last, None)
