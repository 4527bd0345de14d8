"""Saving of states on one mesh, and loading on another.

``save`` and ``save_async``, in `saving`, make a `tasks.SaveTask`. On every rank
`contents` lists the boxes of the tree that it writes, `safetensors` writes them, and
`agreement` reports to the first rank. That one derives the table of all files from
their `headers`, writes it as the manifest and renames the folder. An error of one rank
is raised on all.

``load`` is the reverse: `finding` reads the table (`stored` checks what `headers`
reads); `loading` finds the stored leaf for each leaf of the target; `reading` reads the
boxes that make up a rank's parts, and compares checksums. ``latest`` is in `finding`.

saving.py tasks.py  save, save_async: copies compared; the save of one rank
contents.py safetensors.py   the leaves that are saved; safetensors files, written
agreement.py        reports of ranks; errors raised on all of them
stored.py           the table of a checkpoint, and what must be true of it
headers.py          what files say of themselves, and the manifest, made and read
parsing.py folders.py   JSON, read by type; folders that appear whole, files in them
loading.py          load: leaves matched, and filled
exporting.py        export: a folder of whole tensors, for others
finding.py reading.py   metadata, latest; reads of boxes, proven by checksums
"""
