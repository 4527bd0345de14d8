"""States that outlive the run: saved on one mesh, loaded on another.

``save`` and ``save_async`` are one `tasks.SaveTask`, begun in `saving`: on every rank
`contents` says which boxes of the tree it holds and writes, `safetensors` writes them,
`status` tells the first rank, which writes the `manifest` and renames the folder.
`agreement` raises one rank's error on all. ``load`` goes the other way: `finding` reads
what lies there, `reading` asks for the boxes that make up a rank's parts, `blocks`
reads and proves them.

saving.py tasks.py  save, save_async; what one rank writes, and how it ends
contents.py safetensors.py manifest.py   what is saved; its files; fsfunc.json
status.py agreement.py folders.py   how ranks fare; folders that appear whole
loading.py finding.py reading.py blocks.py   load; what lies there; boxes, proven
consolidation.py    one file of whole tensors
"""
