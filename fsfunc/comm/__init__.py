"""Communication: meshes, the collectives on them, and the backends that run these.

``mesh`` names the ranks, ``launch`` runs a program on them. ``linear_maps`` has the
collectives as data with their transposes, ``groups`` is a rank's handle on the ranks
along an axis, ``collective_ops`` runs linear maps differentiably; ``collectives`` are
the public functions, ``async_collectives`` the same in two phases. ``ledgers`` count
the bytes, ``attribution`` names the unit, phase and line; ``backends`` move the data.

mesh.py launch.py   named axes over ranks; make_mesh, spmd, local_batch
collectives.py async_collectives.py   the public collectives; start now, wait later
typed_maps.py       the linear maps of shard; pcast; checks of dims, cuts and types
collective_ops.py   the one autograd.Function that runs linear maps
collective_pairs.py collective: a user's own, given with its transpose
operations.py       a row for each collective: bytes, shapes, reduction
linear_maps.py      collectives as data, with their transposes
groups.py           a rank's handle on the ranks along an axis
ledgers.py attribution.py   bytes sent; the unit, phase and line that sent them
comparison.py       ranks compare what they are about to do
descriptions.py     descriptions of values that are equal in every process
"""
