"""Recordings: calls of a rank in files, to be run again without the other ranks.

keeping.py      recorded: writes what a call begins with, and what it receives
tapes.py        the link that copies messages as they arrive
tree_writer.py  trees as JSON and tensors, without pickles
tree_reader.py  trees rebuilt from these
json_values.py  values that are no tensors, as JSON
files.py        a file for each rank and call, with checksums
replaying.py    replay: a link that hands the recorded messages out
"""

from fsfunc.testing.recordings.keeping import recorded
from fsfunc.testing.recordings.replaying import PartsFromRecording, replay
