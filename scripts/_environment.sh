# Sourced by the other scripts: make (once) and activate a virtual environment for one set of packages.
# Usage: make_environment DIRECTORY SET

make_environment() {
    local directory=$1 set=$2 stamp current
    # What decides whether the environment is still right: the build files, and for the installed (not editable) set the sources.
    current=$(
        { echo "$set"; cat pyproject.toml constraints/*.txt scripts/install.sh catalog/pyproject.toml core/pyproject.toml sdk/pyproject.toml {libs,plugins}/*/pyproject.toml
          if [ "$set" = dev ]; then find catalog core sdk libs plugins -name '*.cpp' -o -name '*.h' -o -name setup.py -o -name '*.toml'
          else find catalog/src core/src {libs,plugins}/*/src -type f ! -name '*.pyc' ! -path '*.egg-info/*'; fi | LC_ALL=C sort | xargs -r cat
        } | sha256sum | cut -d' ' -f1
    )
    stamp="$directory/.rabbet-set"
    if [ ! -x "$directory/bin/python" ]; then
        local python=${PYTHON:-python3}
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "Python 3.11 or newer is needed; $("$python" --version) was found (set PYTHON to another one)" >&2; return 2
        }
        if ! "$python" -m venv "$directory"; then
            rm -rf "$directory"
            echo "cannot make a virtual environment: on Debian, apt-get install python3-venv" >&2
            return 2
        fi
    fi
    # shellcheck disable=SC1091
    . "$directory/bin/activate"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$current" ]; then
        echo "installing into $directory (once) ..."
        PYTHON=python bash scripts/install.sh "$set"
        echo "$current" >"$stamp"
    fi
}
