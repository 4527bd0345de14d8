"""Backends: what runs a rank's collectives with the other ranks.

link.py    the interface of all backends
abstract.py         nothing moves; one level of vmap
simulated.py baton.py interrupts.py
                    threads of one process, one at a time
processes.py process_groups.py
                    torch.distributed, its groups, and the store they meet in
process_collectives.py point_to_point.py exchange.py
                    collectives, sends, and the wait for either
channels.py neighbours.py shared_memory.py same_host.py
                    messages: through shared memory on one host, by gloo otherwise
"""
