"""All private torch API that fsfunc uses; ``tests/test_torch.py`` names what breaks.

Each name here has exact types, with these for what modes are given: ``OpOverload``,
``Args``, ``Kwargs``, ``TorchFunction``. A node is a ``torch.autograd.graph.Node``.

versions.py         the tested versions of torch, and what differs among them
internals.py graph.py   storages, modules, the compiler; the autograd graph
dispatch.py functorch.py   modes and operators; levels of torch.func
views.py            views of memory, in any dtype, conjugated or negated
fake_tensors.py     which tensors are fake

Not exported here, as few modules use them:

fake_modes.py fake_results.py   modes of fake tensors; results of operators on them
formulas.py         decompositions of operators; counterparts that do not write
products.py         nodes of matrix products and lookups in the autograd graph
partitions.py       what a compiled forward saves for its backward
operator_graphs.py  a step's operators and collectives as one graph
scalar_graphs.py    arithmetic of scalars, taken out of such a graph
"""

# First: of a torch that nobody has tried it warns before an import of its may fail.
import fsfunc._torch.versions  # isort: split

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fsfunc._torch.dispatch import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    EFFICIENT_ATTENTION,
    GROUPED_PRODUCT,
    Args,
    DispatchMode,
    HiddenFromCompile,
    Kwargs,
    OperatorMode,
    OpOverload,
    OpOverloadPacket,
    TorchFunction,
    WriteWatcher,
    active_modes,
    arguments_of,
    as_plain_tensors,
    beneath_all_modes,
    beneath_modes,
    data_dependence,
    dispatch_mode_count,
    gives_views,
    is_rounded,
    is_view,
    makes_memory,
    modes_around,
    modes_of_ranks,
    outside_function_modes,
    outside_modes,
    tensors_in,
    tensors_written,
    value_of,
)
from fsfunc._torch.fake_tensors import (
    device_of,
    fake_active,
    fake_mode,
    is_data_dependent,
    ready_for_threads,
)
from fsfunc._torch.functorch import (
    beneath_functorch,
    current_level,
    differentiation_level,
    first_row,
    forward_ad_active,
    forward_ad_enabled,
    forward_ad_state,
    functorch_active,
    is_wrapped,
    only_autograd_sees,
    outside_transforms,
    set_forward_ad_state,
    shared_forward_ad,
    tangents_of,
    transforms_active,
    unwrapped,
    vmap_dim,
    vmap_levels,
    vmap_levels_of,
)
from fsfunc._torch.graph import (
    INSPECTING,
    all_true,
    current_node,
    forbids_hooks,
    function_runs,
    graph_nodes,
    hides_tensors,
    hook_residuals,
    hook_saved,
    is_function_node,
    keeps_graph,
    next_sequence_number,
    norms_are_near,
    output_shape,
    outside_saved_tensors_hooks,
    reaches_leaves,
    reverse_mode_around,
    saved_handles,
    saved_norms,
    saved_tensors,
    saved_tensors_hooked,
    saves_before_filling,
    sequence_number,
    takes_tangents,
)
from fsfunc._torch.internals import (
    compiler_at_work,
    compiler_stance,
    default_store,
    group_timeout,
    hook_tables,
    is_compiled,
    is_compiled_function,
    is_compiler_error,
    likeness_check,
    never_free_process_groups,
    outside_graphs,
    set_compiler_stance,
    set_tensor_tables,
    set_uses_device_threads,
    storage,
    storage_key,
    storage_uses,
    storage_uses_by_key,
    tensor_tables,
    uses_device_threads,
)
from fsfunc._torch.views import Place, place_of, view_at
