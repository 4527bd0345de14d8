"""Recordings: the calls of a rank, kept, and run again without the other ranks.

keeping.py      recorded: what a call begins with, and what it receives
tapes.py        the link that keeps messages
tree_writer.py  trees as JSON and tensors, without pickles
tree_reader.py  trees made again of these
json_values.py  values that are no tensors
files.py        a sealed file for each rank and call
replaying.py    replay: a link that hands the messages out again
"""

from fsfunc.testing.recordings.keeping import recorded
from fsfunc.testing.recordings.replaying import PartsFromRecording, replay
