#!/usr/bin/env bash
# Starts one MPI job of containers with unequal limits on this host, a rank in each:
#
#   containers/launch.sh hps_keras "1.0 2g" "0.5 1228m" "0.25 800m" -- /opt/hps/examples/mnist_lenet5.py --epochs 1
#
# Behind the image stand the workers, each with its CPUs and memory; the parameter server gets a container without
# limits. Behind -- stands what hpsrun starts. The image must have MPICH (the default of containers/Containerfile).
#
#   ENGINE="podman"                      or "docker", or "sudo podman"; more words are global options of it
#   OPTIONS="-v $PWD:/job:ro -w /job"    more options for every container
set -euo pipefail

[ $# -ge 4 ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit 2; }
read -ra engine <<< "${ENGINE:-podman}"
read -ra options <<< "${OPTIONS:-}"
image=$1; shift
limits=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do limits+=("$1"); shift; done
[ "${1:-}" = -- ] || { echo "$0: give -- between the workers and the script" >&2; exit 2; }
shift
limits+=("")  # the parameter server is the last rank

job=hps-$$
names=("${!limits[@]}")
names=("${names[@]/#/$job-}")

start() {  # NAME OPTION... IMAGE COMMAND...
  local name=$1; shift
  "${engine[@]}" run --rm --name "$name" --network host "${options[@]}" "$@"
}

# Whatever ends this script ends them: a container outlives the command that has started it.
trap '"${engine[@]}" kill "$job" "${names[@]}" >/dev/null 2>&1 || true' EXIT
trap 'exit 130' INT TERM

# With the manual launcher, mpiexec prints for each of its hosts the command that is to run there: here in a container.
# The names of the containers stand for hosts, so that MPI does not look for memory that containers do not share.
start "$job" "$image" hpsrun -np "${#limits[@]}" --hosts "$(IFS=,; echo "${names[*]}")" \
  --mpi-args "-launcher manual -localhost 127.0.0.1" "$@" < /dev/null |
  while IFS= read -r line; do
    case $line in
      HYDRA_LAUNCH_END*) ;;
      HYDRA_LAUNCH:*)
        read -ra command <<< "${line#HYDRA_LAUNCH:}"
        rank=${command[*]: -1}
        read -ra limit <<< "${limits[rank]}"
        start "$job-$rank" ${limit:+--cpus "${limit[0]}" --memory "${limit[1]}" --memory-swap "${limit[1]}"} \
          "$image" "${command[@]}" < /dev/null &
        ;;
      *) printf '%s\n' "$line" ;;
    esac
  done
