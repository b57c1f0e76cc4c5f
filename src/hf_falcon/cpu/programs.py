# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Programs: a function of a module and of tensors, compiled ahead of time by torch's AOTInductor into a shared library.
A program holds no weights, so modules of one kind share it, and a later process that has the file need not compile,
and not even trace, the function again.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .grouped_attention import forms_of, set_forms
from .packed_layouts import PackedWeight
from .packing import PackedLinear

# The longest constant that a program may hold: a number. A longer one may be a weight, of which another model has
# another.
_LONGEST_CONSTANT = 1
# Attributes in which modules of one kind may differ. A cache that a layer gets in a round does not read the number.
# Checkpointing acts in training only.
_NOT_OF_A_KIND = ("training", "layer_idx", "gradient_checkpointing")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
_PLAIN = {type(None), bool, int, float, str}
Own = TypeVar("Own")


class CannotBeBuilt(Exception):
    """A function that no program can be made of. The message says why."""


class TensorHolder(ABC):
    """An argument of a program that holds tensors, and else nothing that the function reads."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Its tensors. The program may write into them."""

    @abstractmethod
    def with_tensors(self: Own, tensors: list[Tensor], rows: int) -> Own:
        """The same with other tensors, for a call with `rows` rows."""


def leaves(module: nn.Module) -> list[tuple[Any, Any]]:
    """
    Where the tensors are that a module computes with, as pairs of a container and a key: parameters, buffers, and what
    packed and lent weights hold.
    """
    found: dict[tuple[int, Any], tuple[Any, Any]] = {}
    for part in module.modules():
        for named in (part._parameters, part._buffers):
            for name, tensor in named.items():
                if tensor is not None and not isinstance(tensor, PackedWeight):
                    found[id(named), name] = named, name
        lent = vars(part).get("lent")
        for owner in (part.packed if isinstance(part, PackedLinear) else None, lent):
            held = [] if owner is None else owner.tensors
            found |= {(id(held), place): (held, place) for place in range(len(held))}
    return list(found.values())


def tensors_of(module: nn.Module) -> list[Tensor]:
    """The tensors that a module computes with now; see [`leaves`]."""
    return [container[key] for container, key in leaves(module)]


def kind_of(module: nn.Module, names: Sequence[str] = ()) -> str:
    """
    A digest of what code for a module depends on besides its class's source and its configuration: the classes and
    plain attributes of its parts, and the layouts of its tensors.
    """
    parts = [*names, *traits_of(module), *map(_layout, tensors_of(module))]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def traits_of(module: nn.Module) -> list[object]:
    """The classes and plain attributes of a module's parts."""
    found: list[object] = []
    for path, part in module.named_modules():
        # Linear layers change their classes in rounds.
        kind = nn.Linear if isinstance(part, nn.Linear) else type(part)
        own = {
            name: value for name, value in vars(part).copy().items() if name[:1] != "_" and name not in _NOT_OF_A_KIND
        }
        plain = sorted((name, value) for name, value in own.items() if _is_plain(value))
        found += (path, kind.__module__, kind.__qualname__, plain)
    return found


def flattened(value: Any, tensors: list[Tensor]) -> Any:
    """
    Appends the tensors of an argument to `tensors`.

    Returns:
        What remains, of plain values and lists. Calls with the same remainder run the same code.

    Raises:
        [`CannotBeBuilt`]: if it is, or contains, an object that a program cannot get.
    """
    # In the order of how many there are: each layer of each round comes here.
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        forms = forms_of(value)
        tensors.extend(forms.values())
        return ["tensor", *forms]
    if isinstance(value, (list, tuple)):
        return ["list", *[flattened(each, tensors) for each in value]]
    if isinstance(value, dict):
        return ["dict", *[[name, flattened(each, tensors)] for name, each in value.items()]]
    if isinstance(value, TensorHolder):
        held = value.tensors()
        tensors.extend(held)
        return [type(value).__name__, len(held)]
    raise CannotBeBuilt(f"an argument is a {type(value).__name__}")


def refilled(value: Any, tensors: Iterator[Tensor], rows: int) -> Any:
    """An argument as [`flattened`] got it, with other tensors."""
    if isinstance(value, Tensor):
        tensor = next(tensors)
        set_forms(tensor, {group: next(tensors) for group in forms_of(value)})
        return tensor
    if isinstance(value, (list, tuple)):
        return type(value)([refilled(each, tensors, rows) for each in value])
    if isinstance(value, dict):
        return {name: refilled(each, tensors, rows) for name, each in value.items()}
    if isinstance(value, TensorHolder):
        return value.with_tensors([next(tensors) for _ in value.tensors()], rows)
    return value


class Program:
    """
    A compiled function. It is called with the tensors of the module first, and then with those of the arguments.

    Args:
        file (`Path`): the package that torch wrote.
        description (`dict`): what [`build`] returned for it.
    """

    def __init__(self, file: Path, description: dict[str, Any]):
        self.remainder, self._has_tuple = description["remainder"], bool(description["has_tuple"])
        self._inputs = [(_DTYPES[dtype], shape, stride) for dtype, shape, stride in description["inputs"]]
        self._ranges = {name: (low, high) for name, low, high in description["ranges"]}
        self.leaves = int(description["leaves"])
        self._run = _loaded(file)
        self._fitted: object = None
        # Torch waits for a program that runs without letting other threads of Python go on, which it may need.
        self._lock = threading.Lock()

    def suits(self, module_tensors: list[Tensor]) -> bool:
        """Whether a module's tensors have the layout that the program was compiled for."""
        return len(module_tensors) == self.leaves and self._fit(self._inputs[: self.leaves], module_tensors)

    def fits(self, tensors: list[Tensor]) -> bool:
        """Whether the tensors of the arguments have it. The program itself would not notice, and read elsewhere."""
        layouts = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
        # All layers of a round get tensors of the same layout.
        if layouts == self._fitted:
            return True
        fits = len(tensors) == len(self._inputs) - self.leaves and self._fit(self._inputs[self.leaves :], tensors)
        if fits:
            self._fitted = layouts
        return fits

    def __call__(self, tensors: list[Tensor]) -> Any:
        with self._lock:
            found = self._run(tensors)
        return tuple(found) if self._has_tuple else found[0]

    def _fit(self, inputs: list[tuple[Any, list[Any], list[Any]]], tensors: list[Tensor]) -> bool:
        values: dict[str, int] = {}
        for (dtype, shape, stride), tensor in zip(inputs, tensors):
            if tensor.dtype != dtype or tensor.dim() != len(shape) or tensor.device.type != "cpu":
                return False
            # A subclass, such as a quantised weight, keeps its values elsewhere.
            if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter):
                return False
            for want, step, size, found in zip(shape, stride, tensor.shape, tensor.stride()):
                if not _matches(want, size, values) or (want != 1 and not _matches(step, found, values)):
                    return False
        return all(low <= values[name] <= high for name, (low, high) in self._ranges.items() if name in values)


def _loaded(file: Path) -> Callable[[list[Tensor]], Any]:
    """
    What runs a package: torch unpacks the file and loads the library. `aoti_load_package` does the same, but before it
    asks a compiler what this processor has, to warn of another. That takes a second, and runs what is in the folder of
    torch's compiler. A shelf has compared the processor already.
    """
    try:
        run: Any = torch._C._aoti.AOTIModelPackageLoader(str(file), "model", False, 1, -1).boxed_run
    except (AttributeError, TypeError):
        # In another version of torch, which is slower to load it, and loads it all the same.
        run = torch._inductor.aoti_load_package(str(file)).loader.boxed_run
    return run


def build(
    function: Callable[..., Any],
    module: nn.Module,
    examples: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    options: dict[str, Any],
    file: Path,
    others: Sequence[nn.Module] = (),
) -> dict[str, Any]:
    """
    Compiles `function(module, *args, **kwargs)` without gradients.

    Args:
        function (`Callable`): the function. It returns a tensor, or a tuple of tensors.
        module (`torch.nn.Module`): the module.
        examples (sequence of two pairs): arguments and keyword arguments of two calls. Sizes in which they differ may
            be any number later.
        options (`dict`): options of inductor.
        file (`Path`): where to write the package; its name ends in `.pt2`.
        others (sequence of `torch.nn.Module`): other modules that the program is for. Their graphs are compared.

    Returns:
        `dict`: a description of the program's inputs, for [`Program`], that fits into JSON.

    Raises:
        [`CannotBeBuilt`]: if the program would hold a tensor, could not check its inputs, or torch cannot export it.
    """
    exported, has_tuple, remainder = _exported(function, module, examples)
    for other in others:
        if str(_exported(function, other, examples)[0].graph) != str(exported.graph):
            raise CannotBeBuilt("modules of one kind have different graphs")
    inputs, names = [], set[str]()
    given = exported.graph_signature.user_inputs
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in given:
            value = node.meta["val"]
            shape, stride = [_linear(size, names) for size in value.shape], list(value.stride())
            # The only row of a dimension has no neighbour.
            steps = [1 if size == 1 else _linear(step, names) for size, step in zip(shape, stride)]
            inputs.append((str(value.dtype).removeprefix("torch."), shape, steps))
    ranges = [
        (str(symbol), max(0, int(bounds.lower)), min(2**62, int(bounds.upper)) if bounds.upper.is_Integer else 2**62)
        for symbol, bounds in exported.range_constraints.items()
    ]
    with warnings.catch_warnings():
        # Torch warns of its own copies of what was exported.
        warnings.filterwarnings("ignore", ".*treespec, LeafSpec.* is deprecated", FutureWarning)
        torch._inductor.aoti_compile_and_package(exported, package_path=str(file), inductor_configs=options)
    return {
        "leaves": len(leaves(module)),
        "inputs": inputs,
        "ranges": ranges,
        "remainder": remainder,
        "has_tuple": has_tuple,
    }


def _exported(
    function: Callable[..., Any], module: nn.Module, examples: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> tuple[Any, bool, Any]:
    flat: list[list[Tensor]] = [[], []]
    remainder, other = (flattened([list(args), kwargs], each) for (args, kwargs), each in zip(examples, flat))
    if remainder != other:
        raise CannotBeBuilt("its calls differ in more than tensors")
    own = tensors_of(module)
    sizes = [
        {dim: torch.export.Dim.DYNAMIC for dim, size in enumerate(first.shape) if size != second.shape[dim]}
        for first, second in zip(*flat)
    ]
    returned: list[bool] = []
    wrapper = _Call(function, module, examples[0], lambda found: returned.append(not torch.is_tensor(found)))
    with torch.no_grad():
        exported = torch.export.export(
            wrapper,
            ([each.detach() for each in own], [each.detach() for each in flat[0]]),
            dynamic_shapes={"own": [None] * len(own), "tensors": sizes},
            strict=False,
        )
    if any(tensor.numel() > _LONGEST_CONSTANT for tensor in exported.constants.values() if torch.is_tensor(tensor)):
        raise CannotBeBuilt("it computes with a tensor that is no parameter, buffer or argument")
    return exported, returned[-1], remainder


class _Call(nn.Module):
    """A call as `torch.export` sees it: a function of tensors alone."""

    def __init__(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        example: tuple[Any, Any],
        on_output: Callable[[Any], None],
    ):
        super().__init__()
        # In a list, because as an attribute the module would be a part of this one. And what the function returns is
        # reported, because `torch.export` takes changes of attributes back.
        self._held: list[Any] = [function, module, example, on_output]

    def forward(self, own: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        function, module, (args, kwargs), on_output = self._held
        given = iter(tensors)
        rows: Any = tensors[0].shape[1] if tensors[0].dim() > 1 else 1
        args, kwargs = refilled(tuple(args), given, rows), refilled(kwargs, given, rows)
        places = leaves(module)
        before = [container[key] for container, key in places]
        cached = [(each, dict(each)) for each in _cached(module)]
        try:
            for (container, key), tensor in zip(places, own):
                container[key] = tensor
            # What a module keeps from an earlier call is computed in the graph.
            for each, _ in cached:
                each.clear()
            found = function(module, *args, **kwargs)
        finally:
            for (container, key), tensor in zip(places, before):
                container[key] = tensor
            for each, kept in cached:
                each.clear()
                each.update(kept)
        on_output(found)
        outputs = [found] if torch.is_tensor(found) else list(found)
        if not all(map(torch.is_tensor, outputs)):
            raise CannotBeBuilt("it returns more than tensors")
        return outputs


def _cached(module: nn.Module) -> Iterator[MutableMapping[Any, Tensor]]:
    """Dictionaries of tensors that parts of a module keep from earlier calls."""
    for part in module.modules():
        for name, value in vars(part).items():
            holders = [value]
            if type(value).__module__.startswith(__name__.partition(".")[0]) and not isinstance(value, nn.Module):
                holders += vars(value).values() if hasattr(value, "__dict__") else []
            for each in holders:
                is_own = name not in ("_parameters", "_buffers", "_modules")
                if is_own and isinstance(each, dict) and each and all(map(torch.is_tensor, each.values())):
                    yield each


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _layout(tensor: Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride())


def _linear(size: Any, names: set[str]) -> int | list[Any]:
    """A size or stride as a number, or as `[factor, name, summand]` of a name that stands for any number."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if expression.is_Integer:
        return int(expression)
    symbols = list(expression.free_symbols)
    if len(symbols) == 1:
        symbol = symbols[0]
        factor = expression.coeff(symbol)
        summand = expression - factor * symbol
        if factor.is_Integer and factor > 0 and summand.is_Integer:
            names.add(str(symbol))
            return [int(factor), str(symbol), int(summand)]
    raise CannotBeBuilt(f"a size of its inputs is {expression}")


def _matches(want: Any, size: int, values: dict[str, int]) -> bool:
    if type(want) is int:
        return want == size
    factor, name, summand = want
    value, rest = divmod(size - summand, factor)
    return not rest and values.setdefault(name, value) == value
