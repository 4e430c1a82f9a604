#!/usr/bin/env bash
# From a checkout to a first answer: make an environment, install the CPU set and the embedded model, start the
# server, ask it a question, stream the answer. The environment is kept: a second run installs nothing.
#   bash scripts/quickstart.sh [--keep] [QUESTION]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/_environment.sh

keep=false
if [ "${1:-}" = --keep ]; then keep=true; shift; fi
question=${1:-"Explain in two sentences why the sky is blue."}

make_environment "${RABBET_QUICKSTART_VENV:-.venv}" cpu

port=${RABBET_QUICKSTART_PORT:-$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}
url=http://127.0.0.1:$port
log=$(mktemp -t rabbet-quickstart.XXXXXX)
rabbet serve smollm2 --host 127.0.0.1 --port "$port" >"$log" 2>&1 &
server=$!
stop() {
    if kill -0 "$server" 2>/dev/null; then kill -TERM "$server"; wait "$server" 2>/dev/null || true; fi
    rm -f "$log"
}
trap stop EXIT
trap 'exit 130' INT TERM

echo "starting the server at $url ..."
for _ in $(seq 600); do
    if python - "$url/health" <<'PY' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=2).read()
PY
    then break; fi
    if ! kill -0 "$server" 2>/dev/null; then
        cat "$log" >&2
        echo "the server ended before it was ready" >&2
        exit 1
    fi
    sleep 0.2
done

echo "> $question"
rabbet chat --url "$url/v1" --quick "$question" --max-tokens 128

if $keep; then
    cat <<EOF

The server stays up (stop it with Ctrl+C). Try it:
  curl $url/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello!"}]}'
API docs:  $url/docs
Chat:      $(command -v rabbet) chat --url $url/v1
Log:       $log
EOF
    wait "$server"
fi
