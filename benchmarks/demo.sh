#!/usr/bin/env bash
# `make demo`: a new user's first commands, of the programs in BIN: a local cluster up, three prompts with timelines, down.
set -u
bin=${1:?usage: demo.sh BIN}
KVRELAY_STATE_DIR=$(mktemp -d) # its own, because a cluster of the user's may be up
export KVRELAY_STATE_DIR
failed=0

kvrelay() {
    printf '\n$ kvrelay %s\n' "${*@Q}"
    timeout 180 "$bin/kvrelay" "$@" </dev/null || failed=1
}

kvrelay up --detach --grpc-port 0 --http-port 0
if ((!failed)); then
    trap 'kvrelay down; rm -rf "$KVRELAY_STATE_DIR"; exit $failed' EXIT
    for prompt in 'def __init__(self, ' $'import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser(' \
        $'class Queue:\n    \'\'\'Create a queue object with a given maximum size.'; do
        kvrelay generate "$prompt" --max-tokens 64 --temperature 0.5 --seed 1 --timeline
    done
    kvrelay status
fi
exit $failed
