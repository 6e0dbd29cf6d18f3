#!/bin/sh
# Builds everything and runs the C++ tests with the system's Bazel. Written for Debian's Bazel 4
# (packages bazel-bootstrap, bazel-rules-java, bazel-rules-proto), which has no network to use.
# The Python environment is that of $JAX_FLASH_PYTHON, else python3; it needs jaxlib and nanobind.
set -eu
cd "$(dirname "$0")/../.."

if ! command -v bazel >/dev/null; then
  echo "bazel is not installed: apt-get install bazel-bootstrap bazel-rules-java bazel-rules-proto" >&2
  exit 1
fi

rules=/usr/share/bazel/rules
# --batch: no server stays behind.
exec bazel --batch test //... \
  --build_tests_only=false \
  --override_repository=rules_java="$rules/java" \
  --override_repository=rules_proto="$rules/proto" \
  --jobs="${JAX_FLASH_BAZEL_JOBS:-2}" \
  --test_output=errors \
  "$@"
