// The process-wide table of kernels, filled from Python and read by FFI calls.

#ifndef JAX_FLASH_FFI_KERNEL_TABLE_H_
#define JAX_FLASH_FFI_KERNEL_TABLE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/kernel.h"
#include "ffi/kernel_spec.h"

namespace jax_flash {

// Kernels are added and never removed, so Find takes no lock: a bucket is a list that grows at its
// head.
class KernelTable {
 public:
  KernelTable() = default;
  ~KernelTable();
  KernelTable(const KernelTable&) = delete;
  KernelTable& operator=(const KernelTable&) = delete;

  static KernelTable& Get();

  // Returns why `spec` cannot be added, or an empty string. An equal kernel may be added again.
  std::string Add(KernelSpec spec);

  // The kernel, which lives as long as the table, or null.
  Kernel* Find(std::string_view name) const;

  // Sorted.
  std::vector<std::string> Names() const;

 private:
  struct Node {
    Kernel kernel;
    Node* next;
  };
  static constexpr size_t kBuckets = 1024;

  static size_t Bucket(std::string_view name);

  std::mutex add_mutex_;
  std::array<std::atomic<Node*>, kBuckets> buckets_{};
};

}  // namespace jax_flash

#endif  // JAX_FLASH_FFI_KERNEL_TABLE_H_
