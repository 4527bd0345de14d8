"""States that outlive the run: saved on one mesh, loaded on another.

``save`` and ``save_async`` are one `tasks.SaveTask`, begun in `saving`: on every rank
`contents` says which boxes of the tree it holds and writes, `replicas` which leaves
differ between ranks that hold the same boxes, `safetensors` writes them,
`status` tells the first rank, which writes the `manifest` and renames the folder.
`agreement` raises one rank's error on all. ``load`` goes the other way: `finding` reads
what lies there, which `parsing` proves to make sense before anybody sees it (`stored`);
`matching` says what each leaf takes, `reading` asks for the boxes that make up a rank's
parts, `blocks` reads and proves them. ``latest`` is in `newest`.

saving.py tasks.py  save, save_async; the save of one rank
contents.py safetensors.py   the leaves that are saved; safetensors files, written
replicas.py         leaves of which several ranks hold a copy, compared
agreement.py        errors raised on all ranks, and the way out
status.py   reports of ranks; errors raised on all ranks
folders.py save_lock.py newest.py   folders that appear atomically; their locks; latest
stored.py parsing.py   metadata of a checkpoint; parsing and validation
manifest.py headers.py opening.py   fsfunc.json; headers of files; regular files
loading.py matching.py   load; matching of leaves
finding.py reading.py blocks.py   metadata; reads of boxes; blocks with checksums
consolidation.py    one file of whole tensors
"""
