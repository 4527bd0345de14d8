"""States that outlive the run: saved on one mesh, loaded on another.

``save`` and ``save_async`` are one `tasks.SaveTask`, begun in `saving`: on every rank
`contents` says which boxes of the tree it holds and writes, `safetensors` writes them,
`status` tells the first rank, which writes the `manifest` and renames the folder.
`agreement` raises one rank's error on all. ``load`` goes the other way: `finding` reads
what lies there, which `parsing` proves to make sense before anybody sees it (`stored`);
`matching` says what each leaf takes, `reading` asks for the boxes that make up a rank's
parts, `blocks` reads and proves them. ``latest`` is in `newest`.
"""
