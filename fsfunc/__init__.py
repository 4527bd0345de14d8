"""fsfunc: a plain train step, transformed."""

from fsfunc import show, testing
from fsfunc.accounting import ledger
from fsfunc.autodiff import Weighted, value_and_grad
from fsfunc.auxiliary import Summed
from fsfunc.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pbroadcast,
    pcast,
    pmax,
    pmean,
    ppermute,
    psum,
    psum_scatter,
)
from fsfunc.foresight.planning import plan
from fsfunc.launching import local_batch, make_mesh, spmd
from fsfunc.layout import Flat, Layout, Owned, Split
from fsfunc.mesh import Mesh
from fsfunc.optim import (
    Optimizer,
    add_decayed_weights,
    chain,
    clip_by_global_norm,
    constant,
    cosine_decay,
    global_norm,
    join,
    linear,
    masked,
    partition,
    scale,
    sgd,
    sharded_adam,
    tree_sum,
    warmup_cosine,
)
from fsfunc.pipelining import schedules
from fsfunc.pipelining.balancing import balance
from fsfunc.pipelining.clocks import clock
from fsfunc.pipelining.pipelines import pipeline
from fsfunc.pipelining.predicting import momentum_prediction
from fsfunc.pipelining.profiling import profile
from fsfunc.pipelining.timing import Costs, bubble
from fsfunc.pipelining.tracing import program
from fsfunc.pipelining.verification import verify
from fsfunc.placing import place, unshard
from fsfunc.sharded import Sharded, is_sharded
from fsfunc.splitting import start
from fsfunc.statistics import (
    RunningStatistics,
    batch_norm,
    commit_statistics,
    init_statistics,
)
from fsfunc.training import TrainState, init_state
from fsfunc.transforms.accumulation import accumulate
from fsfunc.transforms.casting import precision
from fsfunc.transforms.donation import donate
from fsfunc.transforms.policies import SaveAllBut, SaveOnly, checkpoint_name
from fsfunc.transforms.rematerialization import remat
from fsfunc.transforms.sharding import shard
from fsfunc.units import unit

__version__ = "0.1.0"
