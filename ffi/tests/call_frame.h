// Calls FFI handlers the way XLA does, without XLA.

#ifndef JAX_FLASH_FFI_TESTS_CALL_FRAME_H_
#define JAX_FLASH_FFI_TESTS_CALL_FRAME_H_

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_flash::testing {

struct Outcome {
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_OK;
  std::string message;

  bool ok() const { return code == XLA_FFI_Error_Code_OK; }
};

using Attribute = std::variant<int32_t, int64_t, float, double, std::string>;

class Invocation {
 public:
  Invocation();

  // Adds a buffer. Its address is `address`, or one of an allocation that lives as long as this.
  Invocation& Operand(const std::string& name, xla::ffi::DataType type, std::vector<int64_t> shape,
                      uintptr_t address = 0);
  Invocation& Result(const std::string& name, xla::ffi::DataType type, std::vector<int64_t> shape,
                     uintptr_t address = 0);

  // Sets an attribute. `version` is 1, and `operands` and `results` are the names of the buffers,
  // where they are not set.
  Invocation& Set(const std::string& name, Attribute value);
  Invocation& Unset(const std::string& name);

  Outcome Prepare(int device = 0) const;
  Outcome Execute(int device = 0) const;

  uintptr_t Address(const std::string& name) const;

 private:
  struct Buffer {
    std::string name;
    xla::ffi::DataType type;
    std::vector<int64_t> shape;
    uintptr_t address;
  };
  Outcome Run(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, int device) const;
  uintptr_t AddressOrDefault(uintptr_t address) const;

  std::vector<Buffer> operands_;
  std::vector<Buffer> results_;
  std::map<std::string, Attribute> attributes_;
  std::vector<std::string> unset_;
};

}  // namespace jax_flash::testing

#endif  // JAX_FLASH_FFI_TESTS_CALL_FRAME_H_
