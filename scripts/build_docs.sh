#!/usr/bin/env bash
# Builds the site of the documents in build/site, without network access. Called by `make docs`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rm -rf build/docs
git ls-files -coz --exclude-standard '*.md' '*.png' | xargs -0 cp --parents -t "$(mkdir -p build/docs && echo build/docs)"
.venv/bin/mkdocs build --strict --quiet
echo "docs: build/site/index.html"
