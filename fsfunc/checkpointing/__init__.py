"""States that outlive the run: saved on one mesh, loaded on another."""

from fsfunc.checkpointing.consolidating import consolidate
from fsfunc.checkpointing.finding import metadata
from fsfunc.checkpointing.folders import latest
from fsfunc.checkpointing.loading import load
from fsfunc.checkpointing.manifest import CheckpointError, Stored
from fsfunc.checkpointing.reading import Reader
from fsfunc.checkpointing.saving import Saving, save, save_async
