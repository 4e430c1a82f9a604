#!/usr/bin/env bash
# Build the site of the documentation into DIRECTORY (default: build/site). A warning is an error: a page that is in no
# table of contents, a link that leads nowhere, a generated page that is out of date. Needs no network.
#   bash scripts/docs.sh [DIRECTORY]
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-build/site}")
python=${PYTHON:-python3}
"$python" -c 'import sphinx, myst_parser' 2>/dev/null || {
    echo "docs.sh: sphinx and myst-parser are needed: bash scripts/install.sh dev" >&2; exit 2
}
for pages in contract_pages option_pages catalog; do "$python" "scripts/$pages.py" --check; done

# The pages as they lie in the repository, and nothing else of it: links between them are checked, whatever their folder.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp --parents README.md CONTRIBUTING.md CHANGELOG.md LICENSE sdk/README.md libs/*/README.md plugins/*/README.md "$work"
cp -r docs "$work/docs"
"$python" -m sphinx -q -W --keep-going -b html -c docs -d "$work/.doctrees" "$work" "$out"
cat >"$out/index.html" <<'PAGE'
<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=docs/index.html"><a href="docs/index.html">Rabbet</a>
PAGE
echo "built: $out/index.html"
