"""The process at hand: scopes, generators, buffers, where a compiler stands aside.

scoped.py collector.py   a context variable, or no collector, for a block
generators.py       random states, kept and put back; seeds
buffer_pool.py      memory for gathers and reductions, used in turn
memory_kinds.py     what memory is for;  prefault.py   its pages, taken in time
stores.py           memory beside the device: the host's, and mapped files
save_guard.py       memory that is being saved, and that no step may write into
block_codes.py      numbers in 8 bits, by blocks that share a scale
random_blocks.py    random numbers of which any range can be drawn alone
compiled.py         where torch.compile stands aside
"""
