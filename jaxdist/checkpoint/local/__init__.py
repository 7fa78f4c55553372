"""Save frequently to each host's own disk, with copies on other hosts.

Each host writes the shards of its devices to `checkpoint.local_dir`, and `checkpoint.neighbours`
other hosts have a copy. A restart loads the newest save whose sets of shards are all available on
some host. Saves to the run directory have their own interval.

    <local_dir>/<run>/<generation>/<shards>/<step>/    one set of shards of one save
        00012.0           shard 0 of the state's array 12: its elements in row-major order
        document.json     step, the caller's meta, and shape, dtype, checksum of every array
        manifest.json     size and CRC-32 of every file, written last

`shards` is a digest of names, shapes, dtypes and indices of all pieces in the set, so processes
that need equal sets can share files. `run` and `generation` separate unrelated saves (`Lineage`).
"""
