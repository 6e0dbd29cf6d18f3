#include "ffi/tests/fixture.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <utility>

#include "ffi/kernel_table.h"
#include "ffi/sha256.h"
#include "ffi/tests/check.h"

namespace jax_flash::testing {
namespace {

// Removed when the program ends.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = std::filesystem::temp_directory_path() / "jax_flash_XXXXXX";
    path_ = mkdtemp(pattern.data());
    setenv("JAX_FLASH_FAKE_LOG", (path_ / "log.jsonl").c_str(), 1);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

const TemporaryFolder folder;

}  // namespace

std::string WriteFile(const std::string& name, std::string_view content) {
  const std::string path = folder.path() / name;
  std::ofstream(path, std::ios::binary) << content;
  return path;
}

std::string FakeCubin(const std::string& symbol, const std::vector<KernelArgument>& arguments) {
  std::string text = "fake cubin\nkernel " + symbol;
  const std::vector<size_t> offsets = ParameterOffsets(arguments);
  for (size_t i = 0; i < arguments.size(); ++i) {
    text += Concat(" ", offsets[i], ":", arguments[i].bytes());
  }
  return text + "\n";
}

KernelArgument TensorMapOf(const std::string& operand, const char* dtype, uint32_t box_columns,
                           uint32_t box_rows, uint32_t swizzle_bytes) {
  return {
      ArgumentKind::kTensorMap, operand, FindDtype(dtype), box_columns, box_rows, swizzle_bytes};
}

KernelArgument PointerTo(const std::string& operand, const char* dtype) {
  return {ArgumentKind::kPointer, operand, FindDtype(dtype)};
}

KernelArgument Int32(const std::string& value_name) { return {ArgumentKind::kInt32, value_name}; }

KernelArgument Float32(const std::string& value_name) {
  return {ArgumentKind::kFloat32, value_name};
}

KernelSpec MakeSpec(const std::string& variant, std::vector<KernelArgument> arguments) {
  KernelSpec spec{};
  spec.name = "sm_90a/" + variant;
  spec.symbol = variant + "_kernel";
  const std::string cubin = FakeCubin(spec.symbol, arguments);
  spec.path = WriteFile(variant + ".cubin", cubin);
  spec.sha256 = Sha256Hex(cubin);
  spec.threads = 384;
  spec.cluster = {1, 1, 1};
  spec.shared_memory_bytes = 200 * 1024;
  spec.arguments = std::move(arguments);
  spec.grid = {{"batch", 1}};
  return spec;
}

std::string Add(const KernelSpec& spec) {
  CHECK_EQ(KernelTable::Get().Add(spec), "");
  return spec.name;
}

KernelSpec ForwardSpec(const std::string& variant) {
  KernelSpec spec =
      MakeSpec(variant, {Int32("query_heads"), TensorMapOf("query", "bf16", 64, 128, 128),
                         TensorMapOf("key", "bf16", 64, 96, 128), PointerTo("output", "bf16"),
                         Float32("scale"), PointerTo("lse", "f32"), Int32("window")});
  spec.grid = {{"query_length", 128}, {"query_heads", 1}, {"batch", 1}};
  return spec;
}

Invocation ForwardCall(const std::string& kernels) {
  Invocation call;
  call.Operand("query", xla::ffi::BF16, {2, 300, 8, 64})
      .Operand("key", xla::ffi::BF16, {2, 200, 4, 64})
      .Operand("value", xla::ffi::BF16, {2, 200, 4, 64})
      .Result("output", xla::ffi::BF16, {2, 300, 8, 64})
      .Result("lse", xla::ffi::F32, {2, 300, 8})
      .Set("kernels", kernels)
      .Set("scale", 0.125f)
      .Set("window", int32_t{-7});
  return call;
}

std::vector<std::string> TakeLog() {
  static size_t taken = 0;
  std::ifstream file(folder.path() / "log.jsonl");
  std::vector<std::string> lines;
  size_t count = 0;
  for (std::string line; std::getline(file, line); ++count) {
    if (count >= taken) lines.push_back(line);
  }
  taken = count;
  return lines;
}

size_t CountCalls(const std::vector<std::string>& log, const std::string& function) {
  return std::count_if(log.begin(), log.end(), [&](const std::string& line) {
    return line.find("\"call\": \"" + function + "\"") != std::string::npos;
  });
}

std::string Parameter(const std::string& launch, size_t index) {
  constexpr std::string_view kKey = "\"parameters\": [\"";
  size_t begin = launch.find(kKey);
  CHECK(begin != std::string::npos);
  begin += kKey.size();
  for (size_t i = 0; i < index; ++i) begin = launch.find("\", \"", begin) + 4;
  const size_t end = launch.find('"', begin);
  std::string bytes;
  for (size_t at = begin; at < end; at += 2) {
    bytes += static_cast<char>(std::stoi(launch.substr(at, 2), nullptr, 16));
  }
  return bytes;
}

ScopedEnvironment::ScopedEnvironment(const char* name, const char* value) : name_(name) {
  setenv(name, value, 1);
}

ScopedEnvironment::~ScopedEnvironment() { unsetenv(name_); }

}  // namespace jax_flash::testing
