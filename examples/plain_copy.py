"""Copy a folder from HDFS as one plain client does: file after file, each in one stream. Called by copy_and_train.sh.

plain_copy.py hdfs://host:port/folder FOLDER
"""

import sys
from pathlib import Path
from urllib.parse import urlsplit

from hdfs_native import Client


def main(uri: str, target: Path) -> None:
    parts = urlsplit(uri)
    client = Client(f"hdfs://{parts.netloc}")
    target.mkdir(parents=True)
    for entry in client.list_status(parts.path):
        if entry.isdir:
            continue
        source = client.read(entry.path)
        with (target / Path(entry.path).name).open("wb") as file:
            for piece in source.read_range_stream(0, entry.length) if entry.length else ():
                file.write(piece)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
