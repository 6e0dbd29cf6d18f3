"""A repository made of what a Python environment has installed: headers of XLA's FFI (in jaxlib),
nanobind and Python's own headers. It downloads nothing.

The Python is that of $JAX_FLASH_PYTHON, else python3. $JAX_FLASH_XLA_INCLUDE overrides the folder of
XLA's headers: a release is built with those of the oldest jaxlib supported.
"""

_QUERY = """
import importlib.util, os, sys, sysconfig

def folder(package):
    spec = importlib.util.find_spec(package)
    if spec is None:
        sys.exit("%s has no package %s: install it" % (sys.executable, package))
    return spec.submodule_search_locations[0]

print(os.environ.get("JAX_FLASH_XLA_INCLUDE") or os.path.join(folder("jaxlib"), "include"))
print(folder("nanobind"))
print(sysconfig.get_paths()["include"])
stable_abi = sys.version_info >= (3, 12)
print("abi3.so" if stable_abi else sysconfig.get_config_var("EXT_SUFFIX").lstrip("."))
print("-DPy_LIMITED_API=0x030C0000" if stable_abi else "")
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "xla_ffi",
    hdrs = glob(["xla/xla/ffi/api/*.h"]),
    includes = ["xla"],
)

cc_library(
    name = "python_headers",
    hdrs = glob(["python/**/*.h"]),
    includes = ["python"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h"]),
    copts = [
        "-std=c++17",
        "-fno-strict-aliasing",
        "-fvisibility=hidden",
    ] + {defines},
    includes = [
        "nanobind/ext/robin_map/include",
        "nanobind/include",
    ],
    textual_hdrs = glob(
        ["nanobind/ext/**/*.h", "nanobind/src/*.cpp", "nanobind/src/*.h"],
        exclude = ["nanobind/src/nb_combined.cpp"],
    ),
    deps = [":python_headers"],
)
"""

_CONFIG = """
EXTENSION = "_ffi.{suffix}"
DEFINES = {defines}
"""

def _python_environment_impl(repository_ctx):
    python = repository_ctx.os.environ.get("JAX_FLASH_PYTHON", "python3")
    answer = repository_ctx.execute([python, "-c", _QUERY])
    if answer.return_code != 0:
        fail("%s: %s" % (python, answer.stderr))
    xla, nanobind, headers, suffix, define = [
        line.strip()
        for line in answer.stdout.split("\n")[:5]
    ]
    defines = repr([define]) if define else "[]"
    repository_ctx.symlink(xla, "xla")
    repository_ctx.symlink(nanobind, "nanobind")
    repository_ctx.symlink(headers, "python")
    repository_ctx.file("BUILD.bazel", _BUILD.replace("{defines}", defines))
    repository_ctx.file("config.bzl", _CONFIG.format(suffix = suffix, defines = defines))

python_environment = repository_rule(
    implementation = _python_environment_impl,
    environ = ["JAX_FLASH_PYTHON", "JAX_FLASH_XLA_INCLUDE"],
    local = True,
)
