"""All private torch API that fsfunc uses; ``tests/test_torch.py`` names what breaks.

Everything here was written against torch 2.13 and runs on 2.11.

internals.py graph.py   of storages, modules and the like; of the autograd graph
dispatch.py functorch.py   modes and operators; levels
fake_modes.py fake_results.py   fake tensors; results of theirs, faster
"""

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fsfunc._torch.dispatch import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    GROUPED_PRODUCT,
    DispatchMode,
    UnheardMode,
    active_modes,
    arguments_of,
    beneath_all_modes,
    beneath_modes,
    is_view,
    outside_function_modes,
    outside_modes,
    plain_tensors,
    tells_places,
    tells_value,
    value_of,
    written,
)
from fsfunc._torch.fake_modes import (
    abstract_mode,
    check_device,
    device_of,
    device_of_fake,
    fake_active,
    fake_mode,
    fake_mode_of,
    fake_of,
    forget_fakes,
    is_data_dependent,
    quiet_fakes,
    remembering_nothing,
    result_below,
)
from fsfunc._torch.fake_results import (
    fake_result,
    quick_fake,
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
    plainly,
    set_forward_ad_state,
    shared_forward_ad,
    transforms_active,
    unwrapped,
)
from fsfunc._torch.graph import (
    KINDS,
    LOOKING,
    current_node,
    first_factor,
    function_around,
    function_under_func,
    graph_nodes,
    has_two_products,
    hook_residuals,
    hook_saved,
    is_hooked,
    keeps_graph,
    kind_of,
    last_saving,
    leaf_behind,
    looked_up,
    next_sequence_number,
    output_shape,
    reaches_leaves,
    saved_tensors,
    saved_tensors_hooked,
    saving_function,
    seeds_a_backward,
    sequence_number,
    weight_edge,
)
from fsfunc._torch.internals import (
    compiler_at_work,
    compiler_stance,
    default_store,
    group_timeout,
    held,
    hook_tables,
    is_compiled,
    is_held_once,
    is_of_compiler,
    is_recompile_limit,
    keep_process_groups,
    set_compiler_stance,
    set_tables,
    storage,
    storage_key,
    storage_uses,
    tables,
    uses_of,
)
