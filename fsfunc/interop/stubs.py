"""Placeholders in a copied module, for tensors and units; and what units are given.

`structures` copies a module without its tensors (`AbsentTensor` stands for each) and
puts a call of a unit in place of the forward of each module that is one (`UnitStub`).

A unit runs on a copy of its own. A hook that a forward registers on a module within a
unit is not on that copy: what it would be given comes out of the unit (`record_calls`),
and it runs on that afterwards (`run_late_hooks`).

A cache, such as one of keys and values, fills as a module runs. With gradients it is
left out, as under a checkpoint: a unit that runs again would fill it twice. Without,
and where every unit runs here and once, it goes through units as it is
(`wrap_objects`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from fsfunc import _torch, tree
from fsfunc.core.frames import frame
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import PyTree

_Outer = TypeVar("_Outer")  # what a stub's call needs of the copy around it


class AbsentTensor:
    """A placeholder of a tensor; any use raises."""

    __slots__ = ("name", "shape", "dtype", "__weakref__")
    name: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.name, self.shape, self.dtype = name, shape, dtype

    def __repr__(self) -> str:
        return f"Absent({self.name!r})"

    def __copy__(self) -> AbsentTensor:
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> AbsentTensor:
        return self

    def __getattr__(self, attribute: str) -> NoReturn:
        # Protocols, such as copy's, ask for special names and take a no for an answer.
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"{self.name!r} is read where it is not, such as a parameter that is kept "
            "in a list: read it as the attribute that registers it"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        values = [*args, *(kwargs or {}).values()]
        # Of torch.cat and the like, in a list.
        values += [y for x in values if isinstance(x, list | tuple) for y in x]
        next(x for x in values if isinstance(x, AbsentTensor))._refuse()


def _refuse_operator(self: AbsentTensor, *_: Any) -> NoReturn:
    self._refuse()


for _name in (
    "add sub mul truediv matmul pow radd rsub rmul rtruediv rmatmul "
    "getitem setitem len iter neg bool float int"
).split():
    # Python looks operators up on the class, so `__getattr__` does not see them.
    setattr(AbsentTensor, f"__{_name}__", _refuse_operator)


class UnitStub:
    """A mixin for a module that is a unit: its forward calls the unit."""

    def __init_subclass__(cls, **_: Any) -> None:
        # A library may register subclasses of its modules: this is no new kind of one.
        pass

    def forward(self, *args: Any, **keywords: Any) -> Any:
        call, outer = self.__dict__["_fsfunc"]
        return call(outer, self, args, keywords)


_STUB_CLASSES: dict[type, type] = {}


def make_stub(
    m: nn.Module, call: Callable[[_Outer, nn.Module, Any, Any], Any], outer: _Outer
) -> None:
    """Makes ``m``, a module of a copy, run ``call(outer, m, args, keywords)``.

    That takes the place of its forward. Its class becomes a subclass of its class, so
    that ``isinstance`` says what it said.
    """
    cls = type(m)
    if cls not in _STUB_CLASSES:
        attributes = {
            k: getattr(cls, k) for k in ("__module__", "__qualname__", "__doc__")
        }
        make_class: Any = type(cls)  # its metaclass
        _STUB_CLASSES[cls] = make_class(cls.__name__, (UnitStub, cls), attributes)
    m.__class__ = _STUB_CLASSES[cls]
    m.__dict__["_fsfunc"] = call, outer
    for hooks in _torch.hook_tables(m, before=True):
        hooks.clear()  # they run inside the unit: some compute its weights


Hook: TypeAlias = Callable[[nn.Module, Any, Any], Any]
ModuleCalls: TypeAlias = list[tuple[str, Any, Any]]
"""Calls of modules: the path of each, its inputs and its output."""


class LateHooks:
    """Forward hooks that were registered within a unit as the module ran."""

    def __init__(self, unit: nn.Module):
        inner = [(path, all_hook_tables(m)) for path, m in unit.named_modules() if path]
        self._known_keys = [(path, t, [set(x) for x in t]) for path, t in inner]
        self._tables = [table for _, tables in inner for table in tables]
        self._sizes = list(map(len, self._tables))

    def find_added(self) -> dict[str, list[Hook]]:
        """Returns the hooks, by the path of the module that they are registered on.

        Raises:
            RuntimeError: hooks of another kind, that the unit alone could run.
        """
        added: dict[str, list[Hook]] = {}
        # The usual case, at the cost of some lengths in every call.
        if list(map(len, self._tables)) == self._sizes:
            return added
        for path, tables, known_keys in self._known_keys:
            forward_hooks, *other_hooks = (
                [hook for key, hook in table.items() if key not in known]
                for table, known in zip(tables, known_keys, strict=True)
            )
            if any(other_hooks):
                raise RuntimeError(
                    f"the module hangs a hook on {path!r} within a unit as it runs, "
                    "which the unit alone could run: hang it there before from_module, "
                    "or make a unit of what is around both"
                )
            if forward_hooks:
                added[path] = forward_hooks
        return added


def all_hook_tables(m: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Returns the tables of a module's hooks: that of plain forward hooks first."""
    return [x for b in (False, True) for x in _torch.hook_tables(m, before=b)]


def record_calls(m: nn.Module, paths: Sequence[str]) -> ModuleCalls:
    """Returns a list that fills with the calls of the modules at these paths."""
    calls: ModuleCalls = []
    for path in paths:

        def record(_: nn.Module, inputs: Any, output: Any, path: str = path) -> None:
            calls.append((path, inputs, output))

        m.get_submodule(path).register_forward_hook(record)
    return calls


def run_late_hooks(
    m: nn.Module, hooks: Sequence[Hook], inputs: Any, output: Any
) -> None:
    """Runs hooks on what a module was given and returned on a unit's copy.

    Raises:
        RuntimeError: one changes the output, which the unit has used by then.
    """
    for hook in hooks:
        if hook(m, inputs, output) is not None:
            raise RuntimeError(
                f"a hook that was hung on a {type(m).__name__} within a unit, as the "
                "module ran, changes what it returns: hang it there before from_module"
            )


def check_no_hidden(values: PyTree, title: str) -> bool:
    """Raises if an object in a tree hides tensors, and returns whether one may.

    A transform does not see these tensors: it would neither move nor differentiate
    them.

    Returns:
        whether there are objects that hide none as yet, and may later.

    Raises:
        TypeError: an object holds tensors that no tree shows. A cache of keys and
            values is one, which a second run of the unit would fill twice.
    """
    if type(values) is Tensor:
        return False
    parts = _PARTS if isinstance(values, tuple) and len(values) == 2 else ()
    try:
        leaves = tree.shown(values, title, "is given, or gives,", parts, is_sharded)
    except TypeError as error:
        raise TypeError(
            f"{error}. A cache that a model fills, of keys and values, works under "
            "torch.no_grad() alone: leave use_cache at its default, or False"
        ) from error
    return not tree.are_shown(leaves)


_PARTS = ("args", "keywords")


def may_fill_caches() -> bool:
    """Returns whether a cache may be filled: no unit called now will run again."""
    f = frame()
    is_traced = f.tracer is not None and not f.tracer.fills
    may_run_again = is_traced or f.staged or _torch.functorch_active()
    return not (may_run_again or torch.is_grad_enabled())


def turn_off_caches(objects: Iterable[Any]) -> None:
    """Turns off the cache in a module's settings; a call may ask for it again."""
    for x in objects:
        settings = getattr(x, "__dict__", {})
        if settings.get("use_cache") is True:
            settings["use_cache"] = False


class _WrappedObject:
    """An object that goes through a unit as it is, whatever it holds.

    Functions may hide tensors (`tree.shown`), so this is one that returns the object.
    """

    __slots__ = ("object",)

    def __init__(self, object: Any):
        self.object = object

    def __call__(self) -> Any:
        return self.object


def wrap_objects(values: PyTree) -> PyTree:
    """Wraps leaves that may hide tensors, which then go through a unit as they are."""
    leaves, treedef = tree.flatten(values, is_leaf=is_sharded)
    if tree.are_shown(leaves):
        return values
    leaves = [
        leaf if tree.are_shown([leaf]) else _WrappedObject(leaf) for leaf in leaves
    ]
    return tree.unflatten(treedef, leaves)


def unwrap_objects(values: PyTree) -> PyTree:
    """Undoes :func:`wrap_objects`."""
    leaves, treedef = tree.flatten(values, is_leaf=is_sharded)
    if not any(type(leaf) is _WrappedObject for leaf in leaves):
        return values
    leaves = [leaf() if type(leaf) is _WrappedObject else leaf for leaf in leaves]
    return tree.unflatten(treedef, leaves)
