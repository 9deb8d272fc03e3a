"""Copy a folder from HDFS as one plain client does: file after file, each in one stream.

plain_copy.py hdfs://host:port/folder FOLDER
"""

import sys
from pathlib import Path
from urllib.parse import urlsplit

from hdfs_native import Client


def main(uri: str, target: Path) -> None:
    parts = urlsplit(uri)
    client = Client(f"hdfs://{parts.netloc}")
    for entry in client.list_status(parts.path, recursive=True):
        if entry.isdir:
            continue
        copy = target / Path(entry.path).relative_to(parts.path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        source = client.read(entry.path)
        with copy.open("wb") as file:
            for piece in source.read_range_stream(0, entry.length) if entry.length else ():
                file.write(piece)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
