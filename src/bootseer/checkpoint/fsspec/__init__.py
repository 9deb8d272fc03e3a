"""Checkpoints as fsspec file systems, for all that opens files through fsspec.

`bootseer+hdfs://NAMENODE/PATH` and `bootseer+file:///PATH`; installing BootSeer makes both known to fsspec.
"""

from bootseer.checkpoint.fsspec.filesystem import FolderFileSystem, HdfsFileSystem

__all__ = ["FolderFileSystem", "HdfsFileSystem"]
