"""The local tier: frequent saves to each host's own disk, with copies on other hosts.

Each process writes the shards that its devices hold to `checkpoint.local_dir`, and every set of
shards lies on `checkpoint.neighbours` other hosts too. A restart takes the newest save whose every
set of shards is found on some host; the run directory keeps its own, slower interval.

    <local_dir>/<run>/<generation>/<shards>/<step>/    one set of shards of one save
        00012.0           shard 0 of the state's array 12: its elements in row-major order
        document.json     step, the caller's meta, and shape, dtype, checksum of every array
        manifest.json     size and CRC-32 of every file, written last

`shards` is a digest of what the set holds: names, shapes, dtypes and places of its pieces. Whoever
needs that set can use it, whichever process wrote it. `run` and `generation` keep saves apart that
do not belong together, as `lineage` says.

    copies    which process sends its shards where, and which losses that survives; pure
    lineage   which saves still belong to the run, in the run directory
    store     the files on this host's disk
    shards    arrays to pieces of bytes and back
    tier      saves and restores, all processes together
"""
