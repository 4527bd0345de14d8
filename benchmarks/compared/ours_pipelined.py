"""fsfunc's pipelined train steps, cut where the peers of peers_pipelined.py are cut."""

from __future__ import annotations

import functools
from collections.abc import Callable

from compared.models import cut, functional_loss, init_params
from compared.ours import advancing, mesh_of, train_step
from compared.peers import Competitor, Setting

import fsfunc as ff


def build(
    setting: Setting, *, schedule: str, chunks: int = 1, donate: bool = True
) -> Competitor:
    """A step of the schedule of that name in `ff.schedules`; every rank has the batch.

    `chunks` is how many stages the schedule gives to a rank by its defaults.
    """
    loss_fn = functional_loss(setting.size, ff.unit, lambda block: block)
    train = train_step(loss_fn)
    mesh = mesh_of(setting, "pipe")
    step = ff.pipeline(
        train,
        mesh,
        "pipe",
        n_microbatches=setting.microbatches,
        schedule=getattr(ff.schedules, schedule),
        stages=cut(setting.size, chunks * setting.ranks),
    )
    params = init_params(setting.size, device=setting.device)
    batch = setting.whole_batch()
    state = ff.init_state(step, params, train.optimizer, batch)
    return advancing(ff.donate(step) if donate else step, [state], batch)


def _builders() -> dict[str, Callable[[Setting], Competitor]]:
    chunks = {"gpipe": 1, "one_f_one_b": 1, "interleaved_1f1b": 2, "zb_v": 2}
    made: dict[str, Callable[[Setting], Competitor]] = {}
    for name, count in chunks.items():
        kind = functools.partial(build, schedule=name, chunks=count)
        made[name] = kind
        made[f"{name}_pure"] = functools.partial(kind, donate=False)
    return made


BUILDERS = _builders()
