#!/bin/bash
# Starts kvrelay on this pod's Ray cluster, and again when it is lost: after a restart of Ray's container (a new, empty
# cluster), after a failed start. Ray itself restarts a supervisor that ends.
# Never ends, so it works under every restartPolicy that KubeRay gives the pod.
set -u

config=${KVRELAY_CONFIG:-/etc/kvrelay/config.yaml}
check=${KVRELAY_CHECK_SECONDS:-30}
pause=5
longest=60
# Running streams survive a supervisor that is slow to answer, but not a new start: so it fails three checks first.
strikes=3

say() { echo "launcher: $*"; }

# Exit code of `kvrelay status`: requests are served without the supervisor, which Ray starts again by itself.
serving=3

silent=0
wait=$pause
while true; do
  if ! ray health-check --address 127.0.0.1:6379 > /dev/null 2>&1; then
    say "waiting for Ray's GCS"
    sleep "$pause"
  elif kvrelay status > /dev/null 2>&1; then
    silent=0
    wait=$pause
    sleep "$check"
  elif (($? == serving)); then
    say "the supervisor is away; requests are served"
    silent=0
    sleep "$check"
  elif ((++silent < strikes)); then
    sleep "$pause"
  else
    # Workers of a lost supervisor still hold their names and their resources.
    kvrelay down
    say "starting kvrelay"
    if kvrelay up --config "$config" --address auto --detach; then
      say "kvrelay is up"
    else
      say "kvrelay up failed; again in $wait s"
      sleep "$wait"
      wait=$((wait * 2 < longest ? wait * 2 : longest))
    fi
  fi
done
