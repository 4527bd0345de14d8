"""Messages: gathers and reductions of packed buffers, as values that compose.

wire.py             a gather and a reduction: encode, move, decode
encodings.py        in a narrower dtype; in 8 bits
hierarchy.py        in levels, across nodes and within
residuals.py        error_feedback: the loss of a reduction, added to the next
low_rank.py         powersgd: gradients by their strongest directions
"""
