// What the tests that run on the fake driver share: fake cubins, kernels made from them, and the
// driver's log.

#ifndef JAX_FLASH_FFI_TESTS_FIXTURE_H_
#define JAX_FLASH_FFI_TESTS_FIXTURE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/kernel_spec.h"
#include "ffi/tests/call_frame.h"
#include "ffi/tests/fake_cuda.h"

namespace jax_flash::testing {

// Writes a file of the test program's temporary folder, and returns its path.
std::string WriteFile(const std::string& name, std::string_view content);

// The text of a cubin with one kernel whose parameters are what `arguments` declare.
std::string FakeCubin(const std::string& symbol, const std::vector<KernelArgument>& arguments);

KernelArgument TensorMapOf(const std::string& operand, const char* dtype, uint32_t box_columns,
                           uint32_t box_rows, uint32_t swizzle_bytes);
KernelArgument PointerTo(const std::string& operand, const char* dtype);
KernelArgument Int32(const std::string& value_name);
KernelArgument Float32(const std::string& value_name);

// A kernel as the manifest might list it; its cubin is written and matches. The symbol is
// `variant` + "_kernel".
KernelSpec MakeSpec(const std::string& variant, std::vector<KernelArgument> arguments);

// Adds the kernel to the process's table, and returns its name.
std::string Add(const KernelSpec& spec);

// A forward-shaped kernel, and a call that fits it: batch 2, T 300, S 200, N 8, K 4, D = Dv = 64.
KernelSpec ForwardSpec(const std::string& variant);
Invocation ForwardCall(const std::string& kernels);

// Lines that the fake driver has logged since the last call of this.
std::vector<std::string> TakeLog();
size_t CountCalls(const std::vector<std::string>& log, const std::string& function);

// The bytes of parameter `index` in the log's line of a launch.
std::string Parameter(const std::string& launch, size_t index);

template <typename T>
T ParameterAs(const std::string& launch, size_t index) {
  T value{};
  Parameter(launch, index).copy(reinterpret_cast<char*>(&value), sizeof(value));
  return value;
}

// While it lives, the environment variable `name` has `value`.
class ScopedEnvironment {
 public:
  ScopedEnvironment(const char* name, const char* value);
  ~ScopedEnvironment();
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  const char* name_;
};

}  // namespace jax_flash::testing

#endif  // JAX_FLASH_FFI_TESTS_FIXTURE_H_
