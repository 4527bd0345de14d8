"""Sharded training as transforms of plain train steps.

``import fsfunc as ff``. ``help(ff.shard)`` and the like say all about a name, and
``python -m fsfunc names`` prints a sentence on each of these:

transforms
    unit value_and_grad value shard remat remat_calls accumulate pipeline donate offload
    precision jit SaveOnly SaveAllBut MinCut checkpoint_name Store
losses
    Weighted Summed Max
meshes and ranks
    make_mesh Mesh spmd axis_index axis_size local_batch ledger
collectives
    psum pmean pmax pmin all_gather psum_scatter all_to_all ppermute pbroadcast
    pcast start collective
layouts and states
    place init_state abstract_state TrainState unshard whole_leaves remesh
    lay_like reduce_like assume Sharded is_sharded Layout Flat Split Owned Own
    randn_like
messages of shard
    Gather Reduction QuantizedGather QuantizedReduction
    HierarchicalGather HierarchicalReduction powersgd error_feedback
optimizers
    Optimizer sgd sharded_adam lion adafactor muon shampoo lamb lars schedule_free
    from_torch chain partition masked join scale scale_by_trust_ratio
    add_decayed_weights clip_by_global_norm clip_by_value apply_if_finite loss_scale
    layerwise_loss_scale adascale master_weights stochastic_rounding step_in_backward
    ema swa eval_params
    constant linear cosine_decay warmup_cosine
    global_norm leaf_norms tree_sum tree_scale elementwise all_finite
local updates
    local_sgd LocalState slowmo gossip consensus graphs
pipelines
    schedules Costs bubble verify clock balance program
layers
    nn batch_norm init_statistics commit_statistics RunningStatistics
checkpoints
    save save_async load latest metadata consolidate export CheckpointError
modules and data
    from_module to_module by_size batches
plans
    plan estimate fits search recompute_points Hardware Level hardware measure_hardware
    show
transforms and tests of your own
    Interpretation transformed recording observe_gradients tree testing prove
    full_traceback
"""

from typing import TYPE_CHECKING

from fsfunc.runtime.lazy_imports import lazy_names as _later_names
from fsfunc.runtime.scopes import gc_paused as _uncollected

with _uncollected():  # it would walk all of torch, for as long as these take
    from fsfunc.comm.async_collectives import start
    from fsfunc.comm.collectives import (
        all_gather,
        all_to_all,
        pbroadcast,
        pmax,
        pmean,
        pmin,
        ppermute,
        psum,
        psum_scatter,
    )
    from fsfunc.comm.groups import axis_index, axis_size
    from fsfunc.comm.launch import local_batch, make_mesh, spmd
    from fsfunc.comm.mesh import Mesh
    from fsfunc.comm.traffic import ledger
    from fsfunc.comm.typed_maps import pcast
    from fsfunc.core.autodiff import value, value_and_grad
    from fsfunc.core.frames import Interpretation, recording, transformed
    from fsfunc.core.losses import Max, Summed, Weighted
    from fsfunc.core.units import unit
    from fsfunc.optim.adam import sharded_adam
    from fsfunc.optim.adaptive_scale import observe_gradients
    from fsfunc.optim.optimizer import Optimizer
    from fsfunc.optim.reductions import (
        all_finite,
        global_norm,
        leaf_norms,
        tree_scale,
        tree_sum,
    )
    from fsfunc.optim.schedules import (
        constant,
        cosine_decay,
        join,
        linear,
        warmup_cosine,
    )
    from fsfunc.optim.transformations import (
        add_decayed_weights,
        chain,
        clip_by_global_norm,
        clip_by_value,
        scale,
    )
    from fsfunc.runtime.memory_spaces import Store
    from fsfunc.sharded.layout import Flat, Layout, Owned, Split
    from fsfunc.sharded.leaf import Sharded, is_sharded
    from fsfunc.sharded.placements import Own
    from fsfunc.state.initialization import abstract_state, init_state
    from fsfunc.state.laid_like import lay_like, randn_like, reduce_like
    from fsfunc.state.placing import place
    from fsfunc.state.train_state import TrainState
    from fsfunc.state.unsharding import unshard
    from fsfunc.transforms.accumulation import accumulate
    from fsfunc.transforms.casting import precision
    from fsfunc.transforms.donation import donate
    from fsfunc.transforms.messages.wire import Gather, Reduction
    from fsfunc.transforms.offloading import offload
    from fsfunc.transforms.ownership import assume
    from fsfunc.transforms.policies import MinCut, SaveAllBut, SaveOnly, checkpoint_name
    from fsfunc.transforms.rematerialization import remat, remat_calls
    from fsfunc.transforms.sharding import shard

if TYPE_CHECKING:
    from fsfunc import nn, optim, show, testing, tree
    from fsfunc.checkpoint.exporting import export
    from fsfunc.checkpoint.finding import latest, metadata
    from fsfunc.checkpoint.loading import load
    from fsfunc.checkpoint.safetensors import consolidate
    from fsfunc.checkpoint.saving import save, save_async
    from fsfunc.checkpoint.stored import CheckpointError
    from fsfunc.comm.collective_pairs import collective
    from fsfunc.comm.tracebacks import full_traceback
    from fsfunc.data.loader import batches
    from fsfunc.interop.modules import from_module, to_module
    from fsfunc.interop.patterns import by_size
    from fsfunc.nn.statistics import (
        RunningStatistics,
        batch_norm,
        commit_statistics,
        init_statistics,
    )
    from fsfunc.optim.adaptive_scale import adascale
    from fsfunc.optim.averaging import ema, eval_params, schedule_free, swa
    from fsfunc.optim.backward_steps import step_in_backward
    from fsfunc.optim.descent import lion, sgd
    from fsfunc.optim.elements import elementwise
    from fsfunc.optim.factored import adafactor
    from fsfunc.optim.layerwise import lamb, lars, scale_by_trust_ratio
    from fsfunc.optim.loss_scaling import (
        apply_if_finite,
        layerwise_loss_scale,
        loss_scale,
    )
    from fsfunc.optim.masking import masked, partition
    from fsfunc.optim.matrix.orthogonal_momentum import muon
    from fsfunc.optim.matrix.preconditioning import shampoo
    from fsfunc.optim.torch_optimizers import from_torch
    from fsfunc.optim.widening import master_weights, stochastic_rounding
    from fsfunc.pipelining import schedules
    from fsfunc.pipelining.pipelines import pipeline
    from fsfunc.pipelining.stage_plans import balance
    from fsfunc.pipelining.timing import Costs, bubble, clock
    from fsfunc.pipelining.verification import verify
    from fsfunc.planning import hardware
    from fsfunc.planning.allocation import fits
    from fsfunc.planning.calibration import measure_hardware
    from fsfunc.planning.estimation import estimate
    from fsfunc.planning.machines import Hardware, Level
    from fsfunc.planning.planner import plan
    from fsfunc.planning.recomputation import recompute_points
    from fsfunc.planning.stack_search import search
    from fsfunc.state.leaf_by_leaf import whole_leaves
    from fsfunc.state.remeshing import remesh
    from fsfunc.testing.proofs import prove
    from fsfunc.tracing.tracer import program
    from fsfunc.transforms.compilation import jit
    from fsfunc.transforms.local import graphs
    from fsfunc.transforms.local.averaging import LocalState, consensus
    from fsfunc.transforms.local.gossiping import gossip
    from fsfunc.transforms.local.local_updates import local_sgd
    from fsfunc.transforms.local.slow_momentum import slowmo
    from fsfunc.transforms.messages.encodings import (
        QuantizedGather,
        QuantizedReduction,
    )
    from fsfunc.transforms.messages.hierarchy import (
        HierarchicalGather,
        HierarchicalReduction,
    )
    from fsfunc.transforms.messages.low_rank import powersgd
    from fsfunc.transforms.messages.residuals import error_feedback

__version__ = "0.1.0"

# What a checker takes for public; at run time `help` and `*` go by the names there are.
if TYPE_CHECKING:
    __all__ = [
        "abstract_state",
        "accumulate",
        "adafactor",
        "adascale",
        "add_decayed_weights",
        "all_finite",
        "all_gather",
        "all_to_all",
        "apply_if_finite",
        "assume",
        "axis_index",
        "axis_size",
        "balance",
        "batch_norm",
        "batches",
        "bubble",
        "by_size",
        "chain",
        "checkpoint_name",
        "CheckpointError",
        "clip_by_global_norm",
        "clip_by_value",
        "clock",
        "collective",
        "commit_statistics",
        "consensus",
        "consolidate",
        "constant",
        "cosine_decay",
        "Costs",
        "donate",
        "elementwise",
        "ema",
        "error_feedback",
        "estimate",
        "eval_params",
        "export",
        "fits",
        "Flat",
        "from_module",
        "from_torch",
        "full_traceback",
        "Gather",
        "global_norm",
        "gossip",
        "graphs",
        "Hardware",
        "hardware",
        "HierarchicalGather",
        "HierarchicalReduction",
        "init_state",
        "init_statistics",
        "Interpretation",
        "is_sharded",
        "jit",
        "join",
        "lamb",
        "lars",
        "latest",
        "lay_like",
        "layerwise_loss_scale",
        "Layout",
        "leaf_norms",
        "ledger",
        "Level",
        "linear",
        "lion",
        "load",
        "local_batch",
        "local_sgd",
        "LocalState",
        "loss_scale",
        "make_mesh",
        "masked",
        "master_weights",
        "Max",
        "measure_hardware",
        "Mesh",
        "metadata",
        "MinCut",
        "muon",
        "nn",
        "optim",
        "observe_gradients",
        "offload",
        "Optimizer",
        "Own",
        "Owned",
        "partition",
        "pbroadcast",
        "pcast",
        "pipeline",
        "place",
        "plan",
        "pmax",
        "pmean",
        "pmin",
        "powersgd",
        "ppermute",
        "precision",
        "program",
        "prove",
        "psum",
        "psum_scatter",
        "QuantizedGather",
        "QuantizedReduction",
        "randn_like",
        "recompute_points",
        "recording",
        "reduce_like",
        "Reduction",
        "remat",
        "remesh",
        "remat_calls",
        "RunningStatistics",
        "save",
        "save_async",
        "SaveAllBut",
        "SaveOnly",
        "scale",
        "scale_by_trust_ratio",
        "schedule_free",
        "schedules",
        "search",
        "sgd",
        "shampoo",
        "shard",
        "Sharded",
        "sharded_adam",
        "show",
        "slowmo",
        "Split",
        "spmd",
        "start",
        "step_in_backward",
        "stochastic_rounding",
        "Store",
        "Summed",
        "swa",
        "testing",
        "to_module",
        "TrainState",
        "transformed",
        "tree",
        "tree_scale",
        "tree_sum",
        "unit",
        "unshard",
        "value",
        "value_and_grad",
        "verify",
        "warmup_cosine",
        "Weighted",
        "whole_leaves",
    ]

# What only some programs use comes when it is asked for: imports are paid by all.
_LATER = {
    name: module
    for module, names in {
        "fsfunc.checkpoint.exporting": "export",
        "fsfunc.checkpoint.finding": "latest metadata",
        "fsfunc.checkpoint.loading": "load",
        "fsfunc.checkpoint.safetensors": "consolidate",
        "fsfunc.checkpoint.saving": "save save_async",
        "fsfunc.checkpoint.stored": "CheckpointError",
        "fsfunc.comm.collective_pairs": "collective",
        "fsfunc.comm.tracebacks": "full_traceback",
        "fsfunc.data.loader": "batches",
        "fsfunc.interop.modules": "from_module to_module",
        "fsfunc.interop.patterns": "by_size",
        "fsfunc.nn": "nn",
        "fsfunc.nn.statistics": "RunningStatistics batch_norm commit_statistics "
        "init_statistics",
        "fsfunc.optim.adaptive_scale": "adascale",
        "fsfunc.optim.averaging": "ema eval_params schedule_free swa",
        "fsfunc.optim.backward_steps": "step_in_backward",
        "fsfunc.optim.descent": "lion sgd",
        "fsfunc.optim.elements": "elementwise",
        "fsfunc.optim.factored": "adafactor",
        "fsfunc.optim.layerwise": "lamb lars scale_by_trust_ratio",
        "fsfunc.optim.loss_scaling": "apply_if_finite layerwise_loss_scale loss_scale",
        "fsfunc.optim.masking": "masked partition",
        "fsfunc.optim.matrix.orthogonal_momentum": "muon",
        "fsfunc.optim.matrix.preconditioning": "shampoo",
        "fsfunc.optim.torch_optimizers": "from_torch",
        "fsfunc.optim.widening": "master_weights stochastic_rounding",
        "fsfunc.pipelining.pipelines": "pipeline",
        "fsfunc.pipelining.schedules": "schedules",
        "fsfunc.pipelining.stage_plans": "balance",
        "fsfunc.pipelining.timing": "Costs bubble clock",
        "fsfunc.pipelining.verification": "verify",
        "fsfunc.planning.allocation": "fits",
        "fsfunc.planning.calibration": "measure_hardware",
        "fsfunc.planning.estimation": "estimate",
        "fsfunc.planning.hardware": "hardware",
        "fsfunc.planning.machines": "Hardware Level",
        "fsfunc.planning.planner": "plan",
        "fsfunc.planning.recomputation": "recompute_points",
        "fsfunc.planning.stack_search": "search",
        "fsfunc.show": "show",
        "fsfunc.state.leaf_by_leaf": "whole_leaves",
        "fsfunc.state.remeshing": "remesh",
        "fsfunc.testing": "testing",
        "fsfunc.testing.proofs": "prove",
        "fsfunc.tracing.tracer": "program",
        "fsfunc.transforms.compilation": "jit",
        "fsfunc.transforms.local.averaging": "LocalState consensus",
        "fsfunc.transforms.local.gossiping": "gossip",
        "fsfunc.transforms.local.graphs": "graphs",
        "fsfunc.transforms.local.local_updates": "local_sgd",
        "fsfunc.transforms.local.slow_momentum": "slowmo",
        "fsfunc.transforms.messages.encodings": "QuantizedGather QuantizedReduction",
        "fsfunc.transforms.messages.hierarchy": "HierarchicalGather "
        "HierarchicalReduction",
        "fsfunc.transforms.messages.low_rank": "powersgd",
        "fsfunc.transforms.messages.residuals": "error_feedback",
    }.items()
    for name in names.split()
}

# Not for checkers, to which it would say that any name is there: they read the block
# above, and a misspelt one is an error.
if not TYPE_CHECKING:
    __getattr__, __dir__ = _later_names(__name__, _LATER)
