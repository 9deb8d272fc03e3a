"""Checkpoints as fsspec file systems, for all that opens files through fsspec.

`bootseer+hdfs://NAMENODE/PATH`, `bootseer+s3://BUCKET/PATH` (gs, az) and `bootseer+file:///PATH`; installing BootSeer
makes them known to fsspec.
"""

from bootseer.checkpoint.fsspec.filesystem import (
    AzureFileSystem,
    FolderFileSystem,
    GoogleFileSystem,
    HdfsFileSystem,
    S3FileSystem,
)

__all__ = ["AzureFileSystem", "FolderFileSystem", "GoogleFileSystem", "HdfsFileSystem", "S3FileSystem"]
