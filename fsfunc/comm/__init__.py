"""Meshes, and the collectives on them.

A public function of `collectives` makes a `linear_maps.LinearMap`;
`collective_ops.apply_map` applies it by an ``autograd.Function`` whose backward applies
its transpose; `groups.RankGroup.start` records the bytes and passes it to the backend.

mesh.py launch.py   named axes over ranks; make_mesh, spmd, local_batch
folding.py          two views of one mesh, and their finest axes
groups.py           a rank's handle on the ranks along an axis
operations.py       the table of collectives: all that there is to say of each
linear_maps.py      collectives as data, with their transposes
collective_ops.py   the autograd.Function of all collectives
collectives.py      psum, all_gather and the other public functions
typed_maps.py       the linear maps of shard; pcast; checks of arguments
async_collectives.py collective_pairs.py   start and wait; your own with its transpose
ledgers.py traffic.py   notes of what is sent; ledgers, which count it
attribution.py      the unit, the phase and the source line
tracebacks.py       errors leave the library without its frames
comparison.py       what ranks must agree on; one rank's error raised on all
descriptions.py     values as text, and as checksums
backends/ watch/    what moves the data; failure reports
"""
