"""Messages: gathers and reductions of packed buffers, as values that compose.

wire.py             Gather and Reduction, to derive from: encode, move, decode
encodings.py        in 8 bits
hierarchy.py        in levels, across nodes and within
residuals.py        error_feedback: the error of a reduction is added to the next
low_rank.py         powersgd: gradients of low rank
"""
