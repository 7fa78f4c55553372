"""Where a run keeps its files. Every read, write and listing of a run directory goes through here.

`locate(path)` gives a `Location`; its methods are the only file operations that the package makes
on a run directory or a checkpoint. They are what an object store can offer too:

| operation | guarantee |
|---|---|
| `write` | atomic: a reader sees the old content or the new one. Durable unless `durable=False` |
| `create` | of several writers exactly one succeeds; durable |
| `appender` | what was appended survives a kill of the process, in order |
| `entries`, `files` | names in order; files that are still being written are not listed |
| `delete_tree` | not atomic: what makes a directory count must be deleted first |
| `lock` | excludes other processes where the storage can, and tells who holds it |

There is no rename. Several files become valid together when the file that names them is written
last (`checkpoint.manifest`).

`location` defines the operations, `posix` does them on a local or shared file system. Another kind
of storage is another file next to `posix`, with a `Location` of its own, and one line in `locate`.
"""

from jaxdist.runtime.storage.location import Appender, Location, Locked, LockFile
from jaxdist.runtime.storage.posix import locate, url_problem

__all__ = ["Appender", "Location", "LockFile", "Locked", "locate", "url_problem"]
