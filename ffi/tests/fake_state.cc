#include "ffi/tests/fake_state.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>

namespace jax_flash::cuda {
namespace {

// What a kernel may use before its attribute is raised.
constexpr int kSharedBytesWithoutAttribute = 48 * 1024;

}  // namespace

std::mutex mutex;
Books books;

bool Known(const KernelObject* kernel) {
  return std::any_of(books.libraries.begin(), books.libraries.end(), [&](const auto& library) {
    return std::any_of(library->kernels.begin(), library->kernels.end(),
                       [&](const auto& known) { return known.get() == kernel; });
  });
}

bool Known(const LibraryObject* library) {
  return std::any_of(books.libraries.begin(), books.libraries.end(),
                     [&](const auto& known) { return known.get() == library; });
}

bool IsDevice(Device device) { return device >= 0 && device < testing::kFakeDevices; }

std::unique_ptr<LibraryObject> ParseCubin(const char* text) {
  std::istringstream lines(text);
  std::string line;
  if (!std::getline(lines, line) || line != "fake cubin") return nullptr;
  auto library = std::make_unique<LibraryObject>();
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string word;
    auto kernel = std::make_unique<KernelObject>();
    if (!(words >> word >> kernel->symbol) || word != "kernel") return nullptr;
    while (words >> word) {
      size_t offset = 0;
      size_t bytes = 0;
      if (std::sscanf(word.c_str(), "%zu:%zu", &offset, &bytes) != 2) return nullptr;
      kernel->parameters.emplace_back(offset, bytes);
    }
    std::fill_n(kernel->max_dynamic_shared_bytes, testing::kFakeDevices,
                kSharedBytesWithoutAttribute);
    library->kernels.push_back(std::move(kernel));
  }
  return library;
}

std::string_view Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The failure that the environment asks of `function`.
Result Injected(std::string_view function) {
  const std::string_view fail = Environment("JAX_FLASH_FAKE_FAIL");
  const size_t colon = fail.find(':');
  if (colon == std::string_view::npos || fail.substr(0, colon) != function) return Result::kSuccess;
  return static_cast<Result>(std::atoi(fail.data() + colon + 1));
}

void Log(const std::string& line) {
  const std::string path(Environment("JAX_FLASH_FAKE_LOG"));
  if (path.empty()) return;
  std::ofstream(path, std::ios::app) << line << "\n";
}

}  // namespace jax_flash::cuda
