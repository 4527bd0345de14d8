"""States that outlive the run: saved on one mesh, loaded on another.

``save`` and ``save_async`` are one `tasks.SaveTask`, begun in `saving`: on every rank
`contents` says which boxes of the tree it holds and writes, `safetensors` writes them,
`agreement` tells the first rank, which writes the `manifest` and renames the folder,
and raises one rank's error on all. ``load`` goes the other way: `finding` reads what
lies there, which `parsing` proves to make sense before anybody sees it (`stored`);
`matching` says what each leaf takes, `reading` asks for the boxes that make up a rank's
parts, reads and proves them. ``latest`` is in `finding`.

saving.py tasks.py  save, save_async: copies compared; the save of one rank
contents.py safetensors.py   the leaves that are saved; safetensors files, written
agreement.py        reports of ranks; errors raised on all; the way out
folders.py save_lock.py   folders that appear atomically; their locks
stored.py parsing.py   metadata of a checkpoint; parsing and validation
manifest.py headers.py   fsfunc.json; headers of files
loading.py matching.py   load; matching of leaves
finding.py reading.py   metadata, latest; reads of boxes, proven by checksums
"""
