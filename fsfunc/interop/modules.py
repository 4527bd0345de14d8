"""``from_module`` and ``to_module``: an nn.Module as a function, and back.

``from_module`` takes the module's tensors out of it, selects its units, and makes a
`Structure` of the rest, which ``apply`` calls with tensors of the caller.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from fsfunc.comm.tracebacks import api_boundary
from fsfunc.interop.layer_plans import make_plan
from fsfunc.interop.module_tensors import collect_tensors, computed_tensors
from fsfunc.interop.patterns import Units, complete_units, plan_of_model, select_units
from fsfunc.interop.structures import Structure
from fsfunc.interop.stubs import check_no_hidden, may_fill_caches
from fsfunc.interop.whole_rows import taking_whole_rows
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.structure import nearest


@api_boundary
def from_module(
    module: nn.Module,
    units: Units = (),
    *,
    plan: Mapping[str, str | tuple[str, str]] | str | None = None,
    axis: str | None = None,
) -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, Tensor]]:
    """Returns ``(apply, params, buffers)``: a module as a function of its tensors.

    ``apply(params, buffers, *args, **keywords)`` returns the module's output. The
    module is neither kept nor changed; ``apply`` may run many times at once. Hooks run,
    on copies: a unit's forward hooks after its forward, outside the unit, all others
    inside.

    A Hugging Face model skips its cache of keys and values while gradients are on, as
    under a checkpoint, since a unit that runs again would fill it twice. Under
    ``torch.no_grad()`` it is filled, sharded too; a pipeline's stages never do.

    Args:
        module: any nn.Module, on any device (``"meta"`` too); ``apply`` is in the mode,
            ``train()`` or ``eval()``, that it is in now.
        units: which of its modules are units, by class; by name (``"model.layers.*"``,
            where ``*`` is one component and ``**`` any number) or compiled regular
            expression; by size (:func:`by_size`, or its number); by a predicate of
            ``(name, module)``; or several of these. Modules beside them that own
            parameters, or are torch's dropouts or RReLU in train mode, become units
            too; others that draw random numbers draw the same on every mesh only if
            they are made units. A unit has the module's name; ``apply.units`` lists
            them.
        plan: by pattern of names (``*`` is one component), how a layer is split over
            ``axis``, as in ``{"model.layers.*.self_attn.[qkv]_proj": "column",
            "model.layers.*.self_attn.o_proj": "row"}``; or ``"auto"``, the plan that a
            model of transformers has (``base_model_tp_plan`` of its configuration). A
            Linear is split by its output features (``"column"``) or by its input
            features (``"row"``); both are in one unit. As under torch's
            ``parallelize_module``, the forward between them sees this rank's sizes, and
            takes each feature, or each head, by itself: it says ``x.view(*shape, -1,
            head_dim)``, not a number of heads. A run on shapes alone checks that. A
            module between them with parameters, such as a norm over a head, is
            ``"whole"``. ``"column_gathered"`` is whole for what follows, such as
            logits. ``"vocab"`` is an Embedding.
            ``"expert"`` is a module of experts that are stacked along dim 0 of its
            parameters, as those of transformers (``"**.experts"``): they are spread
            over ``axis``, one of the data or not, or over that of ``("expert",
            "data")``, and tokens travel to them; nobody is dropped. ``apply.layouts``
            are the ``layouts=`` of ``ff.place`` and ``ff.init_state``; parameters that
            come whole run as on one device.
        axis: the axis of the mesh that the plan splits over.

    Returns:
        ``apply``; ``params``, what is trained, by state-dict names, tied ones once;
        ``buffers``, what runs need besides: buffers, and parameters that do not require
        grad, which so get no gradient, no moment and no reduction. Both share memory
        with the module. With ``mutable=True``, ``apply`` returns ``(output, buffers)``,
        these with what the forward wrote: under ``shard`` each rank's own, and under
        ``accumulate`` and ``pipeline`` each microbatch's own, as each starts from the
        buffers that were given (batch statistics over all are those of
        ``ff.batch_norm``). Attributes that the forward sets outside of units are then
        dropped after the call; without it they raise.

    Raises:
        ValueError: units that match nothing; parameters without a shape yet, or tied by
            their memory; a plan's pattern that matches no module, or one that another
            matches; a word that is none; a column layer without a row layer in its
            unit; "auto" of a model without a plan. Of ``apply``: missing, further or
            mis-shaped tensors; parameters that lie otherwise than planned.
        TypeError: a plan without an axis, or of what is no Linear, Embedding or stack
            of experts; a module that is wrapped (DataParallel, fully_shard, compile,
            script), or whose structure cannot be copied; functions in it, such as a
            patched forward or a hook, that hold the module by closure; parameters with
            hooks.
            Of ``apply``: a unit that is given tensors out of sight, such as a cache of
            keys and values, while gradients are on.
        RuntimeError: of ``apply``: a forward writes a buffer, or leaves an attribute
            changed, without ``mutable=True``; a unit leaves one changed, or one is set
            on a unit from outside; a parameter is changed, or a list that a unit is
            given; split features of a plan meet others of theirs, a number of all
            heads, whole parameters, or random numbers; heads that the axis does not
            divide; a torch.utils.checkpoint within, whose backward comes after the
            call.

    Cost: a copy of the structure, without tensors, for every call that runs at once
    (for every call, where attributes hold what cannot be put back, such as a random
    generator's state); of each buffer that a call reads a copy, and a comparison with
    it; in a unit's first call on data, of its parameters too, which tells whether the
    forward writes them. A parameter that a forward reads outside every unit is a unit
    call of its own. With a plan, as ``ff.nn.column_linear`` and ``row_linear``: layers
    that follow each other on one input share its sum, so that a decoder layer sends
    four all-reduces of an activation.
    Experts: four all-to-alls of their tokens, as ``ff.nn.expert_layer`` without a
    capacity; where the ranks' tokens are the same, each sends its share of them, and
    the results are gathered.

    Source: of plans, Shoeybi et al., Megatron-LM, 2019.

    >>> import torch, fsfunc as ff
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    >>> apply, params, buffers = from_module(model)
    >>> list(params), apply.units
    (['0.weight', '0.bias', '1.weight', '1.bias'], ('0', '1'))
    >>> y, new = apply(params, buffers, torch.ones(4, 2), mutable=True)
    >>> y.shape, new["1.num_batches_tracked"], buffers["1.num_batches_tracked"]
    (torch.Size([4, 2]), tensor(1), tensor(0))
    """
    tensors = collect_tensors(module)
    names = complete_units(module, select_units(module, units))
    if (plan is None) != (axis is None):
        raise TypeError(
            "plan= says which layers are split, and axis= over which axis of the mesh: "
            'give both, as in plan={"**.q_proj": "column"}, axis="model"'
        )
    words: Any = plan_of_model(module) if plan == "auto" else plan or {}
    layer_plan = make_plan(module, tensors, names, words, axis or "")
    structure = Structure(module, tensors, names, layer_plan)
    params = {name: x.detach() for name, x in tensors.params.items()}
    buffers = {name: x.detach() for name, x in tensors.frozen.items()}
    buffers |= {name: x.detach() for name, x in tensors.buffers.items()}
    shapes = _shapes(params), _shapes(buffers)
    frozen = tuple(tensors.frozen)

    def apply(
        params: Any, buffers: Any, /, *args: Any, mutable: bool = False, **keywords: Any
    ) -> Any:
        _check("params", params, shapes[0])
        _check("buffers", buffers, shapes[1])
        # Frozen parameters are among the buffers, as nothing is to differentiate,
        # update or reduce them. The module reads them as its parameters.
        all_params = {**params, **{name: buffers[name] for name in frozen}}
        with taking_whole_rows(args, keywords):
            out, written = structure.call(all_params, buffers, args, keywords, mutable)
        if not may_fill_caches():
            check_no_hidden(out, "the module")
        return (out, {**buffers, **written}) if mutable else out

    apply.units = tuple(n or type(module).__name__ for n in names)  # type: ignore
    apply.layouts = dict(layer_plan.layouts)  # type: ignore
    return apply, params, buffers


@api_boundary
def to_module(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """Returns a new module like ``module`` with these tensors; ties stay.

    The inverse of :func:`from_module`: state-dict names are those of ``module``.

    Args:
        module: gives the structure; it is not touched.
        params: whole tensors (``ff.unshard`` first), by name, of any dtype and device.
        buffers: as from_module gave them; by default the module's own.

    Raises:
        TypeError: a tensor that is sharded.
        ValueError: missing, further or mis-shaped tensors; none, where the module is on
            "meta".

    Cost: one copy of the tensors.

    >>> from torch import nn
    >>> model = nn.Linear(2, 1)
    >>> apply, params, _ = from_module(model)
    >>> double = to_module(model, {name: 2 * x for name, x in params.items()})
    >>> bool((double.weight == 2 * model.weight).all())
    True
    """
    tensors = collect_tensors(module)
    module_buffers = tensors.frozen | tensors.buffers  # as from_module returns them
    _check("params", params, _shapes(tensors.params))
    if buffers is None:
        buffers = module_buffers
        if any(x.is_meta for x in buffers.values()):
            raise ValueError(
                "the module is on 'meta', so that its buffers have no values: give "
                "buffers= too"
            )
    _check("buffers", buffers, _shapes(module_buffers))
    # deepcopy takes what the memo has for an object as its copy.
    memo: dict[int, Any] = {}
    for name, old in tensors.all.items():
        new = (params if name in params else buffers)[name]
        if is_sharded(new):
            raise TypeError(
                f"{name!r} is this rank's part: to_module(module, ff.unshard(params)) "
                "puts the parts together, on every rank"
            )
        x = new.detach().clone()
        if name in tensors.buffers:
            x.requires_grad_(old.requires_grad)
        else:
            x = nn.Parameter(x, requires_grad=old.requires_grad)
        memo[id(old)] = x
    # Computed by hooks of the old weights: the next forward computes them again.
    for _, x in computed_tensors(module):
        memo.setdefault(id(x), x.detach().clone())
    return copy.deepcopy(module, memo)


_Shapes: TypeAlias = dict[str, tuple[int, ...]]


def _shapes(tensors: Mapping[str, Tensor]) -> _Shapes:
    return {name: tuple(x.shape) for name, x in tensors.items()}


def _check(title: str, tensors: Mapping[str, Tensor], shapes: _Shapes) -> None:
    """Raises if the names or the shapes are not the module's."""
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"{title}: expected the dict of tensors by name that from_module returned, "
            f"got {type(tensors).__name__}"
        )
    if tensors.keys() != shapes.keys():
        missing = [name for name in shapes if name not in tensors][:1]
        further = [name for name in tensors if name not in shapes][:1]
        faults = [f"has no tensor {n!r} (near: {nearest(n, tensors)})" for n in missing]
        faults += [f"has, and the module has not, {name!r}" for name in further]
        raise ValueError(f"{title} {' and '.join(faults)}")
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(
                f"{title}: {name!r} has shape {tuple(tensors[name].shape)}, and "
                f"{shape} in the module"
            )
