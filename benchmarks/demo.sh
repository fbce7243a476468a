#!/usr/bin/env bash
# `make demo`: a new user's first commands, of the programs in BIN: a cluster up with a model that talks, three questions,
# where the time of an answer goes, a decode worker killed in mid-answer that costs no token, down.
set -u
bin=${1:?usage: demo.sh BIN}
KVRELAY_STATE_DIR=$(mktemp -d) # its own, because a cluster of the user's may be up
export KVRELAY_STATE_DIR
failed=0

kvrelay() {
    printf '\n$ kvrelay %s\n' "${*@Q}"
    timeout 300 "$bin/kvrelay" "$@" || failed=1
}

# With weights in 4 bits, as they are stored, so small a model answers worse: they are held in the worker's dtype.
shown=$KVRELAY_STATE_DIR/shown
kvrelay up --detach --grpc-port 0 --http-port 0 --model smollm2 --quantization dense --decode 2 \
    </dev/null > >(tee "$shown") 2>&1
if ((failed)); then
    exit 1
fi
trap '"$bin/kvrelay" down; rm -rf "$KVRELAY_STATE_DIR"; exit $failed' EXIT

if grep -q pico "$shown"; then # `up` has said why; that model continues Python
    for prompt in 'def __init__(self, ' $'import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser(' \
        $'class Queue:\n    \'\'\'Create a queue object with a given maximum size.'; do
        kvrelay generate "$prompt" --max-tokens 64 --temperature 0.5 --seed 1 </dev/null
    done
else
    kvrelay chat --max-tokens 80 --temperature 0 < <(printf '%s\n' 'What is the capital of France?' \
        'What is it famous for? Name two things.' 'Write one sentence that invites a friend there.')
fi
kvrelay generate 'The three primary colors are' --max-tokens 32 --temperature 0 --timeline </dev/null

prompt='Once upon a time, there was a little girl who lived by the sea.' options=(--max-tokens 400 --temperature 0 --ignore-eos)
printf '\nThe same answer twice: alone, and with the decode worker that writes it killed in its middle.\n'
alone=$("$bin/kvrelay" generate "$prompt" "${options[@]}" </dev/null) || failed=1
answer=$(mktemp)
"$bin/kvrelay" generate "$prompt" "${options[@]}" </dev/null >"$answer" &
asked=$!
# The pid of the decode worker that has a request, once a part of the answer is there.
until [[ $(wc -c <"$answer") -gt 40 ]] || ! kill -0 $asked 2>/dev/null; do sleep 0.02; done
serving=$("$bin/kvrelay" status --json </dev/null | "$bin/python" -c '
import json, sys
busy = [m for m in json.load(sys.stdin)["workers"] if m["role"] == "decode" and m["requests"]["running"]]
print(busy[0]["name"], busy[0]["pid"]) if busy else print()')
if [[ $serving ]]; then
    kill -9 "${serving#* }"
    printf '$ kill -9 %s    # %s, after %d characters\n' "${serving#* }" "${serving% *}" "$(wc -c <"$answer")"
fi
wait $asked || failed=1
cat "$answer"
if [[ -z $serving ]]; then
    echo "The answer had ended before the worker was found; nothing was killed."
elif [[ $alone == "$(<"$answer")" ]]; then
    echo "Both answers are equal: the death cost no token."
else
    echo "The answers differ:"
    echo "$alone"
    failed=1
fi
rm -f "$answer"
kvrelay status </dev/null
