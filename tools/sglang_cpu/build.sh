#!/usr/bin/env bash
# Builds a virtual environment in which a real SGLang server runs on a CPU, for tests and examples: about 1.6 GB.
#
#   tools/sglang_cpu/build.sh [DIRECTORY]        the directory is .venv-sglang when not given
#
# With a GPU this is not for you: install SGLang as its own documentation says, in an environment of its own, and give
# that environment's Python to train.py with --sglang-python.
#
# SGLang's package asks for CUDA libraries that neither install nor load here. So its packages are installed without
# their dependencies (requirements.txt lists the ones that a CPU server imports), and cpu_stand_ins.py takes the place
# of three compiled ones that are imported but never called, and of two functions that need a GPU. To start a server
# there by hand:
#
#   .venv-sglang/bin/python -m sglang.launch_server --config tools/sglang_cpu/server.yaml --model-path CHECKPOINT
#
# PyPI's torch for Linux is the CUDA build, 2 GB more; for the CPU build tell pip where it lies:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu tools/sglang_cpu/build.sh
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
environment=${1:-.venv-sglang}
python=${PYTHON:-python3}
stamp=$environment/.built

fail() {
    echo "sglang_cpu: $1" >&2
    exit 1
}

# Built from these very files before: nothing to do.
inputs=$(cat "$here"/build.sh "$here"/requirements.txt "$here"/cpu_stand_ins.py | sha256sum)
if [[ -f $stamp && $(<"$stamp") == "$inputs" ]]; then
    exit 0
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "SGLang 0.5.23 needs Python 3.11 or newer, but $python is $("$python" --version 2>&1); set PYTHON to another."
if [[ -e $environment && ! -f $environment/pyvenv.cfg ]]; then
    fail "$environment exists and is not a virtual environment; move it away or name another directory."
fi

rm -f "$stamp" # a build that breaks off is begun anew next time
test -x "$environment/bin/python" || "$python" -m venv "$environment"
install=("$environment/bin/python" -m pip install --quiet --quiet --disable-pip-version-check)
"${install[@]}" --no-deps --requirement "$here/requirements.txt" ||
    fail "pip could not install the packages of $here/requirements.txt; its words are above."

packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp "$here/cpu_stand_ins.py" "$packages/"
echo "import cpu_stand_ins" >"$packages/cpu_stand_ins.pth" # run by Python when it starts, workers included

"$environment/bin/python" -W ignore -c '
import sglang.srt.entrypoints.http_server, sglang.srt.models.qwen3, sglang.srt.models.qwen3_moe' >/dev/null ||
    fail "the packages are installed but SGLang's server does not import; its words are above."
echo "$inputs" >"$stamp"
echo "$environment has SGLang $("$environment/bin/python" -W ignore -c 'import sglang; print(sglang.__version__)')"
