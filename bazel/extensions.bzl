"""The repository of python_environment.bzl, for Bazel with modules."""

load("//bazel:python_environment.bzl", "python_environment")

def _python_environment_extension(_module_ctx):
    python_environment(name = "python_environment")

python_environment_extension = module_extension(implementation = _python_environment_extension)
