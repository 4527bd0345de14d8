"""Communication: who the ranks are, what moves between them, and what carries it.

``mesh`` names the ranks, ``launch`` runs a program on them. ``linear_maps`` says as
data what can move between ranks, ``groups`` is a rank's handle on those along an axis,
``collective_ops`` moves it differentiably; ``collectives`` are the user's words for it,
``async_collectives`` the same in two phases. ``ledgers`` count what is sent, and
``attribution`` says on whose behalf; ``backends`` carry it.

mesh.py launch.py   named axes over ranks; make_mesh, spmd, local_batch
collectives.py async_collectives.py   the public ones; start now, wait later
collective_pairs.py   collective: one of your own, given with its transpose
collective_ops.py   the one autograd.Function that runs linear maps
collective_pairs.py collective: one of your own, given with its transpose
linear_maps.py shard_linear_maps.py   what moves, as data; shard's own
groups.py           a rank's handle on the ranks along an axis
ledgers.py attribution.py   what is sent; for which unit, phase and line
comparison.py       ranks say what they are about to do, and hear who disagrees
descriptions.py     what a value is, in words that are the same in every process
fake_errors.py      who asked a fake tensor for its value
"""
