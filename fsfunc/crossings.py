"""The crossings of ``shard``: wherever own values meet parts of leaves, or one value.

Under ``shard`` the loss is the mean over n ranks of their own losses. Own values pair
by the mean over ranks (M), the parts of a sharded leaf by the sum over the ranks that
hold them (V), and what is one value on all ranks is paired once. Each crossing is a
:class:`~fsfunc.moves.Move`, and so has its transpose; nothing else knows of n:

===========  =======================================  ===============================
crossing     forward                                  transpose
===========  =======================================  ===============================
GATHER       parts to own: a unit's parameters        REDUCE
REDUCE       own to parts: the mean, this rank's      GATHER
ENTER        one value to own: a whole parameter      MEAN
MEAN         own to own, which agree                  MEAN
SUM          partial sums of parts to own: a norm     the mean, into parts
SPREAD       own, which agree, into parts: a scale    n times own
LAY          own, which agree, to parts: this rank's  n times own, zero elsewhere
OWN          a part, taken for a value of its own     one n-th
PART         own, taken for a part                    n times
===========  =======================================  ===============================
"""

from __future__ import annotations

from fsfunc.moves import Move

__all__ = ["ENTER", "GATHER", "LAY", "MEAN", "OWN", "PART", "REDUCE", "SPREAD", "SUM"]

GATHER = Move("all_gather", "V", "M")
REDUCE = Move("psum_scatter", "M", "V", power=-1)
MEAN = Move("psum", "M", "M", power=-1)
ENTER = Move("enter", "M", "M", power=-1)
SUM = Move("psum", "P", "M")
SPREAD = Move("cast", "M", "R")
LAY = Move("slice", "M", "V")
OWN = Move("cast", "V", "M")
PART = Move("cast", "M", "V")
