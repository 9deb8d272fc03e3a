"""Locates Hadoop on this machine and builds the commands of its servers. Used by `hdfs_cluster`.

With `$HADOOP_HOME`, that installed distribution is used; otherwise the one that scripts/hadoop.sh puts into .hadoop/.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FETCHED = Path(__file__).parents[1] / ".hadoop" / "3.3.6"
_SERVER = "org.apache.hadoop.hdfs.server"
_JAVA_OPTIONS = ("-Xmx512m", "-Djava.net.preferIPv4Stack=true", "-XX:-UsePerfData")
_BRIEF_OPTIONS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""For servers that run for seconds: optimizing compilation would be half of their processor time and not pay off."""
ARCHIVE = "classes.jsa"
_LOG = """\
log4j.rootLogger=INFO,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{HH:mm:ss,SSS} %p %c{2}: %m%n
"""


def missing() -> str:
    """The reason why HDFS cannot be started here; "" if it can."""
    if os.environ.get("BOOTSEER_WITHOUT_HDFS") == "1":
        return "BOOTSEER_WITHOUT_HDFS=1"
    if shutil.which("java") is None:
        return "java is not installed"
    if home := os.environ.get("HADOOP_HOME"):
        found = (Path(home) / "share/hadoop/hdfs").is_dir()
        return "" if found else f"HADOOP_HOME is {home}, which has no share/hadoop/hdfs"
    return "" if (FETCHED / "stamp").exists() else "Hadoop was not fetched; scripts/hadoop.sh does it"


def router_missing() -> str:
    """The reason why no router (RBF) can be started here; "" if one can: scripts/hadoop.sh does not fetch it."""
    home = os.environ.get("HADOOP_HOME", "")
    found = home and any(Path(home, "share/hadoop/hdfs").glob("hadoop-hdfs-rbf-*.jar"))
    return missing() if found else "this Hadoop has no routers: set HADOOP_HOME to an installed one"


def class_path() -> list[str]:
    """The class path, whose wildcards the JVM expands. Folders are last: a class data archive is used only if the
    class path begins with the jars that it was made from."""
    if home := os.environ.get("HADOOP_HOME"):
        share = Path(home) / "share/hadoop"
        # The web server loads its pages, which are in the folder `hdfs`, from the class path.
        return [f"{share}/{part}" for part in ("common/*", "common/lib/*", "hdfs", "hdfs/*", "hdfs/lib/*")]
    return [f"{FETCHED}/lib/*", str(FETCHED)]


def prepared_folder() -> Path | None:
    """The folder in which `hdfs_cluster` keeps data for faster starts: the archive of loaded classes and a formatted
    NameNode. An archive is valid for one JVM and one path of the jars. None with an installed Hadoop."""
    if os.environ.get("HADOOP_HOME") or not (java := shutil.which("java")) or not FETCHED.exists():
        return None
    program = Path(java).resolve()
    key = hashlib.sha256(f"{program} {program.stat().st_mtime_ns} {FETCHED} {(FETCHED / 'stamp').read_text()}".encode())
    return FETCHED.parent / f"prepared-{key.hexdigest()[:16]}"


def archive_classes(names: Sequence[str], archive: Path) -> None:
    """Write a class data archive of these classes, with which servers start in 60 % of the CPU time."""
    listed = archive.with_suffix(".names")
    listed.write_text("".join(f"{name}\n" for name in names))
    options = ("-Xshare:dump", f"-XX:SharedClassListFile={listed}", f"-XX:SharedArchiveFile={archive}")
    command = ["java", *_BRIEF_OPTIONS, *options, "-cp", f"{FETCHED}/lib/*"]
    subprocess.run(command, check=True, capture_output=True)


def java(conf: Path, server: str, *arguments: str, is_brief: bool = True, options: Sequence[str] = ()) -> list[str]:
    """The command of a server class, e.g. `namenode.NameNode`. `arguments` are Hadoop's, `options` the JVM's.
    `is_brief`: it starts in a third of the CPU time, and is slower later."""
    return _java(conf, f"{_SERVER}.{server}", *arguments, is_brief=is_brief, options=options)


def tool(conf: Path, name: str, *arguments: str) -> list[str]:
    """The command of one of Hadoop's tools, e.g. `fs.FsShell` or `hdfs.tools.DFSAdmin`."""
    return _java(conf, f"org.apache.hadoop.{name}", *arguments, is_brief=True)


def _java(conf: Path, name: str, *arguments: str, is_brief: bool, options: Sequence[str] = ()) -> list[str]:
    # Killed servers leave their unpacked web pages in the folder for temporary files.
    used = [*_JAVA_OPTIONS, f"-Djava.io.tmpdir={conf}", *options, *(_BRIEF_OPTIONS if is_brief else ())]
    if not options and (folder := prepared_folder()) is not None and folder.exists():
        used.append(f"-XX:SharedArchiveFile={folder / ARCHIVE}")
    return ["java", *used, "-cp", ":".join([*class_path(), str(conf)]), name, *arguments]


def bean(address: str, name: str) -> Any:
    """One of a server's JMX beans."""
    with urllib.request.urlopen(f"http://{address}/jmx?qry={name}", timeout=5) as answer:
        return json.load(answer)["beans"][0]


def write_conf(conf: Path, files: Mapping[str, Mapping[str, str]]) -> None:
    """Write the configuration folder: file name to keys and values; logs go to standard error."""
    conf.mkdir(parents=True, exist_ok=True)
    for file, values in files.items():
        rows = "".join(
            f"<property><name>{key}</name><value>{value}</value></property>\n" for key, value in values.items()
        )
        (conf / file).write_text(f"<configuration>\n{rows}</configuration>\n")
    (conf / "log4j.properties").write_text(_LOG)
    # The values of /jmx are as old as this period; the default is 10 s.
    (conf / "hadoop-metrics2.properties").write_text("*.periodMillis=100\n")
