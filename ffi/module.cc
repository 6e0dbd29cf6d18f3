// The Python module jax_flash._ffi. Its types are in jax_flash/_ffi.pyi.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ffi/driver_api.h"
#include "ffi/handlers.h"
#include "ffi/kernel_spec.h"
#include "ffi/kernel_table.h"

namespace nb = nanobind;

namespace jax_flash {
namespace {

// Version of this module's interface and of the manifest's kernel descriptions.
constexpr int kAbiVersion = 1;

// Forward and backward have a name each so that profiles and compiled programs read well.
constexpr const char* kTargets[] = {"jax_flash_forward_v1", "jax_flash_backward_v1",
                                    "jax_flash_backward_bias_v1"};

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Registrations() {
  nb::dict targets;
  for (const char* target : kTargets) {
    nb::dict stages;
    stages["prepare"] = Capsule(JaxFlashPrepare);
    stages["execute"] = Capsule(JaxFlashExecute);
    targets[target] = stages;
  }
  return targets;
}

#ifdef JAX_FLASH_TESTING
nb::dict CpuRegistrations() {
  nb::dict targets;
  for (const char* target : kTargets) {
    nb::dict stages;
    stages["execute"] = Capsule(JaxFlashExecuteOnCpu);
    targets[target] = stages;
  }
  return targets;
}
#endif

[[noreturn]] void RaiseValueError(const std::string& text) {
  throw nb::value_error(("jax_flash: " + text).c_str());
}

// A tuple (kind, name, ...) as in _ffi.pyi.
KernelArgument ParseArgument(const std::string& kernel, nb::tuple tuple) {
  const std::string described =
      Concat("kernel ", kernel, ": argument ", nb::repr(tuple).c_str(), ": ");
  const auto require_size = [&](size_t size) {
    if (tuple.size() != size) RaiseValueError(Concat(described, "must have ", size, " items"));
  };
  const auto dtype = [&](nb::handle name) {
    const Dtype* found = FindDtype(nb::cast<std::string>(name));
    if (found == nullptr) {
      RaiseValueError(Concat(described, "dtype must be one of ", DtypeNames()));
    }
    return found;
  };
  if (tuple.size() == 0) RaiseValueError(described + "is empty");
  const auto kind = nb::cast<std::string>(tuple[0]);
  KernelArgument argument{};
  if (kind == "tensor_map") {
    require_size(6);
    argument.kind = ArgumentKind::kTensorMap;
    argument.dtype = dtype(tuple[2]);
    argument.box_columns = nb::cast<uint32_t>(tuple[3]);
    argument.box_rows = nb::cast<uint32_t>(tuple[4]);
    argument.swizzle_bytes = nb::cast<uint32_t>(tuple[5]);
  } else if (kind == "pointer" || kind == "optional_pointer") {
    require_size(3);
    argument.kind =
        kind == "pointer" ? ArgumentKind::kPointer : ArgumentKind::kOptionalPointer;
    argument.dtype = dtype(tuple[2]);
  } else if (kind == "int32" || kind == "float32") {
    require_size(2);
    argument.kind = kind == "int32" ? ArgumentKind::kInt32 : ArgumentKind::kFloat32;
  } else {
    RaiseValueError(described + "kind must be tensor_map, pointer, optional_pointer, int32 or float32");
  }
  argument.name = nb::cast<std::string>(tuple[1]);
  return argument;
}

void AddKernel(const std::string& name, const std::string& path, const std::string& symbol,
               const std::string& sha256, uint32_t threads,
               std::tuple<uint32_t, uint32_t, uint32_t> cluster, uint32_t shared_memory_bytes,
               bool programmatic_launch, const std::vector<nb::tuple>& arguments,
               const std::vector<std::pair<std::string, int64_t>>& grid, int64_t resident_up_to) {
  KernelSpec spec{};
  spec.name = name;
  spec.path = path;
  spec.symbol = symbol;
  spec.sha256 = sha256;
  spec.threads = threads;
  spec.cluster = {std::get<0>(cluster), std::get<1>(cluster), std::get<2>(cluster)};
  spec.shared_memory_bytes = shared_memory_bytes;
  spec.programmatic_launch = programmatic_launch;
  for (const nb::tuple& argument : arguments) {
    spec.arguments.push_back(ParseArgument(name, argument));
  }
  for (const auto& [value_name, divisor] : grid) spec.grid.push_back({value_name, divisor});
  spec.resident_up_to = resident_up_to;
  const std::string problem = KernelTable::Get().Add(std::move(spec));
  if (!problem.empty()) RaiseValueError(problem);
}

}  // namespace
}  // namespace jax_flash

NB_MODULE(_ffi, module) {
  using namespace nb::literals;
  module.attr("ABI_VERSION") = jax_flash::kAbiVersion;
  module.def("registrations", &jax_flash::Registrations);
  module.def("add_kernel", &jax_flash::AddKernel, "name"_a, nb::kw_only(), "path"_a, "symbol"_a,
             "sha256"_a, "threads"_a, "cluster"_a, "shared_memory_bytes"_a, "programmatic_launch"_a,
             "arguments"_a, "grid"_a, "resident_up_to"_a);
  module.def("kernel_names", [] { return jax_flash::KernelTable::Get().Names(); });
  module.def("driver_error", [] { return jax_flash::DriverApi::Get().error; });
#ifdef JAX_FLASH_TESTING
  module.def("cpu_registrations", &jax_flash::CpuRegistrations);
#endif
}
