"""States that outlive the run: saved on one mesh, loaded on another.

``save`` and ``save_async`` are one `tasks.SaveTask`, begun in `saving`: on every rank
`contents` says which boxes of the tree it holds and writes, `replicas` which leaves
differ between ranks that hold the same boxes, `safetensors` writes them,
`status` tells the first rank, which writes the `manifest` and renames the folder.
`agreement` raises one rank's error on all. ``load`` goes the other way: `finding` reads
what lies there, which `parsing` proves to make sense before anybody sees it (`stored`);
`matching` says what each leaf takes, `reading` asks for the boxes that make up a rank's
parts, `blocks` reads and proves them. ``latest`` is in `newest`.

saving.py tasks.py  save, save_async; what one rank writes, and how it ends
contents.py safetensors.py   what is saved; its files
replicas.py          leaves of which several ranks hold a copy, alike or not
status.py agreement.py advice.py   how ranks fare; errors, and the way out
folders.py jobs.py newest.py   folders that appear whole; whose they are; latest
stored.py parsing.py   what lies there, proven by one parse of all that files say
manifest.py headers.py opening.py   fsfunc.json; heads of files; regular files
loading.py matching.py   load; which leaf takes which
finding.py reading.py blocks.py   what lies at a path; boxes, proven as they come
consolidation.py    one file of whole tensors
"""
