# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
A simulated accelerator. Its tensors compute on the CPU, by the rules of a device:

- an operation refuses tensors of two devices, except scalars and indices of the host;
- every operation on it is a launch, and is counted;
- whatever brings a value to the host (`item`, `tolist`, `nonzero`, a boolean mask, `.cpu()`) is a synchronisation, and
  so is a copy from the host without `non_blocking`; each is counted with the line of hf_falcon that asked for it.

```python
move(target), move(drafter, "sim:1")
with device() as counts:
    output = target.generate(on_device(input_ids), assistant_model=drafter)
tokens, syncs = on_host(output), counts.syncs
```

It has no kernels of its own, so it says nothing about time. Its random numbers are the CPU's. Inside
[`rounding_by_shape`] its products round by the number of their rows, as those of kernels that are chosen by shape.
"""

import collections
import contextlib
import linecache
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.backend_registration as registration
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from utilities import changes_nothing

if not hasattr(registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip(f"torch {torch.__version__} has no devices written in Python", allow_module_level=True)


class _Availability(registration._DummyBackendModule):
    """The device is there inside [`device`] only: other tests of the process, as of training, run without it."""

    is_here = False

    def is_available(self) -> bool:
        return self.is_here


_availability = _Availability()
registration._setup_privateuseone_for_python_backend("sim", _availability)

HOST = torch.device("cpu")
# Operations that the host waits for, and operations whose indices may be on the host.
_WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select"}
_WAITS |= {"aten::_unique2", "aten::unique_dim"}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}
_MOVES = {"aten::_to_copy", "aten::to"}
# These ask for the device in C++ before they are dispatched.
_FACTORIES = {"tensor", "as_tensor", "arange", "ones", "zeros", "empty", "full", "eye", "rand", "randn", "linspace"}
_FACTORIES |= {"randint", "tril", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}


class Counts:
    """What happened on the device, outside of modules that are [`Counts.leave_out`]."""

    def __init__(self) -> None:
        self.launches = 0
        self.operations: collections.Counter[str] = collections.Counter()
        self.syncs: collections.Counter[tuple[str, str]] = collections.Counter()
        self._paused = 0

    def launch(self, name: str) -> None:
        if not self._paused:
            self.launches += 1
            self.operations[name] += 1

    def sync(self, what: str) -> None:
        if not self._paused:
            # Not `traceback.extract_stack`, which reads the source of the whole stack each time.
            frame = sys._getframe()
            while frame is not None and "hf_falcon" not in frame.f_code.co_filename:
                frame = frame.f_back
            line = frame and linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self.syncs[what, f"{frame.f_code.co_name}: {line}" if frame else ""] += 1

    @contextlib.contextmanager
    def leave_out(self, module: nn.Module) -> Iterator[None]:
        """Inside, forwards of `module` are not counted."""

        def pause(by: int) -> Callable[..., None]:
            def change(*arguments: Any) -> None:
                self._paused += by

            return changes_nothing(change)

        hooks = [module.register_forward_pre_hook(pause(1)), module.register_forward_hook(pause(-1))]
        yield
        for hook in hooks:
            hook.remove()


_counts = Counts()


class DeviceTensor(Tensor):
    """A tensor on the device; `value` is the tensor of the host that it computes with."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor, place: torch.device) -> "DeviceTensor":
        made = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype,
            device=place,
        )  # fmt: skip
        made.value = value
        return made

    def __init__(self, value: Tensor, place: torch.device):
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceTensor":
        return DeviceTensor(self.value.clone(), self.device)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.value.untyped_storage()

    def numpy(self, *arguments: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert a tensor of a device to numpy: copy it to the host first")

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _waiting(name: str) -> Callable[..., Any]:
    def ask(self: DeviceTensor, *arguments: Any) -> Any:
        _counts.sync(name.strip("_"))
        return getattr(self.value, name)(*arguments)

    return ask


for _name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__"):
    setattr(DeviceTensor, _name, _waiting(_name))


DeviceTensor.cpu = lambda self: self.to("cpu")


def _is_ours(place: Any) -> bool:
    return place is not None and torch.device(place).type == "sim"


def _numbered(place: Any) -> torch.device:
    return torch.device("sim", torch.device(place).index or 0)


def _value_of(each: Any) -> Any:
    return each.value if isinstance(each, DeviceTensor) else each


def on_host(tree: Any) -> Any:
    """The tensors of the host that tensors of the device compute with; nothing is counted."""
    return tree_map(_value_of, tree)


def on_device(tensor: Tensor, place: str = "sim:0") -> DeviceTensor:
    """A copy of a tensor on the device."""
    return DeviceTensor(tensor.clone(), torch.device(place))


def _each_tensor(change: Callable[[Tensor], Any], value: Any) -> Any:
    """`tree_map` over the tensors of an operation's arguments or results; these nest lists and tuples only."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)([_each_tensor(change, each) for each in value]) if isinstance(value, (list, tuple)) else value


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = function._schema.name
    tensors: list[Tensor] = []
    _each_tensor(tensors.append, [args, list(kwargs.values())])
    places = {each.device for each in tensors if isinstance(each, DeviceTensor)}
    asked = kwargs.get("device")
    if not places and not _is_ours(asked):
        return function(*args, **kwargs)
    _counts.launch(name)
    if name in _MOVES:
        others = {key: value for key, value in kwargs.items() if key != "device"}
        result = function(*_each_tensor(_value_of, args), **others)
        if not places and not kwargs.get("non_blocking"):
            _counts.sync("copy from the host")
        if asked is None or _is_ours(asked):
            return DeviceTensor(result, next(iter(places)) if asked is None else _numbered(asked))
        _counts.sync("copy to the host")
        return result
    if name == "aten::copy_":
        if not isinstance(args[0], DeviceTensor):
            _counts.sync("copy to the host")
        function(*_each_tensor(_value_of, args))
        return args[0]
    if name in _WAITS:
        _counts.sync(name)
    if name in _INDEXING and any(each.dtype == torch.bool for each in args[1] if each is not None):
        _counts.sync("boolean mask")
    allowed = _INDEXING if name in _INDEXING else set()
    strangers = [each for each in tensors if not isinstance(each, DeviceTensor) and each.dim() > 0]
    if len(places) > 1 or (strangers and not allowed):
        found = sorted({str(each.device) for each in tensors})
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {' and '.join(found)}")
    place = _numbered(asked) if asked is not None else next(iter(places))
    others = {key: _each_tensor(_value_of, value) for key, value in kwargs.items()}
    if asked is not None:
        others["device"] = HOST
    result = _compute(name, function, _each_tensor(_value_of, args), others)
    if function._schema.is_mutable and isinstance(result, Tensor):
        given = [*zip(function._schema.arguments, args)]
        given += [(each, kwargs[each.name]) for each in function._schema.arguments if each.name in kwargs]
        for argument, value in given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                return value
    return _each_tensor(lambda each: DeviceTensor(each, place), result)


_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
_rounds_by_shape = False


@contextlib.contextmanager
def rounding_by_shape() -> Iterator[None]:
    """Inside, products of the device change by some units in the last place, by the number of their rows alone."""
    global _rounds_by_shape
    _rounds_by_shape = True
    try:
        yield
    finally:
        _rounds_by_shape = False


def _compute(name: str, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if _rounds_by_shape and name in _PRODUCTS:
        product = function(*args, **kwargs)
        return product * (1 + product.shape[-2] % 7 * torch.finfo(product.dtype).eps)
    if name != "aten::_thnn_fused_lstm_cell":
        return function(*args, **kwargs)
    # It has no kernel for CPUs.
    gates = args[0] + args[1] + sum(each for each in args[3:] if each is not None)
    into, forget, new, out = gates.chunk(4, 1)
    cell = forget.sigmoid() * args[2] + into.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell, gates


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class _Factories(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name not in _FACTORIES:
            return function(*args, **kwargs)
        place = kwargs.get("device")
        if name == "new_tensor" and isinstance(args[0], DeviceTensor) and place is None:
            return DeviceTensor(torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)), args[0].device)
        if not _is_ours(place):
            return function(*args, **kwargs)
        if name == "as_tensor" and isinstance(args[0], DeviceTensor):
            return args[0]
        _counts.launch(name)
        if name in ("tensor", "as_tensor"):
            _counts.sync("copy from the host")
        return DeviceTensor(function(*on_host(args), **{**kwargs, "device": "cpu"}), _numbered(place))


@contextlib.contextmanager
def device() -> Iterator[Counts]:
    """Inside, tensors may be made on the device. Gives the [`Counts`] of what is done there."""
    global _counts
    _counts = Counts()
    _availability.is_here = True
    try:
        with _Operations(), _Factories(), torch.no_grad():
            yield _counts
    finally:
        _availability.is_here = False


def move(module: nn.Module, place: str = "sim:0") -> nn.Module:
    """Puts the parameters and buffers of a module on the device, in place; tied weights stay tied."""
    module.tie_weights = lambda *arguments, **kwargs: None
    moved: dict[int, Any] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not isinstance(parameter.data, DeviceTensor):
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(on_device(parameter.data, place), requires_grad=False)
                part._parameters[name] = moved[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None and not isinstance(buffer, DeviceTensor):
                part._buffers[name] = on_device(buffer, place)
    return module
