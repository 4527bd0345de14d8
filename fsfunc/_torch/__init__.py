"""All private torch API that fsfunc uses; ``tests/test_torch.py`` names what breaks.

versions.py         the tested versions of torch, and what differs among them
internals.py graph.py   storages, modules, the compiler; the autograd graph
dispatch.py functorch.py   modes and operators; levels of torch.func
views.py            views of memory, in any dtype, conjugated or negated
fake_tensors.py     which tensors are fake

Not exported here, as few modules use them:

fake_modes.py fake_results.py   modes of fake tensors; results of operators on them
formulas.py         decompositions of operators, and what writes without writing
products.py         nodes of matrix products and lookups in the autograd graph
partitions.py       what the compiler keeps for a backward
operator_graphs.py  a step's operators and collectives as one graph
scalar_graphs.py    arithmetic of scalars, taken out of such a graph
"""

# First: of a torch that nobody has tried it warns before an import of its may fail.
import fsfunc._torch.versions  # isort: split

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fsfunc._torch.dispatch import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    GROUPED_PRODUCT,
    Args,
    DispatchMode,
    Kwargs,
    OperatorMode,
    OpOverload,
    OpOverloadPacket,
    TorchFunction,
    UnheardMode,
    Writes,
    active_modes,
    arguments_of,
    beneath_all_modes,
    beneath_modes,
    dispatch_modes,
    gives_views,
    is_rounded,
    is_view,
    makes_memory,
    modes_of_ranks,
    outside_function_modes,
    outside_modes,
    plain_tensors,
    tells,
    tensors_in,
    value_of,
    written,
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
    differentiated_at,
    forward_ad_active,
    forward_ad_on,
    forward_ad_state,
    functorch_active,
    is_wrapped,
    mapped_at,
    mapped_dim,
    mapping_levels,
    one_row,
    outside_transforms,
    plainly,
    set_forward_ad_state,
    shared_forward_ad,
    tangents_of,
    transforms_active,
    unwrapped,
)
from fsfunc._torch.graph import (
    LOOKING,
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
    nearness,
    next_sequence_number,
    output_shape,
    reaches_leaves,
    reverse_mode_around,
    saved_handles,
    saved_norms,
    saved_tensors,
    saved_tensors_hooked,
    saves_early,
    sequence_number,
    takes_tangents,
)
from fsfunc._torch.internals import (
    alike,
    compiler_at_work,
    compiler_stance,
    default_store,
    device_threads,
    group_timeout,
    hook_tables,
    is_compiled,
    is_compiled_function,
    is_of_compiler,
    keep_process_groups,
    outside_graphs,
    set_compiler_stance,
    set_device_threads,
    set_tables,
    storage,
    storage_key,
    storage_uses,
    tables,
    uses_of,
)
from fsfunc._torch.views import Place, place_of, view_at
