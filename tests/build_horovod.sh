#!/usr/bin/env bash
# Makes an environment with stock Horovod 0.28.1 on TensorFlow 2.18 and Keras 3, and this package: three minutes.
#
#   tests/build_horovod.sh [FOLDER]        .venv-horovod unless given
#
# It needs Open MPI with its compiler, a C++ compiler, make, and Python 3.10 to 3.12 with its headers (PYTHON=...). As
# root on Debian or Ubuntu it installs what is missing. A newer TensorFlow does not build: Horovod 0.28.1 is its last.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="$(realpath -m "${1:-.venv-horovod}")"
python="${PYTHON:-python3}"
export DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1

"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || {
  echo "TensorFlow 2.18 has wheels for Python 3.10 to 3.12, and $python is another: name one with PYTHON=..." >&2; exit 2; }

missing=()
command -v mpicxx >/dev/null && command -v mpirun >/dev/null || missing+=(libopenmpi-dev openmpi-bin)
command -v g++ >/dev/null || missing+=(g++)
command -v make >/dev/null || missing+=(make)
"$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || missing+=(python3-dev)
"$python" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
if [ "${#missing[@]}" -gt 0 ]; then
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing: ${missing[*]} (names of Debian's packages); install them first" >&2
    exit 2
  fi
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi

# Built already: only what this package needs may have changed.
if ! "$folder/bin/python" -c 'import horovod.tensorflow' 2>/dev/null; then
  rm -rf "$folder"
  "$python" -m venv "$folder"
  export PATH="$folder/bin:$PATH"
  pip install -q 'tensorflow-cpu==2.18.*' 'keras>=3.8,<4' 'setuptools<70' wheel cloudpickle psutil pyyaml packaging cffi \
    'cmake<3.28'
  HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_MPI=1 \
    HOROVOD_WITHOUT_GLOO=1 pip install -q --no-build-isolation horovod==0.28.1
fi
# No wheel of an MPI: mpi4py has to load the one that Horovod was built with.
"$folder/bin/pip" install -q 'tensorflow-cpu==2.18.*' 'setuptools<70' pytest pytest-timeout hypothesis
"$folder/bin/pip" install -q --editable .
"$folder/bin/python" -c 'import horovod.tensorflow, keras; print("Horovod", horovod.__version__, "and Keras", keras.__version__)'
