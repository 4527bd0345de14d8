"""Communication: who the ranks are, what moves between them, and what carries it.

``mesh`` names the ranks, ``launch`` runs a program on them. ``linear_maps`` says as
data what can move between ranks, ``groups`` is a rank's handle on those along an axis,
``collective_ops`` moves it differentiably; ``collectives`` are the user's words for it,
``async_collectives`` the same in two phases. ``ledgers`` count what is sent, and
``attribution`` says on whose behalf; ``backends`` carry it.
"""
