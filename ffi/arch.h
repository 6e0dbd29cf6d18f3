// GPU architectures by the names that ptxas uses, such as "sm_90a".

#ifndef JAX_FLASH_FFI_ARCH_H_
#define JAX_FLASH_FFI_ARCH_H_

#include <optional>
#include <string_view>

namespace jax_flash {

struct Arch {
  int major;
  int minor;
  // "a": this compute capability only. "f": it and later ones of its family. None: as "f", which
  // for cubins is all that binary compatibility promises.
  char suffix;

  static std::optional<Arch> Parse(std::string_view name);

  // Whether a cubin for this architecture runs on a device of the given compute capability.
  bool RunsOn(int device_major, int device_minor) const;
};

}  // namespace jax_flash

#endif  // JAX_FLASH_FFI_ARCH_H_
