#include "ffi/tests/check.h"

#include <atomic>
#include <cstdio>
#include <utility>
#include <vector>

namespace jax_flash::testing {
namespace {

std::vector<std::pair<const char*, void (*)()>>& Tests() {
  static std::vector<std::pair<const char*, void (*)()>> tests;
  return tests;
}

std::atomic<int> failures{0};

}  // namespace

bool AddTest(const char* name, void (*body)()) {
  Tests().emplace_back(name, body);
  return true;
}

void Fail(const char* file, int line, const std::string& text) {
  ++failures;
  std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
}

}  // namespace jax_flash::testing

int main() {
  using jax_flash::testing::failures;
  for (const auto& [name, body] : jax_flash::testing::Tests()) {
    const int before = failures;
    body();
    std::printf("%s %s\n", failures == before ? "passed" : "FAILED", name);
  }
  std::printf("%zu tests, %d failures\n", jax_flash::testing::Tests().size(), failures.load());
  // A program without tests is a mistake in the build files.
  return failures == 0 && !jax_flash::testing::Tests().empty() ? 0 : 1;
}
