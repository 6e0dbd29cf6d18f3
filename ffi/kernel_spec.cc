#include "ffi/kernel_spec.h"

#include <algorithm>
#include <tuple>

namespace jax_flash {
namespace {

// Limits of the hardware and of cuTensorMapEncodeTiled.
constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kMaxClusterSize = 16;
constexpr uint32_t kMaxBoxExtent = 256;
constexpr uint32_t kBoxRowGranularity = 16;

bool IsHexDigest(std::string_view text) {
  return text.size() == 64 && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

std::string ValidateTensorMap(const KernelArgument& argument) {
  const auto& [kind, name, dtype, box_columns, box_rows, swizzle_bytes] = argument;
  if (box_columns == 0 || box_columns > kMaxBoxExtent || box_rows == 0 ||
      box_rows > kMaxBoxExtent) {
    return Concat("tensor map of ", name, ": box ", box_columns, " x ", box_rows,
                  "; each extent must be between 1 and ", kMaxBoxExtent);
  }
  if (swizzle_bytes != 0 && swizzle_bytes != 32 && swizzle_bytes != 64 && swizzle_bytes != 128) {
    return Concat("tensor map of ", name, ": swizzle_bytes ", swizzle_bytes,
                  "; must be 0, 32, 64 or 128");
  }
  const uint32_t row_bytes = box_columns * dtype->bytes;
  if (row_bytes % kBoxRowGranularity != 0) {
    return Concat("tensor map of ", name, ": a box row of ", box_columns, " ", dtype->name, " has ",
                  row_bytes, " bytes; must be a multiple of ", kBoxRowGranularity);
  }
  if (swizzle_bytes != 0 && row_bytes > swizzle_bytes) {
    return Concat("tensor map of ", name, ": a box row of ", box_columns, " ", dtype->name, " has ",
                  row_bytes, " bytes; must fit the swizzle's ", swizzle_bytes);
  }
  return "";
}

std::string ValidateArguments(const std::vector<KernelArgument>& arguments) {
  if (arguments.empty() || arguments.size() > kMaxArguments) {
    return Concat(arguments.size(), " arguments; must be between 1 and ", kMaxArguments);
  }
  for (const KernelArgument& argument : arguments) {
    if (argument.name.empty()) return "an argument has an empty name";
    const bool is_buffer =
        argument.kind != ArgumentKind::kInt32 && argument.kind != ArgumentKind::kFloat32;
    if (is_buffer && argument.dtype == nullptr) {
      return Concat("argument ", argument.name, " has no known dtype; known: ", DtypeNames());
    }
    if (argument.kind == ArgumentKind::kTensorMap) {
      if (std::string problem = ValidateTensorMap(argument); !problem.empty()) return problem;
    }
  }
  const size_t bytes = ParameterOffsets(arguments).back();
  if (bytes > kMaxParameterBytes) {
    return Concat("arguments take ", bytes, " bytes; at most ", kMaxParameterBytes, " fit");
  }
  return "";
}

}  // namespace

size_t KernelArgument::bytes() const {
  switch (kind) {
    case ArgumentKind::kTensorMap:
      return sizeof(cuda::TensorMap);
    case ArgumentKind::kPointer:
    case ArgumentKind::kOptionalPointer:
      return sizeof(void*);
    case ArgumentKind::kInt32:
    case ArgumentKind::kFloat32:
      return 4;
  }
  return 0;
}

size_t KernelArgument::alignment() const {
  return kind == ArgumentKind::kTensorMap ? alignof(cuda::TensorMap) : bytes();
}

bool KernelArgument::operator==(const KernelArgument& other) const {
  const auto fields = [](const KernelArgument& a) {
    return std::tie(a.kind, a.name, a.dtype, a.box_columns, a.box_rows, a.swizzle_bytes);
  };
  return fields(*this) == fields(other);
}

bool GridFactor::operator==(const GridFactor& other) const {
  return value_name == other.value_name && divisor == other.divisor;
}

bool KernelSpec::operator==(const KernelSpec& other) const {
  const auto fields = [](const KernelSpec& s) {
    return std::tie(s.name, s.path, s.symbol, s.sha256, s.threads, s.cluster, s.shared_memory_bytes,
                    s.programmatic_launch, s.arguments, s.grid, s.resident_up_to);
  };
  return fields(*this) == fields(other);
}

std::vector<size_t> ParameterOffsets(const std::vector<KernelArgument>& arguments) {
  std::vector<size_t> offsets;
  size_t end = 0;
  for (const KernelArgument& argument : arguments) {
    const size_t alignment = argument.alignment();
    const size_t offset = (end + alignment - 1) / alignment * alignment;
    offsets.push_back(offset);
    end = offset + argument.bytes();
  }
  offsets.push_back(end);
  return offsets;
}

std::string Validate(const KernelSpec& spec) {
  const size_t slash = spec.name.find('/');
  if (slash == std::string::npos || slash == 0 || slash + 1 == spec.name.size() ||
      spec.name.find(',') != std::string::npos) {
    return "name must be \"<arch>/<variant>\", without commas";
  }
  if (spec.path.empty()) return "path is empty";
  if (spec.symbol.empty()) return "symbol is empty";
  if (!IsHexDigest(spec.sha256)) {
    return Concat("sha256 \"", spec.sha256, "\" must be 64 lower-case hexadecimal digits");
  }
  if (spec.threads == 0 || spec.threads > kMaxThreads) {
    return Concat("threads ", spec.threads, "; must be between 1 and ", kMaxThreads);
  }
  const auto [x, y, z] = spec.cluster;
  // The grid is one row of blocks, so a cluster is one too.
  if (x == 0 || x > kMaxClusterSize || y != 1 || z != 1) {
    return Concat("cluster (", x, ", ", y, ", ", z, "); must be (1 to ", kMaxClusterSize,
                  ", 1, 1)");
  }
  if (spec.grid.empty()) return "grid has no factors";
  for (const GridFactor& factor : spec.grid) {
    if (factor.value_name.empty() || factor.divisor <= 0) {
      return Concat("grid factor (\"", factor.value_name, "\", ", factor.divisor,
                    ") needs a name and a positive divisor");
    }
  }
  if (spec.resident_up_to < 0) {
    return Concat("resident_up_to ", spec.resident_up_to, "; must not be negative");
  }
  return ValidateArguments(spec.arguments);
}

}  // namespace jax_flash
