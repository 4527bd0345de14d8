"""fsfunc: a plain train step, transformed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsfunc import hardware
from fsfunc.autodiff import Weighted, value_and_grad
from fsfunc.auxiliary import Summed
from fsfunc.comm.async_collectives import start
from fsfunc.comm.collectives import (
    all_gather,
    all_to_all,
    pbroadcast,
    pcast,
    pmax,
    pmean,
    ppermute,
    psum,
    psum_scatter,
)
from fsfunc.comm.groups import axis_index, axis_size
from fsfunc.comm.launch import local_batch, make_mesh, spmd
from fsfunc.comm.ledgers import ledger
from fsfunc.comm.mesh import Mesh
from fsfunc.conversions import lay_like, reduce_like, unshard
from fsfunc.data.loader import batches
from fsfunc.layout import Flat, Layout, Owned, Split
from fsfunc.machines import Hardware, Level
from fsfunc.noise import randn_like
from fsfunc.optim import (
    Optimizer,
    add_decayed_weights,
    chain,
    clip_by_global_norm,
    constant,
    cosine_decay,
    from_torch,
    global_norm,
    join,
    linear,
    masked,
    partition,
    scale,
    sgd,
    sharded_adam,
    tree_scale,
    tree_sum,
    warmup_cosine,
)
from fsfunc.pipelining import schedules
from fsfunc.pipelining.balanced_cuts import balance, profile
from fsfunc.pipelining.pipelines import pipeline
from fsfunc.pipelining.timing import Costs, bubble, clock
from fsfunc.pipelining.verification import verify
from fsfunc.pipelining.weight_prediction import momentum_prediction
from fsfunc.placing import place
from fsfunc.sharded import Sharded, is_sharded
from fsfunc.statistics import (
    RunningStatistics,
    batch_norm,
    commit_statistics,
    init_statistics,
)
from fsfunc.tracing.tracer import program
from fsfunc.train_state import TrainState, abstract_state, init_state
from fsfunc.transforms.accumulation import accumulate
from fsfunc.transforms.casting import precision
from fsfunc.transforms.donation import donate
from fsfunc.transforms.ownership import assume
from fsfunc.transforms.policies import SaveAllBut, SaveOnly, checkpoint_name
from fsfunc.transforms.rematerialization import remat
from fsfunc.transforms.selecting import remat_calls
from fsfunc.transforms.sharding import shard
from fsfunc.units import unit

if TYPE_CHECKING:
    from fsfunc import show, testing
    from fsfunc.checkpointing.consolidation import consolidate
    from fsfunc.checkpointing.finding import metadata
    from fsfunc.checkpointing.folders import latest
    from fsfunc.checkpointing.loading import load
    from fsfunc.checkpointing.manifest import CheckpointError
    from fsfunc.checkpointing.saving import save, save_async
    from fsfunc.foresight.calibration import measure_hardware
    from fsfunc.foresight.estimation import estimate
    from fsfunc.foresight.planning import plan
    from fsfunc.foresight.recomputation import recompute_points
    from fsfunc.foresight.stack_search import search
    from fsfunc.interop.modules import from_module, to_module
    from fsfunc.interop.patterns import by_size

__version__ = "0.1.0"

# What only some programs use comes when it is asked for: imports are paid by all.
_LATER = {
    "CheckpointError": "fsfunc.checkpointing.manifest",
    "consolidate": "fsfunc.checkpointing.consolidation",
    "latest": "fsfunc.checkpointing.folders",
    "metadata": "fsfunc.checkpointing.finding",
    "load": "fsfunc.checkpointing.loading",
    "save_async": "fsfunc.checkpointing.saving",
    "save": "fsfunc.checkpointing.saving",
    "show": "fsfunc.show",
    "testing": "fsfunc.testing",
    "plan": "fsfunc.foresight.planning",
    "estimate": "fsfunc.foresight.estimation",
    "search": "fsfunc.foresight.stack_search",
    "recompute_points": "fsfunc.foresight.recomputation",
    "measure_hardware": "fsfunc.foresight.calibration",
    "from_module": "fsfunc.interop.modules",
    "to_module": "fsfunc.interop.modules",
    "by_size": "fsfunc.interop.patterns",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'fsfunc' has no attribute {name!r}")
    module = import_module(_LATER[name])
    found = module if _LATER[name].endswith(f".{name}") else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
