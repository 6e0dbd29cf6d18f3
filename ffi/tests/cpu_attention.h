// Attention on the CPU in plain loops, for the calls that the kernels' handlers get.
//
// It makes programs that hold jax_flash's FFI calls runnable without a GPU, so that what JAX does
// around a call (batching, partitioning, remat) is tested with values. Written to be read.

#ifndef JAX_FLASH_FFI_TESTS_CPU_ATTENTION_H_
#define JAX_FLASH_FFI_TESTS_CPU_ATTENTION_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "ffi/call.h"
#include "ffi/status.h"

namespace jax_flash {

// The inputs of a call, as float32. Vectors of optional operands are empty where it has none.
class CpuAttention {
 public:
  ffi::Error Load(const Call& call, std::string_view kernels);

  // The results "output" and "lse".
  ffi::Error Forward(const Call& call) const;

  // The results "d_query", "d_key", "d_value", "delta" and "lse_log2".
  ffi::Error Backward(const Call& call) const;

  // The result "d_bias".
  ffi::Error BackwardBias(const Call& call) const;

 private:
  // Indices of a batch element, a query and a query head; of packed heads, a row of several heads.
  struct Row {
    int64_t batch, query, head;
  };

  ffi::Error LoadValues(const Call& call);
  bool IsValidQuery(const Row& row) const;
  // The segment id of a position.
  int64_t IdAt(const std::vector<int64_t>& ids, int64_t batch, int64_t place) const;
  bool MayAttend(const Row& row, int64_t key) const;
  // Scaled and capped, without the bias.
  float CappedLogit(const Row& row, int64_t key) const;
  float Bias(const Row& row, int64_t key) const;
  // Index of a pair in a bias or mask with these axes.
  int64_t DenseIndex(int64_t axes, const Row& row, int64_t key) const;
  // Index of element 0 of a query's, or of a key's, vector.
  int64_t QueryStart(const Row& row, int64_t width) const;
  int64_t KeyStart(const Row& row, int64_t key, int64_t width) const;
  template <typename Visit>
  void ForEachRow(const Visit& visit) const;

  int64_t batch_, query_length_, query_heads_, key_length_, key_heads_, head_dim_, value_head_dim_;
  int64_t band_lower_, band_upper_, rows_per_query_;
  bool has_lower_, has_upper_;
  float scale_, soft_cap_ = 0;
  int64_t bias_axes_ = 0, mask_axes_ = 0;
  std::vector<float> query_, key_, value_, sinks_, bias_;
  std::vector<int64_t> mask_;
  std::vector<int64_t> query_offset_, query_lengths_, key_lengths_;
  std::vector<int64_t> query_segment_ids_, key_segment_ids_;
};

}  // namespace jax_flash

extern "C" {

// The handler of all targets for XLA's CPU backend.
XLA_FFI_Error* JaxFlashCpuAttention(XLA_FFI_CallFrame* call_frame);

// How many forward (0) or backward (1) calls this process has run.
int64_t JaxFlashCpuAttentionCalls(int32_t backward);
}

#endif  // JAX_FLASH_FFI_TESTS_CPU_ATTENTION_H_
